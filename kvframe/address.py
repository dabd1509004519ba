"""Where a placement's bytes lie: shape and strides of its layers' views, and the checks that they can be views at all.

No torch: planners can check a placement before any memory exists.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import attrs

from kvframe.dtypes import element_size
from kvframe.errors import LayoutError
from kvframe.layout import (
    AXES,
    KVCacheLayout,
    Shape,
    Strides,
    compute_layer_kv_cache_shape_bytes,
    compute_layout_strides,
    split_refusal,
)


class Placement(Protocol):
    """What is asked of a placement; `kvframe.config.KVCacheTensor` is one. Strides and offset are bytes."""

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers, in order; they share one spec."""

    @property
    def layer_stride(self) -> int:
        """From one layer's page to the next layer's of the same block."""

    @property
    def block_stride(self) -> int:
        """From one block's page to the next block's of the same layer."""

    @property
    def offset(self) -> int:
        """Of the first layer's page of block 0."""


@attrs.frozen(kw_only=True)
class Addresses:
    """The cells of a placement: cell (l, b, h, n) starts at offset + the sum of index times stride.

    Args:
        shape: (B', H, N', C) of one layer: kernel blocks, head slots, states, bytes.
        strides: bytes, of [L, B', H, N', C].
        offset: bytes, of the first cell.
        num_layers: layers.
    """

    shape: Shape
    strides: Strides
    offset: int
    num_layers: int

    @property
    def end(self) -> int:
        """One past the last byte."""
        sizes = (self.num_layers, *self.shape)
        steps = sum((size - 1) * stride for size, stride in zip(sizes, self.strides, strict=True))
        return self.offset + steps + 1

    @property
    def overlap(self) -> str:
        """The axis whose steps are too short to clear what lies inside it, "" if every byte belongs to one cell."""
        sizes = (self.num_layers, *self.shape)
        axes = sorted(zip(self.strides, sizes, AXES, strict=True))
        extent = 1
        for stride, size, axis in axes:
            if size > 1 and stride < extent:
                return axis
            extent += (size - 1) * stride
        return ""

    @property
    def alignment(self) -> int:
        """The largest number of bytes that divides every cell's address and size."""
        steps = self.strides[:-1] if self.num_layers > 1 else self.strides[1:-1]
        return math.gcd(self.offset, *steps, self.shape[-1])


def addresses(
    spec: Any,
    num_blocks: int,
    layout: KVCacheLayout,
    tensor: Placement,
    *,
    buffer_bytes: int,
    kernel_block_size: int | None = None,
) -> Addresses:
    """The addresses of a placement's cells (contract 3.6), checked against the invariants of contract 2.21.

    Kinds without layer views have one cell a block: the raw page.

    Args:
        spec: the spec of the placement's layers.
        num_blocks: manager blocks.
        layout: the physical order.
        tensor: the placement.
        buffer_bytes: size of the pool's buffer.
        kernel_block_size: tokens of a kernel block; None: the block.

    Raises:
        LayoutError: the blocks cannot be split into kernel blocks, cells overlap, lie outside the buffer, or are not
            aligned to the spec's element size; names spec, layout, shape and strides.
    """
    if spec.has_layer_views:
        found = _cells(spec, num_blocks, layout, tensor, kernel_block_size)
    else:
        page = spec.page_size_bytes
        found = Addresses(
            shape=(num_blocks, 1, 1, page),
            strides=(tensor.layer_stride, tensor.block_stride, page, page, 1),
            offset=tensor.offset,
            num_layers=len(tensor.layers),
        )
    problem = _problem(spec, found, buffer_bytes)
    if problem:
        raise LayoutError(layout=layout.name, reason=f"{type(spec).__name__} {tensor.layers[0]!r}: {problem}")
    return found


def _cells(
    spec: Any, num_blocks: int, layout: KVCacheLayout, tensor: Placement, kernel_block_size: int | None
) -> Addresses:
    shape = compute_layer_kv_cache_shape_bytes(spec, num_blocks, kernel_block_size)
    block_stride, ratio = tensor.block_stride, shape[0] // num_blocks
    if ratio > 1:
        if spec.tokens_per_state < 0:
            raise LayoutError(
                layout=layout.name,
                reason=f"{type(spec).__name__} keeps one state a block, which no kernel block can split",
            )
        if block_stride != spec.unpadded_page_size_bytes or spec.page_size_bytes != block_stride:
            raise split_refusal(spec, block_stride, layout)
        block_stride //= ratio
    strides = compute_layout_strides(
        spec,
        num_blocks,
        len(tensor.layers),
        layout,
        kernel_block_size,
        fixed=(tensor.layer_stride, block_stride, None, None, None),
    )
    found = Addresses(shape=shape, strides=strides, offset=tensor.offset, num_layers=len(tensor.layers))
    if ratio > 1 and found.overlap:  # the placement's strides are those of whole blocks
        raise split_refusal(spec, tensor.block_stride, layout)
    return found


def _problem(spec: Any, found: Addresses, buffer_bytes: int) -> str:
    what = f"shape {found.shape} (bytes), strides {found.strides}, offset {found.offset}"
    if found.offset < 0 or found.end > buffer_bytes:
        return f"{what} ends at byte {found.end:,} of a buffer of {buffer_bytes:,}"
    if found.overlap:
        return f"{what} overlaps: axis {found.overlap} steps over less than what lies inside it"
    element = element_size(spec.dtype) if hasattr(spec, "dtype") else 1
    if found.alignment % element:
        return f"{what} is not aligned to the {element} bytes of {spec.dtype}"
    return ""
