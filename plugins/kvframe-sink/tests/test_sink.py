import pickle

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvframe_sink
from kvframe import EngineConfig, FullAttentionSpec, Refusal
from kvframe.errors import SpecError
from kvframe.family import full_attention_family
from kvframe_sink import SinkFullAttentionSpec

FAMILY = kvframe_sink.kvframe_spec_families()[0]


def spec(**changes):
    fields = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16", "sink_len": 128}
    return SinkFullAttentionSpec(**{**fields, **changes})


specs = st.builds(
    SinkFullAttentionSpec,
    block_size=st.sampled_from([2, 16, 64]),
    num_kv_heads=st.integers(1, 8),
    head_size=st.integers(1, 256),
    dtype=st.sampled_from(["bfloat16", "uint8"]),
    sink_len=st.one_of(st.none(), st.integers(1, 256)),
    tokens_per_state=st.sampled_from([1, 2]),
    non_causal=st.booleans(),
)


@pytest.mark.parametrize("value", [0, -16, 2.5])
def test_bad_values_are_refused_by_name(value):
    with pytest.raises(SpecError) as caught:
        spec(sink_len=value)
    assert (caught.value.field, caught.value.value) == ("sink_len", value)
    assert "at least 1" in caught.value.rule


def test_it_is_sized_as_full_attention():
    assert spec().max_memory_usage_bytes(EngineConfig(max_model_len=4096)) == 256 * 65536
    assert FAMILY.lifetime(spec()).peak(8, 4096) == 256
    assert FAMILY.lifetime(spec()).dead(4096, 10) == (0, 0)


@given(specs)
def test_specs_are_values(layer):
    assert pickle.loads(pickle.dumps(layer)) == layer
    assert {layer: 1}[attrs.evolve(layer)] == 1


@given(specs)
def test_merging_equal_layers_loses_nothing(layer):
    assert FAMILY.merge({"a": layer, "b": layer}) == layer


@given(specs, st.sampled_from([2, 4, 32, 256]))
def test_a_new_block_size_scales_the_page(layer, block_size):
    changed = layer.copy_with_new_block_size(block_size)
    assert changed.page_size_bytes * layer.block_size == layer.page_size_bytes * block_size
    assert changed.sink_len == layer.sink_len


@pytest.mark.parametrize("other", [64, None])
def test_different_sinks_are_refused(other):
    layers = {"a": spec(), "b": spec(sink_len=other)}
    for order in (layers, dict(reversed(layers.items()))):
        refusal = FAMILY.merge(order)
        assert isinstance(refusal, Refusal)
        assert (refusal.field, refusal.layers) == ("sink_len", {"128": ("a",), str(other): ("b",)})


def test_a_sink_is_not_lost_to_full_attention():
    full = FullAttentionSpec(16, num_kv_heads=8, head_size=128, dtype="bfloat16")
    for layers in ({"a": full, "b": spec()}, {"b": spec(), "a": full}):
        assert isinstance(FAMILY.merge(layers), Refusal)
    # both keep every token: one table serves both
    assert FAMILY.table_key(spec()) == full_attention_family().table_key(full)
    assert FAMILY.promote(spec(), 32) == spec()
