"""`kvframe plan`: how many blocks, tokens and requests of a model fit into a budget."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from kvframe.cli.model import model_options
from kvframe.cli.options import new_file, parse_numbers, parse_size
from kvframe.cli.plugin_options import PlanCommand
from kvframe.cli.request import PlanRequest
from kvframe.cli.show import show_explanation, show_plan
from kvframe.planning import STRATEGIES
from kvframe.planning.versions import versions
from kvframe.plugins import load_plugins

_EPILOG = """
\b
Examples:
  kvframe plan config.json --memory 64GiB
  kvframe plan config.json --gpu-memory 80GiB --weights 16GiB --reserve 2GiB -tp 2
  kvframe plan config.json --memory 64GiB --cache-dtype fp8_e4m3 --max-model-len 32768 --json
  kvframe plan config.json --memory 64GiB --explain
  kvframe plan config.json --memory 24GiB --fit-max-model-len
  kvframe plan config.json --requests 256 --mean-len 2048
"""
_CHOICES = click.Choice


def _plan_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(
        (
            click.option(
                "--memory",
                type=parse_size,
                metavar="SIZE",
                help="Memory for the cache on one rank: bytes, or 64GiB, 64GB, ….",
            ),
            click.option(
                "--host-memory",
                type=parse_size,
                metavar="SIZE",
                help="Memory of the host for one rank, where a plugin keeps layers there.",
            ),
            click.option(
                "--gpu-memory",
                type=parse_size,
                metavar="SIZE",
                help="Instead of --memory: what the device has.",
            ),
            click.option(
                "--weights",
                type=parse_size,
                metavar="SIZE",
                help="With --gpu-memory: what the weights take on one rank.",
            ),
            click.option(
                "--reserve",
                type=parse_size,
                metavar="SIZE",
                default=0,
                help="With --gpu-memory: what else to leave free.",
            ),
            click.option(
                "--max-model-len",
                type=click.IntRange(1),
                help="Longest request, tokens; default: the config's.",
            ),
            click.option(
                "--block-size",
                type=click.IntRange(1),
                default=16,
                show_default=True,
                help="Tokens of a block.",
            ),
            click.option(
                "--in-flight-tokens",
                type=click.IntRange(1),
                default=1,
                show_default=True,
                help="Tokens scheduled and not settled, over all concurrent steps; 1 is steady decode.",
            ),
            click.option(
                "--max-num-seqs",
                type=click.IntRange(1),
                help="Also say whether so many requests fit at once.",
            ),
            click.option("--mean-len", type=click.IntRange(1), help="Their mean length, tokens."),
            click.option(
                "--no-prefix-caching", is_flag=True, help="Requests share no blocks; states are not cached."
            ),
            click.option(
                "--layout",
                help="Memory layout of the device pool; default: the first of LBHNC and BLHNC that holds the layers "
                "for engine, the cheapest for optimal.",
            ),
            click.option(
                "--scales-in-checkpoint",
                type=_CHOICES(["yes", "no", "unknown"]),
                default="unknown",
                show_default=True,
                help="Whether the checkpoint has scales for a scaled cache dtype.",
            ),
            click.option(
                "--scale-policy",
                type=_CHOICES(["checkpoint", "computed", "unit"]),
                help="The scales to use: the checkpoint's, computed while running, or 1.0.",
            ),
            click.option(
                "--strategy",
                type=_CHOICES(STRATEGIES),
                default=STRATEGIES[0],
                show_default=True,
                help="How to group.",
            ),
            click.option("--exact", is_flag=True, help="Search for the optimal plan exhaustively."),
            click.option(
                "--max-structural-share",
                type=click.FloatRange(0, 1),
                default=0.02,
                show_default=True,
                help="Most of a request's bytes that may hold nothing.",
            ),
            click.option(
                "--max-slab",
                type=parse_size,
                metavar="SIZE",
                default="256MiB",
                show_default=True,
                help="Largest slab.",
            ),
            click.option(
                "--max-groups",
                type=click.IntRange(1),
                default=16,
                show_default=True,
                help="Most groups, each with a block table.",
            ),
            click.option(
                "--pipeline-layers",
                type=parse_numbers,
                metavar="N,N,…",
                help="Layers of each pipeline stage, such as 20,22.",
            ),
            click.option(
                "-dcp",
                "--decode-context-parallel-size",
                "dcp",
                type=click.IntRange(1),
                default=1,
                show_default=True,
                help="Ranks that a request's tokens are spread over in decode.",
            ),
            click.option(
                "--attention-tp",
                type=click.IntRange(1),
                help="Tensor parallel size of attention alone, where it runs data parallel.",
            ),
            click.option("--fit-max-model-len", is_flag=True, help="Plan for the largest length that fits."),
            click.option(
                "--requests",
                type=click.IntRange(1),
                help="Instead of --memory: the memory for so many requests.",
            ),
        )
    ):
        function = option(function)
    return function


@click.command("plan", cls=PlanCommand, epilog=_EPILOG)
@model_options
@_plan_options
@click.option(
    "--explain", is_flag=True, help="Also print what every alternative would have cost, and where bytes go."
)
@click.option(
    "--html", type=new_file, metavar="FILE", help="Also write a report with plots and the memory map as HTML."
)
@click.option(
    "--map",
    "map_file",
    type=new_file,
    metavar="FILE",
    help="Also draw one slab and its blocks to scale as SVG.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def command(
    config: Path, as_json: bool, explain: bool, html: Path | None, map_file: Path | None, **options: Any
) -> None:
    """Plan a model's KV cache: how many blocks, tokens and requests fit into a budget on one rank.

    CONFIG is a Hugging Face config.json, or a folder that holds one.
    """
    # imported before any work, since its library may be missing
    write_html = import_module("kvframe.cli.html").report_html if html else None
    asked = PlanRequest.read(config, load_plugins(), options, command.extras(options))
    made, source = asked.answer()
    result = asked.result(made) | {
        "memory_source": source,
        "warnings": list(asked.warnings),
        "options": options,
        "versions": versions(asked.host),
    }
    for warning in asked.warnings:
        click.echo(f"warning: {warning}", err=True)
    if html and write_html:
        _write(html, write_html(config, asked, made, result))
    if map_file:
        from kvframe.cli.memory_map import plan_map_svg

        _write(map_file, plan_map_svg(made, asked.model.kinds, asked.host.layouts))
    if as_json:
        click.echo(json.dumps(result, indent=2))
        return
    show_plan(config, result)
    if explain:
        show_explanation(result)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.FileError(str(path), error.strerror or "cannot be written") from error
    click.echo(f"wrote {path}", err=True)
