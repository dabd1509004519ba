"""Cache data types: names, bytes, quantisation modes and packing rules as data. No torch.

An *element dtype* is the type of one stored number ("bfloat16", "uint8"). A *cache dtype* is what an operator asks
for ("auto", "fp8_e4m3", "int8_per_token_head"): an element dtype plus how a cell is packed and where its scales live.
"""

from __future__ import annotations

import functools
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
class CellPart:
    """One named piece of a packed cell, which a view of its own can show.

    Args:
        name: such as "key" or "key_scale".
        dtype: element dtype of the piece.
        offset: bytes from the start of the cell.
        width: elements.
        slots: (first, count) of the head slots that hold it; None: all.
        scalar: one number a cell, which kernels index by token before head.
    """

    name: str
    dtype: str
    offset: int
    width: int
    slots: tuple[int, int] | None = None
    scalar: bool = False


@attrs.frozen(kw_only=True)
class CacheDType:
    """A cache data type that an operator can ask for by name.

    Args:
        name: as given on the command line.
        mode: what kernels dispatch on.
        storage: element dtype of the stored bytes; None means the model's own dtype.
        scales: where scales live.
        pack: cell geometry to packed cell; None means dense K and V.
        parts: cell geometry to the pieces of the packed cell; None where `pack` is None.
        codec: cell geometry to the torch codec of such cells (`kvframe.ops`); None: the core's, by mode.
        families: names of the only families it may serve; None means every family that stores tokens.
    """

    name: str
    mode: KVQuantMode = KVQuantMode.NONE
    storage: str | None = None
    scales: ScaleStorage = ScaleStorage.NONE
    pack: Callable[[CellGeometry], PackedCell] | None = None
    parts: Callable[[CellGeometry], tuple[CellPart, ...]] | None = None
    codec: Callable[[CellGeometry], Any] | None = None
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


def _pack_per_token_head(cell: CellGeometry, values_per_element: int) -> PackedCell:
    # int4's zero points live inside the two scale words
    widths = cell.head_size // values_per_element + cell.head_size_v // values_per_element
    content = widths * cell.element_bytes + 2 * SCALE_BYTES
    return PackedCell(content_bytes=content, head_slots=cell.num_kv_heads)


def _parts_per_token_head(cell: CellGeometry, data: str, values_per_element: int) -> tuple[CellPart, ...]:
    # contract 4.3: K data, K scale, V data, V scale; a joint vector is followed by both scales
    sides = [("key", cell.head_size, 1), ("value", cell.head_size_v, 1)]
    if cell.head_size_v == 0:
        sides = [("kv", cell.head_size, 2)]
    parts: list[CellPart] = []
    offset = 0
    for name, values, scales in sides:
        width = values // values_per_element
        after = offset + width * cell.element_bytes
        parts += [
            CellPart(name=name, dtype=data, offset=offset, width=width),
            CellPart(name=f"{name}_scale", dtype="float32", offset=after, width=scales, scalar=scales == 1),
        ]
        offset = after + scales * SCALE_BYTES
    return tuple(parts)


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


def _parts_nvfp4(cell: CellGeometry) -> tuple[CellPart, ...]:
    # contract 4.3: K in the first half of the slots, V in the second; in each cell the data, then the scales
    heads, data = cell.num_kv_heads, cell.head_size // 2
    scales = cell.head_size // NVFP4_VALUES_PER_SCALE
    parts: list[CellPart] = []
    for name, slots in (("key", (0, heads)), ("value", (heads, heads))):
        parts += [
            CellPart(name=name, dtype="uint8", offset=0, width=data, slots=slots),
            CellPart(name=f"{name}_scale", dtype="float8_e4m3fn", offset=data, width=scales, slots=slots),
        ]
    return tuple(parts)


def builtin_cache_dtypes() -> tuple[CacheDType, ...]:
    """The cache dtypes that every installation knows (contract 2.19); plugins add theirs by hook."""
    plain = [CacheDType(name="auto")]
    plain += [CacheDType(name=name, storage=name) for name in ("bfloat16", "float16", "float32")]
    stored = {"fp8": "uint8", "fp8_e4m3": "uint8", "fp8_e5m2": "uint8", "fp8_inc": "float8_e4m3fn"}
    fp8 = [
        CacheDType(
            name=name, mode=KVQuantMode.FP8_PER_TENSOR, storage=storage, scales=ScaleStorage.CHECKPOINT
        )
        for name, storage in stored.items()
    ]
    per_token_head = [
        CacheDType(
            name=mode.name.lower(),
            mode=mode,
            storage=storage,
            scales=ScaleStorage.INLINE,
            pack=functools.partial(_pack_per_token_head, values_per_element=values),
            parts=functools.partial(_parts_per_token_head, data=data, values_per_element=values),
        )
        for mode, storage, data, values in (
            (KVQuantMode.INT8_PER_TOKEN_HEAD, "int8", "int8", 1),
            (KVQuantMode.FP8_PER_TOKEN_HEAD, "uint8", "float8_e4m3fn", 1),
            (KVQuantMode.INT4_PER_TOKEN_HEAD, "uint8", "uint8", 2),
        )
    ]
    packing: Mapping[str, Any] = {"pack": _pack_nvfp4, "parts": _parts_nvfp4, "scales": ScaleStorage.INLINE}
    nvfp4 = [
        CacheDType(name=name, mode=KVQuantMode.NVFP4, storage="uint8", **packing)
        for name in ("nvfp4", "nvfp4_4over6")
    ]
    return (*plain, *fp8, *per_token_head, *nvfp4)


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

    def of_mode(self, mode: KVQuantMode) -> CacheDType | None:
        """A cache dtype of that mode; all that share a mode share its cells."""
        return next((dtype for dtype in self._by_name.values() if dtype.mode is mode), None)

    def get(self, name: str) -> CacheDType:
        """The cache dtype of that name; torch dtypes count by their name.

        Raises:
            UnknownCacheDTypeError: nobody claims it. It never falls back to "not quantised".
        """
        try:
            return self._by_name[str(name).removeprefix("torch.")]
        except KeyError:
            raise UnknownCacheDTypeError(name=str(name), known=self.names) from None
