"""Packing a spec's cells: what a cache dtype, or a kernel that keeps K and V in two planes, makes of them."""

from __future__ import annotations

from typing import TypeVar

import attrs

from kvframe.dtypes import CacheDType, CellGeometry, element_size
from kvframe.errors import SpecError
from kvframe.spec import AttentionSpec

A = TypeVar("A", bound=AttentionSpec)


def packed(spec: A, cache_dtype: CacheDType) -> A:
    """`spec` with its cells packed as `cache_dtype` says (contract 2.19); a packed spec keeps its cells.

    Raises:
        SpecError: the dtype cannot pack heads of this size.
    """
    spec = attrs.evolve(spec, kv_quant_mode=cache_dtype.mode)
    if cache_dtype.pack is None or spec.state_content_bytes is not None:
        return spec
    cell = cache_dtype.pack(
        CellGeometry(
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            head_size_v=spec.head_size_v,
            element_bytes=element_size(spec.dtype),
        )
    )
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
