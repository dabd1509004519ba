"""Which distributions plan here: two plans can differ for no other reason."""

from __future__ import annotations

from kvframe.discovery import ACTIVE, CORE
from kvframe.plugins import PluginHost
from kvframe.version import VERSION


def versions(host: PluginHost) -> dict[str, str]:
    """The distributions in use, kvframe first, to their versions; a plugin that is no distribution goes by its name."""
    active = sorted((r for r in host.records if r.status == ACTIVE), key=lambda r: r.distribution or r.name)
    return {CORE: VERSION, **{r.distribution or r.name: r.version or "no version" for r in active}}
