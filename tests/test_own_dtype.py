"""A plugin's own packed format: it has no quantisation mode, and its cells are known by their packing."""

import attrs
import pytest

from kvframe import CacheDType, FullAttentionSpec, KVQuantMode, PackedCell, ScaleStorage, hookimpl
from kvframe.dtypes import CellPart
from kvframe.errors import SpecError
from kvframe.packing import cell_dtype, cell_parts, packed, two_planes
from kvframe.testing import isolated_host

SPEC = FullAttentionSpec(16, num_kv_heads=8, head_size=128, dtype="int8")


def rows(name, extra, storage="int8"):
    """A dtype of int8 keys and values with `extra` bytes behind them."""

    def pack(cell):
        if cell.head_size % 2:
            raise SpecError(spec=name, field="head_size", value=cell.head_size, rule="must be even")
        return PackedCell(
            content_bytes=cell.head_size + cell.head_size_v + extra, head_slots=cell.num_kv_heads
        )

    def parts(cell):
        return (
            CellPart(name="key", dtype="int8", offset=0, width=cell.head_size),
            CellPart(name="value", dtype="int8", offset=cell.head_size, width=cell.head_size_v),
            CellPart(name="scales", dtype="uint8", offset=cell.head_size + cell.head_size_v, width=extra),
        )

    return CacheDType(name=name, storage=storage, scales=ScaleStorage.INLINE, pack=pack, parts=parts)


def dtypes_of(*brought):
    class Plugin:
        @hookimpl
        def kvframe_cache_dtypes(self):
            return list(brought)

    return isolated_host(Plugin()).cache_dtypes


def test_cells_are_known_by_their_packing():
    dtypes = dtypes_of(rows("four", 4), rows("eight", 8))
    spec = packed(SPEC, dtypes.get("eight"))
    assert (spec.state_content_bytes, spec.kv_quant_mode) == (128 + 128 + 8, KVQuantMode.NONE)
    assert cell_dtype(spec, dtypes) is dtypes.get("eight")
    assert [part.name for part in cell_parts(spec, dtypes)] == ["key", "value", "scales"]


def test_two_formats_with_the_same_cells_are_told_apart_by_nobody():
    dtypes = dtypes_of(rows("one", 4), rows("other", 4))
    assert cell_parts(packed(SPEC, dtypes.get("one")), dtypes) is None


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,  # plain cells
        two_planes(SPEC),
        attrs.evolve(SPEC, head_size=127, state_content_bytes=127 + 127 + 4),  # the format has no such size
        attrs.evolve(SPEC, dtype="uint8", state_content_bytes=128 + 128 + 4),  # other storage
        attrs.evolve(SPEC, state_content_bytes=128 + 128 + 5),
    ],
)
def test_other_cells_are_not_taken_for_it(spec):
    dtypes = dtypes_of(rows("four", 4))
    assert cell_dtype(spec, dtypes) is not dtypes.get("four")


def test_a_mode_decides_where_there_is_one():
    dtypes = dtypes_of(rows("four", 4))
    spec = packed(SPEC, dtypes.get("int8_per_token_head"))
    assert cell_dtype(spec, dtypes) is dtypes.get("int8_per_token_head")
