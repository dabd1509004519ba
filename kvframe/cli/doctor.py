"""`kvframe doctor`: is this installation sound? Versions, requirements, duplicates, clashes, and what is in force."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import click
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvframe.cli.output import console, table
from kvframe.discovery import (
    ACTIVE,
    BLOCKED,
    CORE,
    GROUP,
    Filters,
    PluginRecord,
    core_requirements,
    requirements,
)
from kvframe.errors import KVFrameError
from kvframe.plugins import PluginHost
from kvframe.version import VERSION

OK, WARNING, ERROR = "ok", "warning", "error"
_EXTRAS = ("torch", "new-plugin")  # those of users; the others are for work on kvframe itself
_BOUNDS = frozenset({"<", "<=", "==", "===", "~="})


@attrs.frozen(kw_only=True)
class Finding:
    """One thing that was looked at.

    Args:
        level: "ok", "warning" or "error".
        about: what it is about, such as a distribution.
        found: what there is.
        advice: what to do, empty where all is well.
    """

    level: str
    about: str
    found: str
    advice: str = ""


@click.command("doctor", epilog="Example:  kvframe doctor --json")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def command(as_json: bool) -> int:
    """Look at the installation: versions, requirements, duplicates, clashes, and environment variables in force.

    The exit code is 1 if something is wrong; warnings alone leave it at 0.
    """
    found = list(findings(os.environ))
    wrong = [finding for finding in found if finding.level == ERROR]
    if as_json:
        click.echo(
            json.dumps({"healthy": not wrong, "findings": [attrs.asdict(one) for one in found]}, indent=2)
        )
        return 1 if wrong else 0
    rows = [(one.level, one.about, one.found, one.advice) for one in found]
    console().print(table(("", "about", "found", "what to do"), rows), highlight=False)
    warned = sum(finding.level == WARNING for finding in found)
    click.echo(f"{len(wrong)} wrong, {warned} warnings.")
    return 1 if wrong else 0


def findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """All that is looked at, in order."""
    distributions = list(importlib.metadata.distributions())
    yield Finding(level=OK, about="python", found=sys.version.split()[0])
    yield from _core(distributions)
    yield from _duplicates(distributions)
    yield from _environment(environ)
    yield from _plugins(environ)
    yield from _bounds(distributions)


def _core(distributions: Sequence[importlib.metadata.Distribution]) -> Iterator[Finding]:
    """kvframe, and what it requires."""
    core = next((dist for dist in distributions if _name(dist) == CORE), None)
    where = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if core is None:
        advice = "pip install kvframe"
        yield Finding(level=WARNING, about=CORE, found=f"{VERSION} in {where}, not installed", advice=advice)
        return
    if core.version != VERSION:
        yield Finding(
            level=ERROR,
            about=CORE,
            found=f"{where} is version {VERSION}, its metadata say {core.version}",
            advice="install it again: pip install --force-reinstall kvframe",
        )
    else:
        yield Finding(level=OK, about=CORE, found=f"{VERSION} in {where}{_editable(core)}")
    installed = {_name(dist): dist for dist in reversed(distributions)}
    for requirement in requirements(core):
        yield _requirement(requirement, installed.get(canonicalize_name(requirement.name)))
    for extra in _EXTRAS:
        for requirement in requirements(core, extra):
            dist = installed.get(canonicalize_name(requirement.name))
            if dist is not None:  # an extra may be left out
                yield _requirement(requirement, dist)


def _requirement(requirement: Requirement, dist: importlib.metadata.Distribution | None) -> Finding:
    advice = f"pip install '{requirement.name}{requirement.specifier}'"
    if dist is None:
        return Finding(level=ERROR, about=requirement.name, found="not installed", advice=advice)
    if not requirement.specifier.contains(dist.version, prereleases=True):
        found = f"{dist.version}, and {requirement.specifier} is required"
        return Finding(level=ERROR, about=requirement.name, found=found, advice=advice)
    return Finding(level=OK, about=requirement.name, found=f"{dist.version}{_editable(dist)}")


def _duplicates(distributions: Iterable[importlib.metadata.Distribution]) -> Iterator[Finding]:
    """Distributions of ours that are installed more than once: Python sees the first, and stale files stay."""
    found: dict[str, list[importlib.metadata.Distribution]] = {}
    for dist in distributions:
        if _name(dist) == CORE or any(point.group == GROUP for point in dist.entry_points):
            found.setdefault(_name(dist), []).append(dist)
    for name, copies in found.items():
        places = dict.fromkeys(f"{copy.version} in {copy.locate_file('')}" for copy in copies)
        if len(copies) > 1:
            advice = f"remove them all and install it once: pip uninstall {name}, until none is left"
            yield Finding(
                level=ERROR,
                about=name,
                found=f"installed {len(copies)} times: {'; '.join(places)}",
                advice=advice,
            )


def _environment(environ: Mapping[str, str]) -> Iterator[Finding]:
    known = ("KVFRAME_PLUGINS", "KVFRAME_DISABLE_PLUGINS", "KVFRAME_STRICT")
    for variable, value in sorted(environ.items()):
        if variable in known:
            yield Finding(level=OK, about=variable, found=f"in force: {value!r}")
        elif variable.startswith("KVFRAME_"):
            advice = f"kvframe reads {', '.join(known)}"
            yield Finding(level=WARNING, about=variable, found=f"is read by nobody: {value!r}", advice=advice)


def _plugins(environ: Mapping[str, str]) -> Iterator[Finding]:
    """What became of each plugin: the version handshake, clashes, and what fails to load."""
    try:
        filters = attrs.evolve(Filters.from_environment(environ), strict=False)  # to name all that is wrong
        host = PluginHost(filters=filters)
    except KVFrameError as error:
        yield Finding(
            level=ERROR, about="plugins", found=str(error), advice="correct the variable, or unset it"
        )
        return
    if not host.records:
        advice = "pip install 'kvframe[all]'"
        yield Finding(
            level=WARNING,
            about="plugins",
            found="none is installed: only full attention is known",
            advice=advice,
        )
    for record in host.records:
        yield _plugin(record)


def _plugin(record: PluginRecord) -> Finding:
    about = f"plugin {record.label}"
    if record.status == ACTIVE:
        brings = [*record.families, *record.cache_dtypes, *record.layouts, *record.commands]
        found = f"in use{_editable(_of(record))}: {', '.join(brings)}"
        if record.slow:
            advice = "ask its author to import heavy libraries inside functions"
            return Finding(
                level=WARNING, about=about, found=f"took {record.load_seconds:.1f} s to load", advice=advice
            )
        return Finding(level=OK, about=about, found=found)
    level = WARNING if record.status == BLOCKED else ERROR
    return Finding(
        level=level, about=about, found=f"{record.status}: {record.reason}", advice=record.remedy or ""
    )


def _bounds(distributions: Iterable[importlib.metadata.Distribution]) -> Iterator[Finding]:
    """Plugins that any later kvframe would load, though its hooks may differ."""
    for dist in distributions:
        if not any(point.group == GROUP for point in dist.entry_points):
            continue
        needed = core_requirements(dist)
        operators = {part.operator for one in needed for part in one.specifier}
        if not operators & _BOUNDS:
            found = f"has no upper bound on kvframe ({', '.join(map(str, needed)) or 'it does not require it at all'})"
            advice = "ask its author for a bound, such as kvframe>=0.1,<0.2"
            yield Finding(level=WARNING, about=_name(dist), found=found, advice=advice)


def _name(dist: importlib.metadata.Distribution) -> str:
    try:
        return canonicalize_name(dist.metadata["Name"] or "")
    except (
        Exception
    ):  # metadata that cannot be read, as after an uninstall cut short; what is raised depends on Python
        return ""


def _of(record: PluginRecord) -> importlib.metadata.Distribution | None:
    return importlib.metadata.distribution(record.distribution) if record.distribution else None


def _editable(dist: importlib.metadata.Distribution | None) -> str:
    """ " (editable)" where pip says that the files are those of a working copy."""
    text = dist.read_text("direct_url.json") if dist else None
    direct: Any = json.loads(text) if text else {}
    return " (editable)" if direct.get("dir_info", {}).get("editable") else ""
