"""What plugins bring at load: the sorts of things, what each must look like, and that every name has one owner."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import attrs

from kvframe.discovery import ACTIVE, PluginRecord
from kvframe.dtypes import CacheDType, builtin_cache_dtypes
from kvframe.errors import HookError
from kvframe.family import SpecFamily, full_attention_family
from kvframe.layout import ALIASES, KVCacheLayout, builtin_layouts
from kvframe.readers import LayerReader, ModelReader, full_attention_reader


@attrs.frozen
class Contribution:
    """One sort of thing that plugins bring.

    Args:
        hook: the hook that brings it.
        field: the `PluginRecord` field that lists its names.
        noun: what messages call one.
        item_type: its class, or the class's name where importing the class costs too much.
        names: an item to the names it claims.
    """

    hook: str
    field: str
    noun: str
    item_type: type | str
    names: Callable[[Any], Sequence[str]]

    @property
    def called(self) -> str:
        """The class's name."""
        return self.item_type if isinstance(self.item_type, str) else self.item_type.__name__

    def fits(self, item: object) -> bool:
        """Whether an item is of the class."""
        if isinstance(self.item_type, str):
            return any(base.__name__ == self.item_type for base in type(item).__mro__)
        return isinstance(item, self.item_type)


FAMILIES = "families"
CONTRIBUTIONS = (
    Contribution("kvframe_spec_families", FAMILIES, "family", SpecFamily, lambda family: (family.name,)),
    Contribution(
        "kvframe_cache_dtypes", "cache_dtypes", "cache dtype", CacheDType, lambda dtype: (dtype.name,)
    ),
    Contribution("kvframe_layouts", "layouts", "layout", KVCacheLayout, lambda layout: (layout.name,)),
    Contribution(
        "kvframe_layer_readers", "layer_kinds", "layer kind", LayerReader, lambda reader: (reader.kind,)
    ),
    Contribution(
        "kvframe_model_readers", "model_types", "model type", ModelReader, lambda reader: reader.model_types
    ),
    Contribution(
        "kvframe_eviction_policies",
        "eviction_policies",
        "eviction policy",
        "EvictionPolicy",
        lambda policy: (policy.name,),
    ),
    Contribution("kvframe_commands", "commands", "command", "Command", lambda command: (command.name,)),
)
_NOUNS: Mapping[str, str] = {contribution.field: contribution.noun for contribution in CONTRIBUTIONS}


@attrs.frozen(kw_only=True)
class Brought:
    """One name and what goes by it. `record` is the plugin that brings it, None for kvframe itself."""

    field: str
    name: str
    item: Any
    record: PluginRecord | None = None

    @property
    def active(self) -> bool:
        """Whether its owner is in use."""
        return self.record is None or self.record.status == ACTIVE


def builtin_items() -> list[Brought]:
    """What every installation has; its names are taken."""
    own = full_attention_reader()
    layouts = {layout.name: layout for layout in builtin_layouts()}
    layouts |= {alias: layouts[name] for alias, name in ALIASES.items()}
    named: Mapping[str, Mapping[str, Any]] = {
        FAMILIES: {family.name: family for family in (full_attention_family(),)},
        "cache_dtypes": {dtype.name: dtype for dtype in builtin_cache_dtypes()},
        "layouts": layouts,
        "layer_kinds": {own.kind: own},
    }
    return [
        Brought(field=field, name=name, item=item)
        for field, items in named.items()
        for name, item in items.items()
    ]


def brought_by(contribution: Contribution, result: object, record: PluginRecord) -> list[Brought]:
    """A hook's answer, taken apart.

    Raises:
        HookError: it is no list of the hook's items, or an item has no usable name.
    """
    if result is None:
        return []
    if not isinstance(result, (list, tuple)):
        reason = f"must return a list of {contribution.called}, not {type(result).__name__}"
        raise HookError(hook=contribution.hook, plugin=record.label, reason=reason)
    brought: list[Brought] = []
    for item in result:
        problem = _problem(contribution, item)
        if problem is not None:
            raise HookError(hook=contribution.hook, plugin=record.label, reason=problem)
        brought += [
            Brought(field=contribution.field, name=name, item=item, record=record)
            for name in contribution.names(item)
        ]
    return brought


def _problem(contribution: Contribution, item: Any) -> str | None:
    """Why an item cannot be used, or None."""
    if not contribution.fits(item):
        return f"must list {contribution.called} objects, not {type(item).__name__}"
    try:
        names = contribution.names(item)
    except Exception as error:  # a plugin's object: reading its attributes may do anything
        return f"a {contribution.noun} has no name: {type(error).__name__}: {error}"
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) and name for name in names):
        return f"a {contribution.noun} must be named by text that is not empty, not by {names!r}"
    if isinstance(item, SpecFamily) and not isinstance(item.spec_type, type):
        return f"spec_type of family {item.name!r} must be a class, not {item.spec_type!r}"
    if isinstance(item, SpecFamily) and not isinstance(item.replaces, (str, type(None))):
        return f"family {item.name!r} must name the family that it replaces, not {item.replaces!r}"
    return None


def conflicts(brought: Iterable[Brought]) -> list[tuple[str, list[PluginRecord]]]:
    """Every claim with more than one owner: what is claimed by whom, and the plugins among them."""
    brought = list(brought)
    places = _places_taken(brought)
    owners: dict[tuple[str, bool], list[Brought]] = {}
    for thing in brought:
        # a family that another takes the place of clashes with others of its name, not with its successor
        replaced = _is_replaced(thing, places)
        for claim in _claims(thing):
            owners.setdefault((claim, replaced), []).append(thing)
    return [
        (
            f"{claim} is claimed by {' and '.join(_owner(thing) for thing in things)}",
            [thing.record for thing in things if thing.record is not None],
        )
        for (claim, _), things in owners.items()
        if len(things) > 1
    ]


def in_use(brought: Iterable[Brought]) -> Mapping[str, Mapping[str, Any]]:
    """The items of active owners by name, by record field; families whose place is taken are left out."""
    active = [thing for thing in brought if thing.active]
    places = _places_taken(active)
    items: dict[str, dict[str, Any]] = {contribution.field: {} for contribution in CONTRIBUTIONS}
    for thing in active:
        if not _is_replaced(thing, places):
            items[thing.field][thing.name] = thing.item
    return {field: MappingProxyType(named) for field, named in items.items()}


def _owner(thing: Brought) -> str:
    return thing.record.label if thing.record else "kvframe itself"


def _places_taken(brought: Iterable[Brought]) -> set[str]:
    return {thing.item.replaces for thing in brought if thing.field == FAMILIES and thing.item.replaces}


def _is_replaced(thing: Brought, places: Collection[str]) -> bool:
    return thing.field == FAMILIES and thing.name in places and thing.item.replaces != thing.name


def _claims(thing: Brought) -> list[str]:
    claims = [f"{_NOUNS[thing.field]} {thing.name!r}"]
    if thing.field == FAMILIES:
        spec_type = thing.item.spec_type
        claims.append(f"spec type {spec_type.__module__}.{spec_type.__qualname__}")
        if thing.item.replaces:
            claims.append(f"the place of family {thing.item.replaces!r}")
    return claims
