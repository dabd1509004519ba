import pickle

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvframe_hidden_state
import kvframe_mla
from kvframe import EngineConfig, Refusal, load_plugins
from kvframe.errors import SpecError
from kvframe_hidden_state import HiddenStateCacheSpec

(FAMILY,) = kvframe_hidden_state.kvframe_spec_families()


def spec(**changes):
    return HiddenStateCacheSpec(
        **{"block_size": 16, "num_kv_heads": 3, "head_size": 4096, "dtype": "bfloat16", **changes}
    )


specs = st.builds(
    spec,
    block_size=st.integers(1, 64),
    num_kv_heads=st.integers(1, 4),
    head_size=st.integers(1, 8192),
    page_size_padded=st.one_of(st.none(), st.just(1 << 24)),
)


def test_pages_and_memory():
    layer = spec()
    assert layer.page_size_bytes == 393_216  # 3 * 16 * 4096 * 2
    assert layer.max_memory_usage_bytes(EngineConfig(max_model_len=4096)) == 256 * 393_216
    assert layer.max_memory_usage_bytes(EngineConfig(max_model_len=100_003, dcp=4)) == 1563 * 393_216
    assert FAMILY.lifetime(layer).dead(4096, 1) == (0, 0)


def test_padding_grows_with_the_block():
    layer = spec(block_size=4, num_kv_heads=1, head_size=5120, page_size_padded=65_536)
    assert layer.copy_with_new_block_size(1).page_size_bytes == 65_536
    assert layer.copy_with_new_block_size(32).page_size_bytes == 327_680  # 32 * 5120 * 2


def test_bad_values_are_refused_by_name():
    with pytest.raises(SpecError) as caught:
        spec(page_size_padded=1)
    assert (caught.value.field, caught.value.value) == ("page_size_padded", 1)


@given(specs)
def test_specs_are_values_and_equal_layers_merge(layer):
    assert pickle.loads(pickle.dumps(layer)) == layer
    assert {layer: 1}[attrs.evolve(layer)] == 1
    assert FAMILY.merge({"a": layer, "b": layer}) == layer


def test_a_conflict_names_the_field_and_its_layers():
    refusal = FAMILY.merge({"a": spec(), "b": spec(num_kv_heads=1)})
    assert isinstance(refusal, Refusal)
    assert (refusal.field, refusal.layers) == ("num_kv_heads", {"1": ("b",), "3": ("a",)})


def test_it_is_a_family_of_its_own_and_a_group_of_its_own():
    host = load_plugins(extra=[kvframe_mla, kvframe_hidden_state])
    latent = kvframe_mla.MLAAttentionSpec(16, num_kv_heads=3, head_size=4096, dtype="bfloat16")
    assert host.family(spec()).name == "hidden_state"
    assert host.family(spec()).paging.own_group
    assert host.family(latent).name == "mla"
    assert not host.family(latent).paging.own_group
    for layers in ({"a": latent, "b": spec()}, {"b": spec(), "a": latent}):
        assert isinstance(host.family(spec()).merge(layers), Refusal)
