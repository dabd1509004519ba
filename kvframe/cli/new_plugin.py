"""`kvframe new-plugin`: a complete distribution for a new kind of cache, from a template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from kvframe.errors import MissingDependencyError, UsageError
from kvframe.plugins import load_plugins
from kvframe.version import VERSION

TEMPLATE = Path(__file__).parent / "new_plugin_template"
STORAGES: Mapping[str, str] = {
    "per-token": "keys and values of every token",
    "compressed": "one vector for several tokens",
    "state": "one state of fixed size",
}
LIFETIMES: Mapping[str, str] = {
    "all": "every token stays",
    "window": "the last tokens stay",
    "chunk": "the tokens of the current chunk stay",
    "prefix-window": "the first and the last tokens stay",
    "fixed": "one block for the request's whole life",
    "own": "a rule of its own, written out to be changed",
}
_OF_STATES = (
    "fixed",
    "own",
)  # a state stands for all tokens before it: windows and chunks mean nothing to it
_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
# The fields of the new plugin's two examples, for each lifetime that has some.
_FIELDS: Mapping[str, tuple[list[str], list[str]]] = {
    "window": (["window=256"], ["window=50"]),
    "chunk": (["chunk=128"], ["chunk=40"]),
    "prefix-window": (["prefix=4", "window=256"], ["prefix=40", "window=50"]),
}


@click.command(
    "new-plugin",
    epilog="Example:  kvframe new-plugin strided-window --storage per-token --lifetime own",
)
@click.argument("name")
@click.option("--storage", type=click.Choice(list(STORAGES)), help="What a layer stores.")
@click.option("--lifetime", type=click.Choice(list(LIFETIMES)), help="How long it stays.")
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    help="The folder to make it in.  [default: the current one]",
)
@click.option(
    "--no-input", is_flag=True, help="Ask nothing: per-token storage that all stays, unless options say more."
)
def command(name: str, storage: str | None, lifetime: str | None, output: Path, no_input: bool) -> None:
    """Make the distribution kvframe-NAME, which brings a new kind of cache.

    It installs, passes `kvframe check` and its own tests at once: change it from there. What no option gives is asked.
    Needs the extra: pip install 'kvframe[new-plugin]'
    """
    short = _short_name(name)
    storage = storage or _asked("What does a layer store?", STORAGES, no_input)
    offered = {word: text for word, text in LIFETIMES.items() if storage != "state" or word in _OF_STATES}
    lifetime = lifetime or _asked("How long does it stay?", offered, no_input)
    if lifetime not in offered:
        rule = f"a state stands for all tokens before it, so its lifetime is one of {', '.join(offered)}"
        raise UsageError(option="--lifetime", value=lifetime, rule=rule)
    target = output / f"kvframe-{short}"
    if target.exists() and any(target.iterdir()):
        raise UsageError(option="--output", value=str(target), rule="exists and is not empty")
    _render(target, answers(short, storage, lifetime))
    click.echo(
        f"{target} is ready. Try it:\n\n  pip install -e '{target}[test]'\n  kvframe check kvframe-{short}"
    )
    click.echo(f"  pytest {target}")


def _short_name(name: str) -> str:
    short = name.removeprefix("kvframe-")
    if not _NAME.fullmatch(short):
        rule = "must be lower-case words with - between them, such as strided-window"
        raise UsageError(option="NAME", value=name, rule=rule)
    short = short.replace("_", "-")
    taken = short.replace("-", "_")
    host = load_plugins()
    if taken in host.families or taken in host.layer_readers:
        record = host.provider("families", taken) or host.provider("layer_kinds", taken)
        owner = record.label if record else "kvframe itself"
        rule = f"a family or layer kind {taken!r} exists already, from {owner}: choose another name"
        raise UsageError(option="NAME", value=name, rule=rule)
    return short


def _asked(question: str, offered: Mapping[str, str], no_input: bool) -> str:
    first = next(iter(offered))
    if no_input:
        return first
    click.echo(question)
    for word, text in offered.items():
        click.echo(f"  {word:14} {text}")
    chosen: str = click.prompt("Choose", type=click.Choice(list(offered)), default=first, show_choices=False)
    return chosen


def answers(short: str, storage: str, lifetime: str) -> dict[str, Any]:
    """What the template is given."""
    words = short.split("-")
    major, minor = VERSION.split(".")[:2]
    after = f"0.{int(minor) + 1}" if major == "0" else str(int(major) + 1)
    fields, other_fields = _FIELDS.get(lifetime, ([], []))
    return {
        "name": f"kvframe-{short}",
        "module": f"kvframe_{'_'.join(words)}",
        "family": "_".join(words),
        "title": " ".join(words).capitalize(),
        "prefix": "".join(word.capitalize() for word in words),
        "storage": storage,
        "lifetime": lifetime,
        "fields": fields,
        "other_fields": other_fields,
        "core": f"{major}.{minor}",
        "next_core": after,
    }


def _render(target: Path, given: Mapping[str, Any]) -> None:
    try:
        from copier import run_copy
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            module="kvframe new-plugin", needs="copier", extra="new-plugin"
        ) from error
    run_copy(str(TEMPLATE), target, data=dict(given), defaults=True, quiet=True, overwrite=False)
