"""Latent rows as tensors. torch is imported when views are made, not when the plugin loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvframe.dtypes import CacheDTypes, CellPart, builtin_cache_dtypes

if TYPE_CHECKING:
    import torch

V4_DATA_BYTES = 448 + 128  # of a V4 row: latent and rotary part
V4_SCALE_BYTES = 8

# The pieces of one opaque row, by its bytes (contract 2.4). Scales follow or precede the rotary part as listed.
ROW_PARTS: Mapping[int, tuple[CellPart, ...]] = {
    656: (
        CellPart(name="latent", dtype="float8_e4m3fn", offset=0, width=512),
        CellPart(name="scales", dtype="float32", offset=512, width=4),
        CellPart(name="rope", dtype="bfloat16", offset=528, width=64),
    ),
    352: (
        CellPart(name="latent", dtype="uint8", offset=0, width=256),
        CellPart(name="rope", dtype="float8_e4m3fn", offset=256, width=64),
        CellPart(name="scales", dtype="float8_e4m3fn", offset=320, width=32),
    ),
    528: (
        CellPart(name="latent", dtype="float8_e4m3fn", offset=0, width=512),
        CellPart(name="scales", dtype="uint8", offset=512, width=16),
    ),
    288: (
        CellPart(name="latent", dtype="uint8", offset=0, width=256),
        CellPart(name="scales", dtype="float8_e4m3fn", offset=256, width=32),
    ),
}


def make_views(spec: Any, cells: torch.Tensor) -> dict[str, torch.Tensor]:
    """The named tensors of one latent layer, [B, N, width] each: there is one head slot, and it is left out.

    Dense rows are "latent"; opaque rows are "rows" (bytes), and beside it "latent", "rope" and "scales" where the row's
    pieces are known; packed rows with inline scales are "latent" and "latent_scale".

    Args:
        spec: the layer's spec.
        cells: int8 [B, 1, N, C].

    Raises:
        LayoutError: a piece is not aligned to its element.
    """
    from kvframe.views import default_views, part_cells, typed

    content = spec.state_content_size_bytes
    if spec.state_content_bytes is None or spec.kv_quant_mode.is_per_token_head:
        named = default_views(spec, cells, CacheDTypes(builtin_cache_dtypes()))
        return {name.replace("kv", "latent"): view.squeeze(1) for name, view in named.items()}
    rows = {"rows": typed(cells[:, 0], "uint8")}
    if content == V4_DATA_BYTES + V4_SCALE_BYTES:
        return rows | _separated(cells)
    parts = ROW_PARTS.get(content, ())
    return rows | {part.name: part_cells(cells, part)[:, 0] for part in parts}


def _separated(cells: torch.Tensor) -> dict[str, torch.Tensor]:
    """The pieces of V4 pages, which hold all data rows first and all scale rows behind them (contract 2.4)."""
    from kvframe.views import typed

    blocks, _, states, content = cells.shape
    page = cells.view(blocks, states * content)  # one head: a page's rows follow each other in every layout
    data = page[:, : states * V4_DATA_BYTES].unflatten(1, (states, V4_DATA_BYTES))
    scales = page[:, states * V4_DATA_BYTES :].unflatten(1, (states, V4_SCALE_BYTES))
    return {
        "latent": typed(data, "float8_e4m3fn", 0, 448),
        "rope": typed(data, "bfloat16", 448, 64),
        "scales": typed(scales, "uint8"),
    }
