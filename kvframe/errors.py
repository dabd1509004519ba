"""Every error of kvframe: fields first, the text is made from them.

Each class subclasses the fitting builtin, so `except ValueError` keeps working, and has a stable `kind` for machines.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import attrs

GIB = 1 << 30


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` was most likely meant to be, or None."""
    import difflib  # only a wrong name needs it, and every start would pay

    match = difflib.get_close_matches(name, list(known), n=1)
    return match[0] if match else None


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _hint(name: str, known: Iterable[str]) -> str:
    near = nearest(name, known)
    return f" Did you mean {near!r}?" if near else ""


@attrs.define(auto_exc=True, eq=False, kw_only=True, str=False)
class KVFrameError(Exception):
    """Root of all errors. `kind` is stable; `fields()` holds every value that the text speaks of."""

    kind: ClassVar[str] = "error"

    def fields(self) -> dict[str, Any]:
        """The error's fields by name, as plain values."""
        return attrs.asdict(self, recurse=False)

    def as_dict(self) -> dict[str, Any]:
        """The error as `--json` prints it: kind, type, message, fields."""
        return {
            "kind": self.kind,
            "type": type(self).__name__,
            "message": str(self),
            "fields": self.fields(),
        }

    def __str__(self) -> str:
        raise TypeError(f"{type(self).__name__} must say what happened: define __str__")

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.fields()))


def _rebuild(cls: type[KVFrameError], fields: Mapping[str, Any]) -> KVFrameError:
    return cls(**fields)


class KVFrameDeprecationWarning(FutureWarning):
    """A plugin uses what a later kvframe drops. A FutureWarning, so that users see it and can ask for an update."""


@attrs.define(auto_exc=True, eq=False, kw_only=True, str=False)
class SpecError(KVFrameError, ValueError):
    """A spec was built with a value that breaks one of its rules."""

    kind: ClassVar[str] = "spec_invalid"
    spec: str
    field: str
    value: Any
    rule: str

    def __str__(self) -> str:
        return f"{self.spec}.{self.field} = {self.value!r}: {self.rule}."


@attrs.define(auto_exc=True, eq=False, kw_only=True, str=False)
class MergeError(KVFrameError, ValueError):
    """Layers were asked to become one spec and cannot; `layers` says who holds which value of `field`."""

    kind: ClassVar[str] = "spec_conflict"
    field: str
    layers: Mapping[str, Sequence[str]]
    rule: str

    def __str__(self) -> str:
        held = "; ".join(f"{value} in {', '.join(names)}" for value, names in self.layers.items())
        return f"layers cannot share one spec: {self.rule}. {self.field}: {held}."


@attrs.define(auto_exc=True, eq=False, kw_only=True, str=False)
class PlanError(KVFrameError, ValueError):
    """The layers' specs cannot be planned together."""

    kind: ClassVar[str] = "spec_conflict"
    reason: str
    layers: Sequence[str] = ()
    values: Mapping[str, Any] = attrs.Factory(dict)
    advice: str = ""

    def __str__(self) -> str:
        what = "; ".join(f"{key}: {value}" for key, value in self.values.items())
        return (
            f"{self.reason}.{_where(self.layers)}{f' {what}.' if what else ''}"
            f"{f' {self.advice}.' if self.advice else ''}"
        )


@attrs.define(auto_exc=True, eq=False, kw_only=True, str=False)
class PlanFormatError(KVFrameError, ValueError):
    """A plan's JSON cannot be read, or a plan cannot be written as JSON; `path` says where ("$" is the whole)."""

    kind: ClassVar[str] = "invalid_plan"
    path: str
    value: Any
    rule: str

    def __str__(self) -> str:
        return f"invalid plan: {self.path} = {reprlib.repr(self.value)}: {self.rule}."


@attrs.define(auto_exc=True, eq=False, kw_only=True, str=False)
class LayoutError(KVFrameError, ValueError):
    """A memory layout cannot express what was asked of it; `would_work` names the layouts that can."""

    kind: ClassVar[str] = "layout"
    layout: str
    reason: str
    would_work: Sequence[str] = ()
    layers: Sequence[str] = ()

    def __str__(self) -> str:
        instead = f" Layouts that would work: {', '.join(self.would_work)}." if self.would_work else ""
        return f"layout {self.layout}: {self.reason}.{_where(self.layers)}{instead}"


def _where(layers: Sequence[str]) -> str:
    named = list(layers[:4]) + (["…"] if len(layers) > 4 else [])
    return f" Layers: {', '.join(named)}." if named else ""


