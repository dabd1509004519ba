"""TurboQuant's slots: contract 2.19, worked numbers [run]."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvframe_turboquant
from kvframe import FullAttentionSpec, KVQuantMode, ScaleStorage, load_plugins
from kvframe.dtypes import CellGeometry
from kvframe.errors import SpecError
from kvframe.packing import packed
from kvframe_turboquant import PRESETS

NAMES = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")


@pytest.fixture(scope="module")
def dtypes():
    return load_plugins(extra=[kvframe_turboquant]).cache_dtypes


def layer(head_size, **fields):
    return FullAttentionSpec(16, **{"num_kv_heads": 8, "head_size": head_size, "dtype": "uint8", **fields})


@pytest.mark.parametrize(
    ("name", "slots"),
    [
        # 128: k8v4 128 + 64+4 = 196, 4bit 64+2 + 64+4 = 134, k3v4 48+2 + 64+4 = 118, 3bit 48+2 + 48+4 = 102
        ("turboquant_k8v4", {64: 100, 96: 148, 128: 196, 256: 388}),
        ("turboquant_4bit_nc", {64: 70, 96: 102, 128: 134, 256: 262}),
        ("turboquant_k3v4_nc", {64: 62, 96: 90, 128: 118, 256: 230}),
        ("turboquant_3bit_nc", {64: 54, 96: 78, 128: 102, 256: 198}),
    ],
)
def test_a_slot_holds_a_key_and_a_value(dtypes, name, slots):
    for head_size, slot in slots.items():
        spec = packed(layer(head_size), dtypes.get(name))
        assert (spec.num_heads, spec.state_content_size_bytes) == (8, slot)
        assert spec.page_size_bytes == 8 * 16 * slot
        assert spec.kv_quant_mode is KVQuantMode[name.upper()]


def test_the_page_of_eight_heads(dtypes):
    assert packed(layer(128), dtypes.get("turboquant_k8v4")).page_size_bytes == 25_088


def test_a_narrow_value_gets_the_room_of_a_key(dtypes):
    # 192*3/8+2 + 192*4/8+4 = 74 + 100
    narrow = packed(layer(192, head_size_v=128), dtypes.get("turboquant_k3v4_nc"))
    assert narrow.state_content_size_bytes == 174


def test_a_value_wider_than_the_key_has_no_room(dtypes):
    with pytest.raises(SpecError) as caught:
        packed(layer(128, head_size_v=192), dtypes.get("turboquant_3bit_nc"))
    assert (caught.value.field, caught.value.value) == ("head_size_v", 192)
    assert "128" in caught.value.rule


def test_a_packed_layer_stays_as_it_is(dtypes):
    once = packed(layer(128), dtypes.get("turboquant_3bit_nc"))
    assert packed(once, dtypes.get("turboquant_3bit_nc")) == once


@pytest.mark.parametrize("name", NAMES)
def test_the_dtypes_store_bytes_with_their_scales_inside(dtypes, name):
    dtype = dtypes.get(name)
    assert dtype.is_quantized
    assert dtype.element_dtype("bfloat16") == "uint8"
    assert dtype.scales is ScaleStorage.INLINE
    assert dtype.serves("full_attention")
    assert dtype.serves("sliding_window")
    assert not dtype.serves("mla")
    assert pickle.loads(pickle.dumps(dtype)) == dtype


@given(preset=st.sampled_from(PRESETS), head_size=st.integers(1, 1024), heads=st.integers(1, 64))
def test_no_bit_is_left_out(preset, head_size, heads):
    cell = preset(
        CellGeometry(num_kv_heads=heads, head_size=head_size, head_size_v=head_size, element_bytes=1)
    )
    bits = head_size * (preset.key_bits + preset.value_bits)
    extra_bytes = 4 if preset.key_bits == 8 else 6  # value scale and zero point; key norm
    assert cell.content_bytes % 2 == 0
    assert 8 * (cell.content_bytes - extra_bytes) >= bits
    assert 8 * (cell.content_bytes - extra_bytes - 3) < bits  # three roundings: key, value, even
    assert cell.head_slots == heads
