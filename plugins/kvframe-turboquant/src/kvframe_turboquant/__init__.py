"""TurboQuant's four cache dtypes for kvframe: a key and a value side by side in one slot of bytes (contract 2.19).

Keys are rotated and stored in a few bits an element, with a two-byte norm, or as 8-bit floats; values are stored in a
few bits an element, with a two-byte scale and a two-byte zero point.
"""

from __future__ import annotations

import attrs

from kvframe import CacheDType, KVQuantMode, PackedCell, ScaleStorage, hookimpl
from kvframe.checks import cdiv, round_up
from kvframe.dtypes import CellGeometry, CellPart
from kvframe.errors import SpecError
from kvframe_turboquant.codec import SlotCodec

KEY_NORM_BYTES = 2
VALUE_SCALE_AND_ZERO_BYTES = 4


@attrs.frozen(kw_only=True)
class Preset:
    """One of the formats: called, it is the packing rule of a cache dtype.

    Args:
        mode: what kernels dispatch on.
        key_bits: bits of a key's element; 8: an 8-bit float, which needs no norm.
        value_bits: bits of a value's element.
    """

    mode: KVQuantMode
    key_bits: int
    value_bits: int

    @property
    def name(self) -> str:
        """The dtype's name."""
        return self.mode.name.lower()

    def __call__(self, cell: CellGeometry) -> PackedCell:
        """One slot a KV head, rounded up to an even number of bytes; values get as many elements as keys.

        Raises:
            SpecError: values are wider than keys.
        """
        if cell.head_size_v > cell.head_size:
            raise SpecError(
                spec=f"CacheDType {self.name}",
                field="head_size_v",
                value=cell.head_size_v,
                rule=f"must be at most head_size ({cell.head_size}), which sets the slot's width",
            )
        content = round_up(self.key_bytes(cell) + self.value_bytes(cell), 2)
        return PackedCell(content_bytes=content, head_slots=cell.num_kv_heads)

    def key_bytes(self, cell: CellGeometry) -> int:
        """Bytes of a key: its elements, and its norm where it has one."""
        return cdiv(cell.head_size * self.key_bits, 8) + (0 if self.key_bits == 8 else KEY_NORM_BYTES)

    def value_bytes(self, cell: CellGeometry) -> int:
        """Bytes of a value: its elements, its scale and its zero point."""
        return cdiv(cell.head_size * self.value_bits, 8) + VALUE_SCALE_AND_ZERO_BYTES

    def parts(self, cell: CellGeometry) -> tuple[CellPart, ...]:
        """The key's bytes, then the value's (contract 4.3)."""
        key, value = self.key_bytes(cell), self.value_bytes(cell)
        return (
            CellPart(name="key", dtype="uint8", offset=0, width=key),
            CellPart(name="value", dtype="uint8", offset=key, width=value),
        )

    def codec(self, cell: CellGeometry) -> SlotCodec:
        """How keys and values become those bytes, and back."""
        return SlotCodec(
            parts=self.parts(cell),
            head_size=cell.head_size,
            head_size_v=cell.head_size_v,
            key_bits=self.key_bits,
            value_bits=self.value_bits,
        )


@attrs.frozen
class _PartsOf:
    """A preset's pieces as a value that compares by the preset, which a bound method does not."""

    preset: Preset

    def __call__(self, cell: CellGeometry) -> tuple[CellPart, ...]:
        return self.preset.parts(cell)


@attrs.frozen
class _CodecOf:
    """A preset's codec, likewise."""

    preset: Preset

    def __call__(self, cell: CellGeometry) -> SlotCodec:
        return self.preset.codec(cell)


PRESETS = (
    Preset(mode=KVQuantMode.TURBOQUANT_K8V4, key_bits=8, value_bits=4),
    Preset(mode=KVQuantMode.TURBOQUANT_4BIT_NC, key_bits=4, value_bits=4),
    Preset(mode=KVQuantMode.TURBOQUANT_K3V4_NC, key_bits=3, value_bits=4),
    Preset(mode=KVQuantMode.TURBOQUANT_3BIT_NC, key_bits=3, value_bits=3),
)


@hookimpl
def kvframe_cache_dtypes() -> list[CacheDType]:
    """The four dtypes, for families that store keys and values."""
    return [
        CacheDType(
            name=preset.name,
            mode=preset.mode,
            storage="uint8",
            scales=ScaleStorage.INLINE,
            pack=preset,
            parts=_PartsOf(preset),
            codec=_CodecOf(preset),
            families=frozenset({"full_attention", "sliding_window"}),
        )
        for preset in PRESETS
    ]
