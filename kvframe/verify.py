"""The last look at a plan, byte by byte: blocks that live at once never share memory (contract 2.21, and 8, Q32)."""

from __future__ import annotations

from itertools import combinations

import attrs

from kvframe.address import Addresses, addresses
from kvframe.config import KVCacheConfig, KVCacheTensor
from kvframe.errors import PlanError
from kvframe.layout import Layouts

Span = tuple[int, int]  # bytes [first, end)


@attrs.frozen(kw_only=True)
class _Footprint:
    """What a placement covers, and to which slab each of its bytes belongs.

    Byte x belongs to slab ((x - origin) mod period) // step, without "mod" where `period` is None. Where placements
    overlay each other, one rule for all is what keeps blocks of different slabs apart.
    """

    group: int
    tensor: KVCacheTensor
    covers: Span  # in the pool
    own: Span  # what no other placement of the group may touch: in a block, or in the pool where blocks are inside
    origin: int
    period: int | None
    step: int

    def in_step_with(self, other: _Footprint) -> bool:
        """Whether both have the same rule for the bytes that both cover."""
        periods = sorted({period for period in (self.period, other.period) if period is not None})
        if self.step != other.step or len(periods) > 1:
            return False
        distance = self.origin - other.origin
        return (distance % periods[0] if periods else distance) == 0


def verify(config: KVCacheConfig, layouts: Layouts) -> None:
    """Every page lies in its pool, and neither a group's own pages nor blocks of different slabs overlap.

    Args:
        config: the plan.
        layouts: those of the plugin host, `host.layouts`.

    Raises:
        LayoutError: a pool's layout is unknown, or a placement's cells overlap, leave the pool or are not aligned.
        PlanError: a block is longer than its block stride, or pages of one group or blocks of different slabs overlap.
    """
    group_ids = {layer: index for index, group in enumerate(config.groups) for layer in group.layer_specs}
    footprints = [
        _footprint(config, tensor, group_ids[tensor.layers[0]], layouts)
        for tensor in config.tensors
        if config.num_blocks_of(tensor)
    ]
    for one, other in combinations(footprints, 2):
        if one.tensor.pool != other.tensor.pool or not _meet(one.covers, other.covers):
            continue
        if not one.in_step_with(other):
            raise _overlap("blocks of different slabs would share bytes", one, other)
        if one.group == other.group and _meet(one.own, other.own):
            raise _overlap(f"pages of group {one.group} overlap", one, other)


def _footprint(config: KVCacheConfig, tensor: KVCacheTensor, group_id: int, layouts: Layouts) -> _Footprint:
    group, pool = config.groups[group_id], config.pools[tensor.pool]
    spec = group.layer_specs[tensor.layers[0]]
    layout, num_blocks = layouts.get(pool.layout), config.num_blocks_of(tensor)
    found = addresses(spec, num_blocks, layout, tensor, buffer_bytes=pool.size_bytes)
    # With blocks outermost, and for raw pages, the offset is a place inside every block; else block 0 starts there.
    outermost = layout.block_outermost or not spec.has_layer_views
    inside = tensor.offset if outermost else 0
    extent, period = _block_extent(found, tensor, inside)
    covers = (tensor.offset, found.end)
    return _Footprint(
        group=group_id,
        tensor=tensor,
        covers=covers,
        own=(inside, inside + extent) if outermost else covers,
        origin=tensor.offset - inside,
        period=period,
        step=found.strides[1] * group.blocks_per_slab,
    )


def _block_extent(found: Addresses, tensor: KVCacheTensor, inside: int) -> tuple[int, int | None]:
    """Bytes from a block's first to its last, less axes that repeat beyond all blocks; and the step of those, or None.

    Raises:
        PlanError: a block is longer than the block stride, or what repeats starts before the last block ends.
    """
    num_blocks, step = found.shape[0], found.strides[1]
    sizes = (found.num_layers, *found.shape[1:])
    axes = list(zip(sizes, found.strides[:1] + found.strides[2:], strict=True))
    extent = 1 + sum((size - 1) * stride for size, stride in axes if stride < step)
    beyond = sorted(stride for size, stride in axes if size > 1 and stride >= step)
    period = beyond[0] if beyond else None
    regular = all(stride >= step * num_blocks and stride % beyond[0] == 0 for stride in beyond)
    if inside + extent > step or not regular:
        raise PlanError(
            reason="a block's bytes must lie between two steps of its block stride",
            layers=tensor.layers,
            values={"block stride": step, "first byte": inside, "bytes": extent, "strides beyond": beyond},
        )
    return extent, period


def _meet(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _overlap(reason: str, one: _Footprint, other: _Footprint) -> PlanError:
    return PlanError(
        reason=reason,
        layers=(*one.tensor.layers[:2], *other.tensor.layers[:2]),
        values={
            f"{f.tensor.layers[0]} in group {f.group}": (
                f"bytes {f.own[0]:,} to {f.own[1]:,}, blocks from {f.origin:,} in steps of {f.step:,}"
            )
            for f in (one, other)
        },
    )
