"""Placement: where each layer's pages lie in the device pool (contract 5.7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvframe.checks import round_up
from kvframe.config import DEVICE, KVCacheGroupSpec, KVCacheTensor
from kvframe.errors import LayoutError
from kvframe.layout import KVCacheLayout, compute_layout_strides
from kvframe.spec import UniformTypeKVCacheSpecs


def check_layout(groups: Sequence[KVCacheGroupSpec], layout: KVCacheLayout) -> None:
    """The layout can hold the groups' pages (contract 4.1, rule 4).

    Raises:
        LayoutError: pages of several sizes need a block-compact layout, and in several groups a block-outermost one.
    """
    device = [group for group in groups if group.pool == DEVICE and group.layer_specs]
    pages = {group.page_of(layer) for group in device for layer in group.layer_specs}
    if len(pages) <= 1:
        return
    if not layout.block_compact:
        raise LayoutError(
            layout=layout.name,
            reason=f"pages of several sizes ({_sizes(pages)} bytes) need a layout whose pages are whole",
            would_work=("BLHNC", "BLNHC") if len(device) > 1 else ("LBHNC", "LBNHC", "BLHNC", "BLNHC"),
        )
    if layout.layer_compact and len(device) > 1:
        raise LayoutError(
            layout=layout.name,
            reason=f"groups with pages of several sizes ({_sizes(pages)} bytes) need blocks outermost",
            would_work=("BLHNC", "BLNHC"),
        )


def _sizes(pages: set[int]) -> str:
    return ", ".join(f"{page:,}" for page in sorted(pages))


def place(
    groups: Sequence[KVCacheGroupSpec], *, num_slabs: int, slab_bytes: int, layout: KVCacheLayout
) -> tuple[KVCacheTensor, ...]:
    """Placements of all device layers. Groups overlay each other from byte 0; each cuts a slab into its own blocks.

    Raises:
        LayoutError: a page must be padded and the layout cannot pad it.
    """
    tensors: list[KVCacheTensor] = []
    for group in groups:
        if group.pool != DEVICE:
            continue
        offset = 0
        for spec, layers in _runs(group).items():
            tensor = _tensor(
                spec,
                layers,
                offset=offset,
                num_blocks=num_slabs * group.blocks_per_slab,
                block_bytes=slab_bytes // group.blocks_per_slab,
                layout=layout,
            )
            tensors.append(tensor)
            span = spec.page_size_bytes if layout.block_outermost else _layer_bytes(spec, num_slabs)
            offset += len(layers) * span
    return tuple(tensors)


def _runs(group: KVCacheGroupSpec) -> dict[Any, list[str]]:
    """Layers by the spec that places them: one run where specs merged, else by distinct spec in order of appearance."""
    if not isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
        return {group.kv_cache_spec: list(group.layer_names)} if group.layer_names else {}
    runs: dict[Any, list[str]] = {}
    for layer, spec in group.layer_specs.items():
        runs.setdefault(spec, []).append(layer)
    return runs


def _layer_bytes(spec: Any, num_blocks: int) -> int:
    return round_up(spec.page_size_bytes, spec.block_stride_bytes_multiple) * num_blocks


def _tensor(
    spec: Any, layers: Sequence[str], *, offset: int, num_blocks: int, block_bytes: int, layout: KVCacheLayout
) -> KVCacheTensor:
    if not spec.has_layer_views:
        layer_stride, block_stride = spec.page_size_bytes, block_bytes
    elif layout.block_outermost:
        strides = compute_layout_strides(
            spec, num_blocks, len(layers), layout, fixed=(None, block_bytes, None, None, None)
        )
        layer_stride, block_stride = strides[0], block_bytes
    else:
        block_stride = round_up(spec.page_size_bytes, spec.block_stride_bytes_multiple)
        if block_stride == spec.page_size_bytes:
            block_stride = compute_layout_strides(spec, num_blocks, len(layers), layout)[1]
        elif not layout.block_compact:
            raise LayoutError(
                layout=layout.name,
                reason=f"block_stride_alignment pads pages of {spec.page_size_bytes:,} bytes, and none is whole here",
                would_work=("LBHNC", "LBNHC", "BLHNC", "BLNHC"),
            )
        layer_stride = _layer_bytes(spec, num_blocks)
    return KVCacheTensor(
        size=num_blocks * block_bytes,
        layers=tuple(layers),
        layer_stride=layer_stride,
        block_stride=block_stride,
        offset=offset,
    )
