"""Element dtypes, quantisation modes and packing rules (contract 2.19), and the registry of cache dtypes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframe import CacheDType, FullAttentionSpec, KVQuantMode, PackedCell, ScaleStorage
from kvframe.dtypes import (
    CacheDTypes,
    CellGeometry,
    builtin_cache_dtypes,
    dtype_name,
    element_size,
    nvfp4_row_bytes,
)
from kvframe.errors import SpecError, UnknownCacheDTypeError
from kvframe.packing import cell_geometry, cell_parts, is_two_planes, packed, two_planes

KNOWN = CacheDTypes(builtin_cache_dtypes())


def layer(dtype="bfloat16", **changes):
    return FullAttentionSpec(16, **{"num_kv_heads": 8, "head_size": 128, "dtype": dtype, **changes})


def stored(name, **changes):
    """A bfloat16 model's layer whose cache has that dtype."""
    cache_dtype = KNOWN.get(name)
    return packed(layer(cache_dtype.element_dtype("bfloat16"), **changes), cache_dtype)


# --- element dtypes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [
        ("bfloat16", 2),
        ("float16", 2),
        ("float32", 4),
        ("float64", 8),
        ("uint8", 1),
        ("int8", 1),
        ("bool", 1),
        ("int16", 2),
        ("int32", 4),
        ("int64", 8),
        ("float8_e4m3fn", 1),
        ("float8_e4m3fnuz", 1),
        ("float8_e5m2", 1),
        ("float8_e5m2fnuz", 1),
        ("fp8", 1),
        ("fp8_e4m3", 1),
        ("fp8_e5m2", 1),
        ("torch.bfloat16", 2),
    ],
)
def test_bytes_of_an_element(name, nbytes):
    assert element_size(name) == nbytes


class TorchLike:
    """Prints as a torch dtype does."""

    def __str__(self):
        return "torch.float8_e4m3fn"


@pytest.mark.parametrize(
    ("given_as", "name"),
    [
        (TorchLike(), "float8_e4m3fn"),
        ("fp8", "float8_e4m3fn"),
        ("fp8_e4m3", "float8_e4m3fn"),
        ("fp8_e5m2", "float8_e5m2"),
        ("torch.float16", "float16"),
        ("bfloat16", "bfloat16"),
    ],
)
def test_an_element_dtype_is_a_name_or_prints_as_one(given_as, name):
    assert dtype_name(given_as) == name


def test_numpy_dtypes_are_element_dtypes():
    numpy = pytest.importorskip("numpy")
    assert element_size(numpy.dtype("float32")) == 4


@pytest.mark.parametrize("name", ["", "float7", "auto", "int4_per_token_head", None])
def test_an_unknown_element_dtype_lists_the_known_ones(name):
    with pytest.raises(SpecError) as caught:
        element_size(name)
    assert caught.value.value == str(name)
    assert "bfloat16" in str(caught.value)


# --- quantisation modes (contract 2.19) ------------------------------------------------------------------------------

MODES = [
    "NONE",
    "FP8_PER_TENSOR",
    "INT8_PER_TOKEN_HEAD",
    "FP8_PER_TOKEN_HEAD",
    "INT4_PER_TOKEN_HEAD",
    "NVFP4",
    "TURBOQUANT_K8V4",
    "TURBOQUANT_4BIT_NC",
    "TURBOQUANT_K3V4_NC",
    "TURBOQUANT_3BIT_NC",
    "NVFP4_DS_MLA",
]


def test_modes_have_the_fields_values_and_no_aliases():
    assert {mode.name: mode.value for mode in KVQuantMode} == {name: at for at, name in enumerate(MODES)}
    assert len(KVQuantMode.__members__) == len(MODES)  # Q1: no two names for one value


def test_predicates_of_modes():
    def values(predicate):
        return {mode.value for mode in KVQuantMode if predicate(mode)}

    assert values(lambda mode: mode.is_per_token_head) == {2, 3, 4}
    assert values(lambda mode: mode.is_nvfp4) == {5}
    assert values(lambda mode: mode.is_turboquant) == {6, 7, 8, 9}


