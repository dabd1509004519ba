"""`kvframe inspect`: what a model keeps, without a budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from kvframe.cli.model import load_model, model_options
from kvframe.cli.options import size_text
from kvframe.cli.output import console, table
from kvframe.models import inspect_model, read_config
from kvframe.plugins import load_plugins


@click.command("inspect", epilog="Example:  kvframe inspect config.json --cache-dtype fp8_e4m3 --json")
@model_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with `layers` and `bytes`.")
def command(
    config: Path, cache_dtype: str, state_dtype: str | None, tensor_parallel_size: int, as_json: bool
) -> None:
    """Show what a model keeps in its cache: layers by kind, and bytes per token and per sequence on one rank.

    CONFIG is a Hugging Face config.json, or a folder that holds one.
    """
    host = load_plugins()
    source = read_config(config)
    model = load_model(
        source,
        host,
        cache_dtype=cache_dtype,
        state_dtype=state_dtype,
        tensor_parallel_size=tensor_parallel_size,
    )
    facts = inspect_model(model, host)
    for warning in model.warnings:
        click.echo(f"warning: {warning}", err=True)
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    _show(source.file, facts)


def _show(file: str, facts: dict[str, Any]) -> None:
    sizes = facts["bytes"]
    rows = []
    for kind, count in facts["layers"].items():
        per_token = sizes["bytes_per_token_per_layer"].get(kind)
        constant = sizes["constant_bytes_per_sequence_per_layer"].get(kind)
        rows.append((kind, count, _bytes(per_token), _bytes(constant)))
    headings = ("layer kind", "layers", "bytes/token/layer", "bytes/sequence/layer")
    console().print(table(headings, rows, numbers=headings[1:]), highlight=False)
    totals = [
        ("bytes per token before any window is full", sizes["bytes_per_token_before_any_window_is_full"]),
        (
            "growth per token after all windows are full",
            sizes["bytes_per_token_growth_after_all_windows_are_full"],
        ),
        ("constant bytes per sequence", sizes["constant_bytes_per_sequence"]),
    ]
    if "cross_bytes_per_encoder_position" in sizes:
        totals.append(("bytes per encoder position", sizes["cross_bytes_per_encoder_position"]))
    click.echo(file)
    for name, value in totals:
        click.echo(f"  {name + ':':45} {value:>15,} ({size_text(value)})")


def _bytes(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
