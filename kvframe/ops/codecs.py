"""How keys and values become the bytes of a cell, and back: one codec for each packing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import attrs
import torch

from kvframe.dtypes import NVFP4_VALUES_PER_SCALE, CacheDType, CacheDTypes, CellPart, KVQuantMode
from kvframe.errors import LayoutError
from kvframe.ops.numbers import from_e2m1, pair, to_e2m1, to_float8, unpair
from kvframe.packing import cell_dtype, cell_geometry, cell_parts
from kvframe.spec import AttentionSpec
from kvframe.views import torch_dtype

Parts = Mapping[str, torch.Tensor]


class CellCodec(Protocol):
    """Keys and values [K, heads, width] to the named parts of cells [K, slots, part width], and back."""

    @property
    def parts(self) -> tuple[CellPart, ...]:
        """The pieces of a cell."""

    def encode(self, key: torch.Tensor, value: torch.Tensor | None) -> Parts:
        """Every part's elements. `value` is None where the cache keeps one vector."""

    def decode(self, parts: Parts) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values; the same tensor twice where the cache keeps one vector."""


def cell_codec(
    spec: AttentionSpec,
    cache_dtypes: CacheDTypes,
    *,
    cache_dtype: CacheDType | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> CellCodec:
    """The codec of a spec's cells.

    Args:
        spec: an attention spec.
        cache_dtypes: those of the plugin host.
        cache_dtype: the one that the operator chose, where several share a mode (fp8_e5m2, nvfp4_4over6); None: that of
            the spec's cells.
        key_scale: the scale outside the cache of formats that have one: a stored key times it is the key.
        value_scale: likewise for values.

    Raises:
        LayoutError: only the kernel that owns this packing knows its cells.
    """
    chosen = cache_dtype or cell_dtype(spec, cache_dtypes)
    parts = cell_parts(spec, cache_dtypes)
    if chosen is not None and chosen.codec is not None:
        own: CellCodec = chosen.codec(cell_geometry(spec))
        return own
    if parts is None:
        raise LayoutError(
            layout="any",
            reason=(
                f"cells of {type(spec).__name__} with mode {spec.kv_quant_mode.name} and "
                f"{spec.state_content_size_bytes} bytes are known to their kernel alone"
            ),
        )
    mode, heads = spec.kv_quant_mode, spec.num_kv_heads
    scales = (key_scale, value_scale)
    if mode is KVQuantMode.FP8_PER_TENSOR:
        name = "float8_e5m2" if chosen is not None and chosen.name == "fp8_e5m2" else "float8_e4m3fn"
        return Fp8Codec(parts=parts, heads=heads, stored=torch_dtype(name), scales=scales)
    if mode is KVQuantMode.INT4_PER_TOKEN_HEAD:
        return Int4Codec(parts=parts, heads=heads)
    if mode.is_per_token_head:
        return PerTokenHeadCodec(parts=parts, heads=heads)
    if mode.is_nvfp4:
        adaptive = chosen is not None and chosen.name == "nvfp4_4over6"
        return Nvfp4Codec(parts=parts, heads=heads, scales=scales, adaptive=adaptive)
    return PlainCodec(parts=parts, heads=heads)


def _sides(key: torch.Tensor, value: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {"kv": key} if value is None else {"key": key, "value": value}


@attrs.frozen(kw_only=True)
class _Codec:
    parts: tuple[CellPart, ...]
    heads: int

    @property
    def sides(self) -> tuple[str, ...]:
        """The names of the vectors that a cell keeps."""
        return tuple(part.name for part in self.parts if not part.name.endswith("_scale"))

    def encode(self, key: torch.Tensor, value: torch.Tensor | None) -> Parts:
        """Every part's elements."""
        encoded: dict[str, torch.Tensor] = {}
        for index, (name, vectors) in enumerate(_sides(key, value).items()):
            encoded |= self._encode_side(name, index, vectors)
        return encoded

    def decode(self, parts: Parts) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values."""
        found = [self._decode_side(name, index, parts) for index, name in enumerate(self.sides)]
        return found[0], found[-1]

    def _encode_side(self, name: str, index: int, vectors: torch.Tensor) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def _decode_side(self, name: str, index: int, parts: Parts) -> torch.Tensor:
        raise NotImplementedError

    def _part(self, name: str) -> CellPart:
        return next(part for part in self.parts if part.name == name)


@attrs.frozen(kw_only=True)
class PlainCodec(_Codec):
    """Vectors in the spec's dtype; two planes hold all heads of a side in one slot."""

    def _encode_side(self, name: str, index: int, vectors: torch.Tensor) -> dict[str, torch.Tensor]:
        part = self._part(name)
        stored = vectors.to(torch_dtype(part.dtype))
        return {name: stored if stored.shape[-1] == part.width else stored.flatten(1).unsqueeze(1)}

    def _decode_side(self, name: str, index: int, parts: Parts) -> torch.Tensor:
        found = parts[name]
        return found if found.shape[1] == self.heads else found.flatten(1).unflatten(1, (self.heads, -1))


