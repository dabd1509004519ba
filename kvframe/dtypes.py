"""Cache data types: names, bytes, quantisation modes and packing rules as data. No torch.

An *element dtype* is the type of one stored number ("bfloat16", "uint8"). A *cache dtype* is what an operator asks
for ("auto", "fp8_e4m3", "int8_per_token_head"): an element dtype plus how a cell is packed and where its scales live.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum, IntEnum
from typing import Any

import attrs

from kvframe.errors import SpecError, UnknownCacheDTypeError

_ELEMENT_BYTES: Mapping[str, int] = {
    "bfloat16": 2,
    "bool": 1,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "int8": 1,
    "uint8": 1,
}
_ELEMENT_ALIASES: Mapping[str, str] = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


def dtype_name(dtype: Any) -> str:
    """The element dtype's name, for a name or a torch or numpy dtype (which print as their name)."""
    name = str(dtype).removeprefix("torch.")
    return _ELEMENT_ALIASES.get(name, name)


def element_size(dtype: Any) -> int:
    """Bytes of one element.

    Raises:
        SpecError: no such element dtype; lists the known ones.
    """
    try:
        return _ELEMENT_BYTES[dtype_name(dtype)]
    except KeyError:
        raise SpecError(
            spec="dtype",
            field="name",
            value=str(dtype),
            rule=f"must be a name of, or a torch dtype among, {', '.join([*_ELEMENT_BYTES, *_ELEMENT_ALIASES])}",
        ) from None


class KVQuantMode(IntEnum):
    """How kernels dispatch on quantisation. Values are the field's (contract 2.19)."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4
    NVFP4 = 5
    TURBOQUANT_K8V4 = 6
    TURBOQUANT_4BIT_NC = 7
    TURBOQUANT_K3V4_NC = 8
    TURBOQUANT_3BIT_NC = 9
    NVFP4_DS_MLA = 10

    @property
    def is_per_token_head(self) -> bool:
        """Each token and head has its own scale, stored in the cell."""
        return KVQuantMode.INT8_PER_TOKEN_HEAD <= self <= KVQuantMode.INT4_PER_TOKEN_HEAD

    @property
    def is_nvfp4(self) -> bool:
        """4-bit data with one fp8 scale for 16 values."""
        return self is KVQuantMode.NVFP4

    @property
    def is_turboquant(self) -> bool:
        """Rotated codebook formats that pack K and V into one slot."""
        return KVQuantMode.TURBOQUANT_K8V4 <= self <= KVQuantMode.TURBOQUANT_3BIT_NC


class ScaleStorage(Enum):
    """Where a cache dtype keeps its scales."""

    NONE = "none"
    CHECKPOINT = "checkpoint"  # one scale a tensor, outside the cache: the checkpoint must bring it
    INLINE = "inline"  # in the cell, computed when it is written


@attrs.frozen(kw_only=True)
class CellGeometry:
    """What a packing rule is asked: one token's attention cell. `element_bytes` is that of the stored dtype."""

    num_kv_heads: int
    head_size: int
    head_size_v: int
    element_bytes: int


@attrs.frozen(kw_only=True)
class PackedCell:
    """A packing rule's answer: bytes of one (head slot, state) cell, and the number of head slots."""

    content_bytes: int
    head_slots: int




@attrs.frozen(kw_only=True)
class CacheDType:
    """A cache data type that an operator can ask for by name.

    Args:
        name: as given on the command line.
        mode: what kernels dispatch on.
        storage: element dtype of the stored bytes; None means the model's own dtype.
        scales: where scales live.
        pack: cell geometry to packed cell; None means dense K and V.
        families: names of the only families it may serve; None means every family that stores tokens.
    """

    name: str
    mode: KVQuantMode = KVQuantMode.NONE
    storage: str | None = None
    scales: ScaleStorage = ScaleStorage.NONE
    pack: Callable[[CellGeometry], PackedCell] | None = None
    families: frozenset[str] | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether cells are stored in another precision than the model's."""
        return self.mode is not KVQuantMode.NONE

    def element_dtype(self, model_dtype: str) -> str:
        """The element dtype that a layer of a model in `model_dtype` stores."""
        return self.storage or model_dtype

    def serves(self, family: str) -> bool:
        """Whether layers of the family named `family` may use it."""
        return self.families is None or family in self.families


