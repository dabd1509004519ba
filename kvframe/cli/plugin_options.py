"""Options that plugins add to a command. A plugin that cannot say its options loses them, and the command goes on."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import click

from kvframe.errors import HookError
from kvframe.plugins import PluginHost, load_plugins

HOOK = "kvframe_plan_options"


class PlanCommand(click.Command):
    """`kvframe plan`: its own options, and those of the installed plugins."""

    @functools.cached_property
    def plugin_options(self) -> tuple[click.Option, ...]:
        """The plugins' options, none spelled as another before it; asked for once, with a warning for each loss."""
        taken = {spelling for param in self.params for spelling in _spellings(param)}
        kept: list[click.Option] = []
        for owner, option in _offered(load_plugins()):
            clash = sorted(taken.intersection(_spellings(option)))
            if clash:
                click.echo(f"warning: option {clash[0]} of plugin {owner} is taken and left out", err=True)
                continue
            taken.update(_spellings(option))
            kept.append(option)
        return tuple(kept)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Every parameter, the plugins' after kvframe's own."""
        return [*self.plugin_options, *super().get_params(ctx)]

    def extras(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The plugins' part of the options that were given, by name."""
        return {option.name: options[option.name] for option in self.plugin_options if option.name in options}


def _offered(host: PluginHost) -> Iterator[tuple[str, click.Option]]:
    for record in host.records:
        if HOOK not in record.hooks:
            continue
        try:
            answer = host.call_one(HOOK, record)
            wrong = [item for item in answer or () if not isinstance(item, click.Option)]
            if wrong:
                raise HookError(
                    hook=HOOK, plugin=record.label, reason=f"must list click.Option, not {wrong[0]!r}"
                )
        except HookError as error:
            click.echo(f"warning: {error}", err=True)
            continue
        for option in answer or ():
            yield record.label, option


def _spellings(param: click.Parameter) -> tuple[str, ...]:
    return (*param.opts, *param.secondary_opts, param.name or "")
