"""TurboQuant's four cache dtypes for kvframe: a key and a value side by side in one slot of bytes (contract 2.19).

Keys are rotated and stored in a few bits an element, with a two-byte norm, or as 8-bit floats; values are stored in a
few bits an element, with a two-byte scale and a two-byte zero point.
"""

from __future__ import annotations

import attrs

from kvframe import CacheDType, KVQuantMode, PackedCell, ScaleStorage, hookimpl
from kvframe.checks import cdiv, round_up
from kvframe.dtypes import CellGeometry
from kvframe.errors import SpecError

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
        key = cdiv(cell.head_size * self.key_bits, 8) + (0 if self.key_bits == 8 else KEY_NORM_BYTES)
        value = cdiv(cell.head_size * self.value_bits, 8) + VALUE_SCALE_AND_ZERO_BYTES
        return PackedCell(content_bytes=round_up(key + value, 2), head_slots=cell.num_kv_heads)


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
            families=frozenset({"full_attention", "sliding_window"}),
        )
        for preset in PRESETS
    ]
