"""What `kvframe simulate` prints for people: the same numbers as `--json`, one row a case."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvframe.cli.options import size_text
from kvframe.cli.output import console, table

if TYPE_CHECKING:
    from kvframe.simulate import Result

HEADINGS = (
    "memory",
    "block",
    "strategy",
    "eviction",
    "alive at first refusal",
    "useful then",
    "useful later",
    "hit rate",
    "evictions",
    "preemptions",
    "mean alive",
)
WORDS = ("strategy", "eviction")


def show(path: Path, results: Sequence[Result]) -> None:
    """A table of the cases, and the groups of each."""
    first = results[0]
    click.echo(f"{path}: {first.requests:,} requests, {first.prompt_tokens + first.output_tokens:,} tokens")
    rows = [cells(result) for result in results]
    numbers = [heading for heading in HEADINGS if heading not in WORDS]
    console().print(table(HEADINGS, rows, numbers=numbers), highlight=False)
    headings = ("group", "layers", "block", "blocks/slab", "hit rate", "ended hits", "evictions")
    for result in results:
        if len(results) > 1:
            click.echo(title(result))
        console().print(table(headings, group_cells(result), numbers=headings[1:]), highlight=False)
        for line in notes(result):
            click.echo(f"  {line}")


def title(result: Result) -> str:
    """A case of a sweep in words."""
    name = result.name
    return f"{size_text(name['memory'])}, blocks of {name['block_size']}, {name['strategy']}, {name['eviction']}:"


def cells(result: Result) -> list[str]:
    """A case as a row of the table."""
    name = result.name
    return [
        size_text(name["memory"]),
        f"{name['block_size']}",
        name["strategy"],
        name["eviction"],
        "none refused" if result.alive_at_first_refusal is None else f"{result.alive_at_first_refusal:,}",
        share(result.useful_at_first_refusal),
        share(result.useful_at_refusals),
        share(result.hit_rate),
        f"{result.evictions:,}",
        f"{result.preemptions:,}",
        f"{result.mean_alive:,.1f}",
    ]


def group_cells(result: Result) -> list[list[str]]:
    """The groups of a case as rows."""
    return [
        [
            f"{number}: {group.name}",
            f"{group.layers}",
            f"{group.block_tokens:,} tokens",
            f"{group.blocks_per_slab}",
            share(group.hit_rate),
            f"{group.limited_hits:,}",
            f"{group.evicted_blocks:,}",
        ]
        for number, group in enumerate(result.groups)
    ]


def share(value: float | None) -> str:
    """A share as people read it; a dash for none."""
    return "–" if value is None else f"{value:.2%}"


def notes(result: Result) -> list[str]:
    """What a reader must know beside the numbers."""
    found = []
    if not result.caching:
        found.append("No prefix could be found twice, so none was cached.")
    if result.unservable:
        found.append(f"{result.unservable:,} requests did not fit although nothing else ran.")
    if result.too_long:
        found.append(f"{result.too_long:,} requests are beyond the longest.")
    return found
