"""LayerCache: one layer's cells, prepared once for all the calls of an engine's life."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from kvframe.dtypes import CellPart
from kvframe.errors import LayoutError
from kvframe.ops.codecs import CellCodec
from kvframe.ops.rows import Rows, block_rows, token_rows
from kvframe.views import part_cells, torch_dtype


@attrs.frozen(eq=False, kw_only=True)
class LayerCache:
    """One layer's cells and how they are addressed. Make one with `layer_cache`.

    Args:
        cells: int8 [B, H, N, C].
        blocks: rows of whole blocks.
        tokens: rows of one token's cells.
        parts: rows of one token's pieces of cells, by name; empty where the pieces make up the whole cell.
        pieces: name, place in cells [K, H, C], and element dtype of each piece.
        joint: the dtype in which pieces are put together to cells.
        codec: of the cells; None: only blocks can be moved.
    """

    cells: torch.Tensor
    blocks: Rows
    tokens: Rows
    parts: dict[str, Rows]
    pieces: tuple[tuple[str, tuple[Any, slice, slice], torch.dtype], ...]
    joint: torch.dtype
    codec: CellCodec | None

    def need_codec(self) -> CellCodec:
        """The codec.

        Raises:
            LayoutError: the cache was prepared without one.
        """
        if self.codec is None:
            raise LayoutError(
                layout="any", reason="this cache was prepared without a codec: its cells cannot be read"
            )
        return self.codec

    def put(self, slots: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
        """Overwrite the pieces of the cells of slots [K] with values [K, heads, width] by name."""
        if self.parts:
            for name, rows in self.parts.items():
                rows.put(rows.of_tokens(slots), values[name])
            return
        # putting cells together first is one more pass over new bytes, and one less over the cache
        pieces = [values[name].contiguous().view(self.joint) for name, *_ in self.pieces]
        self.tokens.put(self.tokens.of_tokens(slots), torch.cat(pieces, -1).view(torch.int8))

    def take(self, slots: torch.Tensor) -> dict[str, torch.Tensor]:
        """The named pieces of the cells of slots [K], [K, heads, width] each, in one move of whole cells."""
        taken = self.tokens.take(self.tokens.of_tokens(slots), slots.numel())
        return {name: taken[where].view(dtype) for name, where, dtype in self.pieces}


def layer_cache(cells: torch.Tensor, codec: CellCodec | None = None) -> LayerCache:
    """Prepare one layer's cells.

    Args:
        cells: [B, H, N, C], a view that `create_kv_cache_views` made, of any element type.
        codec: how keys and values lie in the cells; None for states, and for cells that only a kernel knows.

    Raises:
        LayoutError: a piece of the codec's cells is not aligned to its element.
    """
    raw = cells if cells.dtype is torch.int8 else cells.view(torch.int8)
    parts = codec.parts if codec else ()
    pieces = {part.name: part_cells(raw, part) for part in parts}
    if _fill(parts, raw.shape[-1]):
        pieces = {}  # whole cells are put at once
    widths = [part.width * torch_dtype(part.dtype).itemsize for part in parts]
    return LayerCache(
        cells=raw,
        blocks=block_rows(raw),
        tokens=token_rows(raw),
        parts={name: token_rows(piece) for name, piece in pieces.items()},
        pieces=tuple(_piece(part) for part in parts),
        # torch joins tensors of floats faster than those of bytes or integers
        joint=torch.float32 if all(width % 4 == 0 for width in widths) else torch.int8,
        codec=codec,
    )


def _fill(parts: Sequence[CellPart], content: int) -> bool:
    """Whether the parts, in their order, make up cells of `content` bytes without a gap, in every head slot."""
    end = 0
    for part in parts:
        if part.offset != end or part.slots is not None:
            return False
        end += part.width * torch_dtype(part.dtype).itemsize
    return end == content


def _piece(part: CellPart) -> tuple[str, tuple[Any, slice, slice], torch.dtype]:
    dtype = torch_dtype(part.dtype)
    heads = slice(None) if part.slots is None else slice(part.slots[0], sum(part.slots))
    width = slice(part.offset, part.offset + part.width * dtype.itemsize)
    return part.name, (slice(None), heads, width), dtype
