"""Finding plugins: entry points, filters, and the version handshake. Nothing is imported here."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

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

SLOW_SECONDS = 2.0  # every start of every process pays for a plugin's import


@attrs.define(kw_only=True)
class PluginRecord:
    """What became of one plugin: where it came from, what it brings, and why it was set aside if it was."""

    name: str
    distribution: str | None = None
    version: str | None = None
    module: str = ""
    status: str = BROKEN
    reason: str | None = None
    remedy: str | None = None
    load_seconds: float = 0.0
    hooks: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    cache_dtypes: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()
    layer_kinds: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    eviction_policies: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """How messages name the plugin: with its distribution and version where it has them."""
        return f"{self.name} ({self.distribution} {self.version})" if self.distribution else self.name

    @property
    def slow(self) -> bool:
        """Whether importing it took too long."""
        return self.load_seconds > SLOW_SECONDS

    @property
    def known_as(self) -> frozenset[str]:
        """The names that options may call it by: its entry point's and its distribution's, in canonical spelling."""
        return frozenset(canonicalize_name(name) for name in (self.name, self.distribution or self.name))

    def set_aside(self, status: str, reason: str, remedy: str | None = None) -> None:
        """Note why the plugin is not used, and what to do to use it: the usual for the status, or `remedy`."""
        owner = self.distribution
        mend = f"mend it or reinstall it: pip install --force-reinstall {owner}" if owner else "mend it"
        usual = {
            INCOMPATIBLE: f"install versions that fit: pip install --upgrade {CORE} {owner}",
            CONFLICT: "uninstall one of them, or leave one out with KVFRAME_DISABLE_PLUGINS",
        }
        self.status, self.reason, self.remedy = status, reason, remedy or usual.get(status, mend)


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
    for point in sorted(points, key=lambda p: (p.name, _fact(p.dist, "name") or "", p.value)):
        found.setdefault(point.name, []).append(point)
    return found


def discover(
    entry_points: Mapping[str, Sequence[importlib.metadata.EntryPoint]], filters: Filters
) -> list[PluginRecord]:
    """A record for every installed plugin, nothing imported yet; those to load have status active.

    Raises:
        UnknownPluginError: a filter names a plugin that is not installed.
    """
    records = []
    for name, points in entry_points.items():
        for point in points:
            record = PluginRecord(
                name=name,
                distribution=_fact(point.dist, "name"),
                version=_fact(point.dist, "version"),
                module=point.value,
                status=ACTIVE,
            )
            records.append(record)
            mismatch = _core_mismatch(point.dist)
            if mismatch:
                record.set_aside(INCOMPATIBLE, mismatch)
    _apply_filters(records, filters)
    for name in entry_points:
        claimants = [record for record in records if record.name == name and record.status != BLOCKED]
        if len(claimants) > 1:
            owners = " and ".join(record.distribution or record.module for record in claimants)
            for record in claimants:
                record.set_aside(CONFLICT, f"entry point {name!r} is claimed by {owners}")
    return records


def _fact(dist: importlib.metadata.Distribution | None, name: str) -> Any:
    """One of a distribution's facts, None where its metadata cannot be read, as after an uninstall cut short."""
    try:
        return getattr(dist, name, None)
    except Exception:  # what is raised depends on the Python version
        return None


def _apply_filters(records: Sequence[PluginRecord], filters: Filters) -> None:
    found = sorted({r.name for r in records} | {r.distribution for r in records if r.distribution})
    known = {canonicalize_name(name) for name in found}
    for source, wanted in (("KVFRAME_PLUGINS", filters.only), ("KVFRAME_DISABLE_PLUGINS", filters.without)):
        unknown = [name for name in wanted or () if canonicalize_name(name) not in known]
        if unknown:
            raise UnknownPluginError(unknown=unknown, found=found, source=source)
    only = None if filters.only is None else {canonicalize_name(name) for name in filters.only}
    without = {canonicalize_name(name) for name in filters.without}
    for record in records:
        if only is not None and not record.known_as & only:
            record.set_aside(
                BLOCKED, "left out: KVFRAME_PLUGINS does not name it", "add it to KVFRAME_PLUGINS"
            )
        elif record.known_as & without:
            record.set_aside(
                BLOCKED,
                "left out by KVFRAME_DISABLE_PLUGINS",
                "take it out of KVFRAME_DISABLE_PLUGINS",
            )


def requirements(dist: importlib.metadata.Distribution | None, extra: str | None = None) -> list[Requirement]:
    """What a distribution requires on this machine; with `extra`, what that extra adds."""
    found = []
    for text in _fact(dist, "requires") or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        marker = requirement.marker
        wanted = marker is None or marker.evaluate({"extra": ""})
        if extra is not None:
            wanted = not wanted and marker is not None and marker.evaluate({"extra": extra})
        if wanted:
            found.append(requirement)
    return found


def core_requirements(dist: importlib.metadata.Distribution | None) -> list[Requirement]:
    """What a distribution requires of kvframe itself on this machine."""
    return [one for one in requirements(dist) if canonicalize_name(one.name) == CORE]


def _core_mismatch(dist: importlib.metadata.Distribution | None) -> str | None:
    """The distribution's own requirement on kvframe, if the running core does not meet it."""
    for requirement in core_requirements(dist):
        if not requirement.specifier.contains(VERSION, prereleases=True):
            return f"requires kvframe{requirement.specifier}, and this is kvframe {VERSION}"
    return None