SCALE_BYTES = 4  # float32
NVFP4_VALUES_PER_SCALE = 16


def _pack_per_token_head(cell: CellGeometry) -> PackedCell:
    data = (cell.head_size + cell.head_size_v) * cell.element_bytes
    return PackedCell(content_bytes=data + 2 * SCALE_BYTES, head_slots=cell.num_kv_heads)


def _pack_int4_per_token_head(cell: CellGeometry) -> PackedCell:
    # two values a byte; the zero points live inside the two scale words
    data = (cell.head_size // 2 + cell.head_size_v // 2) * cell.element_bytes
    return PackedCell(content_bytes=data + 2 * SCALE_BYTES, head_slots=cell.num_kv_heads)


def nvfp4_row_bytes(width: int) -> int:
    """Bytes of `width` 4-bit values with one fp8 scale for each 16 of them."""
    return width // 2 + width // NVFP4_VALUES_PER_SCALE


def _pack_nvfp4(cell: CellGeometry) -> PackedCell:
    if cell.head_size != cell.head_size_v:
        raise SpecError(
            spec="CacheDType nvfp4",
            field="head_size_v",
            value=cell.head_size_v,
            rule=f"must equal head_size ({cell.head_size}): K and V rows share one slot width",
        )
    row = nvfp4_row_bytes(cell.head_size) * cell.element_bytes
    return PackedCell(content_bytes=row, head_slots=2 * cell.num_kv_heads)


def builtin_cache_dtypes() -> tuple[CacheDType, ...]:
    """The cache dtypes that every installation knows (contract 2.19); plugins add theirs by hook."""
    plain = [CacheDType(name="auto")]
    plain += [CacheDType(name=name, storage=name) for name in ("bfloat16", "float16", "float32")]
    fp8 = [
        CacheDType(
            name=name,
            mode=KVQuantMode.FP8_PER_TENSOR,
            storage=storage,
            scales=ScaleStorage.CHECKPOINT,
        )
        for name, storage in (
            ("fp8", "uint8"),
            ("fp8_e4m3", "uint8"),
            ("fp8_e5m2", "uint8"),
            ("fp8_inc", "float8_e4m3fn"),
        )
    ]
    inline = [
        CacheDType(name=name, mode=mode, storage=storage, scales=ScaleStorage.INLINE, pack=pack)
        for name, mode, storage, pack in (
            ("int8_per_token_head", KVQuantMode.INT8_PER_TOKEN_HEAD, "int8", _pack_per_token_head),
            ("fp8_per_token_head", KVQuantMode.FP8_PER_TOKEN_HEAD, "uint8", _pack_per_token_head),
            ("int4_per_token_head", KVQuantMode.INT4_PER_TOKEN_HEAD, "uint8", _pack_int4_per_token_head),
            ("nvfp4", KVQuantMode.NVFP4, "uint8", _pack_nvfp4),
            ("nvfp4_4over6", KVQuantMode.NVFP4, "uint8", _pack_nvfp4),
        )
    ]
    return (*plain, *fp8, *inline)


class CacheDTypes:
    """The cache dtypes of one plugin host, by name. Frozen once made."""

    def __init__(self, dtypes: Iterable[CacheDType]) -> None:
        self._by_name = {dtype.name: dtype for dtype in dtypes}

    def __iter__(self) -> Any:
        return iter(self._by_name.values())

    @property
    def names(self) -> tuple[str, ...]:
        """All names, sorted."""
        return tuple(sorted(self._by_name))

    def get(self, name: str) -> CacheDType:
        """The cache dtype of that name; torch dtypes count by their name.

        Raises:
            UnknownCacheDTypeError: nobody claims it. It never falls back to "not quantised".
        """
        try:
            return self._by_name[str(name).removeprefix("torch.")]
        except KeyError:
            raise UnknownCacheDTypeError(name=str(name), known=self.names) from None
