"""Placement: where each layer's pages lie in their pool (contract 5.7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvframe.checks import round_up
from kvframe.config import DEVICE, KVCacheGroupSpec, KVCacheTensor, Pool
from kvframe.errors import LayoutError
from kvframe.layout import KVCacheLayout, Layouts, compute_layout_strides
from kvframe.spec import UniformTypeKVCacheSpecs


def check_layout(groups: Sequence[KVCacheGroupSpec], layout: KVCacheLayout, pool: str = DEVICE) -> None:
    """The layout can hold the pages of a pool's groups (contract 4.1, rules 4 and 6).

    Raises:
        LayoutError: pages of several sizes need a block-compact layout, and in several groups a block-outermost one, as
            raw pages do.
    """
    own = [group for group in groups if group.pool == pool and group.layer_specs]
    pages = {
        group.page_of(layer)
        for group in own
        for layer, spec in group.layer_specs.items()
        if spec.has_layer_views
    }
    raw = sorted(
        layer for group in own for layer, spec in group.layer_specs.items() if not spec.has_layer_views
    )
    if raw and not layout.block_outermost:
        raise LayoutError(
            layout=layout.name,
            reason="pages without layer views lie whole in their block, so blocks must be outermost",
            would_work=("BLHNC", "BLNHC"),
            layers=raw,
        )
    layers = [layer for group in own for layer in group.layer_names if layer not in raw]
    if len(pages) > 1 and not layout.block_compact:
        raise LayoutError(
            layout=layout.name,
            reason=f"pages of several sizes ({_sizes(pages)} bytes) need a layout whose pages are whole",
            would_work=("BLHNC", "BLNHC") if len(own) > 1 else ("LBHNC", "LBNHC", "BLHNC", "BLNHC"),
            layers=layers,
        )
    if len(pages) > 1 and layout.layer_compact and len(own) > 1:
        raise LayoutError(
            layout=layout.name,
            reason=f"groups with pages of several sizes ({_sizes(pages)} bytes) need blocks outermost",
            would_work=("BLHNC", "BLNHC"),
            layers=layers,
        )


def _sizes(pages: set[int]) -> str:
    return ", ".join(f"{page:,}" for page in sorted(pages))


def place(
    groups: Sequence[KVCacheGroupSpec], pools: Mapping[str, Pool], layouts: Layouts
) -> tuple[KVCacheTensor, ...]:
    """Placements of all layers. A pool's groups overlay each other from byte 0; each cuts a slab into its own blocks.

    Args:
        groups: a rank's groups.
        pools: their pools by name.
        layouts: the plugin host's, among them those of the pools.

    Raises:
        LayoutError: a page must be padded and the layout cannot pad it.
    """
    tensors: list[KVCacheTensor] = []
    for group in groups:
        if not group.layer_specs:
            continue
        pool, per_slab = pools[group.pool], group.blocks_per_slab
        layout = layouts.get(pool.layout)
        offset = 0
        for spec, layers in _runs(group).items():
            tensors.append(_tensor(spec, layers, offset=offset, per_slab=per_slab, pool=pool, layout=layout))
            num_blocks = pool.num_slabs * per_slab
            span = spec.page_size_bytes if layout.block_outermost else _layer_bytes(spec, num_blocks)
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
    spec: Any, layers: Sequence[str], *, offset: int, per_slab: int, pool: Pool, layout: KVCacheLayout
) -> KVCacheTensor:
    num_blocks, block_bytes = pool.num_slabs * per_slab, pool.slab_bytes // per_slab
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
        size=pool.size_bytes,
        layers=tuple(layers),
        layer_stride=layer_stride,
        block_stride=block_stride,
        offset=offset,
        pool=pool.name,
    )
