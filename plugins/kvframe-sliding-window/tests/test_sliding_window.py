import pickle

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvframe_sliding_window
from kvframe import EngineConfig, FullAttentionSpec, Refusal
from kvframe.errors import SpecError
from kvframe_sliding_window import SlidingWindowSpec, WindowLifetime

FAMILY = kvframe_sliding_window.kvframe_spec_families()[0]


def spec(**changes):
    fields = {
        "block_size": 16,
        "num_kv_heads": 8,
        "head_size": 128,
        "dtype": "bfloat16",
        "sliding_window": 1024,
    }
    return SlidingWindowSpec(**{**fields, **changes})


specs = st.builds(
    SlidingWindowSpec,
    block_size=st.integers(1, 64),
    num_kv_heads=st.integers(1, 8),
    head_size=st.integers(1, 256),
    dtype=st.sampled_from(["bfloat16", "float16", "uint8"]),
    sliding_window=st.integers(1, 4096),
    extra_retained_tokens=st.integers(0, 8),
    page_size_padded=st.one_of(st.none(), st.just(1 << 20)),
)
lifetimes = st.builds(
    WindowLifetime, block=st.integers(1, 9), window=st.integers(1, 30), slack=st.integers(0, 5)
)


# --- sizing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "in_flight", "max_len", "blocks"),
    [
        ({}, 8192, 131072, 577),  # ceil((1024 - 1 + 8192) / 16) + 1
        ({}, 8192, 4096, 257),  # ceil(4096 / 16) + 1
        ({"sliding_window": 4, "extra_retained_tokens": 2, "block_size": 4}, 4, 4096, 4),  # ceil(9 / 4) + 1
    ],
)
def test_admission_bound(words, in_flight, max_len, blocks):
    layer = spec(**words)
    assert layer.max_admission_blocks_per_request(in_flight, max_len) == blocks
    engine = EngineConfig(max_model_len=max_len, max_in_flight_tokens=in_flight)
    assert layer.max_memory_usage_bytes(engine) == blocks * layer.page_size_bytes


def test_the_window_counts_the_current_token():
    assert spec(sliding_window=1024).distance == 1023
    assert spec(sliding_window=4, extra_retained_tokens=2).num_retained_tokens == 5


def test_a_window_is_not_spread_over_context_parallel_ranks():
    engine = EngineConfig(max_model_len=4096, dcp=2)
    with pytest.raises(SpecError, match=r"dcp_sharded = True.*cannot be spread over 2"):
        spec().max_memory_usage_bytes(engine)
    assert spec(dcp_sharded=False).max_memory_usage_bytes(engine) == 65 * 65536  # ceil((1023 + 1) / 16) + 1


@pytest.mark.parametrize("word", ["sliding_window", "extra_retained_tokens"])
@pytest.mark.parametrize("value", [-1, 1.5, "4", True])
def test_bad_values_are_refused_by_name(word, value):
    with pytest.raises(SpecError) as caught:
        spec(**{word: value})
    assert (caught.value.field, caught.value.value) == (word, value)
    assert "at least 0" in caught.value.rule


# --- lifetime --------------------------------------------------------------------------------------------------------


