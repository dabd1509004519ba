"""The command line: `kvframe plan`, `kvframe inspect`, `kvframe plugins`, and what plugins add."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from kvframe.errors import KVFrameError, UsageError
from kvframe.plugins import load_plugins
from kvframe.version import VERSION

_COMMANDS = {
    "check": "kvframe.cli.check",
    "diff": "kvframe.cli.diff",
    "doctor": "kvframe.cli.doctor",
    "inspect": "kvframe.cli.inspect",
    "new-plugin": "kvframe.cli.new_plugin",
    "plan": "kvframe.cli.plan",
    "plugins": "kvframe.cli.plugins",
    "simulate": "kvframe.cli.simulate",
}
_TRACEBACK = "--traceback"


class _Commands(click.Group):
    """The commands by name. A command's module is imported when it is used, so start-up pays only for what runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The core's commands and those of plugins."""
        return sorted([*_COMMANDS, *(command.name for command in load_plugins().commands)])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name; the core's own come first."""
        if cmd_name in _COMMANDS:
            command: click.Command = import_module(_COMMANDS[cmd_name]).command
            return command
        return next((c for c in load_plugins().commands if c.name == cmd_name), None)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Example:  kvframe plan config.json --memory 64GiB",
)
@click.version_option(VERSION, prog_name="kvframe")
@click.option(_TRACEBACK, is_flag=True, expose_value=False, help="Show where an error was raised too.")
def cli() -> None:
    """Plan and inspect the KV cache of LLM engines."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code.

    0: done; 1: a refusal; 2: wrong usage; 3: an error that kvframe does not know, of its own or of a plugin.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    traced = _TRACEBACK in words
    words = [word for word in words if word != _TRACEBACK]  # it may stand behind the command as well
    try:
        result: Any = cli.main(args=words, prog_name="kvframe", standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as problem:
        usage = {"kind": "usage", "type": "UsageError", "message": problem.format_message(), "fields": {}}
        _print_error(usage, words)
        problem.show()
        sys.exit(2)
    except Exception as problem:  # nobody is helped by a traceback that was not asked for
        if traced:
            traceback.print_exc()
        known = isinstance(problem, KVFrameError)
        error = problem.as_dict() if isinstance(problem, KVFrameError) else _unknown_error(problem)
        _print_error(error, words)
        hint = "" if known or traced else f" ({_TRACEBACK} shows where)"
        click.echo(f"{type(problem).__name__}: {problem}{hint}", err=True)
        sys.exit((2 if isinstance(problem, UsageError) else 1) if known else 3)
    sys.exit(result if isinstance(result, int) else 0)


def _unknown_error(problem: Exception) -> dict[str, Any]:
    return {"kind": "internal", "type": type(problem).__name__, "message": str(problem), "fields": {}}


def _print_error(error: dict[str, Any], words: Sequence[str]) -> None:
    if "--json" in words:
        click.echo(json.dumps({"error": error}, indent=2, default=str))
