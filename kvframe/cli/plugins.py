"""`kvframe plugins`: what is installed, what it brings, and what was set aside and why."""

from __future__ import annotations

import json

import attrs
import click

from kvframe.cli.output import console, table
from kvframe.cli.why import why as why_answers
from kvframe.discovery import ACTIVE, PluginRecord
from kvframe.plugins import load_plugins


@click.command(
    "plugins",
    epilog="Example:  KVFRAME_DISABLE_PLUGINS=mamba kvframe plugins",
)
@click.option(
    "--why", metavar="NAME", help="Say who provides NAME, who replaced it, and what was set aside and why."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def command(why: str | None, as_json: bool) -> None:
    """List every plugin: where it comes from, what it brings, its status, and the reason if it was set aside.

    With --why: all that goes by a name, be it a family, cache dtype, layer kind, model type, layout, command or plugin.

    KVFRAME_PLUGINS=a,b loads just those; KVFRAME_DISABLE_PLUGINS=c leaves some out; KVFRAME_STRICT=1 makes a
    set-aside plugin an error.
    """
    if why is not None:
        _show_why(why, as_json)
        return
    records = load_plugins().records
    if as_json:
        click.echo(json.dumps({"plugins": [attrs.asdict(record) for record in records]}, indent=2))
        return
    if not records:
        click.echo("No plugins are installed. Try: pip install 'kvframe[all]'")
        return
    rows = [
        (
            record.name,
            f"{record.distribution or '(in code)'} {record.version or ''}".strip(),
            record.status,
            ", ".join(record.families + record.cache_dtypes + record.commands),
            ", ".join(hook.removeprefix("kvframe_") for hook in record.hooks),
            f"{record.load_seconds * 1000:.1f} ms",
        )
        for record in records
    ]
    console().print(table(("plugin", "distribution", "status", "brings", "hooks", "load"), rows))
    for record in records:
        if record.status != ACTIVE:
            click.echo(f"{record.name}: {record.status}: {record.reason}{_origin(record)}")


def _show_why(name: str, as_json: bool) -> None:
    answers = why_answers(load_plugins(), name)
    if as_json:
        click.echo(
            json.dumps({"name": name, "answers": [attrs.asdict(answer) for answer in answers]}, indent=2)
        )
        return
    for answer in answers:
        click.echo(f"{name}: {answer}")


def _origin(record: PluginRecord) -> str:
    return f" [{record.distribution} {record.version}, {record.module}]" if record.distribution else ""
