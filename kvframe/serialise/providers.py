"""Who brought what a plan is made of, and whether the reader has it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from packaging.utils import canonicalize_name

from kvframe.discovery import CORE
from kvframe.errors import MissingPluginError, PlanFormatError
from kvframe.family import SpecFamily
from kvframe.layout import ALIASES
from kvframe.plain import as_object, check_keys
from kvframe.plugins import PluginHost
from kvframe.version import VERSION

_NOUNS = {"families": "family", "layouts": "layout"}


def providers_to_plain(sort: str, names: Collection[str], host: PluginHost) -> dict[str, Any]:
    """Each name's distribution and version; both None for a plugin that is no installed distribution.

    Args:
        sort: "families" or "layouts".
        names: what is asked about.
        host: the plugins.
    """
    return {name: _provider(sort, name, host) for name in names}


def _provider(sort: str, name: str, host: PluginHost) -> dict[str, Any]:
    record = host.provider(sort, name)
    if record is None:
        return {"distribution": CORE, "version": VERSION}
    distribution = canonicalize_name(record.distribution) if record.distribution else None
    return {"distribution": distribution, "version": record.version}


def label(provider: Mapping[str, Any]) -> str:
    """How messages name a provider."""
    distribution = provider["distribution"]
    return f"{distribution} {provider['version']}" if distribution else "a plugin that is not installed"


def families_by_name(host: PluginHost) -> dict[str, SpecFamily[Any]]:
    """The host's families by their names, and by those of the families that they took over."""
    families = list(host.families.values())
    return {family.replaces: family for family in families if family.replaces} | dict(host.families)


def check_providers(plain: Any, host: PluginHost) -> None:
    """The reader has everything that the plan is made of.

    Raises:
        MissingPluginError: it lacks something; names the distribution, and why that is not in use if it is installed.
        PlanFormatError: `plain` is not what `providers_to_plain` gives for each sort.
    """
    known = {"families": families_by_name(host), "layouts": {*ALIASES, *(x.name for x in host.layouts)}}
    check_keys(plain, known, "$.providers")
    for sort, names in known.items():
        for name, provider in as_object(plain[sort], f"$.providers.{sort}").items():
            path = f"$.providers.{sort}.{name}"
            check_keys(provider, ("distribution", "version"), path)
            if not all(value is None or isinstance(value, str) for value in provider.values()):
                raise PlanFormatError(path=path, value=provider, rule="must be text or null")
            if name not in names:
                raise _missing(f"{_NOUNS[sort]} {name!r}", provider["distribution"], host)


def _missing(wanted: str, distribution: str | None, host: PluginHost) -> MissingPluginError:
    record = host.set_aside(distribution) if distribution else None
    return MissingPluginError(
        wanted=wanted,
        needed_by="the plan",
        distribution=distribution,
        reason=record.reason if record else None,
        remedy=record.remedy if record else None,
    )
