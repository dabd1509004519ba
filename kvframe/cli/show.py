"""What `kvframe plan` prints for people: the same numbers as `--json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvframe.cli.options import size_text
from kvframe.cli.output import console, table
from kvframe.config import DEVICE

Result = dict[str, Any]


def show_plan(path: Path, result: Result) -> None:
    """The plan: its groups, and what fits."""
    click.echo(
        f"{path}: {size_text(result['memory_bytes'])} for the cache ({result['memory_source']}), "
        f"strategy {result['strategy']}, layout {result['layout']}"
    )
    headings = (
        "group",
        "layers",
        "block",
        "content",
        "page",
        "stride",
        "blocks/slab",
        "blocks/request",
        "wasted/request",
    )
    tiers = len(result["pools"]) > 1
    rows = [
        (
            f"{number}: {', '.join(group['kinds'])}" + (f" ({group['pool']})" if tiers else ""),
            sum(group["kinds"].values()),
            f"{group['block_tokens']:,} tokens",
            size_text(group["natural_page_bytes"]),
            size_text(group["page_bytes"]),
            size_text(group["stride_bytes"]),
            group["blocks_per_slab"],
            group["blocks_per_request"],
            size_text(group["wasted_bytes_per_request"]),
        )
        for number, group in enumerate(result["groups"])
    ]
    console().print(table(headings, rows, numbers=headings[1:]), highlight=False)
    for name, value in summary(result):
        click.echo(f"  {name + ':':24} {value}")
    for line in (*_stage_lines(result), *_requested_lines(result.get("requested"))):
        click.echo(f"  {line}")


def summary(result: Result) -> list[tuple[str, str]]:
    """What a plan gives, as names and values for people."""
    device = [group for group in result["groups"] if group["pool"] == DEVICE]
    unit = "blocks" if all(group["blocks_per_slab"] == 1 for group in device) else "slabs"
    length = f"{result['max_model_len']:,}"
    each = f"{_number(result['blocks_per_request_total'])} {unit} each"
    if len(result["pools"]) > 1:
        each = f"limited by the {result['limited_by']}"
    reserve = sum(g["reserve_blocks_per_request"] * g["stride_bytes"] for g in device)
    lines = [
        (
            unit,
            f"{result['num_blocks']:,} of {size_text(result['pool_block_bytes'])} "
            f"({result['usable_blocks']:,} usable, one holds the null block)",
        ),
        ("tokens", f"{result['tokens']:,} in requests of {length}"),
        ("requests at once", f"{result['max_concurrency']:,.2f} of {length} tokens, {each}"),
        *_pool_lines(result, unit),
        ("bytes per token", _growth(result)),
        ("constant per sequence", size_text(result["constant_bytes_per_sequence"])),
        (
            "wasted per request",
            f"{size_text(result['wasted_bytes_per_request'])} ({result['padding_layer_slots']} empty layer slots); "
            f"at most {result['waste']['structural_share']:.2%} of its bytes at any length",
        ),
        ("budget left over", size_text(result["unused_bytes"])),
    ]
    if reserve:
        lines.insert(-2, ("reserve per request", f"{size_text(reserve)} for tokens in flight"))
    return lines


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _pool_lines(result: Result, unit: str) -> list[tuple[str, str]]:
    """A line for each pool, where there are several."""
    if len(result["pools"]) < 2:
        return []
    return [
        (
            f"pool {pool['name']}",
            f"{pool['max_concurrency'] or 0:,.2f} requests, {_number(pool['slabs_per_request'])} "
            f"{unit if pool['name'] == DEVICE else 'blocks'} each; {size_text(pool['budget_bytes'])}, "
            f"{pool['num_slabs']:,} of {size_text(pool['slab_bytes'])}, layout {pool['layout']}",
        )
        for pool in result["pools"]
    ]


def _growth(result: Result) -> str:
    first, later = result["bytes_per_token"], result["bytes_per_token_growth"]
    return f"{first:,}" if first == later else f"{first:,}, then {later:,} once all windows are full"


def _stage_lines(result: Result) -> list[str]:
    if len(result["stages"]) < 2:
        return []
    return [
        f"stage {number}: {stage['layers']} caches, {stage['layers_per_group']} a group, "
        f"{stage['num_blocks']:,} of {size_text(stage['pool_block_bytes'])} would fit"
        for number, stage in enumerate(result["stages"])
    ]


def _requested_lines(requested: Result | None) -> list[str]:
    if not requested:
        return []
    wanted = requested["max_num_seqs"]
    lines = []
    for name in ("max_model_len", "mean_len"):
        if f"at_{name}" in requested:
            fits = requested.get(f"fits_at_{name}")
            verdict = "" if fits is None else f": {wanted:,} {'fit' if fits else 'do NOT fit'}"
            lines.append(f"{requested[f'at_{name}']:,} requests of {name} fit beside the null block{verdict}")
    return lines


def show_explanation(result: Result) -> None:
    """Why this plan: waste by cause, the floor, and what each alternative would have cost."""
    waste = result["waste"]
    click.echo(f"\nOne request of {result['max_model_len']:,} tokens:")
    for name, value in waste_by_cause(waste):
        click.echo(f"  {name + ':':24} {size_text(value)}")
    lengths = list(waste["structural_share_by_length"])
    click.echo(f"\nBytes that one request holds, by length in tokens (chosen: {result['chosen']}):")
    headings = ("plan", "cost", "wasted", *(f"{length:,}" for length in lengths), "")
    rows = [
        (
            other["name"],
            f"{other['cost']:.5f}",
            f"{other['structural_share']:.2%}",
            *(size_text(other["held_bytes"][length]) for length in lengths),
            "chosen" if other["name"] == result["chosen"] else _objection(other),
        )
        for other in sorted(result["alternatives"], key=lambda other: other["cost"])
    ]
    console().print(table(headings, rows, numbers=headings[1:-1]), highlight=False)
    click.echo(limit_text(result))


def _objection(other: Result) -> str:
    if not other["fits"]:
        return "does not fit"
    return "" if other["within_limits"] else "wastes too much"


def waste_by_cause(waste: Result) -> list[tuple[str, int]]:
    """Bytes of one request of max_model_len: what must be kept, and what holds nothing, by cause."""
    return [
        ("must be kept", waste["floor_bytes"]),
        ("empty layer slots", waste["layer_padding_bytes"]),
        ("padded pages", waste["page_padding_bytes"]),
        ("rest between blocks", waste["slab_remainder_bytes"]),
    ]


def limit_text(result: Result) -> str:
    """Which resource limits the number of requests."""
    limit = next(
        (pool for pool in result["pools"] if pool["name"] == result["limited_by"]), result["pools"][0]
    )
    where = f" of pool {limit['name']!r}" if len(result["pools"]) > 1 else ""
    return f"The budget of {size_text(limit['budget_bytes'])}{where} is what limits the number of requests."
