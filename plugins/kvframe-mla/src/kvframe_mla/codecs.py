"""Latent vectors as opaque rows, and back. torch is imported when vectors are coded, not when the plugin loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from kvframe.dtypes import CellPart
from kvframe.errors import LayoutError
from kvframe_mla.views import ROW_PARTS

if TYPE_CHECKING:
    import torch

LATENT = 512  # elements; the rotary part follows
VALUES_PER_FP8_SCALE = 128


@attrs.frozen(kw_only=True)
class Fp8RowCodec:
    """656 bytes: 512 e4m3, a float32 scale for each 128 of them, 64 bfloat16 as they are (contract 2.4)."""

    parts: tuple[CellPart, ...]

    def encode(self, key: torch.Tensor, value: torch.Tensor | None) -> Mapping[str, torch.Tensor]:
        """The row's pieces of latent vectors [K, 1, 576]."""
        import torch

        from kvframe.ops.numbers import to_float8

        groups = key[..., :LATENT].float().unflatten(-1, (-1, VALUES_PER_FP8_SCALE))
        largest = groups.abs().amax(-1, keepdim=True)
        scales = torch.where(
            largest > 0, largest / torch.finfo(torch.float8_e4m3fn).max, torch.ones_like(largest)
        )
        return {
            "latent": to_float8(groups / scales).flatten(-2),
            "scales": scales.squeeze(-1),
            "rope": key[..., LATENT:].to(torch.bfloat16),
        }

    def decode(self, parts: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The latent vectors, twice."""
        import torch

        groups = parts["latent"].float().unflatten(-1, (-1, VALUES_PER_FP8_SCALE))
        latent = (groups * parts["scales"].unsqueeze(-1)).flatten(-2)
        vectors = torch.cat([latent, parts["rope"].float()], -1)
        return vectors, vectors


@attrs.frozen(kw_only=True)
class Nvfp4RowCodec:
    """352 bytes: 512 e2m1 two in a byte, 64 e4m3 without a scale, an e4m3 scale for each 16 of the 512 (contract 2.4).

    The 288-byte row of a vector without a rotary part keeps its scales in plain order.
    """

    parts: tuple[CellPart, ...]

    def encode(self, key: torch.Tensor, value: torch.Tensor | None) -> Mapping[str, torch.Tensor]:
        """The row's pieces of latent vectors [K, 1, 576] or [K, 1, 512]."""
        from kvframe.ops.numbers import pair, to_e2m1, to_float8

        codes, scales = to_e2m1(key[..., :LATENT])
        if not self._rotary:
            return {"latent": pair(codes), "scales": scales}
        # the scale of group s lies at byte 8 * (s & 3) + (s >> 2)
        shuffled = scales.unflatten(-1, (8, 4)).transpose(-1, -2).flatten(-2)
        return {"latent": pair(codes), "scales": shuffled, "rope": to_float8(key[..., LATENT:].float())}

    def decode(self, parts: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """The latent vectors, twice."""
        import torch

        from kvframe.ops.numbers import from_e2m1, unpair

        scales = parts["scales"].float()
        if self._rotary:
            scales = scales.unflatten(-1, (4, 8)).transpose(-1, -2).flatten(-2)
        vectors = from_e2m1(unpair(parts["latent"]), scales)
        if self._rotary:
            vectors = torch.cat([vectors, parts["rope"].float()], -1)
        return vectors, vectors

    @property
    def _rotary(self) -> bool:
        return any(part.name == "rope" for part in self.parts)


def row_codec(cache_dtype: str, row_bytes: int) -> Fp8RowCodec | Nvfp4RowCodec:
    """The codec of a row format.

    Raises:
        LayoutError: its rows do not hold their scales, which lie behind all rows of a page (V4).
    """
    if row_bytes not in ROW_PARTS:
        raise LayoutError(
            layout="any",
            reason=(
                f"rows of {row_bytes} bytes ({cache_dtype}) keep their scales behind all rows of a page: only kernels "
                f"write them"
            ),
        )
    parts = ROW_PARTS[row_bytes]
    return Fp8RowCodec(parts=parts) if cache_dtype == "fp8_ds_mla" else Nvfp4RowCodec(parts=parts)
