import pickle

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvframe_chunked_local
from kvframe import EngineConfig, FullAttentionSpec, Refusal
from kvframe.errors import SpecError
from kvframe_chunked_local import ChunkedLocalAttentionSpec, ChunkLifetime

FAMILY = kvframe_chunked_local.kvframe_spec_families()[0]


def spec(**changes):
    fields = {
        "block_size": 16,
        "num_kv_heads": 8,
        "head_size": 128,
        "dtype": "bfloat16",
        "attention_chunk_size": 8192,
    }
    return ChunkedLocalAttentionSpec(**{**fields, **changes})


specs = st.builds(
    ChunkedLocalAttentionSpec,
    block_size=st.integers(1, 64),
    num_kv_heads=st.integers(1, 8),
    head_size=st.integers(1, 256),
    dtype=st.sampled_from(["bfloat16", "float16", "uint8"]),
    attention_chunk_size=st.integers(1, 4096),
    page_size_padded=st.one_of(st.none(), st.just(1 << 20)),
)
lifetimes = st.builds(ChunkLifetime, block=st.integers(1, 9), chunk=st.integers(1, 30))


# --- sizing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "in_flight", "max_len", "blocks"),
    [
        ({}, 8192, 131072, 1024),  # (8192 + 8192) / 16
        ({}, 8192, 10000, 625),  # 10000 / 16
        ({"attention_chunk_size": 100, "block_size": 64}, 2048, 131072, 35),  # ceil(2148 / 64) + 1
    ],
)
def test_admission_bound(words, in_flight, max_len, blocks):
    layer = spec(**words)
    assert layer.max_admission_blocks_per_request(in_flight, max_len) == blocks
    engine = EngineConfig(max_model_len=max_len, max_in_flight_tokens=in_flight)
    assert layer.max_memory_usage_bytes(engine) == blocks * layer.page_size_bytes


@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_bad_values_are_refused_by_name(value):
    with pytest.raises(SpecError) as caught:
        spec(attention_chunk_size=value)
    assert (caught.value.field, caught.value.value) == ("attention_chunk_size", value)
    assert "at least 1" in caught.value.rule


# --- lifetime --------------------------------------------------------------------------------------------------------


def alive_entries(lifetime, settled, held):
    """Entries with a token of the chunk of position `settled`, or a later one: counted token by token."""
    return {
        token // lifetime.block
        for token in range(held)
        if token // lifetime.chunk >= settled // lifetime.chunk
    }


def test_worked_lifetimes():
    lifetime = FAMILY.lifetime(spec(attention_chunk_size=8, block_size=4))
    assert lifetime.dead(7, 7) == (0, 0)  # the first chunk runs
    assert lifetime.dead(8, 8) == (0, 2)  # position 8 opens the second
    # chunks of 6 in blocks of 4: the chunk of position 6 starts inside entry 1, which stays
    assert FAMILY.lifetime(spec(attention_chunk_size=6, block_size=4)).dead(6, 6) == (0, 1)


def test_a_chunk_that_straddles_takes_the_block_that_the_plain_formula_misses():
    # Chunks of 5 in blocks of 4: the chunk [15, 20) lies in entries 3 and 4. With tokens 19 and 20 in flight entry 5
    # is held too: 3 blocks, and ceil((5 + 2) / 4) = 2.
    layer = spec(attention_chunk_size=5, block_size=4)
    assert FAMILY.lifetime(layer).peak(2, 100) == 3
    assert layer.max_admission_blocks_per_request(2, 100) == 3


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


@given(lifetimes, st.integers(1, 20), st.integers(1, 80))
def test_a_request_reaches_the_peak_and_never_passes_it(lifetime, in_flight, max_len):
    most = max(len(alive_entries(lifetime, n, min(n + in_flight, max_len))) for n in range(max_len))
    assert lifetime.peak(in_flight, max_len) == most


@given(specs, st.integers(1, 9000), st.integers(1, 200_000))
def test_the_peak_is_within_the_spec_bound(layer, in_flight, max_len):
    peak = FAMILY.lifetime(layer).peak(in_flight, max_len)
    assert peak <= layer.max_admission_blocks_per_request(in_flight, max_len)
    assert peak <= -(-max_len // layer.block_size)


@given(specs, st.integers(1, 9000))
def test_a_long_request_comes_within_a_block_of_the_spec_bound(layer, in_flight):
    long = in_flight + layer.attention_chunk_size * (layer.block_size + 1)
    bound = layer.max_admission_blocks_per_request(in_flight, long)
    assert bound - FAMILY.lifetime(layer).peak(in_flight, long) <= 1


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


@given(specs)
def test_merging_equal_layers_changes_nothing(layer):
    assert FAMILY.merge({"a": layer, "b": layer}) == layer


def test_a_conflict_names_the_field_and_its_layers():
    layers = {"a": spec(attention_chunk_size=8), "b": spec(attention_chunk_size=9)}
    for order in (layers, dict(reversed(layers.items()))):
        refusal = FAMILY.merge(order)
        assert isinstance(refusal, Refusal)
        assert (refusal.field, refusal.layers) == ("attention_chunk_size", {"8": ("a",), "9": ("b",)})


def test_only_equal_chunks_share_a_table():
    key = FAMILY.table_key(spec())
    assert key == FAMILY.table_key(spec(head_size=64))
    assert key != FAMILY.table_key(spec(attention_chunk_size=4096))
    assert key != FAMILY.table_key(spec(block_size=32))


@pytest.mark.parametrize(
    ("padded", "promoted"),
    [(None, None), (70_000, 131_072), (200_000, 200_000)],  # max(padded, 65536 * 32 / 16)
)
def test_promotion_keeps_the_chunk_for_the_kernel(padded, promoted):
    assert FAMILY.promote(spec(page_size_padded=padded), 32) == FullAttentionSpec(
        32,
        num_kv_heads=8,
        head_size=128,
        dtype="bfloat16",
        attention_chunk_size=8192,
        page_size_padded=promoted,
    )
