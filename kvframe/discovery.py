"""Finding plugins: entry points, filters, and the version handshake. Nothing is imported here."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence

import attrs
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from kvframe.errors import UnknownPluginError
from kvframe.version import VERSION

GROUP = "kvframe.plugins"
CORE = "kvframe"

ACTIVE = "active"
BLOCKED = "blocked"  # left out by a filter
INCOMPATIBLE = "incompatible"  # its distribution asks for another kvframe
CONFLICT = "conflict"  # claims what another claims too
BROKEN = "broken"  # import, hook or result is wrong


@attrs.define(kw_only=True)
class PluginRecord:
    """What became of one plugin: where it came from, what it brings, and why it was set aside if it was."""

    name: str
    distribution: str | None = None
    version: str | None = None
    module: str = ""
    status: str = BROKEN
    reason: str | None = None
    load_seconds: float = 0.0
    hooks: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    cache_dtypes: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    layer_kinds: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """How messages name the plugin: with its distribution and version where it has them."""
        return f"{self.name} ({self.distribution} {self.version})" if self.distribution else self.name

    def set_aside(self, status: str, reason: str) -> None:
        """Note why the plugin is not used."""
        self.status, self.reason = status, reason


@attrs.frozen(kw_only=True)
class Filters:
    """Which plugins to load. Names are entry-point or distribution names.

    Args:
        only: load just these; None: all.
        without: leave these out.
        strict: a plugin that is set aside is an error.
    """

    only: tuple[str, ...] | None = None
    without: tuple[str, ...] = ()
    strict: bool = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Filters:
        """From KVFRAME_PLUGINS, KVFRAME_DISABLE_PLUGINS (comma-separated names) and KVFRAME_STRICT."""

        def names(variable: str) -> tuple[str, ...]:
            return tuple(part.strip() for part in environ.get(variable, "").split(",") if part.strip())

        return cls(
            only=names("KVFRAME_PLUGINS") if environ.get("KVFRAME_PLUGINS") is not None else None,
            without=names("KVFRAME_DISABLE_PLUGINS"),
            strict=environ.get("KVFRAME_STRICT", "") not in ("", "0"),
        )


def entry_points_by_name() -> dict[str, list[importlib.metadata.EntryPoint]]:
    """The installed entry points of the group by name, each name's sorted by distribution."""
    found: dict[str, list[importlib.metadata.EntryPoint]] = {}
    points = importlib.metadata.entry_points(group=GROUP)
    for point in sorted(points, key=lambda p: (p.name, p.dist.name if p.dist else "")):
        found.setdefault(point.name, []).append(point)
    return found


def discover(
    entry_points: Mapping[str, Sequence[importlib.metadata.EntryPoint]], filters: Filters
) -> list[PluginRecord]:
    """A record for every installed plugin, nothing imported yet; those to load have status active."""
    records = []
    for name, points in entry_points.items():
        for point in points:
            dist = point.dist
            record = PluginRecord(
                name=name,
                distribution=dist.name if dist else None,
                version=dist.version if dist else None,
                module=point.value,
                status=ACTIVE,
            )
            records.append(record)
            mismatch = _core_mismatch(dist)
            if len(points) > 1:
                claimants = " and ".join(p.dist.name if p.dist else p.value for p in points)
                record.set_aside(CONFLICT, f"entry point {name!r} is claimed by {claimants}")
            elif mismatch:
                record.set_aside(INCOMPATIBLE, mismatch)
    _apply_filters(records, filters)
    return records


def _apply_filters(records: Sequence[PluginRecord], filters: Filters) -> None:
    def names(record: PluginRecord) -> set[str]:
        return {canonicalize_name(n) for n in (record.name, record.distribution or record.name)}

    found = sorted({r.name for r in records} | {r.distribution for r in records if r.distribution})
    known = {canonicalize_name(name) for name in found}
    for source, wanted in (("KVFRAME_PLUGINS", filters.only), ("KVFRAME_DISABLE_PLUGINS", filters.without)):
        unknown = [name for name in wanted or () if canonicalize_name(name) not in known]
        if unknown:
            raise UnknownPluginError(unknown=unknown, found=found, source=source)
    only = None if filters.only is None else {canonicalize_name(name) for name in filters.only}
    without = {canonicalize_name(name) for name in filters.without}
    for record in records:
        if only is not None and not names(record) & only:
            record.set_aside(BLOCKED, "left out: KVFRAME_PLUGINS does not name it")
        elif names(record) & without:
            record.set_aside(BLOCKED, "left out by KVFRAME_DISABLE_PLUGINS")


def _core_mismatch(dist: importlib.metadata.Distribution | None) -> str | None:
    """The distribution's own requirement on kvframe, if the running core does not meet it."""
    for text in (dist.requires if dist else None) or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if canonicalize_name(requirement.name) != CORE or (requirement.marker and not requirement.marker.evaluate()):
            continue
        if not requirement.specifier.contains(VERSION, prereleases=True):
            return f"requires kvframe{requirement.specifier}, and this is kvframe {VERSION}"
    return None
