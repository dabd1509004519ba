"""Discovery, isolation, handshake and registry: PluginHost. One broken plugin never stops the others."""

from __future__ import annotations

import functools
import inspect
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar

import attrs
import pluggy
from packaging.utils import canonicalize_name

from kvframe import hookspecs
from kvframe.discovery import (
    ACTIVE,
    BLOCKED,
    BROKEN,
    CONFLICT,
    Filters,
    PluginRecord,
    discover,
    entry_points_by_name,
)
from kvframe.dtypes import CacheDTypes, builtin_cache_dtypes
from kvframe.errors import HookError, MissingPluginError, PluginLoadError, nearest
from kvframe.family import SpecFamily, full_attention_family
from kvframe.layout import ALIASES, Layouts, builtin_layouts
from kvframe.readers import LayerReader, ModelReader, full_attention_reader

T = TypeVar("T")


@attrs.frozen(kw_only=True)
class _Contribution:
    """One sort of thing that plugins bring, each with one owner a name."""

    hook: str
    item_type: str
    names: Callable[[Any], tuple[str, ...]]
    record_field: str


_CONTRIBUTIONS = (
    _Contribution(
        hook="kvframe_spec_families",
        item_type="SpecFamily",
        names=lambda family: (family.name,),
        record_field="families",
    ),
    _Contribution(
        hook="kvframe_cache_dtypes",
        item_type="CacheDType",
        names=lambda dtype: (dtype.name,),
        record_field="cache_dtypes",
    ),
    _Contribution(
        hook="kvframe_layouts",
        item_type="KVCacheLayout",
        names=lambda layout: (layout.name,),
        record_field="layouts",
    ),
    _Contribution(
        hook="kvframe_layer_readers",
        item_type="LayerReader",
        names=lambda reader: (reader.kind,),
        record_field="layer_kinds",
    ),
    _Contribution(
        hook="kvframe_model_readers",
        item_type="ModelReader",
        names=lambda reader: tuple(reader.model_types),
        record_field="model_types",
    ),
    _Contribution(
        hook="kvframe_commands",
        item_type="Command",
        names=lambda command: (command.name,),
        record_field="commands",
    ),
)