def alive_entries(lifetime, settled, held):
    """Entries with a token that the step at `settled` reads, or that is not settled: counted token by token."""
    reach = lifetime.window + lifetime.slack
    return {token // lifetime.block for token in range(held) if token > settled - reach}


def test_worked_lifetimes():
    # w = 6, b = 4, at 16 computed tokens: 11 tokens are below the window, entries 0 and 1 are free (contract 6.3)
    assert FAMILY.lifetime(spec(sliding_window=6, block_size=4)).dead(16, 16) == (0, 2)
    # one token more retained than the window: 16 - 6 + 1 - 4 = 7 tokens, one entry
    retained = spec(sliding_window=6, block_size=4, extra_retained_tokens=4)
    assert FAMILY.lifetime(retained).dead(16, 16) == (0, 1)
    # F = 8: ceil(13 / 4) + 1 = 5 is the spec's bound, and 6 - 1 + 8 tokens can lie in 4 or 5 entries
    assert FAMILY.lifetime(spec(sliding_window=6, block_size=4)).peak(8, 60) == 4


def test_a_window_of_no_token_keeps_the_one_that_is_written():
    lifetime = FAMILY.lifetime(spec(sliding_window=0, block_size=4))
    assert lifetime.dead(3, 1) == (0, 0)
    assert lifetime.dead(4, 1) == (0, 1)


@given(lifetimes, st.integers(0, 80), st.integers(0, 20))
def test_dead_entries_are_those_that_no_step_reads(lifetime, settled, in_flight):
    held = settled + in_flight + 1
    lo, hi = lifetime.dead(settled, 1)
    assert set(range(-(-held // lifetime.block))) - set(range(lo, hi)) == alive_entries(
        lifetime, settled, held
    )


@given(lifetimes, st.lists(st.integers(0, 500), min_size=1))
def test_one_call_answers_for_a_batch(lifetime, settled):
    n = np.sort(np.array(settled))
    lo, hi = lifetime.dead(n, np.ones_like(n))
    assert [(int(a), int(b)) for a, b in zip(lo, hi, strict=True)] == [lifetime.dead(int(x), 1) for x in n]
    assert (np.diff(hi) >= 0).all()


@given(lifetimes, st.integers(1, 20), st.integers(1, 60))
def test_a_request_reaches_the_peak_and_never_passes_it(lifetime, in_flight, max_len):
    most = max(len(alive_entries(lifetime, n, min(n + in_flight, max_len))) for n in range(max_len))
    assert lifetime.peak(in_flight, max_len) == most


@given(specs, st.integers(1, 9000), st.integers(1, 200_000))
def test_the_peak_is_within_a_block_of_the_spec_bound(layer, in_flight, max_len):
    peak = FAMILY.lifetime(layer).peak(in_flight, max_len)
    bound = layer.max_admission_blocks_per_request(in_flight, max_len)
    assert bound - 1 <= peak <= bound
    assert peak <= -(-max_len // layer.block_size)


# --- block size, merge, promotion ------------------------------------------------------------------------------------


@given(specs, st.integers(1, 64))
def test_a_new_block_size_keeps_every_invariant(layer, block_size):
    changed = layer.copy_with_new_block_size(block_size)
    bare = layer.unpadded_page_size_bytes // layer.block_size * block_size
    assert changed.page_size_bytes == max(bare, layer.page_size_padded or 0)
    assert (
        attrs.evolve(changed, block_size=layer.block_size, page_size_padded=layer.page_size_padded) == layer
    )


@given(specs)
def test_specs_are_values(layer):
    assert pickle.loads(pickle.dumps(layer)) == layer
    assert {layer: 1}[attrs.evolve(layer)] == 1


def test_specs_print_short():
    assert repr(spec()) == (
        "SlidingWindowSpec(16, num_kv_heads=8, head_size=128, dtype='bfloat16', sliding_window=1024)"
    )


@given(specs)
def test_merging_equal_layers_changes_nothing(layer):
    assert FAMILY.merge({"a": layer, "b": layer, "c": layer}) == layer


@pytest.mark.parametrize("word", ["sliding_window", "extra_retained_tokens"])
def test_a_conflict_names_the_field_and_its_layers(word):
    layers = {"a": spec(**{word: 8}), "b": spec(**{word: 9}), "c": spec(**{word: 8})}
    for order in (layers, dict(reversed(layers.items()))):
        refusal = FAMILY.merge(order)
        assert isinstance(refusal, Refusal)
        assert (refusal.field, refusal.layers) == (word, {"8": ("a", "c"), "9": ("b",)})


def test_only_equal_windows_share_a_table():
    key = FAMILY.table_key(spec())
    assert key == FAMILY.table_key(spec(num_kv_heads=4))
    for other in (
        {"sliding_window": 512},
        {"extra_retained_tokens": 2},
        {"block_size": 32},
        {"dcp_sharded": False},
    ):
        assert FAMILY.table_key(spec(**other)) != key


def test_promotion_keeps_the_window_for_the_kernel():
    assert FAMILY.promote(spec(extra_retained_tokens=2), None) == FullAttentionSpec(
        16, num_kv_heads=8, head_size=128, dtype="bfloat16", sliding_window=1024
    )


@pytest.mark.parametrize(
    ("padded", "promoted"),
    [(None, None), (70_000, 131_072), (200_000, 200_000)],  # max(padded, 65536 * 32 / 16)
)
def test_promotion_takes_the_block_size_of_the_full_layers(padded, promoted):
    stand_in = FAMILY.promote(spec(page_size_padded=padded), 32)
    assert (stand_in.block_size, stand_in.page_size_padded) == (32, promoted)


def test_retaining_adds_to_the_window():
    retained = FAMILY.retain(spec(), 3)
    assert retained == spec(extra_retained_tokens=3)
    assert FAMILY.window(retained) == 1024
