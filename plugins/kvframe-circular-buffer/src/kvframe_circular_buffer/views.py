"""A ring's rows as a tensor. torch is imported when views are made, not when the plugin loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvframe import AttentionSpec

if TYPE_CHECKING:
    import torch


def make_views(spec: AttentionSpec, cells: torch.Tensor) -> dict[str, torch.Tensor]:
    """The "ring": row `position % block_size` of each block, [B, rows, width]; several heads: [B, H, rows, width].

    Args:
        spec: the layer's spec.
        cells: int8 [B, H, rows, C].

    Raises:
        LayoutError: rows are not aligned to the spec's element.
    """
    from kvframe.views import typed

    ring = typed(cells, spec.dtype)
    return {"ring": ring.squeeze(1) if spec.num_heads == 1 else ring}
