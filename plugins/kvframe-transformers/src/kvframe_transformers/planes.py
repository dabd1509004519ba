"""Planes: one side of a layer's cells, read in the order in which attention wants it, in one copy."""

from __future__ import annotations

from collections.abc import Hashable

import attrs
import torch

from kvframe.dtypes import CellPart
from kvframe.ops import CellCodec
from kvframe.ops.codecs import PlainCodec
from kvframe.ops.rows import Rows, token_rows
from kvframe.views import part_cells


@attrs.frozen(eq=False)
class Plane:
    """Keys, or values, of a layer whose cells keep heads apart.

    Args:
        rows: of one token and head.
        heads: KV heads.
        key: equal for planes that lie alike, whose indices are the same.
    """

    rows: Rows
    heads: int
    key: Hashable = attrs.field(init=False)

    @key.default
    def _key(self) -> Hashable:
        rows = self.rows
        heads = () if rows.along is None else tuple(rows.along.tolist())
        return (rows.block_step, rows.state_step, rows.states, heads)

    def index(self, slots: torch.Tensor) -> torch.Tensor:
        """The rows of slots [B, T], head by head: [B * heads * T]."""
        found = self.rows.of_tokens(slots.reshape(-1)).view(*slots.shape, self.heads)
        return found.transpose(1, 2).reshape(-1)

    def take(self, index: torch.Tensor, batch: int) -> torch.Tensor:
        """[batch, heads, T, width], contiguous."""
        found = self.rows.table.index_select(0, index).view(self.rows.dtype)
        return found.view(batch, self.heads, -1, found.shape[-1])

    def put(self, index: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite the rows that `Rows.of_tokens` gave with values [K, heads, width]."""
        self.rows.put(index, values.to(self.rows.dtype))


def planes(cells: torch.Tensor, codec: CellCodec) -> tuple[Plane, Plane] | None:
    """Keys and values of plain cells with heads apart; None where they lie otherwise.

    Args:
        cells: int8 [B, H, N, C].
        codec: of the cells.
    """
    if type(codec) is not PlainCodec or len(codec.parts) != 2:
        return None
    found = [_plane(cells, part, codec.heads) for part in codec.parts]
    return (found[0], found[1]) if found[0] is not None and found[1] is not None else None


def _plane(cells: torch.Tensor, part: CellPart, heads: int) -> Plane | None:
    rows = token_rows(part_cells(cells, part))
    apart = heads if rows.along is not None else 1
    return Plane(rows, heads) if part.slots is None and apart == heads else None