@attrs.define(auto_exc=True, eq=False, kw_only=True, str=False)
class InsufficientMemoryError(KVFrameError, ValueError):
    """One request of the maximum length does not fit. Sizes are bytes on one rank, lengths are tokens."""

    kind: ClassVar[str] = "insufficient_memory"
    needed_bytes: int
    available_bytes: int
    max_model_len: int
    largest_fitting_len: int
    pool: str = "device"

    def __str__(self) -> str:
        fits = (
            f"The largest length that fits is {self.largest_fitting_len:,} tokens."
            if self.largest_fitting_len
            else "Not even one token fits."
        )
        reserved, advice = "the null block", "raise --memory, or shard with --tensor-parallel-size"
        if self.pool != "device":
            reserved, advice = "the blocks it reserves", f"or raise the budget of pool {self.pool!r}"
        return (
            f"one request of {self.max_model_len:,} tokens needs {_size(self.needed_bytes)} of KV cache, "
            f"{_size(self.available_bytes)} are available in pool {self.pool!r} after {reserved}. {fits} "
            f"Lower --max-model-len, {advice}."
        )


@attrs.define(auto_exc=True, eq=False, kw_only=True, str=False)
class SequenceLimitError(KVFrameError, ValueError):
    """Layers of constant size, states or rings, of so many running sequences do not fit, however short these are."""

    kind: ClassVar[str] = "insufficient_memory"
    max_num_seqs: int
    max_sequences: int
    layers: Sequence[str]
    pool: str = "device"

    def __str__(self) -> str:
        return (
            f"{self.max_num_seqs:,} sequences at once do not fit: pool {self.pool!r} holds what "
            f"{self.max_sequences:,} sequences of any length keep all the time.{_where(self.layers)} "
            f"Lower --max-num-seqs to {self.max_sequences:,}, or raise --memory."
        )


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB" if abs(nbytes) >= GIB // 100 else f"{nbytes:,} bytes"


@attrs.define(auto_exc=True, eq=False, kw_only=True, str=False)
class UnknownCacheDTypeError(KVFrameError, LookupError):
    """No registered cache data type claims this name."""

    kind: ClassVar[str] = "unknown_cache_dtype"
    name: str
    known: Sequence[str]

    def __str__(self) -> str:
        return (
            f"unknown cache dtype {self.name!r}.{_hint(self.name, self.known)} Known: {_listed(self.known)}."
        )


@attrs.define(auto_exc=True, eq=False, kw_only=True, str=False)
class MissingScalesError(KVFrameError, ValueError):
    """A cache dtype needs scales that the checkpoint does not have, and no policy says what to use."""

    kind: ClassVar[str] = "missing_scales"
    cache_dtype: str

    def __str__(self) -> str:
        return (
            f"cache dtype {self.cache_dtype!r} needs scales, and the checkpoint has none. Choose with "
            f"--scale-policy: 'computed' (calibrate while running) or 'unit' (1.0: values beyond the format's "
            f"range are clipped), or use a checkpoint with scales."
        )


@attrs.define(auto_exc=True, eq=False, kw_only=True, str=False)
class ModelConfigError(KVFrameError, ValueError):
    """A model's config.json holds a value that cannot be right."""

    kind: ClassVar[str] = "invalid_config"
    file: str
    field: str
    value: Any = None
    rule: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.field} = {self.value!r}: {self.rule}."


@attrs.define(auto_exc=True, eq=False, kw_only=True, str=False)
class MissingFieldError(ModelConfigError):
    """A field that decides the cache is absent and cannot be derived."""

    kind: ClassVar[str] = "missing_field"

    def __str__(self) -> str:
        return f"{self.file}: field {self.field!r} is missing{f': {self.rule}' if self.rule else ''}."


@attrs.define(auto_exc=True, eq=False, kw_only=True, str=False)
class UnknownLayerKindError(ModelConfigError):
    """A layer's word in the config means no kind that any installed plugin knows."""

    kind: ClassVar[str] = "unknown_layer_type"
    layer: int
    known: Sequence[str]

    def __str__(self) -> str:
        return (
            f"{self.file}: layer {self.layer} is of unknown kind {self.value!r} (field {self.field!r})."
            f"{_hint(str(self.value), self.known)} Known kinds: {_listed(self.known)}. "
            f"A plugin can bring more: see `kvframe plugins`."
        )


@attrs.define(auto_exc=True, eq=False, kw_only=True, str=False)
class NotDivisibleError(ModelConfigError):
    """Two numbers of which one must divide the other do not."""

    kind: ClassVar[str] = "not_divisible"
    divisor: int

    def __str__(self) -> str:
        return f"{self.file}: {self.field} = {self.value} cannot be split over {self.divisor} ranks: {self.rule}."