@pytest.mark.parametrize(
    ("name", "mode", "scales"),
    [
        ("auto", 0, ScaleStorage.NONE),
        ("bfloat16", 0, ScaleStorage.NONE),
        ("float16", 0, ScaleStorage.NONE),
        ("float32", 0, ScaleStorage.NONE),
        ("fp8", 1, ScaleStorage.CHECKPOINT),
        ("fp8_e4m3", 1, ScaleStorage.CHECKPOINT),
        ("fp8_e5m2", 1, ScaleStorage.CHECKPOINT),
        ("fp8_inc", 1, ScaleStorage.CHECKPOINT),
        ("int8_per_token_head", 2, ScaleStorage.INLINE),
        ("fp8_per_token_head", 3, ScaleStorage.INLINE),
        ("int4_per_token_head", 4, ScaleStorage.INLINE),
        ("nvfp4", 5, ScaleStorage.INLINE),
        ("nvfp4_4over6", 5, ScaleStorage.INLINE),
    ],
)
def test_what_every_installation_knows(name, mode, scales):
    cache_dtype = KNOWN.get(name)
    assert (cache_dtype.mode, cache_dtype.scales) == (KVQuantMode(mode), scales)
    assert cache_dtype.is_quantized == (mode != 0)
    assert KNOWN.get(f"torch.{name}") is cache_dtype
    assert cache_dtype.serves("any family")


def test_no_other_dtype_is_built_in():
    assert len(KNOWN.names) == 13
    assert KNOWN.names == tuple(sorted(KNOWN.names))
    assert [cache_dtype.name for cache_dtype in KNOWN] == [d.name for d in builtin_cache_dtypes()]


@pytest.mark.parametrize(
    ("name", "stored_as"),
    [("auto", "float16"), ("bfloat16", "bfloat16"), ("fp8", "uint8"), ("int8_per_token_head", "int8")],
)
def test_what_a_float16_models_cache_holds(name, stored_as):
    assert KNOWN.get(name).element_dtype("float16") == stored_as


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("fp8_e4m4", "fp8_e4m3"),
        ("int8", None),
        ("", None),
        ("turboquant_foo", None),
        ("FP8", None),
        ("nvfp5", "nvfp4"),
    ],
)
def test_an_unknown_cache_dtype_is_never_taken_for_not_quantised(name, near):
    with pytest.raises(UnknownCacheDTypeError) as caught:
        KNOWN.get(name)
    error = caught.value
    assert isinstance(error, LookupError)
    assert (error.name, error.kind, tuple(error.known)) == (name, "unknown_cache_dtype", KNOWN.names)
    assert all(known in str(error) for known in KNOWN.names)
    if near:
        assert f"Did you mean {near!r}?" in str(error)


def test_a_mode_finds_a_dtype_of_its_cells():
    assert KNOWN.of_mode(KVQuantMode.NVFP4).name == "nvfp4"
    assert KNOWN.of_mode(KVQuantMode.TURBOQUANT_K8V4) is None


def test_a_dtype_may_serve_some_families_only():
    picky = CacheDType(name="mine", families=frozenset({"full_attention"}))
    assert picky.serves("full_attention")
    assert not picky.serves("sliding_window")


# --- packing (contract 2.19: 8 heads of 128, blocks of 16) -----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "slots", "cell", "page"),
    [
        ("auto", 8, 512, 65536),  # (128 + 128) * 2
        ("bfloat16", 8, 512, 65536),
        ("fp8_e4m3", 8, 256, 32768),  # scales lie outside
        ("int8_per_token_head", 8, 264, 33792),  # 128 + 128 + 2 * 4
        ("fp8_per_token_head", 8, 264, 33792),
        ("int4_per_token_head", 8, 136, 17408),  # 64 + 64 + 2 * 4
        ("nvfp4", 16, 72, 18432),  # 128 / 2 + 128 / 16, K and V in slots of their own
        ("nvfp4_4over6", 16, 72, 18432),
    ],
)
def test_pages_of_packed_cells(name, slots, cell, page):
    spec = stored(name)
    assert (spec.num_heads, spec.state_content_size_bytes, spec.page_size_bytes) == (slots, cell, page)
    assert slots * 16 * cell == page
    assert spec.kv_quant_mode is KNOWN.get(name).mode


