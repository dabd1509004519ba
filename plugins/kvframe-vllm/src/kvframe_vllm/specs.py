"""vLLM's spec objects to kvframe's and back: the same fields by the same names, page sizes equal, or a typed error."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

import attrs

from kvframe.checks import round_up
from kvframe.dtypes import dtype_name
from kvframe.errors import KVFrameError
from kvframe.spec import MultipleOf, UniformTypeKVCacheSpecs
from kvframe_vllm.errors import UnknownSpecError, UntranslatableError

# vLLM's class to kvframe's, where both have one: module and class.
COUNTERPARTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "FullAttentionSpec": ("kvframe", "FullAttentionSpec"),
        "MLAAttentionSpec": ("kvframe_mla", "MLAAttentionSpec"),
        "HiddenStateCacheSpec": ("kvframe_hidden_state", "HiddenStateCacheSpec"),
        "RSWASpec": ("kvframe_rswa", "RSWASpec"),
        "SinkFullAttentionSpec": ("kvframe_sink", "SinkFullAttentionSpec"),
        "ChunkedLocalAttentionSpec": ("kvframe_chunked_local", "ChunkedLocalAttentionSpec"),
        "SlidingWindowSpec": ("kvframe_sliding_window", "SlidingWindowSpec"),
        "SlidingWindowMLASpec": ("kvframe_mla", "SlidingWindowMLASpec"),
        "CircularBufferSpec": ("kvframe_circular_buffer", "CircularBufferSpec"),
        "MambaSpec": ("kvframe_mamba", "MambaSpec"),
        "CrossAttentionSpec": ("kvframe_cross_attention", "CrossAttentionSpec"),
        "EncoderOnlyAttentionSpec": ("kvframe_cross_attention", "EncoderOnlyAttentionSpec"),
        "HiSparseHotSpec": ("kvframe_hisparse", "HiSparseHotSpec"),
        "HiSparseResidentSpec": ("kvframe_hisparse", "HiSparseResidentSpec"),
    }
)
INTERFACE = "vllm.v1.kv_cache_interface"
BRIDGES = "kvframe_vllm.bridges"  # entry points: further pairs of classes, as Bridge objects

# Fields of vLLM's classes that are derived facts in kvframe.
_DERIVED: Mapping[str, frozenset[str]] = MappingProxyType(
    {"MambaSpec": frozenset({"num_heads", "tokens_per_state"})}
)


@attrs.frozen
class Bridge:
    """A pair of spec classes with the same fields: vLLM's (a dataclass) and kvframe's (an attrs class)."""

    vllm_type: type
    spec_type: type


@functools.cache
def bridges() -> tuple[Bridge, ...]:
    """The pairs that are installed: those that both sides have, then those that plugins registered."""
    interface = importlib.import_module(INTERFACE)
    found = []
    for name, (module, cls) in COUNTERPARTS.items():
        try:
            found.append(Bridge(getattr(interface, name), getattr(importlib.import_module(module), cls)))
        except ModuleNotFoundError:
            continue  # its layers are an error that names the distribution
    return (*found, *(point.load() for point in entry_points(group=BRIDGES)))


def is_interface_class(cls: type) -> bool:
    """Whether a spec class is one of vLLM's own."""
    return cls.__module__ == INTERFACE


def to_kvframe(spec: Any, layer: str = "?") -> Any:
    """vLLM's spec as kvframe's.

    Args:
        spec: a spec of vLLM; UniformTypeKVCacheSpecs become kvframe's, layer by layer.
        layer: its layer, for errors.

    Raises:
        UnknownSpecError: there is no such class in kvframe and its plugins.
        UntranslatableError: a value has no counterpart, or the pages would differ.
    """
    if type(spec).__name__ == "UniformTypeKVCacheSpecs":
        parts = {name: to_kvframe(one, name) for name, one in spec.kv_cache_specs.items()}
        return UniformTypeKVCacheSpecs(parts)
    if hasattr(spec, "kvframe_spec"):  # made from a family: it carries kvframe's own
        return spec.kvframe_spec
    target = next((pair.spec_type for pair in bridges() if pair.vllm_type is type(spec)), None)
    if target is None:
        raise UnknownSpecError(
            spec=type(spec).__name__, layer=layer, side="kvframe", advice=_advice(type(spec).__name__)
        )
    given = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    for name in _DERIVED.get(type(spec).__name__, ()):
        given.pop(name)
    alignment = given.get("alignment")
    if alignment and given["page_size_padded"] == round_up(spec.real_page_size_bytes, alignment):
        given["page_size_padded"] = None  # vLLM stores what follows from the alignment; kvframe derives it
    known = {field.alias for field in attrs.fields(target) if field.init}
    _check_lost(spec, layer, set(given) - known, given)
    try:
        made = target(
            **{name: _to_kvframe_value(name, value) for name, value in given.items() if name in known}
        )
    except KVFrameError as error:
        raise UntranslatableError(
            spec=type(spec).__name__, layer=layer, reason=str(error).rstrip(".")
        ) from error
    return _same_page(spec, made, spec, layer)