@attrs.define(auto_exc=True, eq=False, kw_only=True, str=False)
class MissingPluginError(KVFrameError, LookupError):
    """Something is needed that an uninstalled, or a set-aside, plugin provides."""

    kind: ClassVar[str] = "missing_plugin"
    wanted: str
    needed_by: str = "model"
    distribution: str | None = None
    reason: str | None = None
    remedy: str | None = None

    def __str__(self) -> str:
        if self.distribution is None:
            return f"{self.needed_by} needs {self.wanted}, which no installed plugin provides. See `kvframe plugins`."
        if self.reason:
            remedy = f"To use it, {self.remedy}" if self.remedy else "See `kvframe plugins`"
            return (
                f"{self.needed_by} needs {self.wanted}, provided by {self.distribution}, which was set aside: "
                f"{self.reason}. {remedy}"
            )
        return (
            f"{self.needed_by} needs {self.wanted}, provided by {self.distribution}: "
            f"pip install {self.distribution}"
        )


@attrs.define(auto_exc=True, eq=False, kw_only=True, str=False)
class MissingDependencyError(KVFrameError, ImportError):
    """A part of kvframe was imported that needs a library which is not installed."""

    kind: ClassVar[str] = "missing_dependency"
    module: str
    needs: str
    extra: str

    def __str__(self) -> str:
        return (
            f"{self.module} needs {self.needs}, which is not installed: pip install 'kvframe[{self.extra}]'"
        )


@attrs.define(auto_exc=True, eq=False, kw_only=True, str=False)
class BufferMemoryError(KVFrameError, MemoryError):
    """A pool's buffer does not fit into memory. Sizes are bytes; `available_bytes` is None where nobody knows."""

    kind: ClassVar[str] = "insufficient_memory"
    pool: str
    memory: str
    wanted_bytes: int
    available_bytes: int | None = None

    def __str__(self) -> str:
        available = "" if self.available_bytes is None else f", {self.available_bytes:,} are available"
        return (
            f"pool {self.pool!r} wants {self.wanted_bytes:,} bytes of {self.memory}{available}. "
            f"Lower --memory, or free what else holds it."
        )


@attrs.define(auto_exc=True, eq=False, kw_only=True, str=False)
class UnknownPluginError(KVFrameError, LookupError):
    """A filter names plugins that are not installed."""

    kind: ClassVar[str] = "unknown_plugin"
    unknown: Sequence[str]
    found: Sequence[str]
    source: str

    def __str__(self) -> str:
        hints = "".join(_hint(name, self.found) for name in self.unknown)
        return (
            f"{self.source} names plugins that are not installed: {_listed(self.unknown)}.{hints} "
            f"Installed: {_listed(self.found)}."
        )


@attrs.define(auto_exc=True, eq=False, kw_only=True, str=False)
class PluginLoadError(KVFrameError, RuntimeError):
    """A plugin could not be used and KVFRAME_STRICT asks for that to be an error."""

    kind: ClassVar[str] = "plugin_load"
    failures: Mapping[str, str]

    def __str__(self) -> str:
        listed = "; ".join(f"{name}: {reason}" for name, reason in self.failures.items())
        return f"plugins were set aside and KVFRAME_STRICT is set: {listed}."


@attrs.define(auto_exc=True, eq=False, kw_only=True, str=False)
class HookError(KVFrameError, RuntimeError):
    """A plugin's hook raised, or returned something else than its contract says."""

    kind: ClassVar[str] = "plugin_load"
    hook: str
    plugin: str
    reason: str

    def __str__(self) -> str:
        return f"hook {self.hook} of plugin {self.plugin}: {self.reason}."


@attrs.define(auto_exc=True, eq=False, kw_only=True, str=False)
class UsageError(KVFrameError, ValueError):
    """Options or arguments that contradict each other or cannot be read."""

    kind: ClassVar[str] = "usage"
    option: str
    value: Any
    rule: str

    def __str__(self) -> str:
        return (
            f"{self.option} {self.value}: {self.rule}."
            if self.value is not None
            else f"{self.option}: {self.rule}."
        )


@attrs.define(auto_exc=True, eq=False, kw_only=True, str=False)
class AgreementError(KVFrameError, RuntimeError):
    """Ranks cannot agree on a plan. The same on every rank.

    `ranks` are those to look at, none where it concerns all; `held` says for each disputed name which ranks hold
    which value; `cause` is the error that ended the planning, as its `as_dict` gives it.
    """

    kind: ClassVar[str] = "ranks_disagree"
    ranks: Sequence[int]
    reason: str
    held: Mapping[str, Mapping[str, Sequence[int]]] = attrs.Factory(dict)
    cause: Mapping[str, Any] | None = None
    advice: str = ""

    def __str__(self) -> str:
        who = _ranks(self.ranks) if self.ranks else "all ranks"
        what = "; ".join(
            f"{name}: " + ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in values.items())
            for name, values in self.held.items()
        )
        return (
            f"{who}: {self.reason}.{f' {what}.' if what else ''}{f' {self.advice}.' if self.advice else ''}"
        )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
