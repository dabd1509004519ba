import pickle

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvframe_cross_attention
from kvframe import EngineConfig, Refusal
from kvframe.errors import SpecError
from kvframe_cross_attention import CrossAttentionSpec, EncoderOnlyAttentionSpec

CROSS, ENCODER_ONLY = kvframe_cross_attention.kvframe_spec_families()


def spec(cls, **changes):
    return cls(**{"block_size": 16, "num_kv_heads": 8, "head_size": 64, "dtype": "bfloat16", **changes})


specs = st.builds(
    spec,
    st.sampled_from([CrossAttentionSpec, EncoderOnlyAttentionSpec]),
    block_size=st.integers(1, 64),
    num_kv_heads=st.integers(1, 8),
    head_size=st.integers(1, 256),
    page_size_padded=st.one_of(st.none(), st.just(1 << 20)),
)


def family(layer):
    return CROSS if isinstance(layer, CrossAttentionSpec) else ENCODER_ONLY


def test_cross_attention_is_sized_by_the_encoder():
    # E = 1500, block 16, page 8 * 16 * 128 * 2 = 32768: ceil(1500 / 16) = 94 pages
    engine = EngineConfig(max_model_len=448, max_encoder_tokens=1500)
    layer = spec(CrossAttentionSpec)
    assert layer.page_size_bytes == 32768
    assert layer.max_memory_usage_bytes(engine) == 94 * 32768 == 3_080_192
    assert CROSS.lifetime(layer).peak(1, 448, max_encoder_tokens=1500) == 94


def test_cross_attention_of_a_text_request_is_empty():
    assert spec(CrossAttentionSpec).max_memory_usage_bytes(EngineConfig(max_model_len=448)) == 0


def test_cross_attention_is_filled_once():
    lifetime = CROSS.lifetime(spec(CrossAttentionSpec, block_size=4))
    assert (lifetime.source, lifetime.hits) == ("encoder", "never")
    assert lifetime.entries(10) == 3  # 10 encoder tokens in blocks of 4, unchanged later
    assert lifetime.dead(10_000, 1) == (0, 0)


def test_encoder_only_layers_keep_nothing():
    layer = spec(EncoderOnlyAttentionSpec)
    lifetime = ENCODER_ONLY.lifetime(layer)
    assert layer.max_memory_usage_bytes(EngineConfig(max_model_len=4096)) == 0
    assert (lifetime.entries(4096), lifetime.peak(64, 4096), lifetime.hits) == (0, 0, "never")


@pytest.mark.parametrize("cls", [CrossAttentionSpec, EncoderOnlyAttentionSpec])
def test_bad_values_are_refused_by_name(cls):
    with pytest.raises(SpecError) as caught:
        spec(cls, page_size_padded=32767)
    assert (caught.value.field, caught.value.value) == ("page_size_padded", 32767)
    assert "at least the page's own 32768 bytes" in caught.value.rule


@given(specs)
def test_specs_are_values_and_equal_layers_merge(layer):
    assert pickle.loads(pickle.dumps(layer)) == layer
    assert {layer: 1}[attrs.evolve(layer)] == 1
    assert family(layer).merge({"a": layer, "b": layer}) == layer


@given(specs, st.integers(1, 64))
def test_a_new_block_size_keeps_the_page_whole(layer, block_size):
    changed = layer.copy_with_new_block_size(block_size)
    bare = layer.unpadded_page_size_bytes // layer.block_size * block_size
    assert changed.page_size_bytes == max(bare, layer.page_size_padded or 0)


@pytest.mark.parametrize("cls", [CrossAttentionSpec, EncoderOnlyAttentionSpec])
def test_a_conflict_names_the_field_and_its_layers(cls):
    layers = {"a": spec(cls), "b": spec(cls, num_kv_heads=4)}
    refusal = family(layers["a"]).merge(layers)
    assert isinstance(refusal, Refusal)
    assert (refusal.field, refusal.layers) == ("num_kv_heads", {"4": ("b",), "8": ("a",)})


def test_the_two_kinds_share_nothing():
    cross, encoder = spec(CrossAttentionSpec), spec(EncoderOnlyAttentionSpec)
    assert CROSS.table_key(cross) != ENCODER_ONLY.table_key(encoder)
    assert CROSS.table_key(cross) == CROSS.table_key(spec(CrossAttentionSpec, num_kv_heads=4))
    assert isinstance(CROSS.promote(cross, None), Refusal)
    assert isinstance(ENCODER_ONLY.promote(encoder, None), Refusal)