class PluginHost:
    """The plugins of one process, frozen after loading: families, dtypes and readers by name, and the records of all.

    Make one with `load_plugins()`; there is no module-level registry.
    """

    def __init__(self, extra: Sequence[ModuleType | object] = (), filters: Filters | None = None) -> None:
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._modules: dict[str, object] = {}
        filters = filters or Filters.from_environment(os.environ)
        entry_points = entry_points_by_name()
        self.records: list[PluginRecord] = discover(entry_points, filters)
        for record in self.records:
            if record.status == ACTIVE:
                self._load(record, entry_points[record.name][0].load)
        for number, plugin in enumerate(extra):
            self._load_extra(plugin, number)
        self._items = self._collect()
        self._families = self._index_families()
        self.cache_dtypes = CacheDTypes(
            [*builtin_cache_dtypes(), *(item for item, _ in self._items["cache_dtypes"].values())]
        )
        self.layouts = Layouts([*builtin_layouts(), *(item for item, _ in self._items["layouts"].values())])
        failures = {
            r.label: str(r.reason) for r in self.records if r.status not in (ACTIVE, BLOCKED)
        }
        if filters.strict and failures:
            raise PluginLoadError(failures=failures)

    # --- loading ---

    def _load_extra(self, plugin: object, number: int) -> None:
        name = getattr(plugin, "__name__", f"extra-{number}")
        if any(plugin is module for module in self._modules.values()):
            return
        record = PluginRecord(name=name, module=getattr(plugin, "__name__", repr(plugin)), status=ACTIVE)
        if any(record.name == other.name for other in self.records):
            record.name = f"{name}#{number}"
        self.records.append(record)
        self._load(record, lambda: plugin)

    def _load(self, record: PluginRecord, load: Callable[[], object]) -> None:
        started = time.perf_counter()
        try:
            plugin = load()
            hooks = self._hooks(plugin)
            problem = _hook_problem(hooks)
            if problem is None:
                self._manager.register(plugin, name=record.name)
        except (Exception, SystemExit) as error:  # a plugin may do anything at import; none of it may stop the rest
            record.set_aside(BROKEN, f"{type(error).__name__}: {error}")
        else:
            if problem is not None:
                record.set_aside(BROKEN, problem)
            else:
                self._modules[record.name] = plugin
                record.hooks = tuple(sorted(hooks))
        record.load_seconds = time.perf_counter() - started

    def _unload(self, record: PluginRecord, status: str, reason: str) -> None:
        record.set_aside(status, reason)
        if self._manager.has_plugin(record.name):
            self._manager.unregister(name=record.name)
        self._modules.pop(record.name, None)

    # --- what plugins bring ---

    def _collect(self) -> dict[str, dict[str, tuple[Any, PluginRecord]]]:
        brought: dict[str, list[tuple[str, Any, PluginRecord]]] = {c.record_field: [] for c in _CONTRIBUTIONS}
        for record in self.records:
            if record.status != ACTIVE:
                continue
            try:
                items = {c.record_field: self._contributed(c, record) for c in _CONTRIBUTIONS}
            except HookError as error:
                self._unload(record, BROKEN, str(error))
                continue
            for field, pairs in items.items():
                setattr(record, field, tuple(name for name, _ in pairs))
                brought[field] += [(name, item, record) for name, item in pairs]
        for reason, records in self._conflicts(brought):
            for record in records:
                self._unload(record, CONFLICT, reason)
        return {
            field: {name: (item, record) for name, item, record in pairs if record.status == ACTIVE}
            for field, pairs in brought.items()
        }

    def _contributed(self, contribution: _Contribution, record: PluginRecord) -> list[tuple[str, Any]]:
        result = self.call_one(contribution.hook, record)
        if result is None:
            return []
        if not isinstance(result, (list, tuple)):
            raise HookError(
                hook=contribution.hook,
                plugin=record.label,
                reason=f"must return a list of {contribution.item_type}, not {type(result).__name__}",
            )
        pairs = []
        for item in result:
            if not any(base.__name__ == contribution.item_type for base in type(item).__mro__):
                raise HookError(
                    hook=contribution.hook,
                    plugin=record.label,
                    reason=f"must list {contribution.item_type} objects, not {type(item).__name__}",
                )
            pairs += [(name, item) for name in contribution.names(item)]
        return pairs

    def _conflicts(
        self, brought: Mapping[str, Sequence[tuple[str, Any, PluginRecord]]]
    ) -> Iterable[tuple[str, Sequence[PluginRecord]]]:
        builtin = {
            "families": {"full_attention": "kvframe itself"},
            "cache_dtypes": {dtype.name: "kvframe itself" for dtype in builtin_cache_dtypes()},
            "layouts": dict.fromkeys([*(x.name for x in builtin_layouts()), *ALIASES], "kvframe itself"),
            "layer_kinds": {full_attention_reader().kind: "kvframe itself"},
            "model_types": {},
            "commands": {},
        }
        for field, pairs in brought.items():
            claims: dict[str, list[PluginRecord]] = {}
            for name, item, record in pairs:
                for claimed in _claims(field, name, item):
                    claims.setdefault(claimed, []).append(record)
            for claimed, records in claims.items():
                owners = [record.label for record in records]
                owners += [builtin[field][claimed]] if claimed in builtin[field] else []
                if len(owners) > 1:
                    sort = field.rstrip("s").replace("_", " ").replace("familie", "family")
                    yield f"{sort} {claimed!r} is claimed by {' and '.join(owners)}", records

    def _index_families(self) -> dict[type, SpecFamily[Any]]:
        families = [full_attention_family(), *(item for item, _ in self._items["families"].values())]
        replaced = {family.replaces for family in families if family.replaces}
        return {
            family.spec_type: family
            for family in sorted(families, key=lambda f: f.replaces is not None)
            if family.name not in replaced
        }

    # --- asking ---

    def family(self, spec: object) -> SpecFamily[Any]:
        """The family of a spec, by the nearest class in its MRO.

        Raises:
            MissingPluginError: no installed plugin has a family for it.
        """
        for base in type(spec).__mro__:
            if base in self._families:
                return self._families[base]
        raise MissingPluginError(wanted=f"a family for spec {type(spec).__name__!r}", needed_by="plan")

    @property
    def families(self) -> Mapping[str, SpecFamily[Any]]:
        """The families by name."""
        return {family.name: family for family in self._families.values()}

    @property
    def layer_readers(self) -> Mapping[str, LayerReader]:
        """The readers by the layer kind they own."""
        own = full_attention_reader()
        return {own.kind: own, **{kind: reader for kind, (reader, _) in self._items["layer_kinds"].items()}}

    @property
    def model_readers(self) -> Mapping[str, ModelReader]:
        """The readers by the model type they own."""
        return {model_type: reader for model_type, (reader, _) in self._items["model_types"].items()}

    @property
    def commands(self) -> tuple[Any, ...]:
        """click commands that plugins bring."""
        return tuple(item for item, _ in self._items["commands"].values())

    def set_aside_reason(self, distribution: str) -> str | None:
        """Why the plugin of a distribution is not in use, or None if it is in use or not installed."""
        wanted = canonicalize_name(distribution)
        for record in self.records:
            if record.distribution and canonicalize_name(record.distribution) == wanted:
                return record.reason
        return None

    # --- calling hooks: the only place that touches pluggy's relay ---

    def call_one(self, hook: str, record: PluginRecord, **arguments: Any) -> Any:
        """One plugin's answer to a hook, None if it does not implement it.

        Raises:
            HookError: it raised; the message says whose it was.
        """
        others = [plugin for name, plugin in self._modules.items() if name != record.name]
        caller = self._manager.subset_hook_caller(hook, remove_plugins=others)
        try:
            answers = caller(**arguments)
        except (Exception, SystemExit) as error:
            raise HookError(
                hook=hook, plugin=record.label, reason=f"raised {type(error).__name__}: {error}"
            ) from error
        return answers[0] if answers else None

    def _hooks(self, plugin: object) -> dict[str, Callable[..., Any]]:
        """A plugin's hook implementations by name."""
        return {
            name: getattr(plugin, name)
            for name in dir(plugin)
            if self._manager.parse_hookimpl_opts(plugin, name) is not None
        }

    def call_all(self, hook: str, **arguments: Any) -> Iterable[Any]:
        """Every plugin's answer that is not None, in the order of plugin names; lazily, so a caller may stop early."""
        for record in sorted(self.records, key=_order):
            if record.status == ACTIVE:
                answer = self.call_one(hook, record, **arguments)
                if answer is not None:
                    yield answer

    def fold(self, hook: str, argument: str, value: T, **arguments: Any) -> T:
        """Answers that chain: each plugin sees what the one before made of `value`."""
        for record in sorted(self.records, key=_order):
            if record.status == ACTIVE:
                answer = self.call_one(hook, record, **{argument: value}, **arguments)
                value = value if answer is None else answer
        return value


