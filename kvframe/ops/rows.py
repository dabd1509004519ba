"""Moving cells by index: a strided view is seen as rows of wide words, so that one torch call moves a whole batch.

Everything that follows from strides is worked out once, when a layer's cache is prepared; a call only computes indices.
"""

from __future__ import annotations

import math

import attrs
import torch

# The wider the words, the fewer elements torch counts; complex128 is its widest type, 16 bytes.
_WORDS = (torch.complex128, torch.int64, torch.int32, torch.int16, torch.uint8)
_BLOCK, _HEAD, _STATE = range(3)


@attrs.frozen(eq=False)
class Rows:
    """A view [B, H, N, W] as rows of words, found by token slots or by block ids.

    Args:
        table: [rows, words of a row]; rows may overlap where strides have no large common divisor.
        block_step: rows from one block to the next.
        state_step: rows from one state to the next.
        states: N.
        along: [R], rows of one index after its first, where heads (or heads and states) lie apart; None: one row.
        sizes: of the axes that a moved index has, as they lie in memory, the cell's width last.
        order: where each of those axes stands in logical order.
        dtype: of the view's elements.
    """

    table: torch.Tensor
    block_step: int
    state_step: int
    states: int
    along: torch.Tensor | None
    sizes: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype

    def of_tokens(self, slots: torch.Tensor) -> torch.Tensor:
        """The rows of slots [K], [K * R]."""
        index = slots if self.state_step == 1 else slots * self.state_step
        rest = self.block_step - self.states * self.state_step
        if rest:  # blocks do not follow each other
            index = index + torch.div(slots, self.states, rounding_mode="floor") * rest
        return self._spread(index)

    def of_blocks(self, blocks: torch.Tensor) -> torch.Tensor:
        """The rows of block ids [K], [K * R]."""
        return self._spread(blocks if self.block_step == 1 else blocks * self.block_step)

    def _spread(self, index: torch.Tensor) -> torch.Tensor:
        return index if self.along is None else (index.unsqueeze(-1) + self.along).view(-1)

    def take(self, index: torch.Tensor, count: int) -> torch.Tensor:
        """The rows' elements, [count, the other axes in logical order, W]."""
        found = self.table.index_select(0, index).view(self.dtype).view(count, *self.sizes)
        return found if self._straight else found.permute(0, *(1 + axis for axis in self._logical))

    def put(self, index: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite the rows with elements [count, the other axes in logical order, W]."""
        if not self._straight:
            values = values.permute(0, *(1 + axis for axis in self.order))
        row = self.table.shape[1] * self.table.element_size() // self.dtype.itemsize
        words = values.contiguous().view(index.numel(), row).view(self.table.dtype)
        self.table.index_copy_(0, index, words)

    def fill(self, index: torch.Tensor, value: int) -> None:
        """Set every word of the rows."""
        self.table.index_fill_(0, index, value)

    @property
    def _straight(self) -> bool:
        return self.order == tuple(range(len(self.order)))

    @property
    def _logical(self) -> tuple[int, ...]:
        return tuple(sorted(range(len(self.order)), key=self.order.__getitem__))


def token_rows(cells: torch.Tensor) -> Rows:
    """Rows of a view [B, H, N, W] for slots; what is taken is [K, H, W]."""
    return _rows(cells, (_BLOCK, _STATE))


def block_rows(cells: torch.Tensor) -> Rows:
    """Rows of a view [B, H, N, W] for block ids; what is taken is [K, H, N, W]."""
    return _rows(cells, (_BLOCK,))


def _rows(cells: torch.Tensor, index_axes: tuple[int, ...]) -> Rows:
    size = cells.element_size()
    counts, strides = cells.shape, [stride * size for stride in cells.stride()]
    row, packed, apart = _inside_a_row(cells, index_axes)
    stepping = [axis for axis in (*index_axes, *apart) if counts[axis] > 1]
    unit = math.gcd(*(strides[axis] for axis in stepping)) if stepping else row
    last = sum((counts[axis] - 1) * strides[axis] for axis in stepping)
    grain = math.gcd(unit, row, cells.storage_offset() * size)
    word = next(word for word in _WORDS if grain % word.itemsize == 0)
    table = torch.as_strided(
        cells, (last // unit + 1, row // size), (unit // size, 1), cells.storage_offset()
    )
    along = torch.zeros(1, dtype=torch.int64, device=cells.device)
    for axis in apart:
        steps = torch.arange(counts[axis], device=cells.device) * (strides[axis] // unit)
        along = (along.unsqueeze(-1) + steps).view(-1)
    state_step = strides[_STATE] // unit if _STATE in index_axes and counts[_STATE] > 1 else 0
    one_block = counts[_BLOCK] == 1
    moved = [*apart, *packed]
    return Rows(
        table=table.view(word),
        block_step=counts[_STATE] * state_step if one_block else strides[_BLOCK] // unit,
        state_step=state_step,
        states=counts[_STATE],
        along=along if apart else None,
        sizes=(*(counts[axis] for axis in moved), counts[-1]),
        order=(*(sorted(moved).index(axis) for axis in moved), len(moved)),
        dtype=cells.dtype,
    )


def _inside_a_row(cells: torch.Tensor, index_axes: tuple[int, ...]) -> tuple[int, list[int], list[int]]:
    """Bytes of the longest run that holds whole cells, the axes in it, and those outside, outermost first."""
    size = cells.element_size()
    row = cells.shape[-1] * size
    packed: list[int] = []
    apart: list[int] = []
    others = [axis for axis in (_BLOCK, _HEAD, _STATE) if axis not in index_axes]
    for axis in sorted(others, key=lambda axis: (cells.stride(axis), -axis)):
        if cells.shape[axis] == 1 or (not apart and cells.stride(axis) * size == row):
            packed.insert(0, axis)
            row *= cells.shape[axis]
        else:
            apart.insert(0, axis)
    return row, packed, apart
