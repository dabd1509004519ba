"""Discovery, isolation, handshake and registry: PluginHost. One broken plugin never stops the others."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar

import pluggy
from packaging.utils import canonicalize_name

from kvframe import hookspecs
from kvframe.contributions import CONTRIBUTIONS, Brought, brought_by, builtin_items, conflicts, in_use
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
from kvframe.dtypes import CacheDTypes
from kvframe.errors import HookError, KVFrameError, MissingPluginError, PluginLoadError
from kvframe.family import SpecFamily
from kvframe.hookimpls import hook_implementations, plugin_problem, warn_of_deprecations
from kvframe.layout import Layouts
from kvframe.merge import Refusal
from kvframe.readers import LayerReader, ModelReader

S = TypeVar("S")
T = TypeVar("T")
_LOG = logging.getLogger("kvframe")

# A plugin may do anything when it is imported or called; none of it may stop the rest.
_FAILURES = (Exception, SystemExit)


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
        points = [point for claimants in entry_points.values() for point in claimants]
        for record, point in zip(self.records, points, strict=True):
            if record.status == ACTIVE:
                self._load(record, point.load)
        for number, plugin in enumerate(extra):
            self._load_extra(plugin, number)
        self._brought = self._collect()
        self._items = in_use(self._brought)
        self._families: dict[type, SpecFamily[Any]] = {
            family.spec_type: family for family in self._items["families"].values()
        }
        self.cache_dtypes = CacheDTypes(self._items["cache_dtypes"].values())
        self.layouts = Layouts(self._items["layouts"].values())
        failures = {r.label: str(r.reason) for r in self.records if r.status not in (ACTIVE, BLOCKED)}
        if filters.strict and failures:
            raise PluginLoadError(failures=failures)
        # where the program has no log handler of its own, these are lines on standard error
        for label, reason in failures.items():
            _LOG.warning("plugin %s was set aside: %s", label, " ".join(reason.split()))
        for record in self.records:
            if record.slow:
                _LOG.warning("plugin %s took %.1f s to load", record.label, record.load_seconds)

    # --- loading ---

    def _load_extra(self, plugin: object, number: int) -> None:
        name = getattr(plugin, "__name__", f"extra-{number}")
        if self._name_of(plugin) is not None:
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
            hooks = hook_implementations(self._manager, plugin)
            problem = plugin_problem(plugin, hooks, loaded_as=self._name_of(plugin))
            if problem is None:
                self._manager.register(plugin, name=record.name)
                self._modules[record.name] = plugin
                record.hooks = tuple(sorted(one.hook for one in hooks))
                warn_of_deprecations(record.label, hooks)
        except _FAILURES as error:
            problem = _said(error)
        if problem is not None:
            self._unload(record, BROKEN, problem)
        record.load_seconds = time.perf_counter() - started

    def _name_of(self, plugin: object) -> str | None:
        """The name under which this very object is loaded, or None."""
        return next((name for name, module in self._modules.items() if module is plugin), None)

    def _unload(self, record: PluginRecord, status: str, reason: str) -> None:
        record.set_aside(status, reason)
        if self._manager.has_plugin(record.name):
            self._manager.unregister(name=record.name)
        self._modules.pop(record.name, None)

    def _collect(self) -> list[Brought]:
        """What kvframe and the plugins bring. A plugin that fails, or claims what another claims, is set aside."""
        brought = builtin_items()
        for record in self.records:
            if record.status != ACTIVE:
                continue
            try:
                own = [
                    thing
                    for c in CONTRIBUTIONS
                    for thing in brought_by(c, self.call_one(c.hook, record), record)
                ]
            except HookError as error:
                self._unload(record, BROKEN, str(error))
                continue
            for contribution in CONTRIBUTIONS:
                names = tuple(thing.name for thing in own if thing.field == contribution.field)
                setattr(record, contribution.field, names)
            brought += own
        for reason, records in conflicts(brought):
            for record in records:
                if record.status == ACTIVE:
                    self._unload(record, CONFLICT, reason)
        return brought

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
        return self._items["layer_kinds"]

    @property
    def model_readers(self) -> Mapping[str, ModelReader]:
        """The readers by the model type they own."""
        return self._items["model_types"]

    @property
    def eviction_policies(self) -> Mapping[str, Any]:
        """The eviction policies that plugins bring, by name: what `KVCacheManager` takes as `policies`."""
        return self._items["eviction_policies"]

    @property
    def commands(self) -> tuple[Any, ...]:
        """click commands that plugins bring."""
        return tuple(self._items["commands"].values())

    def provider(self, sort: str, name: str) -> PluginRecord | None:
        """The plugin that brings a thing, None if kvframe itself does, or nobody.

        Args:
            sort: "families", "layouts", or what else a record lists.
            name: the thing's name.
        """
        item = self._items[sort].get(name)
        return next((thing.record for thing in self._brought if thing.item is item), None)

    def set_aside(self, distribution: str) -> PluginRecord | None:
        """The plugin of a distribution, if it was set aside; None if it is in use or not installed."""
        wanted = canonicalize_name(distribution)
        for record in self.records:
            owner = record.distribution
            if record.status != ACTIVE and owner and canonicalize_name(owner) == wanted:
                return record
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
        except _FAILURES as error:
            raise HookError(hook=hook, plugin=record.label, reason=f"raised {_said(error)}") from error
        return answers[0] if answers else None

    def _ask(self, hook: str, record: PluginRecord, **arguments: Any) -> Any:
        """As `call_one`, but an error of kvframe's own kind is the plugin's refusal and passes as it is."""
        try:
            return self.call_one(hook, record, **arguments)
        except HookError as error:
            if isinstance(error.__cause__, KVFrameError):
                raise error.__cause__ from None
            raise

    def call_all(self, hook: str, **arguments: Any) -> Iterable[Any]:
        """Every plugin's answer that is not None, in the order of plugin names; lazily, so a caller may stop early.

        Raises:
            HookError: a plugin failed.
            KVFrameError: a plugin refused.
        """
        for record in sorted(self.records, key=_order):
            if record.status == ACTIVE:
                answer = self._ask(hook, record, **arguments)
                if answer is not None:
                    yield answer

    def fold(self, hook: str, argument: str, value: T, **arguments: Any) -> T:
        """Answers that chain: each plugin sees what the one before made of `value`.

        Raises:
            HookError: a plugin failed.
            KVFrameError: a plugin refused.
        """
        for record in sorted(self.records, key=_order):
            if record.status == ACTIVE:
                answer = self._ask(hook, record, **{argument: value}, **arguments)
                value = value if answer is None else answer
        return value


def _order(record: PluginRecord) -> tuple[str, str]:
    return record.name, record.distribution or ""


def _said(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # the text of a plugin's own error is a plugin's code too
        return type(error).__name__


def load_plugins(extra: Sequence[ModuleType | object] = ()) -> PluginHost:
    """The installed plugins, found by entry points, plus `extra` modules or objects with hooks.

    The host without extras is made once a process and kept; environment variables are read at that moment.

    Raises:
        UnknownPluginError: KVFRAME_PLUGINS or KVFRAME_DISABLE_PLUGINS names one that is not installed.
        PluginLoadError: KVFRAME_STRICT is set and a plugin was set aside.
    """
    return PluginHost(extra) if extra else _installed()


def merge_specs(specs: Mapping[str, S], host: PluginHost | None = None) -> S:
    """The layers' specs as one, where that must succeed.

    Args:
        specs: layer name to spec, at least one.
        host: whose families merge; None: the installed plugins.

    Raises:
        MergeError: they do not merge; names the field and, per value, the layers that hold it.
    """
    family = (host or load_plugins()).family(next(iter(specs.values())))
    merged: S | Refusal = family.merge(specs)
    if isinstance(merged, Refusal):
        raise merged.error()
    return merged


@functools.cache
def _installed() -> PluginHost:
    return PluginHost()
