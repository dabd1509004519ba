"""Typed torch views over a pool's flat bytes: what kernels see. Nothing here copies.

Every layer first gets its bytes as [B, H, N, C]; its family, or its cells' packing, then names the tensors in them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvframe.address import Placement, addresses
from kvframe.config import KVCacheConfig
from kvframe.dtypes import CacheDTypes, CellPart, dtype_name
from kvframe.errors import LayoutError, MissingDependencyError
from kvframe.layout import KVCacheLayout
from kvframe.packing import cell_parts, is_two_planes
from kvframe.plugins import PluginHost
from kvframe.spec import AttentionSpec

try:
    import torch
except ModuleNotFoundError as error:
    raise MissingDependencyError(module="kvframe.views", needs="torch", extra="torch") from error

Views = dict[str, torch.Tensor]


def torch_dtype(name: Any) -> torch.dtype:
    """The torch dtype of an element dtype's name."""
    found: torch.dtype = getattr(torch, dtype_name(name))
    return found


def create_kv_cache_views(
    raw: torch.Tensor,
    spec: Any,
    num_blocks: int,
    layout: KVCacheLayout,
    tensor: Placement,
    kernel_block_size: int | None = None,
) -> tuple[torch.Tensor, ...]:
    """One view [B', H, N', C / element size] for each layer of a placement, in order (contract 3.6).

    Elements are of the spec's dtype, int8 where it has none. B' counts kernel blocks of N' states.

    Args:
        raw: the pool's buffer, flat int8.
        spec: the spec of the placement's layers.
        num_blocks: manager blocks.
        layout: the physical order.
        tensor: the placement.
        kernel_block_size: tokens that kernels index at once; None: the block.

    Raises:
        LayoutError: the placement cannot be viewed so; names spec, layout, shape and strides.
    """
    cells = _cells(raw, spec, num_blocks, layout, tensor, kernel_block_size)
    return tuple(typed(layer, spec.dtype) if hasattr(spec, "dtype") else layer for layer in cells)


