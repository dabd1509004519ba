"""`kvframe diff`: what changed between two plans, and why."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import click

from kvframe.cli.differences import Change, Difference, difference
from kvframe.cli.options import size_text
from kvframe.cli.output import console, table
from kvframe.errors import UsageError

_NEEDED = (
    "memory_bytes",
    "strategy",
    "engine",
    "layout",
    "groups",
    "pools",
    "limited_by",
    "tokens",
    "max_model_len",
)
_EPILOG = """
\b
Example:
  kvframe plan config.json --memory 64GiB --json > a.json
  kvframe plan config.json --memory 64GiB --json --cache-dtype fp8_e4m3 > b.json
  kvframe diff a.json b.json
"""


@click.command("diff", epilog=_EPILOG)
@click.argument("first", metavar="A.json", type=click.Path(path_type=Path))
@click.argument("second", metavar="B.json", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def command(first: Path, second: Path, as_json: bool) -> None:
    """Say what changed between two plans and why: what was asked differently, and what follows from it.

    A.json and B.json are what `kvframe plan --json` printed.
    """
    found = difference(_read(first), _read(second))
    if as_json:
        click.echo(json.dumps({**attrs.asdict(found), "same": found.same}, indent=2))
        return
    if found.same:
        click.echo("The plans are the same.")
        return
    _show(found)


def _read(path: Path) -> dict[str, Any]:
    """A result of `kvframe plan --json`.

    Raises:
        UsageError: the file is none; says what it is instead, where that is known.
    """
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _no_plan(path, error.strerror or "cannot be read") from error
    except ValueError as error:
        raise _no_plan(path, f"holds no JSON: {error}") from error
    if not isinstance(plain, dict):
        raise _no_plan(path, f"holds a JSON {type(plain).__name__}, not an object")
    missing = [key for key in _NEEDED if key not in plain]
    if missing:
        raise _no_plan(path, _instead(plain) or f"lacks {', '.join(missing)}")
    return plain


def _instead(plain: dict[str, Any]) -> str:
    """What a file is that is no plan, "" if nobody knows."""
    if "error" in plain:
        return f"a plan that was refused: {plain['error'].get('message', plain['error'])}"
    if str(plain.get("format", "")).startswith("kvframe-plan/"):
        return "a plan for engines, without the numbers for people"
    if "model_type" in plain or "architectures" in plain:
        return "a model's config.json, of which `kvframe plan` makes a plan"
    if "layers" in plain and "bytes" in plain:
        return "output of `kvframe inspect`, which plans nothing"
    return ""


def _no_plan(path: Path, found: str) -> UsageError:
    rule = f"must be a file with what `kvframe plan … --json` printed. Found: {found.rstrip('.')}"
    return UsageError(option="diff", value=path, rule=rule)


def _show(found: Difference) -> None:
    if found.causes:
        click.echo("What was asked differently")
        rows = [(change.what, *_texts(change)) for change in found.causes]
        console().print(table(("input", "A", "B"), rows), highlight=False)
    else:
        click.echo(_no_cause(found))
    if found.consequences:
        click.echo("What follows")
        columns = ("where", "number", "A", "B", "change", "because of")
        changes = [
            (
                ": ".join(filter(None, (change.pool, change.group))),
                change.what,
                *_texts(change),
                _factor(change),
                ", ".join(change.because),
            )
            for change in found.consequences
        ]
        console().print(table(columns, changes, numbers=("A", "B", "change")), highlight=False)
    if found.factors:
        click.echo(_why(found.factors))


def _no_cause(found: Difference) -> str:
    silent = f" (the files do not tell {', '.join(found.silent)})" if found.silent else ""
    return f"Nothing that was asked differs{silent}: the planner itself, or the model's layers, must have changed.\n"


def _why(factors: Mapping[str, float]) -> str:
    times = {name: f"× {value:.4g}" for name, value in factors.items()}
    return (
        f"Requests at once {times['requests']}: budget {times['budget']}, bytes of one request "
        f"{times['bytes_per_request']}.\nTokens {times['tokens']}: requests at once {times['requests']}, "
        f"length of a request {times['max_model_len']}."
    )


def _texts(change: Change) -> tuple[str, str]:
    """Both values for people; sizes in their units, unless they would read the same."""
    a, b = (_text(value, sizes="bytes" in change.what) for value in (change.a, change.b))
    return (a, b) if a != b else (_text(change.a), _text(change.b))


def _text(value: Any, *, sizes: bool = False) -> str:
    if value is None:
        return "–"
    if isinstance(value, list):
        runs = [
            (text, len(list(run))) for text, run in itertools.groupby(_text(v, sizes=sizes) for v in value)
        ]
        return ", ".join(f"{count} × {text}" if count > 1 else text for text, count in runs)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if sizes:
        return size_text(int(value))
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _factor(change: Change) -> str:
    numbers = [value for value in (change.a, change.b) if isinstance(value, (int, float))]
    if len(numbers) < 2 or not numbers[0]:
        return ""
    return f"× {numbers[1] / numbers[0]:.4g}"
