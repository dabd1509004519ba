"""The bytes of one block of a group: which layer each belongs to. Pure arithmetic on a plan's placements."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from kvframe.address import addresses
from kvframe.config import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, Pool
from kvframe.layout import Layouts


@attrs.frozen(kw_only=True)
class Piece:
    """Bytes [start, end) of a block that one layer uses, and bytes up to `page_end` that pad its page.

    Args:
        position: the layer's among those of its placement.
        run: the placement's among those of the group.
    """

    layer: str
    position: int
    start: int
    end: int
    page_end: int
    run: int


@attrs.frozen(kw_only=True)
class Block:
    """One block of a group, its layers' pieces in the order of bytes.

    Args:
        regions: where a layer-outermost layout's layer regions begin; empty where a block is one piece of memory.
        tensors: the placements of the group's layers.
    """

    name: str
    number: int
    group: KVCacheGroupSpec
    stride: int
    pieces: tuple[Piece, ...]
    regions: tuple[int, ...]
    tensors: tuple[KVCacheTensor, ...]


def block_of(config: KVCacheConfig, pool: Pool, number: int, name: str, layouts: Layouts) -> Block:
    """One block of a group: block 0, since all are alike.

    Args:
        config: the plan.
        pool: the group's pool.
        number: the group's id.
        name: what to call the group.
        layouts: the known layouts.

    Raises:
        LayoutError: no such layout, or a layer cannot lie where it is placed.
    """
    group = config.groups[number]
    tensors = tuple(t for t in config.tensors if t.layers[0] in group.layer_specs)
    stride = pool.slab_bytes // group.blocks_per_slab
    apart = any(tensor.block_stride != stride for tensor in tensors)  # layers outermost
    fold = max(pool.num_slabs, 1) if apart else 1
    pieces = [
        piece
        for run, tensor in enumerate(tensors)
        for piece in _pieces(config, pool, group, tensor, run=run, fold=fold, layouts=layouts)
    ]
    starts = [
        (tensor.offset + layer * tensor.layer_stride) // fold
        for tensor in tensors
        for layer in range(len(tensor.layers))
    ]
    return Block(
        name=name,
        number=number,
        group=group,
        stride=stride,
        pieces=tuple(sorted(pieces, key=lambda piece: piece.start)),
        regions=tuple(sorted(starts)) if apart else (),
        tensors=tensors,
    )


def _pieces(
    config: KVCacheConfig,
    pool: Pool,
    group: KVCacheGroupSpec,
    tensor: KVCacheTensor,
    *,
    run: int,
    fold: int,
    layouts: Layouts,
) -> Iterable[Piece]:
    """The pieces of block 0 of each layer. Regions of layers are folded to one page: `fold` pages lie in each."""
    spec = group.layer_specs[tensor.layers[0]]
    found = addresses(
        spec,
        max(config.num_blocks_of(tensor), 1),
        layouts.get(pool.layout),
        tensor,
        buffer_bytes=max(pool.size_bytes, pool.slab_bytes),
    )
    heads, states, cell = found.shape[1:]
    size, starts = cell, [0]
    for count, stride in sorted(zip((heads, states), found.strides[2:4], strict=True), key=lambda a: a[1]):
        if count > 1 and stride != size:
            starts = [start + index * stride for index in range(count) for start in starts]
        else:
            size *= count
    padding = spec.page_size_bytes - size if len(starts) == 1 else 0
    for index, layer in enumerate(tensor.layers):
        for start in starts:
            first = (tensor.address(index, 0) + start) // fold
            yield Piece(
                layer=layer,
                position=index,
                start=first,
                end=first + size,
                page_end=first + size + padding,
                run=run,
            )