def group_kernel_blocks(cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """A view with manager blocks as axis 0: [B, ...] as it is, [B * ratio, ...] as [B, ratio, ...] (contract 3.7).

    Raises:
        LayoutError: axis 0 holds no whole number of kernel blocks a block.
    """
    kernel_blocks = cache.shape[0]
    if kernel_blocks == num_blocks:
        return cache
    if num_blocks < 1 or kernel_blocks % num_blocks:
        raise LayoutError(
            layout="any", reason=f"{kernel_blocks} kernel blocks cannot be grouped into {num_blocks} blocks"
        )
    return cache.unflatten(0, (num_blocks, kernel_blocks // num_blocks))


def make_views(
    host: PluginHost,
    config: KVCacheConfig,
    buffers: Mapping[str, torch.Tensor],
    kernel_block_sizes: Mapping[int, int] | None = None,
) -> dict[str, Views]:
    """The named tensors of every layer of a plan.

    Args:
        host: the plugins that made the plan.
        config: the plan.
        buffers: pool name to its flat int8 buffer.
        kernel_block_sizes: group id to the tokens of a kernel block, for groups whose kernels index smaller blocks.

    Raises:
        LayoutError: a placement cannot be viewed; names spec, layout, shape and strides.
    """
    group_ids = {layer: index for index, group in enumerate(config.groups) for layer in group.layer_specs}
    views: dict[str, Views] = {}
    for tensor in config.tensors:
        group_id = group_ids[tensor.layers[0]]
        views |= make_layer_views(
            host,
            buffers[tensor.pool],
            config.groups[group_id].layer_specs[tensor.layers[0]],
            num_blocks=config.num_blocks_of(tensor),
            layout=host.layouts.get(config.pools[tensor.pool].layout),
            tensor=tensor,
            kernel_block_size=(kernel_block_sizes or {}).get(group_id),
        )
    return views


def make_layer_views(
    host: PluginHost,
    raw: torch.Tensor,
    spec: Any,
    *,
    num_blocks: int,
    layout: KVCacheLayout,
    tensor: Placement,
    kernel_block_size: int | None = None,
) -> dict[str, Views]:
    """The named tensors of every layer of one placement, by its family. Arguments as `create_kv_cache_views`.

    Raises:
        LayoutError: the placement cannot be viewed; names spec, layout, shape and strides.
        MissingPluginError: no plugin has a family for the spec.
    """
    family = host.family(spec)
    layers = _cells(raw, spec, num_blocks, layout, tensor, kernel_block_size)
    if family.make_views is not None:
        return {
            name: dict(family.make_views(spec, cells))
            for name, cells in zip(tensor.layers, layers, strict=True)
        }
    return {
        name: default_views(spec, cells, host.cache_dtypes)
        for name, cells in zip(tensor.layers, layers, strict=True)
    }


def default_views(spec: Any, cells: torch.Tensor, cache_dtypes: CacheDTypes) -> Views:
    """The named tensors of one layer, by its packing alone.

    "key" and "value" [B, H, N, width] where K and V can be told apart, "kv" where they are one vector or an opaque
    row; "…_scale" [B, N, H] or [B, H, N, scales] beside packed data; "pages" [B, bytes] where storage stays raw.

    Args:
        spec: the layer's spec.
        cells: its bytes, int8 [B, H, N, C]; raw pages are [B, 1, 1, bytes].
        cache_dtypes: those of the plugin host, which know the packed cells.
    """
    if not spec.has_layer_views:
        return {"pages": cells[:, 0, 0]}
    if not isinstance(spec, AttentionSpec):
        return {"states": cells}
    if is_two_planes(spec):
        planes = typed(cells, spec.dtype).unflatten(-1, (spec.num_kv_heads, spec.head_size))
        return {"key": planes[:, 0].transpose(1, 2), "value": planes[:, 1].transpose(1, 2)}
    parts = cell_parts(spec, cache_dtypes)
    if parts is None:
        return {"kv": typed(cells, spec.dtype)}
    return {part.name: part_view(cells, part) for part in parts}


def part_cells(cells: torch.Tensor, part: CellPart) -> torch.Tensor:
    """One piece of every cell, [B, slots, N, width].

    Raises:
        LayoutError: the piece is not aligned to its element.
    """
    first, count = part.slots or (0, cells.shape[1])
    return typed(cells[:, first : first + count], part.dtype, part.offset, part.width)


def part_view(cells: torch.Tensor, part: CellPart) -> torch.Tensor:
    """One piece of every cell as kernels see it: scalars as [B, N, slots], else as `part_cells`."""
    found = part_cells(cells, part)
    return found.squeeze(-1).transpose(1, 2) if part.scalar else found


def typed(rows: torch.Tensor, dtype: Any, offset: int = 0, width: int | None = None) -> torch.Tensor:
    """The elements that lie `offset` bytes into every row of int8 bytes; without `width`, all to the row's end.

    Raises:
        LayoutError: the row is too short, or address, size or strides are not multiples of the element.
    """
    element_dtype = torch_dtype(dtype)
    size = element_dtype.itemsize
    end = rows.shape[-1] if width is None else offset + width * size
    piece = rows[..., offset:end]
    numbers = (piece.storage_offset(), piece.shape[-1], *piece.stride()[:-1])
    if end > rows.shape[-1] or any(number % size for number in numbers):
        raise LayoutError(
            layout="given",
            reason=(
                f"{dtype_name(dtype)} cannot be seen in bytes {offset} to {end} of rows of shape {tuple(rows.shape)}, "
                f"strides {rows.stride()}, offset {rows.storage_offset()}: all must be multiples of {size}"
            ),
        )
    return piece.view(element_dtype)


def _cells(
    raw: torch.Tensor,
    spec: Any,
    num_blocks: int,
    layout: KVCacheLayout,
    tensor: Placement,
    kernel_block_size: int | None,
) -> tuple[torch.Tensor, ...]:
    """int8 [B', H, N', C] of every layer."""
    if raw.dtype is not torch.int8 or raw.dim() != 1 or raw.stride(0) != 1:
        raise LayoutError(
            layout=layout.name,
            reason=f"the buffer must be flat int8, not {raw.dtype} of shape {tuple(raw.shape)}",
        )
    found = addresses(
        spec,
        num_blocks,
        layout,
        tensor,
        buffer_bytes=raw.numel(),
        kernel_block_size=kernel_block_size,
    )
    shape = (found.num_layers, *found.shape)
    every = torch.as_strided(raw, shape, found.strides, raw.storage_offset() + found.offset)
    return tuple(every.unbind(0))
