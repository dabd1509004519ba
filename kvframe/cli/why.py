"""`kvframe plugins --why NAME`: who provides a name, who took it over, what was set aside, and who could provide it."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
from packaging.utils import canonicalize_name

from kvframe.contributions import CONTRIBUTIONS, builtin_items
from kvframe.discovery import ACTIVE, PluginRecord
from kvframe.errors import UsageError, nearest
from kvframe.models.providers import DISTRIBUTIONS, NEEDED_KINDS
from kvframe.plugins import PluginHost


@attrs.frozen(kw_only=True)
class Answer:
    """One thing that goes by the name.

    Args:
        what: its sort, such as "family" or "plugin".
        state: "in use", "replaced", "set aside" or "not installed".
        provider: who brings it.
        reason: why it is not in use, or what else there is to say.
    """

    what: str
    state: str
    provider: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.what} {self.state}, from {self.provider}{f': {self.reason}' if self.reason else ''}"


def why(host: PluginHost, name: str) -> list[Answer]:
    """All that goes by a name, whatever its sort.

    Raises:
        UsageError: nothing does.
    """
    answers = [*_built_in(host, name), *_brought(host, name), *_plugins(host, name)]
    answers = answers or list(_could_be_installed(host, name))
    if not answers:
        raise UsageError(option="--why", value=name, rule=_unknown(host, name))
    return answers


_FIELDS = {contribution.field: contribution.noun for contribution in CONTRIBUTIONS}


def _unknown(host: PluginHost, name: str) -> str:
    known = {own.name for own in builtin_items()}
    known |= {item for record in host.records for field in _FIELDS for item in getattr(record, field)}
    near = nearest(name, known | {record.name for record in host.records})
    aside = ", ".join(record.label for record in host.records if record.status != ACTIVE)
    return (
        "nothing that is installed goes by this name"
        + (f" (did you mean {near!r}?)" if near else "")
        + (f"; plugins that were set aside may bring it: {aside}" if aside else "")
    )


def _built_in(host: PluginHost, name: str) -> Iterator[Answer]:
    for own in builtin_items():
        if own.name == name:
            by = _replaced_by(host, name) if own.field == "families" else None
            state = "replaced" if by else "in use"
            yield Answer(what=_FIELDS[own.field], state=state, provider="kvframe itself", reason=by or "")


def _brought(host: PluginHost, name: str) -> Iterator[Answer]:
    for record in host.records:
        for field, noun in _FIELDS.items():
            if name not in getattr(record, field):
                continue
            if record.status != ACTIVE:
                yield Answer(what=noun, state="set aside", provider=record.label, reason=_reason(record))
            elif field == "families" and host.provider(field, name) is not record:
                by = _replaced_by(host, name) or ""
                yield Answer(what=noun, state="replaced", provider=record.label, reason=by)
            else:
                taken = host.families[name].replaces if field == "families" else None
                note = f"it takes the place of family {taken!r}" if taken else ""
                yield Answer(what=noun, state="in use", provider=record.label, reason=note)


def _replaced_by(host: PluginHost, name: str) -> str | None:
    for family in host.families.values():
        if family.replaces == name:
            record = host.provider("families", family.name)
            return f"family {family.name!r} of {record.label if record else 'kvframe itself'} takes its place"
    return None


def _plugins(host: PluginHost, name: str) -> Iterator[Answer]:
    for record in host.records:
        if canonicalize_name(name) in record.known_as:
            if record.status == ACTIVE:
                brings = [
                    f"{noun} {item}" for field, noun in _FIELDS.items() for item in getattr(record, field)
                ]
                yield Answer(
                    what="plugin", state="in use", provider=record.label, reason=f"brings {', '.join(brings)}"
                )
            else:
                yield Answer(what="plugin", state="set aside", provider=record.label, reason=_reason(record))


def _could_be_installed(host: PluginHost, name: str) -> Iterator[Answer]:
    if name in DISTRIBUTIONS:
        yield _provided(host, "layer kind", DISTRIBUTIONS[name])
    if name not in NEEDED_KINDS:
        return
    kind = NEEDED_KINDS[name]
    if kind in host.layer_readers:
        by = host.provider("layer_kinds", kind)
        label, note = by.label if by else "kvframe itself", f"the core reads it, with layer kind {kind!r}"
        yield Answer(what="model type", state="in use", provider=label, reason=note)
    else:
        yield _provided(host, "model type", DISTRIBUTIONS[kind])


def _provided(host: PluginHost, what: str, distribution: str) -> Answer:
    record = host.set_aside(distribution)
    if record is not None:
        return Answer(what=what, state="set aside", provider=record.label, reason=_reason(record))
    return Answer(
        what=what, state="not installed", provider=distribution, reason=f"pip install {distribution}"
    )


def _reason(record: PluginRecord) -> str:
    return f"{record.status}: {record.reason}{f'; {record.remedy}' if record.remedy else ''}"