@pytest.mark.parametrize(
    ("name", "changes", "cell"),
    [
        ("int8_per_token_head", {"head_size_v": 64}, 200),  # 128 + 64 + 8
        (
            "int8_per_token_head",
            {"head_size": 576, "head_size_v": 0, "num_kv_heads": 1},
            584,
        ),  # a pair of scales
        ("int4_per_token_head", {"head_size": 576, "head_size_v": 0, "num_kv_heads": 1}, 296),  # 288 + 8
        ("nvfp4", {"head_size": 64}, 36),  # 32 + 4
        ("nvfp4", {"head_size": 256}, 144),  # 128 + 16
    ],
)
def test_cells_of_other_widths(name, changes, cell):
    assert stored(name, **changes).state_content_size_bytes == cell


def test_packing_twice_is_packing_once():
    for name in KNOWN.names:
        once = stored(name)
        assert packed(once, KNOWN.get(name)) == once


def test_rows_of_four_bits_need_k_and_v_of_one_width():
    with pytest.raises(SpecError, match=r"head_size_v = 64: must equal head_size \(128\)"):
        stored("nvfp4", head_size_v=64)


def test_a_row_of_four_bits():
    assert nvfp4_row_bytes(512) == 288  # 256 + 32


def test_two_planes_hold_all_heads_of_k_and_of_v():
    spec = two_planes(layer())
    assert (spec.num_heads, spec.state_content_size_bytes, spec.page_size_bytes) == (
        2,
        2048,
        65536,
    )  # 8 * 128 * 2
    assert is_two_planes(spec)
    assert not is_two_planes(layer())
    assert two_planes(spec) == spec
    with pytest.raises(SpecError, match="head_size_v = 64: must equal head_size"):
        two_planes(layer(head_size_v=64))


# --- the parts of a cell ---------------------------------------------------------------------------------------------

widths = st.sampled_from([16, 32, 64, 128, 256])


@given(st.sampled_from(sorted(KNOWN.names)), st.integers(1, 16), widths)
def test_the_parts_of_a_cell_fill_it_and_do_not_overlap(name, heads, width):
    spec = stored(name, num_kv_heads=heads, head_size=width)
    parts = cell_parts(spec, KNOWN)
    used = {}
    for part in parts:
        first, count = part.slots or (0, spec.num_heads)
        for slot in range(first, first + count):
            for byte in range(part.offset, part.offset + part.width * element_size(part.dtype)):
                assert used.setdefault((slot, byte), part.name) == part.name
    assert used.keys() == {
        (slot, byte) for slot in range(spec.num_heads) for byte in range(spec.state_content_size_bytes)
    }


def test_a_joint_vector_has_one_part():
    (part,) = cell_parts(layer(head_size_v=0), KNOWN)
    assert (part.name, part.offset, part.width) == ("kv", 0, 128)


def test_the_parts_of_planes():
    key, value = cell_parts(two_planes(layer()), KNOWN)
    assert [(part.name, part.slots, part.width) for part in (key, value)] == [
        ("key", (0, 1), 1024),
        ("value", (1, 1), 1024),
    ]


def test_cells_that_only_a_kernel_knows_have_no_parts():
    assert cell_parts(layer(state_content_bytes=656), KNOWN) is None


def test_a_plugins_packing_rule_is_asked_for_one_tokens_cell():
    asked = []

    def pack(cell):
        asked.append(cell)
        return PackedCell(content_bytes=100, head_slots=4)

    spec = packed(layer("uint8", head_size_v=64), CacheDType(name="mine", pack=pack, storage="uint8"))
    assert asked == [CellGeometry(num_kv_heads=8, head_size=128, head_size_v=64, element_bytes=1)]
    assert cell_geometry(layer("uint8", head_size_v=64)) == asked[0]
    assert (spec.num_heads, spec.state_content_size_bytes, spec.page_size_bytes) == (
        4,
        100,
        6400,
    )  # 4 * 16 * 100