def to_vllm(spec: Any, layer: str = "?") -> Any:
    """kvframe's spec as vLLM's; arguments and errors as of `to_kvframe`."""
    interface = importlib.import_module(INTERFACE)
    if isinstance(spec, UniformTypeKVCacheSpecs):
        parts = {name: to_vllm(one, name) for name, one in spec.kv_cache_specs.items()}
        return interface.UniformTypeKVCacheSpecs(block_size=spec.block_size, kv_cache_specs=parts)
    target = next((pair.vllm_type for pair in bridges() if pair.spec_type is type(spec)), None)
    if target is None:
        from kvframe_vllm.families import engine_spec

        return engine_spec(spec, layer)
    given = {field.alias: getattr(spec, field.alias) for field in attrs.fields(type(spec)) if field.init}
    known = {field.name for field in dataclasses.fields(target) if field.init}
    _check_lost(spec, layer, set(given) - known - {"is_draft"}, given)
    values = {name: _to_vllm_value(name, value) for name, value in given.items() if name in known}
    return _same_page(spec, target(**values), spec, layer)


def _advice(name: str) -> str:
    if name in COUNTERPARTS:
        return f"Install {COUNTERPARTS[name][0].replace('_', '-')}"
    return f"Register a Bridge for it under the entry points {BRIDGES}, or run this model without kvframe"


def _check_lost(spec: Any, layer: str, names: set[str], given: Mapping[str, Any]) -> None:
    """Fields that the other side does not have must have their defaults."""
    lost = sorted(name for name in names if given[name] not in (None, False))
    if lost:
        reason = f"the other side has no field {', '.join(lost)}"
        raise UntranslatableError(spec=type(spec).__name__, layer=layer, reason=reason)


def _same_page(source: Any, made: Any, spec: Any, layer: str) -> Any:
    try:
        pages = (int(source.page_size_bytes), int(made.page_size_bytes))
    except NotImplementedError:
        return made
    if pages[0] != pages[1]:
        reason = f"its page of {pages[0]:,} bytes would become {pages[1]:,}"
        raise UntranslatableError(spec=type(spec).__name__, layer=layer, reason=reason)
    return made


def _to_kvframe_value(name: str, value: Any) -> Any:
    if name == "kv_quant_mode":
        return int(value)
    if name == "block_stride_alignment" and value is not None and not isinstance(value, int):
        return MultipleOf(value.base)
    if name == "cache_role":
        return importlib.import_module("kvframe_mla.spec").SparseCacheRole(value.value)
    if name == "mamba_type":
        return value.name.lower()
    return value


def _to_vllm_value(name: str, value: Any) -> Any:
    if name in ("dtype", "dtypes"):
        import torch

        if name == "dtypes":
            return tuple(getattr(torch, dtype_name(one)) for one in value)
        return getattr(torch, dtype_name(value))
    interface = importlib.import_module(INTERFACE)
    if name == "kv_quant_mode":
        return interface.KVQuantMode(int(value))
    if name == "cache_role":
        return interface.SparseCacheRole(value.value)
    if isinstance(value, MultipleOf):
        return importlib.import_module("vllm.v1.attention.backend").MultipleOf(value.tokens)
    if name == "mamba_type":
        return interface.MambaAttentionBackendEnum[value.upper()]
    return value
