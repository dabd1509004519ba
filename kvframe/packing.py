"""Packing a spec's cells: what a cache dtype, or a kernel that keeps K and V in two planes, makes of them."""

from __future__ import annotations

from typing import TypeVar

import attrs

from kvframe.dtypes import CacheDType, CacheDTypes, CellGeometry, CellPart, KVQuantMode, element_size
from kvframe.errors import SpecError
from kvframe.spec import AttentionSpec

A = TypeVar("A", bound=AttentionSpec)


def cell_geometry(spec: AttentionSpec) -> CellGeometry:
    """The attention cell of one token of `spec`, before any packing."""
    return CellGeometry(
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        head_size_v=spec.head_size_v,
        element_bytes=element_size(spec.dtype),
    )


def packed(spec: A, cache_dtype: CacheDType) -> A:
    """`spec` with its cells packed as `cache_dtype` says (contract 2.19); a packed spec keeps its cells.

    Raises:
        SpecError: the dtype cannot pack heads of this size.
    """
    spec = attrs.evolve(spec, kv_quant_mode=cache_dtype.mode)
    if cache_dtype.pack is None or spec.state_content_bytes is not None:
        return spec
    cell = cache_dtype.pack(cell_geometry(spec))
    slots = None if cell.head_slots == spec.num_kv_heads else cell.head_slots
    return attrs.evolve(spec, state_content_bytes=cell.content_bytes, num_head_slots=slots)


def two_planes(spec: A) -> A:
    """`spec` with all K heads in one slot and all V heads in another, for kernels that want two planes.

    Raises:
        SpecError: K and V differ in width.
    """
    if spec.state_content_bytes is not None:
        return spec
    if spec.head_size != spec.head_size_v:
        raise SpecError(
            spec=type(spec).__name__,
            field="head_size_v",
            value=spec.head_size_v,
            rule=f"must equal head_size ({spec.head_size}) for two planes of one width",
        )
    row = spec.num_kv_heads * spec.head_size * element_size(spec.dtype)
    return attrs.evolve(spec, state_content_bytes=row, num_head_slots=2)


def is_two_planes(spec: AttentionSpec) -> bool:
    """Whether the cells are those of `two_planes`."""
    row = spec.num_kv_heads * spec.head_size * element_size(spec.dtype)
    return spec.num_heads == 2 and spec.state_content_bytes == row and spec.head_size == spec.head_size_v


def cell_dtype(spec: AttentionSpec, cache_dtypes: CacheDTypes) -> CacheDType | None:
    """The cache dtype that the spec's cells are packed by: the first of its mode.

    Formats of plugins have no mode of their own: theirs is the one dtype without a mode that packs such cells.

    Args:
        spec: an attention spec.
        cache_dtypes: those of the plugin host.
    """
    if (
        spec.kv_quant_mode is KVQuantMode.NONE
        and spec.state_content_bytes is not None
        and not is_two_planes(spec)
    ):
        own: list[CacheDType] = [
            dtype for dtype in cache_dtypes if dtype.mode is KVQuantMode.NONE and _packs(dtype, spec)
        ]
        if len(own) == 1:
            return own[0]
    return cache_dtypes.of_mode(spec.kv_quant_mode)


def _packs(cache_dtype: CacheDType, spec: AttentionSpec) -> bool:
    if cache_dtype.pack is None or cache_dtype.storage not in (None, spec.dtype):
        return False
    try:
        cell = cache_dtype.pack(cell_geometry(spec))
    except SpecError:  # it has no cells of this size
        return False
    return (cell.content_bytes, cell.head_slots) == (spec.state_content_size_bytes, spec.num_heads)


def cell_parts(spec: AttentionSpec, cache_dtypes: CacheDTypes) -> tuple[CellPart, ...] | None:
    """The pieces of the spec's cells, by its cache dtype; None where only the kernel knows them.

    Args:
        spec: an attention spec.
        cache_dtypes: those of the plugin host.
    """
    cell = cell_geometry(spec)
    cache_dtype = cell_dtype(spec, cache_dtypes)
    if cache_dtype is not None and cache_dtype.pack is not None and cache_dtype.parts is not None:
        rule = cache_dtype.pack(cell)
        same = (rule.content_bytes, rule.head_slots) == (spec.state_content_size_bytes, spec.num_heads)
        return cache_dtype.parts(cell) if same else None
    if is_two_planes(spec):
        row = spec.num_kv_heads * spec.head_size
        return tuple(
            CellPart(name=name, dtype=spec.dtype, offset=0, width=row, slots=(slot, 1))
            for slot, name in enumerate(("key", "value"))
        )
    width_k, width_v = spec.head_size, spec.head_size_v
    dense = (width_k + width_v) * cell.element_bytes
    if (spec.num_heads, spec.state_content_size_bytes) != (spec.num_kv_heads, dense):
        return None
    key = CellPart(name="key" if width_v else "kv", dtype=spec.dtype, offset=0, width=width_k)
    value = CellPart(name="value", dtype=spec.dtype, offset=width_k * cell.element_bytes, width=width_v)
    return (key, value) if width_v else (key,)
