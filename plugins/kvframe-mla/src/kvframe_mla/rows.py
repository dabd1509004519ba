"""The opaque row formats of latent layers as cache dtypes (contract 2.4, 2.19)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from kvframe import CacheDType, KVQuantMode, PackedCell, ScaleStorage, hookimpl
from kvframe.dtypes import CellGeometry
from kvframe.errors import SpecError
from kvframe_mla.codecs import Fp8RowCodec, Nvfp4RowCodec, row_codec

# Bytes of one opaque row, by cache dtype and by the elements of the vector that it packs (contract 2.4).
# 576 = 512 latent + 64 rotary elements; 512 is a V4 vector, whose pages need the layer's `alignment` besides.
ROW_BYTES: Mapping[str, Mapping[int, int]] = {
    "fp8_ds_mla": {576: 512 + 16 + 128, 512: 448 + 128 + 8},
    "nvfp4_ds_mla": {576: 256 + 64 + 32, 512: 256 + 32},
}


def row_bytes(cache_dtype: str, head_size: int) -> int:
    """Bytes of one opaque row of a vector of `head_size` elements, scales included (contract 2.4).

    Raises:
        SpecError: the format has no row for such a vector.
    """
    widths = ROW_BYTES[cache_dtype]
    if head_size not in widths:
        known = " or ".join(map(str, widths))
        raise SpecError(
            spec=f"CacheDType {cache_dtype}",
            field="head_size",
            value=head_size,
            rule=f"must be {known}: the format's rows are fixed",
        )
    return widths[head_size]


def _pack_rows(cell: CellGeometry, *, cache_dtype: str) -> PackedCell:
    return PackedCell(content_bytes=row_bytes(cache_dtype, cell.head_size), head_slots=cell.num_kv_heads)


def _codec(cell: CellGeometry, *, cache_dtype: str) -> Fp8RowCodec | Nvfp4RowCodec:
    return row_codec(cache_dtype, row_bytes(cache_dtype, cell.head_size))


@hookimpl
def kvframe_cache_dtypes() -> list[CacheDType]:
    """The opaque row formats, for latent layers only."""
    modes = {"fp8_ds_mla": KVQuantMode.FP8_PER_TENSOR, "nvfp4_ds_mla": KVQuantMode.NVFP4_DS_MLA}
    return [
        CacheDType(
            name=name,
            mode=mode,
            storage="uint8",
            scales=ScaleStorage.INLINE,
            pack=partial(_pack_rows, cache_dtype=name),
            codec=partial(_codec, cache_dtype=name),
            families=frozenset({"mla", "sliding_window_mla"}),
        )
        for name, mode in modes.items()
    ]