@attrs.frozen(kw_only=True)
class Fp8Codec(PlainCodec):
    """8-bit floats with one scale a tensor, kept outside the cache. Values beyond the format's range are clipped.

    Args:
        stored: float8_e4m3fn or float8_e5m2.
        scales: of keys and of values.
    """

    stored: torch.dtype
    scales: tuple[float, float]

    def _encode_side(self, name: str, index: int, vectors: torch.Tensor) -> dict[str, torch.Tensor]:
        quantized = to_float8(vectors.float() / self.scales[index], self.stored)
        return super()._encode_side(name, index, quantized.view(torch_dtype(self._part(name).dtype)))

    def _decode_side(self, name: str, index: int, parts: Parts) -> torch.Tensor:
        stored = super()._decode_side(name, index, parts)
        return stored.view(self.stored).float() * self.scales[index]


@attrs.frozen(kw_only=True)
class PerTokenHeadCodec(_Codec):
    """8 bits a value, int8 or e4m3, with one float32 scale for each token and head, kept in the cell."""

    def _encode_side(self, name: str, index: int, vectors: torch.Tensor) -> dict[str, torch.Tensor]:
        stored = torch_dtype(self._part(name).dtype)
        limit = 127.0 if stored is torch.int8 else torch.finfo(stored).max
        values = vectors.float()
        largest = values.abs().amax(-1, keepdim=True)
        scale = torch.where(largest > 0, largest / limit, torch.ones_like(largest))
        scaled = values / scale
        quantized = scaled.round().to(stored) if stored is torch.int8 else to_float8(scaled, stored)
        return {name: quantized, **self._scales(name, scale)}

    def _scales(self, name: str, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        # a joint vector's cell has room for two scales; the second repeats the first
        return {f"{name}_scale": scale.expand(*scale.shape[:-1], self._part(f"{name}_scale").width)}

    def _decode_side(self, name: str, index: int, parts: Parts) -> torch.Tensor:
        return parts[name].float() * parts[f"{name}_scale"][..., :1]


@attrs.frozen(kw_only=True)
class Int4Codec(PerTokenHeadCodec):
    """4 bits a value, the even element in the low nibble, between the vector's smallest and largest value.

    The zero point, 0 to 15, takes the place of the scale's four lowest bits: as float32 it stays a scale.
    """

    def _encode_side(self, name: str, index: int, vectors: torch.Tensor) -> dict[str, torch.Tensor]:
        values = vectors.float()
        low, high = values.amin(-1, keepdim=True).clamp(max=0), values.amax(-1, keepdim=True).clamp(min=0)
        raw = torch.where(high > low, (high - low) / 15, torch.ones_like(low))
        bits = raw.view(torch.int32) & ~15
        scale = bits.view(torch.float32)
        zero = (-low / scale).round().clamp(0, 15)
        codes = ((values / scale).round() + zero).clamp(0, 15).to(torch.uint8)
        word = (bits | zero.to(torch.int32)).view(torch.float32)
        return {name: pair(codes), **self._scales(name, word)}

    def _decode_side(self, name: str, index: int, parts: Parts) -> torch.Tensor:
        bits = parts[f"{name}_scale"][..., :1].contiguous().view(torch.int32)
        scale = (bits & ~15).view(torch.float32)
        return (unpair(parts[name]).float() - (bits & 15)) * scale


@attrs.frozen(kw_only=True)
class Nvfp4Codec(_Codec):
    """4-bit floats (e2m1), the even element in the low nibble, with one e4m3 scale for 16 of them.

    Args:
        scales: of keys and of values: what the e4m3 scales are multiplied with.
        adaptive: a group's largest value becomes 6, or 4 where that is nearer to its values; else always 6.
    """

    scales: tuple[float, float]
    adaptive: bool

    def _encode_side(self, name: str, index: int, vectors: torch.Tensor) -> dict[str, torch.Tensor]:
        scaled = vectors.float() / self.scales[index]
        codes, scale = to_e2m1(scaled)
        if self.adaptive:
            other_codes, other_scale = to_e2m1(scaled, largest_code=4.0)
            better = _misses(scaled, other_codes, other_scale) < _misses(scaled, codes, scale)
            codes = torch.where(better.repeat_interleave(NVFP4_VALUES_PER_SCALE, -1), other_codes, codes)
            scale = torch.where(better, other_scale.float(), scale.float()).to(scale.dtype)
        return {name: pair(codes), f"{name}_scale": scale}

    def _decode_side(self, name: str, index: int, parts: Parts) -> torch.Tensor:
        return from_e2m1(unpair(parts[name]), parts[f"{name}_scale"]) * self.scales[index]


def _misses(values: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The squared error of each 16 values."""
    missed = (from_e2m1(codes, scale) - values).square()
    return missed.unflatten(-1, (-1, NVFP4_VALUES_PER_SCALE)).sum(-1)
