"""Keys and values as TurboQuant slots, and back. torch is imported when vectors are coded, not when the plugin loads.

A key is turned by a fixed rotation, after which its elements are close to normal whatever the model, and each becomes
the nearest level of the best quantiser for a normal distribution. The norm is stored so that the decoded key is as long
as the key was. A value's elements are even steps between its smallest and its largest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvframe.dtypes import CellPart

if TYPE_CHECKING:
    import torch

# Levels above 0 of the quantiser with the least squared error for a standard normal (J. Max, 1960), by bits.
LEVELS: Mapping[int, tuple[float, ...]] = {
    3: (0.2451, 0.7560, 1.3439, 2.1520),
    4: (0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326),
}
ROTATION_SEED = 0


@attrs.frozen(kw_only=True)
class SlotCodec:
    """The bytes of one slot: key, then value.

    Args:
        parts: the slot's two pieces.
        head_size: elements of a key.
        head_size_v: elements of a value; the slot has room for as many as a key has.
        key_bits: bits of a key's element; 8: e4m3, neither rotated nor scaled.
        value_bits: bits of a value's element.
    """

    parts: tuple[CellPart, ...]
    head_size: int
    head_size_v: int
    key_bits: int
    value_bits: int

    def encode(self, key: torch.Tensor, value: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The bytes of keys and values [K, heads, width]."""
        return {"key": self._encode_key(key.float()), "value": self._encode_value(value.float())}

    def decode(self, parts: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, float32."""
        return self._decode_key(parts["key"]), self._decode_value(parts["value"])

    def _encode_key(self, key: torch.Tensor) -> torch.Tensor:
        import torch

        from kvframe.ops.numbers import to_float8

        if self.key_bits == 8:
            return to_float8(key).view(torch.uint8)
        turned = key @ _rotation(self.head_size).to(key.device).T
        length = turned.norm(dim=-1, keepdim=True)
        unit = turned / length.clamp(min=torch.finfo(torch.float32).tiny) * math.sqrt(self.head_size)
        levels = _levels(self.key_bits).to(key.device)
        codes = torch.bucketize(unit, (levels[1:] + levels[:-1]) / 2)
        norm = length / levels[codes].norm(dim=-1, keepdim=True)
        return torch.cat([_to_bits(codes, self.key_bits), norm.half().view(torch.uint8)], -1)

    def _decode_key(self, stored: torch.Tensor) -> torch.Tensor:
        import torch

        if self.key_bits == 8:
            return stored.contiguous().view(torch.float8_e4m3fn).float()
        codes = _from_bits(stored[..., :-2], self.key_bits, self.head_size)
        norm = stored[..., -2:].contiguous().view(torch.float16).float()
        turned = _levels(self.key_bits).to(stored.device)[codes] * norm
        return turned @ _rotation(self.head_size).to(stored.device)

    def _encode_value(self, value: torch.Tensor) -> torch.Tensor:
        import torch
        from torch.nn.functional import pad

        top = 2**self.value_bits - 1
        low, high = value.amin(-1, keepdim=True), value.amax(-1, keepdim=True)
        zero = low.half()
        scale = ((high - zero.float()).clamp(min=0) / top).half()
        steps = torch.where(scale > 0, (value - zero.float()) / scale.float(), torch.zeros_like(value))
        codes = pad(steps.round().clamp(0, top).long(), (0, self.head_size - self.head_size_v))
        numbers = torch.cat([scale, zero], -1).view(torch.uint8)
        return torch.cat([_to_bits(codes, self.value_bits), numbers], -1)

    def _decode_value(self, stored: torch.Tensor) -> torch.Tensor:
        import torch

        codes = _from_bits(stored[..., :-4], self.value_bits, self.head_size_v)
        numbers = stored[..., -4:].contiguous().view(torch.float16).float()
        return codes * numbers[..., :1] + numbers[..., 1:]


def _levels(bits: int) -> torch.Tensor:
    import torch

    above = LEVELS[bits]
    return torch.tensor([*(-level for level in reversed(above)), *above])


def _rotation(size: int) -> torch.Tensor:
    """A fixed orthogonal matrix, the same in every process."""
    import torch

    drawn = np.random.default_rng(ROTATION_SEED).standard_normal((size, size))
    return torch.from_numpy(np.linalg.qr(drawn)[0]).float()


def _to_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes one after the other, lowest bit first, in whole bytes."""
    import torch
    from torch.nn.functional import pad

    stream = (codes.unsqueeze(-1) >> torch.arange(bits, device=codes.device) & 1).flatten(-2)
    octets = pad(stream, (0, -stream.shape[-1] % 8)).unflatten(-1, (-1, 8))
    return (octets << torch.arange(8, device=codes.device)).sum(-1).to(torch.uint8)


def _from_bits(stored: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    import torch

    octets = stored.long().unsqueeze(-1) >> torch.arange(8, device=stored.device) & 1
    stream = octets.flatten(-2)[..., : count * bits].unflatten(-1, (count, bits))
    return (stream << torch.arange(bits, device=stored.device)).sum(-1)
