import pickle

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvframe_rswa
from kvframe import EngineConfig, FullAttentionSpec, Refusal
from kvframe.errors import SpecError
from kvframe.family import full_attention_family
from kvframe_rswa import RSWALifetime, RSWASpec

FAMILY = kvframe_rswa.kvframe_spec_families()[0]


def spec(**changes):
    fields = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16", "rswa_window": 512}
    return RSWASpec(**{**fields, **changes})


specs = st.builds(
    RSWASpec,
    block_size=st.integers(1, 64),
    num_kv_heads=st.integers(1, 8),
    head_size=st.integers(1, 256),
    dtype=st.sampled_from(["bfloat16", "uint8"]),
    rswa_window=st.integers(1, 4096),
    sliding_window=st.one_of(st.none(), st.integers(1, 99)),
    non_causal=st.booleans(),
)
lifetimes = st.builds(RSWALifetime, block=st.integers(1, 9), window=st.integers(1, 30))


# --- sizing ----------------------------------------------------------------------------------------------------------


def test_it_is_sized_as_full_attention():
    engine = EngineConfig(max_model_len=4096, max_in_flight_tokens=512, dcp=4)
    assert spec().max_memory_usage_bytes(engine) == 64 * 65536  # ceil(4096 / 4 / 16) pages
    assert not hasattr(spec(), "max_admission_blocks_per_request")


@pytest.mark.parametrize("value", [0, -5, None])
def test_bad_values_are_refused_by_name(value):
    with pytest.raises(SpecError) as caught:
        spec(rswa_window=value)
    assert (caught.value.field, caught.value.value) == ("rswa_window", value)
    assert "at least 1" in caught.value.rule


# --- lifetime --------------------------------------------------------------------------------------------------------


def alive_entries(lifetime, settled, held, prompt):
    """Entries with a token of the prompt, or one within the window of position `settled`: counted token by token."""
    return {
        token // lifetime.block
        for token in range(held)
        if token < prompt or token >= settled - lifetime.window
    }


def test_worked_lifetime():
    # p = 10, w = 6, b = 4, 24 tokens: entries ceil(10 / 4) = 3 up to (24 - 6) // 4 = 4 are free: [1, 2, 3, 0, 5, 6]
    assert FAMILY.lifetime(spec(rswa_window=6, block_size=4)).dead(24, 10) == (3, 4)


@given(lifetimes, st.integers(0, 80), st.integers(0, 20), st.data())
def test_dead_entries_are_those_that_no_step_reads(lifetime, settled, in_flight, data):
    held = settled + in_flight + 1
    prompt = data.draw(st.integers(1, held))
    lo, hi = lifetime.dead(settled, prompt)
    alive = set(range(-(-held // lifetime.block))) - set(range(lo, hi))
    assert alive == alive_entries(lifetime, settled, held, prompt)


@given(lifetimes, st.lists(st.tuples(st.integers(0, 500), st.integers(1, 500)), min_size=1))
def test_one_call_answers_for_a_batch(lifetime, requests):
    n, prompt = (np.array(column) for column in zip(*requests, strict=True))
    lo, hi = lifetime.dead(n, prompt)
    assert [(int(a), int(b)) for a, b in zip(lo, hi, strict=True)] == [
        lifetime.dead(*pair) for pair in requests
    ]


@given(lifetimes, st.integers(1, 500), st.integers(1, 500))
def test_nothing_comes_back_to_life(lifetime, settled, prompt):
    before, after = lifetime.dead(settled, prompt), lifetime.dead(settled + 1, prompt)
    assert before[0] == after[0]
    assert before[1] <= after[1]


@given(lifetimes, st.integers(1, 20), st.integers(1, 40))
def test_the_longest_prompt_reaches_the_peak_and_none_passes_it(lifetime, in_flight, max_len):
    most = {
        prompt: max(
            len(alive_entries(lifetime, n, min(n + in_flight, max_len), prompt)) for n in range(max_len)
        )
        for prompt in range(1, max_len + 1)
    }
    assert lifetime.peak(in_flight, max_len) == max(most.values()) == most[max_len]


# --- merge and tables ------------------------------------------------------------------------------------------------


@given(specs)
def test_specs_are_values(layer):
    assert pickle.loads(pickle.dumps(layer)) == layer
    assert {layer: 1}[attrs.evolve(layer)] == 1
    assert FAMILY.merge({"a": layer, "b": layer}) == layer


def test_a_conflict_names_the_field_and_its_layers():
    refusal = FAMILY.merge({"a": spec(), "b": spec(rswa_window=256)})
    assert isinstance(refusal, Refusal)
    assert (refusal.field, refusal.layers) == ("rswa_window", {"256": ("b",), "512": ("a",)})


def test_hints_of_single_layers_survive_the_merge_in_any_order():
    layers = {"a": spec(non_causal=True), "b": spec(sliding_window=64), "c": spec()}
    merged = spec(non_causal=True, sliding_window=64)
    assert FAMILY.merge(layers) == FAMILY.merge(dict(reversed(layers.items()))) == merged


def test_it_never_joins_full_attention():
    full = FullAttentionSpec(16, num_kv_heads=8, head_size=128, dtype="bfloat16")
    assert FAMILY.table_key(spec()) != full_attention_family().table_key(full)
    for layers in ({"a": full, "b": spec()}, {"b": spec(), "a": full}):
        refusal = FAMILY.merge(layers)
        assert isinstance(refusal, Refusal)
        assert refusal.layers == {"FullAttentionSpec": ("a",), "RSWASpec": ("b",)}
    assert isinstance(FAMILY.promote(spec(), None), Refusal)


def test_only_equal_windows_share_a_table():
    assert FAMILY.table_key(spec()) == FAMILY.table_key(spec(head_size=64))
    assert FAMILY.table_key(spec()) != FAMILY.table_key(spec(rswa_window=256))
