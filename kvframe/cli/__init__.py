"""The command line: `kvframe plan`, `kvframe inspect`, `kvframe plugins`, and what plugins add."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from kvframe.errors import KVFrameError, UsageError
from kvframe.plugins import load_plugins
from kvframe.version import VERSION

_COMMANDS = {
    "inspect": "kvframe.cli.inspect",
    "plan": "kvframe.cli.plan",
    "plugins": "kvframe.cli.plugins",
}


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
def cli() -> None:
    """Plan and inspect the KV cache of LLM engines."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code: 0, 1 for a refusal, 2 for wrong usage."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        result: Any = cli.main(args=words, prog_name="kvframe", standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as problem:
        usage = {"kind": "usage", "type": "UsageError", "message": problem.format_message(), "fields": {}}
        _print_error(usage, words)
        problem.show()
        sys.exit(2)
    except KVFrameError as problem:
        _print_error(problem.as_dict(), words)
        click.echo(f"{type(problem).__name__}: {problem}", err=True)
        sys.exit(2 if isinstance(problem, UsageError) else 1)
    sys.exit(result if isinstance(result, int) else 0)


def _print_error(error: dict[str, Any], words: Sequence[str]) -> None:
    if "--json" in words:
        click.echo(json.dumps({"error": error}, indent=2, default=str))
