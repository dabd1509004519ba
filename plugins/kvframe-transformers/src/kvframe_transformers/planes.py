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
    """

    rows: Rows
    heads: int

    @property
    def key(self) -> Hashable:
        """Equal for planes that lie alike, whose indices are the same."""
        along = self.rows.along
        heads = () if along is None else tuple(along.tolist())
        return (self.rows.block_step, self.rows.state_step, self.rows.states, heads)

    def index(self, slots: torch.Tensor) -> torch.Tensor:
        """The rows of slots [B, T], head by head: [B * heads * T]."""
        found = self.rows.of_tokens(slots.reshape(-1)).view(*slots.shape, self.heads)
        return found.transpose(1, 2).reshape(-1)

    def take(self, index: torch.Tensor, batch: int) -> torch.Tensor:
        """[batch, heads, T, width], contiguous."""
        found = self.rows.table.index_select(0, index).view(self.rows.dtype)
        return found.view(batch, self.heads, -1, found.shape[-1])


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
