"""`kvframe plan`: how many blocks, tokens and requests of a model fit into a budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from kvframe.cli.model import ScaleChoice, length_of, load_model, model_options
from kvframe.cli.options import Size, size_text
from kvframe.cli.output import console, table
from kvframe.engine import EngineConfig
from kvframe.errors import UsageError
from kvframe.models import ModelSpecs, encoder_positions, inspect_model, read_config
from kvframe.planning import STRATEGIES, Plan, plan
from kvframe.planning.report import mean_len_concurrency
from kvframe.plugins import PluginHost, load_plugins

_EPILOG = """
\b
Examples:
  kvframe plan config.json --memory 64GiB
  kvframe plan config.json --gpu-memory 80GiB --weights 16GiB --reserve 2GiB -tp 2
  kvframe plan config.json --memory 64GiB --cache-dtype fp8_e4m3 --max-model-len 32768 --json
"""


@click.command("plan", epilog=_EPILOG)
@model_options
@click.option("--memory", type=Size(), help="Memory for the cache on one rank: bytes, or 64GiB, 64GB, ….")
@click.option("--gpu-memory", type=Size(), help="Instead of --memory: what the device has.")
@click.option("--weights", type=Size(), help="With --gpu-memory: what the model's weights take on one rank.")
@click.option("--reserve", type=Size(), default=0, help="With --gpu-memory: what else to leave free.")
@click.option("--max-model-len", type=click.IntRange(1), help="Longest request, tokens; default: the config's.")
@click.option("--block-size", type=click.IntRange(1), default=16, show_default=True, help="Tokens in one block.")
@click.option(
    "--in-flight-tokens",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Tokens scheduled and not settled, over all concurrent steps; 1 is steady decode.",
)
@click.option("--max-num-seqs", type=click.IntRange(1), help="Also say whether so many requests fit at once.")
@click.option("--mean-len", type=click.IntRange(1), help="With --max-num-seqs: their mean length, tokens.")
@click.option("--no-prefix-caching", is_flag=True, help="Requests share no blocks; states are not cached.")
@click.option("--layout", default="LBHNC", show_default=True, help="Memory layout of the pool.")
@click.option(
    "--scales-in-checkpoint",
    type=click.Choice(["yes", "no", "unknown"]),
    default="unknown",
    show_default=True,
    help="Whether the checkpoint has scales for a scaled cache dtype.",
)
@click.option(
    "--scale-policy",
    type=click.Choice(["checkpoint", "computed", "unit"]),
    help="The scales to use: the checkpoint's, computed while running, or 1.0.",
)
@click.option("--strategy", type=click.Choice(STRATEGIES), default="engine", show_default=True, help="How to group.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def command(config: Path, as_json: bool, **options: Any) -> None:
    """Plan a model's KV cache: how many blocks, tokens and requests fit into a budget on one rank.

    CONFIG is a Hugging Face config.json, or a folder that holds one.
    """
    host = load_plugins()
    memory, source = _budget(options)
    model, engine, warnings = _model(config, host, options)
    made = plan(
        model.specs,
        engine=engine,
        memory=memory,
        host=host,
        layout=options["layout"],
        strategy=options["strategy"],
        kinds=model.kinds,
    )
    result = _result(made, model, host) | {"memory_source": source, "warnings": warnings}
    if options["max_num_seqs"] or options["mean_len"]:
        result["requested"] = _requested(made, engine, host, options)
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    if as_json:
        click.echo(json.dumps(result, indent=2))
    else:
        _show(config, result)


def _budget(options: dict[str, Any]) -> tuple[int, str]:
    """Bytes for the cache, and where the number comes from."""
    memory, device, weights, reserve = (options[k] for k in ("memory", "gpu_memory", "weights", "reserve"))
    if (memory is None) == (device is None):
        rule = "give the cache's memory, or the device's with --gpu-memory and --weights"
        raise UsageError(option="--memory", value=None, rule=rule + (", not both" if memory is not None else ""))
    if memory is not None:
        if weights is not None or reserve:
            raise UsageError(option="--weights and --reserve", value=None, rule="they go with --gpu-memory")
        return memory, "--memory"
    if weights is None:
        raise UsageError(option="--weights", value=None, rule="is needed with --gpu-memory")
    left = device - weights - reserve
    if left <= 0:
        rule = f"leaves {left:,} bytes of --gpu-memory {device:,} after --reserve {reserve:,}"
        raise UsageError(option="--weights", value=f"{weights:,}", rule=rule)
    return left, "--gpu-memory less --weights and --reserve"


def _model(
    path: Path, host: PluginHost, options: dict[str, Any]
) -> tuple[ModelSpecs, EngineConfig, list[str]]:
    length = length_of(read_config(path), options["max_model_len"])
    caching = not options["no_prefix_caching"]
    source, model = load_model(
        path,
        host,
        cache_dtype=options["cache_dtype"],
        state_dtype=options["state_dtype"],
        tensor_parallel_size=options["tensor_parallel_size"],
        block_size=options["block_size"],
        longest=length,
        caching=caching,
    )
    scales = ScaleChoice(in_checkpoint=options["scales_in_checkpoint"], policy=options["scale_policy"])
    warnings = [*model.warnings, *scales.check(host.cache_dtypes.get(options["cache_dtype"]))]
    engine = EngineConfig(
        max_model_len=length,
        max_in_flight_tokens=options["in_flight_tokens"],
        max_encoder_tokens=encoder_positions(source) or 0,
        max_num_seqs=options["max_num_seqs"],
        tp=options["tensor_parallel_size"],
        state_cache_mode="align" if caching else "none",
        prefix_caching=caching,
    )
    return model, engine, warnings


def _result(made: Plan, model: ModelSpecs, host: PluginHost) -> dict[str, Any]:
    facts = inspect_model(model, host)
    sizes = facts["bytes"]
    return {
        "layers": facts["layers"],
        "kv_heads_total": dict(model.kv_heads_total),
        "kv_heads_per_rank": dict(model.kv_heads_per_rank),
        "bytes_per_token": sizes["bytes_per_token_before_any_window_is_full"],
        "bytes_per_token_growth": sizes["bytes_per_token_growth_after_all_windows_are_full"],
        "bytes_per_token_per_layer": sizes["bytes_per_token_per_layer"],
        "constant_bytes_per_sequence": sizes["constant_bytes_per_sequence"],
        **made.report.as_dict(),
    }


def _requested(made: Plan, engine: EngineConfig, host: PluginHost, options: dict[str, Any]) -> dict[str, Any]:
    wanted = options["max_num_seqs"]
    usable, each = made.report.usable_blocks, made.report.blocks_per_request_total
    answer: dict[str, Any] = {"max_num_seqs": wanted, "at_max_model_len": usable // each}
    if wanted:
        answer["fits_at_max_model_len"] = answer["at_max_model_len"] >= wanted
    if options["mean_len"]:
        fitting = mean_len_concurrency(made.config, engine=engine, host=host, mean_len=options["mean_len"])
        answer |= {"mean_len": options["mean_len"], "at_mean_len": fitting}
        if wanted:
            answer["fits_at_mean_len"] = fitting >= wanted
    return answer


def _show(path: Path, result: dict[str, Any]) -> None:
    headings = ("group", "layers", "block", "content", "page", "blocks/request", "wasted/request")
    rows = [
        (
            f"{number}: {', '.join(group['kinds'])}",
            sum(group["kinds"].values()),
            f"{group['block_tokens']:,} tokens",
            size_text(group["natural_page_bytes"]),
            size_text(group["page_bytes"]),
            group["blocks_per_request"],
            size_text(group["wasted_bytes_per_request"]),
        )
        for number, group in enumerate(result["groups"])
    ]
    click.echo(
        f"{path}: {size_text(result['memory_bytes'])} for the cache ({result['memory_source']}), "
        f"strategy {result['strategy']}, layout {result['layout']}"
    )
    console().print(table(headings, rows, numbers=headings[1:]), highlight=False)
    concurrency = result["max_concurrency"]
    lines = [
        ("blocks", f"{result['num_blocks']:,} of {size_text(result['pool_block_bytes'])} ({result['usable_blocks']:,} usable)"),
        ("tokens", f"{result['tokens']:,} in requests of {result['max_model_len']:,}"),
        ("requests at once", f"{concurrency:,.2f} of {result['max_model_len']:,} tokens, {result['blocks_per_request_total']:,} blocks each"),
        ("bytes per token", f"{result['bytes_per_token']:,}, then {result['bytes_per_token_growth']:,} once all windows are full"),
        ("constant per sequence", size_text(result["constant_bytes_per_sequence"])),
        ("wasted per request", f"{size_text(result['wasted_bytes_per_request'])} ({result['padding_layer_slots']} empty layer slots)"),
        ("budget left over", size_text(result["unused_bytes"])),
    ]
    for name, value in lines:
        click.echo(f"  {name + ':':24} {value}")
    for line in _requested_lines(result.get("requested")):
        click.echo(f"  {line}")


def _requested_lines(requested: dict[str, Any] | None) -> list[str]:
    if not requested:
        return []
    wanted = requested["max_num_seqs"]
    lines = []
    for name, length in (("at_max_model_len", "max_model_len"), ("at_mean_len", "mean_len")):
        if name in requested:
            fits = requested.get(f"fits_{name}")
            verdict = "" if fits is None else f": {wanted:,} {'fit' if fits else 'do NOT fit'}"
            lines.append(f"{requested[name]:,} requests of {length} fit beside the null block{verdict}")
    return lines
