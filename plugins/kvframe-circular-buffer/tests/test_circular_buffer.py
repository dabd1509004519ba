"""Rings: contract 2.8 and 2.10, worked numbers [run]."""

import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvframe_circular_buffer
import kvframe_sliding_window
from kvframe import EngineConfig, FullAttentionSpec, Refusal, load_plugins
from kvframe.errors import SpecError
from kvframe_circular_buffer import CircularBufferSpec, KpoolTailSpec
from kvframe_sliding_window import SlidingWindowSpec

WHOLE = EngineConfig(max_model_len=131_072, max_in_flight_tokens=8192)


@pytest.fixture(scope="module")
def host():
    return load_plugins(extra=[kvframe_sliding_window, kvframe_circular_buffer])


def ring(block_size=16, **fields):
    return CircularBufferSpec(
        block_size, **{"num_kv_heads": 1, "head_size": 128, "dtype": "bfloat16", **fields}
    )


def tail(block_size=16, **fields):
    fields = {"num_kv_heads": 1, "head_size": 128, "dtype": "bfloat16", "sliding_window": 16, **fields}
    return KpoolTailSpec(block_size, **fields)


def test_a_compressor_keeps_its_last_rows():
    spec = ring(8, head_size=1024, head_size_v=0, dtype="float32")
    assert spec.page_size_bytes == spec.max_memory_usage_bytes(WHOLE) == 32_768  # 8 * 1024 * 4


@pytest.mark.parametrize("spec", [ring(), tail()])
def test_a_request_has_one_block_for_life(spec):
    assert spec.page_size_bytes == spec.max_memory_usage_bytes(WHOLE) == 8192  # 16 * 2*128*2
    assert spec.max_num_blocks_per_req(WHOLE, 131_072) == 1
    assert not spec.prefix_cacheable
    assert not spec.uses_slot_mapping
    assert spec.has_layer_views
    assert spec.num_states == 16


def test_the_tail_keeps_a_windows_facts():
    assert tail().max_admission_blocks_per_request(8192, 131_072) == 1
    assert tail().num_retained_tokens == 15
    assert (tail().block_table_token_alignment, ring().block_table_token_alignment) == (128, None)


def test_a_tail_is_not_spread_over_context_parallel_ranks():
    with pytest.raises(SpecError, match="2 decode context parallel ranks"):
        tail().max_memory_usage_bytes(EngineConfig(max_model_len=4096, dcp=2))
    assert ring().max_memory_usage_bytes(EngineConfig(max_model_len=4096, dcp=2)) == 8192


@pytest.mark.parametrize("make", [ring, tail])
def test_a_larger_block_is_a_larger_ring(make):
    assert make().copy_with_new_block_size(32).page_size_bytes == 16_384
    padded = make(page_size_padded=10_000)
    assert padded.copy_with_new_block_size(32).page_size_bytes == 16_384
    with pytest.raises(SpecError) as caught:
        make(page_size_padded=8191)
    assert (caught.value.field, caught.value.value) == ("page_size_padded", 8191)
    with pytest.raises(SpecError, match="block_size = 0"):
        make(0)


@pytest.mark.parametrize("spec", [ring(), tail()])
def test_equal_specs_are_one_value(spec):
    copied = pickle.loads(pickle.dumps(spec))
    assert copied == spec
    assert hash(copied) == hash(spec)
    assert repr(spec).startswith(f"{type(spec).__name__}(16, num_kv_heads=1")


@pytest.mark.parametrize("make", [ring, tail])
def test_merging_takes_equal_layers_only(host, make):
    family = host.family(make())
    assert family.merge({"a": make(), "b": make()}) == make()
    refused = family.merge({"a": make(), "b": make(num_kv_heads=2)})
    assert isinstance(refused, Refusal)
    assert refused == family.merge({"b": make(num_kv_heads=2), "a": make()})
    assert refused.field == "num_kv_heads"


def test_rings_share_a_table_whatever_their_rows_hold(host):
    def key(spec):
        return host.family(spec).table_key(spec)

    assert key(ring()) == key(ring(num_kv_heads=2))
    assert key(ring()) != key(ring(32))
    assert key(tail()) == key(tail(sliding_window=32))
    assert key(tail()) != key(ring())
    window = SlidingWindowSpec(16, num_kv_heads=1, head_size=128, dtype="bfloat16", sliding_window=16)
    assert key(tail()) != key(window)


def test_the_family_is_the_nearest_class(host):
    assert (host.family(ring()).name, host.family(tail()).name) == ("circular_buffer", "kpool_tail")
    assert (host.family(ring()).traits.event_kind, host.family(ring()).window(ring())) == ("unknown", None)
    assert (host.family(tail()).traits.event_kind, host.family(tail()).window(tail())) == (
        "sliding_window",
        16,
    )
    assert host.family(tail()).retain is None  # a ring keeps no token longer
    for spec in (ring(), tail()):
        assert (host.family(spec).paging.bucket, host.family(spec).paging.scales) == ("state", True)
        assert not host.family(spec).traits.needs_zeroing


def test_a_tail_can_be_kept_as_full_attention_and_a_ring_cannot(host):
    promoted = host.family(tail()).promote(tail(), 64)
    assert promoted == FullAttentionSpec(
        64, num_kv_heads=1, head_size=128, dtype="bfloat16", sliding_window=16
    )
    assert isinstance(host.family(ring()).promote(ring(), None), Refusal)


@given(block=st.integers(1, 64), in_flight=st.integers(1, 300), max_len=st.integers(1, 300))
def test_no_request_holds_more_than_the_peak(host, block, in_flight, max_len):
    for spec in (ring(block), tail(block)):
        lifetime = host.family(spec).lifetime(spec)
        held = [lifetime.alive(n, min(n + in_flight, max_len), max_len) for n in range(max_len)]
        assert set(map(int, held)) == {lifetime.peak(in_flight, max_len)} == {1}
        assert lifetime.hits == "free"
