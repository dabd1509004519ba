"""Small number formats in torch: clipped 8-bit floats, e2m1 with shared scales, and codes packed two in a byte."""

from __future__ import annotations

import torch

from kvframe.dtypes import NVFP4_VALUES_PER_SCALE

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of the eight codes without their sign bit


def to_float8(values: torch.Tensor, stored: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """The nearest 8-bit floats; values beyond the range become the largest."""
    limit = torch.finfo(stored).max
    return values.clamp(-limit, limit).to(stored)


def to_e2m1(values: torch.Tensor, largest_code: float = 6.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of 4 bits, the sign in bit 3, and one e4m3 scale for each 16 of them.

    Args:
        values: [..., W], W a multiple of 16.
        largest_code: what the largest of 16 values becomes, 6 or less.

    Returns:
        uint8 codes [..., W] and scales [..., W / 16].
    """
    groups = values.float().unflatten(-1, (-1, NVFP4_VALUES_PER_SCALE))
    stored = to_float8(groups.abs().amax(-1, keepdim=True) / largest_code)
    step = stored.float()
    scaled = torch.where(step > 0, groups / step, torch.zeros_like(groups))
    levels = torch.tensor(_E2M1, device=values.device)
    codes = torch.bucketize(scaled.abs(), (levels[1:] + levels[:-1]) / 2)
    return (codes + 8 * (scaled < 0)).to(torch.uint8).flatten(-2), stored.squeeze(-1)


def from_e2m1(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The float32 values of codes [..., W] and their scales [..., W / 16]."""
    levels = torch.tensor([*_E2M1, *(-level for level in _E2M1)], device=codes.device)
    groups = levels[codes.long()].unflatten(-1, (-1, NVFP4_VALUES_PER_SCALE))
    return (groups * scales.float().unsqueeze(-1)).flatten(-2)


def pair(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits, two in a byte, the even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpair(pairs: torch.Tensor) -> torch.Tensor:
    """The codes of `pair`."""
    return torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)