def _order(record: PluginRecord) -> tuple[str, str]:
    return record.name, record.distribution or ""


def _claims(field: str, name: str, item: Any) -> tuple[str, ...]:
    if field != "families" or item.replaces is not None:
        return () if field == "families" else (name,)
    return (name, f"type {item.spec_type.__module__}.{item.spec_type.__qualname__}")


def _hook_problem(hooks: Mapping[str, Callable[..., Any]]) -> str | None:
    """Why a plugin's hooks cannot be used, or None."""
    if not hooks:
        return "it has no hook: mark its functions with @kvframe.hookimpl"
    known = {name for name in dir(hookspecs) if name.startswith("kvframe_")}
    for name, function in hooks.items():
        if name not in known:
            near = nearest(name, known)
            return f"unknown hook {name!r}" + (f": did you mean {near!r}?" if near else "")
        offered = set(inspect.signature(getattr(hookspecs, name)).parameters)
        for parameter in inspect.signature(function).parameters.values():
            if parameter.name not in offered:
                return f"hook {name!r} takes {parameter.name!r}, which is not one of its arguments {sorted(offered)}"
            if parameter.default is not inspect.Parameter.empty:
                return f"hook {name!r} gives {parameter.name!r} a default value, which hooks may not"
    return None


def load_plugins(extra: Sequence[ModuleType | object] = ()) -> PluginHost:
    """The installed plugins, found by entry points, plus `extra` modules or objects with hooks.

    The host without extras is made once a process and kept; environment variables are read at that moment.

    Raises:
        UnknownPluginError: KVFRAME_PLUGINS or KVFRAME_DISABLE_PLUGINS names one that is not installed.
        PluginLoadError: KVFRAME_STRICT is set and a plugin was set aside.
    """
    return PluginHost(extra) if extra else _installed()


@functools.cache
def _installed() -> PluginHost:
    return PluginHost()
