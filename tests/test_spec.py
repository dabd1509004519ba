"""Specs: sizes against the contract's worked numbers (2.1 to 2.3, 2.18, 3.3), and values that are refused."""

import pickle
from fractions import Fraction

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframe import (
    AttentionSpec,
    EngineConfig,
    FullAttentionSpec,
    KVQuantMode,
    MultipleOf,
    SpecBase,
    UniformTypeKVCacheSpecs,
    is_full_attention_spec,
    iter_layer_specs,
    kv_field,
    replace_as,
)
from kvframe.checks import at_least, cdiv, optional_at_least, round_up
from kvframe.errors import SpecError
from kvframe.spec import BLOCK_TABLE_ALIGNMENT


@attrs.frozen(kw_only=True, repr=False)
class WindowSpec(AttentionSpec):
    """A family's spec as a plugin may write it."""

    window: int = kv_field(validator=at_least(1))
    extra: int | None = kv_field(default=None, validator=optional_at_least(0))


def full(block_size=16, cls=FullAttentionSpec, **changes):
    """8 heads of 128 elements in bfloat16: 512 bytes a head and token, 65,536 bytes a page of 16 tokens."""
    return cls(block_size, **{"num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16", **changes})


# --- integer helpers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "up"), [(0, 4, 0), (1, 4, 1), (4, 4, 1), (5, 4, 2), (10**30 + 1, 10, 10**29 + 1)]
)
def test_division_rounds_up(a, b, up):
    assert cdiv(a, b) == up
    assert round_up(a, b) == up * b


# --- the root (contract 2.1) -----------------------------------------------------------------------------------------


def test_the_root_has_the_rules_that_most_kinds_share():
    root = SpecBase(48)
    assert (root.block_size, root.dcp_sharded, root.block_stride_alignment, root.is_draft) == (
        48,
        False,
        None,
        False,
    )
    assert (root.prefix_cacheable, root.prefix_replay_tokens) == (True, 0)
    assert (root.has_layer_views, root.uses_slot_mapping) == (True, True)
    assert root.block_table_token_alignment == BLOCK_TABLE_ALIGNMENT == 128
    engine = EngineConfig(max_model_len=4800, dcp=4)
    assert root.max_num_blocks_per_req(engine, 4800) == 100  # 4800 / 48, no rank has fewer
    assert root.max_num_blocks_per_req(engine, 4801) == 101
    assert root.copy_with_new_block_size(16) == SpecBase(16)


@pytest.mark.parametrize(
    "member",
    [
        "num_heads",
        "tokens_per_state",
        "state_content_size_bytes",
        "page_size_bytes",
        "unpadded_page_size_bytes",
        "num_states",
    ],
)
def test_the_root_has_no_geometry(member):
    with pytest.raises(SpecError) as caught:
        getattr(SpecBase(16), member)
    assert (caught.value.spec, caught.value.kind) == ("SpecBase", "spec_invalid")
    assert "no [B, H, N, C] geometry" in caught.value.rule


def test_the_root_has_no_memory_rule():
    with pytest.raises(SpecError, match="max_memory_usage_bytes"):
        SpecBase(16).max_memory_usage_bytes(EngineConfig(max_model_len=16))


def test_a_spec_is_hashable_comparable_picklable_and_prints_short():
    spec = full(page_size_padded=81920)
    assert spec == full(page_size_padded=81920)
    assert spec != full()
    assert len({spec, full(page_size_padded=81920), full()}) == 2
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert repr(spec) == (
        "FullAttentionSpec(16, num_kv_heads=8, head_size=128, dtype='bfloat16', page_size_padded=81920)"
    )
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        spec.block_size = 32


def test_a_draft_layer_is_equal_to_one_of_the_model():
    assert full(is_draft=True) == full()
    assert hash(full(is_draft=True)) == hash(full())


# --- attention (contract 2.2) ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "cell", "states", "page"),
    [
        ({}, 512, 16, 65536),  # (128 + 128) * 2; 8 * 16 * 512
        ({"head_size_v": 64}, 384, 16, 49152),  # (128 + 64) * 2; 8 * 16 * 384
        ({"head_size_v": 128}, 512, 16, 65536),
        ({"num_kv_heads": 1, "head_size": 576, "head_size_v": 0, "block_size": 64}, 1152, 64, 73728),
        ({"num_kv_heads": 4, "head_size": 64, "tokens_per_state": Fraction(1, 4)}, 256, 64, 65536),
        ({"num_kv_heads": 1, "state_content_bytes": 656, "block_size": 64}, 656, 64, 41984),
        (
            {"block_size": 256, "tokens_per_state": 4, "num_kv_heads": 1, "state_content_bytes": 584},
            584,
            64,
            37376,
        ),
        (
            {"block_size": 256, "tokens_per_state": 128, "num_kv_heads": 1, "state_content_bytes": 584},
            584,
            2,
            1168,
        ),
        ({"dtype": "uint8"}, 256, 16, 32768),
        ({"dtype": "fp8_e4m3"}, 256, 16, 32768),
        ({"dtype": "float32"}, 1024, 16, 131072),
    ],
)
def test_page_bytes_are_heads_times_states_times_cell(changes, cell, states, page):
    spec = full(**changes)
    assert (spec.state_content_size_bytes, spec.num_states) == (cell, states)
    assert spec.num_heads * spec.num_states * spec.state_content_size_bytes == page
    assert spec.page_size_bytes == spec.unpadded_page_size_bytes == spec.real_page_size_bytes == page
    assert isinstance(spec.num_states, int)


def test_head_slots_may_differ_from_heads():
    # nvfp4: K and V rows of 72 bytes in slots of their own
    spec = full(num_head_slots=16, state_content_bytes=72)
    assert (spec.num_heads, spec.page_size_bytes) == (16, 18432)  # 16 * 16 * 72


def test_padding_widens_the_page():
    spec = full(page_size_padded=81920)
    assert (spec.page_size_bytes, spec.unpadded_page_size_bytes) == (81920, 65536)
    assert full(page_size_padded=65536).page_size_bytes == 65536


def test_padding_grows_with_the_block_where_the_page_outgrows_it():
    """The figures' source fails here: padded 81,920 bytes, block 16 to 32, content 131,072 bytes (Q7)."""
    spec = full(page_size_padded=81920)
    assert spec.copy_with_new_block_size(32).page_size_bytes == 131072
    assert spec.copy_with_new_block_size(8).page_size_bytes == 81920
    assert spec.copy_with_new_block_size(16) == spec


def test_the_width_of_v_follows_k_until_it_is_given():
    spec = full()
    assert spec.head_size_v == 128
    assert attrs.evolve(spec, head_size=64).head_size_v == 64  # Q18
    assert full(head_size_v=128) == spec
    assert full(head_size_v=0).head_size_v == 0
    assert attrs.evolve(full(head_size_v=64), head_size=32).head_size_v == 64


@pytest.mark.parametrize(("sharded", "dcp", "row"), [(True, 1, 256), (True, 4, 64), (False, 4, 256)])
def test_a_block_tables_row_is_as_long_as_its_ranks_share(sharded, dcp, row):
    engine = EngineConfig(max_model_len=4096, dcp=dcp)
    assert full(dcp_sharded=sharded).max_num_blocks_per_req(engine, 4096) == row  # 4096 / 16 / dcp


@pytest.mark.parametrize(
    ("tokens_per_state", "kernel", "states"),
    [(1, 8, 8), (4, 64, 16), (4, 4, 1), (Fraction(1, 4), 16, 64), (Fraction(3, 2), 3, 2)],
)
def test_states_of_a_kernel_block(tokens_per_state, kernel, states):
    assert full(block_size=192, tokens_per_state=tokens_per_state).kernel_states(kernel) == states


def test_a_kernel_block_that_cuts_a_state_is_refused():
    spec = full(block_size=256, tokens_per_state=4)
    with pytest.raises(SpecError, match=r"tokens_per_state = 4: must divide the block of 2 tokens"):
        spec.kernel_states(2)


@pytest.mark.parametrize(
    ("alignment", "block", "multiple"),
    [
        (None, 16, 1),
        (576, 16, 576),
        (MultipleOf(16), 16, 1),  # the whole block: gcd(16, 16) = 16
        (MultipleOf(64), 16, 1),  # gcd(64, 16) = 16
        (MultipleOf(8), 16, 32768),  # the page of 8 tokens: 8 * 8 * 512
        (MultipleOf(24), 16, 32768),  # gcd(24, 16) = 8
    ],
)
def test_blocks_lie_at_multiples(alignment, block, multiple):
    assert full(block_size=block, block_stride_alignment=alignment).block_stride_bytes_multiple == multiple


# --- values that are refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("block_size", 0, "must be a whole number of at least 1"),
        ("block_size", -1, "must be a whole number of at least 1"),
        ("block_size", 16.0, "must be a whole number of at least 1"),
        ("block_size", True, "must be a whole number of at least 1"),
        ("num_kv_heads", 0, "must be a whole number of at least 1"),
        ("num_kv_heads", -8, "must be a whole number of at least 1"),
        ("head_size", 0, "must be a whole number of at least 1"),
        ("head_size_v", -1, "must be a whole number of at least 0"),
        ("num_head_slots", 0, "must be a whole number of at least 1"),
        ("state_content_bytes", 0, "must be a whole number of at least 1"),
        ("page_size_padded", 65535, "must be at least the page's own 65536 bytes"),
        ("page_size_padded", 0, "must be a whole number of at least 1"),
        ("block_stride_alignment", 0, "must be a whole number of at least 1"),
        ("block_stride_alignment", -576, "must be a whole number of at least 1"),
        ("block_stride_alignment", "512", "must be a whole number of at least 1"),
        ("block_stride_alignment", 2.5, "must be a whole number of at least 1"),
        ("max_tp_shards", 0, "must be a whole number of at least 1"),
        ("tokens_per_state", 0, "must be a whole number or a Fraction above 0"),
        ("tokens_per_state", -1, "must be a whole number or a Fraction above 0"),
        ("tokens_per_state", 0.5, "must be a whole number or a Fraction above 0"),
        ("tokens_per_state", "4", "must be a whole number or a Fraction above 0"),
        ("tokens_per_state", None, "must be a whole number or a Fraction above 0"),
        ("tokens_per_state", True, "must be a whole number or a Fraction above 0"),
        ("tokens_per_state", 3, "must divide the block of 16 tokens, or some tokens would have no storage"),
        ("tokens_per_state", Fraction(3, 4), "must divide the block of 16 tokens"),
        ("sliding_window", 0, "must be a whole number of at least 1"),
        ("attention_chunk_size", 0, "must be a whole number of at least 1"),
    ],
)
def test_a_bad_value_is_refused_when_the_spec_is_built(field, value, rule):
    with pytest.raises(SpecError) as caught:
        full(**{field: value})
    error = caught.value
    assert isinstance(error, ValueError)
    assert (error.spec, error.field, error.value) == ("FullAttentionSpec", field, value)
    assert error.rule.startswith(rule)
    assert str(error) == f"FullAttentionSpec.{field} = {value!r}: {error.rule}."


def test_an_unknown_element_dtype_is_refused_with_the_known_ones():
    with pytest.raises(SpecError) as caught:
        full(dtype="float7")
    assert caught.value.value == "float7"
    assert "bfloat16" in caught.value.rule


def test_a_layer_has_a_window_or_chunks_but_not_both():
    assert full(sliding_window=1024).sliding_window == 1024
    assert full(attention_chunk_size=8192).attention_chunk_size == 8192
    with pytest.raises(
        SpecError, match=r"attention_chunk_size = 8192: a layer has a window or chunks, not both"
    ):
        full(sliding_window=1024, attention_chunk_size=8192)


def test_a_kernel_alignment_has_at_least_one_token():
    with pytest.raises(SpecError, match=r"MultipleOf\.tokens = 0"):
        MultipleOf(0)


def test_a_bad_value_of_a_plugins_field_is_refused_alike():
    with pytest.raises(SpecError, match=r"WindowSpec\.window = 0: must be a whole number of at least 1"):
        full(cls=WindowSpec, window=0)
    with pytest.raises(SpecError, match=r"WindowSpec\.extra = -1"):
        full(cls=WindowSpec, window=1, extra=-1)


# --- full attention (contract 2.3) -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "engine", "nbytes"),
    [
        ({}, {}, 16777216),  # ceil(4096 / 16) * 65,536
        ({}, {"dcp": 4}, 4194304),  # ceil(4096 / 4 / 16) * 65,536
        ({"dcp_sharded": False}, {"dcp": 4}, 16777216),
        ({}, {"max_in_flight_tokens": 8192}, 16777216),
        ({}, {"max_model_len": 4097}, 16842752),  # 257 * 65,536
        ({}, {"max_model_len": 1}, 65536),
        ({"page_size_padded": 81920}, {}, 20971520),  # 256 * 81,920
        ({"sliding_window": 128}, {}, 16777216),  # the kernel's window: every block stays
    ],
)
def test_full_attention_needs_every_block(changes, engine, nbytes):
    limits = EngineConfig(**{"max_model_len": 4096, **engine})
    assert full(**changes).max_memory_usage_bytes(limits) == nbytes


# --- a group of layers with different pages (contract 2.18) ----------------------------------------------------------


def uniform(**heads):
    return UniformTypeKVCacheSpecs({name: full(num_kv_heads=count) for name, count in heads.items()})


def test_a_groups_block_holds_one_page_of_each_layer():
    group = uniform(a=8, b=2)
    engine = EngineConfig(max_model_len=4096)
    assert group.page_size_bytes == 81920  # 65,536 + 16,384
    assert group.max_memory_usage_pages(engine) == 256
    assert group.max_memory_usage_bytes(engine) == 256 * 81920
    assert group.max_num_blocks_per_req(engine, 4096) == 256
    assert (group.block_size, group.dcp_sharded) == (16, True)
    assert [*group.kv_cache_specs] == ["a", "b"]
    assert group.specs == (full(num_kv_heads=8), full(num_kv_heads=2))


def test_a_groups_flags_are_those_of_its_layers():
    group = uniform(a=8, b=2)
    assert (group.prefix_cacheable, group.prefix_replay_tokens) == (True, 0)
    assert (group.has_layer_views, group.uses_slot_mapping) == (True, True)
    assert group.block_table_token_alignment == 128

    @attrs.frozen(kw_only=True, repr=False)
    class Scratch(AttentionSpec):
        prefix_cacheable = False
        prefix_replay_tokens = 64

    mixed = UniformTypeKVCacheSpecs({"a": full(), "b": full(cls=Scratch)})
    assert (mixed.prefix_cacheable, mixed.prefix_replay_tokens) == (False, 64)  # all, and the most


def test_a_group_counts_its_most_common_page():
    assert uniform(a=8, b=2, c=8).max_layers_per_page_size == 2
    assert uniform(a=8).max_layers_per_page_size == 1


def test_a_group_at_another_block_size_changes_its_layers():
    wide = uniform(a=8, b=2).copy_with_new_block_size(32)
    assert {spec.block_size for spec in wide.specs} == {32}
    assert wide.page_size_bytes == 163840
    assert wide.block_size == 32


def test_a_group_is_hashable_and_keeps_the_order_of_layers():
    assert hash(uniform(a=8, b=2)) == hash(uniform(a=8, b=2))
    assert uniform(a=8, b=2) != uniform(b=2, a=8)
    assert pickle.loads(pickle.dumps(uniform(a=8, b=2))) == uniform(a=8, b=2)


@pytest.mark.parametrize(
    ("layers", "field"),
    [
        ({}, "kv_cache_specs"),
        ({"a": full(), "b": full(32)}, "block_size"),
        ({"a": full(), "b": full(dcp_sharded=False)}, "dcp_sharded"),
    ],
)
def test_a_group_that_needs_different_blocks_is_refused(layers, field):
    with pytest.raises(SpecError) as caught:
        UniformTypeKVCacheSpecs(layers)
    assert (caught.value.spec, caught.value.field) == ("UniformTypeKVCacheSpecs", field)


def test_a_group_with_rows_of_different_lengths_has_no_row():
    @attrs.frozen(kw_only=True, repr=False)
    class OneBlock(AttentionSpec):
        def max_num_blocks_per_req(self, engine, max_len):
            return 1

    group = UniformTypeKVCacheSpecs({"a": full(), "b": full(cls=OneBlock)})
    with pytest.raises(SpecError, match="must be equal in all layers") as caught:
        group.max_num_blocks_per_req(EngineConfig(max_model_len=64), 64)
    assert caught.value.value == [1, 4]


def test_the_layers_of_a_group_and_of_a_spec():
    assert iter_layer_specs(full()) == (full(),)
    assert iter_layer_specs(uniform(a=8, b=2)) == (full(num_kv_heads=8), full(num_kv_heads=2))


def test_what_is_full_attention():
    class Derived(FullAttentionSpec):
        pass

    windowed = full(cls=WindowSpec, window=128)
    assert is_full_attention_spec(full())
    assert is_full_attention_spec(full(cls=Derived))
    assert is_full_attention_spec(uniform(a=8, b=2))
    assert not is_full_attention_spec(windowed)
    assert not is_full_attention_spec(UniformTypeKVCacheSpecs({"a": full(), "b": windowed}))


# --- one spec as another class (contract 3.3) ------------------------------------------------------------------------


def test_a_spec_as_another_class_keeps_its_fields():
    windowed = full(cls=WindowSpec, window=1024, head_size_v=64, kv_quant_mode=1, is_draft=True)
    made = replace_as(windowed, FullAttentionSpec, drop={"window", "extra"}, sliding_window=1024)
    assert made == full(head_size_v=64, kv_quant_mode=1, sliding_window=1024)
    assert made.is_draft


def test_a_field_that_the_class_lacks_must_be_dropped():
    with pytest.raises(TypeError):
        replace_as(full(cls=WindowSpec, window=1024), FullAttentionSpec, drop={"extra"})


def test_a_change_wins_over_the_specs_own_value():
    assert replace_as(full(), FullAttentionSpec, block_size=64) == full(64)


# --- the engine's limits ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_model_len", 0),
        ("max_in_flight_tokens", 0),
        ("max_encoder_tokens", -1),
        ("max_num_seqs", 0),
        ("tp", 0),
        ("dcp", 0),
        ("pcp", 0),
        ("attention_tp", 0),
        ("state_cache_mode", "all"),
        ("prefill_lookahead", -1),
    ],
)
def test_limits_are_checked(field, value):
    with pytest.raises(SpecError) as caught:
        EngineConfig(**{"max_model_len": 16, field: value})
    assert (caught.value.spec, caught.value.field, caught.value.value) == ("EngineConfig", field, value)


def test_attention_is_as_parallel_as_the_engine_unless_said():
    assert EngineConfig(max_model_len=16, tp=8).attention_tp == 8
    assert EngineConfig(max_model_len=16, tp=8, attention_tp=1).attention_tp == 1
    assert EngineConfig(max_model_len=16).with_max_model_len(32).max_model_len == 32


# --- laws ------------------------------------------------------------------------------------------------------------

specs = st.builds(
    full,
    block_size=st.sampled_from([1, 4, 16, 48, 256]),
    num_kv_heads=st.integers(1, 16),
    head_size=st.integers(1, 600),
    head_size_v=st.one_of(st.none(), st.integers(0, 600)),
    dtype=st.sampled_from(["bfloat16", "float32", "uint8"]),
    kv_quant_mode=st.sampled_from(KVQuantMode),
    tokens_per_state=st.sampled_from([1, Fraction(1, 4), Fraction(1, 2)]),
    state_content_bytes=st.one_of(st.none(), st.integers(1, 700)),
    page_size_padded=st.one_of(st.none(), st.just(1 << 26)),
    dcp_sharded=st.booleans(),
)


@given(specs, st.integers(1, 300))
def test_a_page_never_cuts_its_content_at_any_block_size(spec, block_size):
    other = spec.copy_with_new_block_size(block_size)
    assert other.page_size_bytes >= other.unpadded_page_size_bytes
    assert other.unpadded_page_size_bytes * spec.block_size == spec.unpadded_page_size_bytes * block_size
    same = attrs.evolve(other, block_size=spec.block_size, page_size_padded=spec.page_size_padded)
    assert same == spec


@given(specs, st.integers(1, 1 << 20), st.integers(1, 8))
def test_memory_is_enough_and_monotone(spec, length, dcp):
    engine = EngineConfig(max_model_len=length, dcp=dcp)
    share = cdiv(length, dcp if spec.dcp_sharded else 1)
    blocks, rest = divmod(spec.max_memory_usage_bytes(engine), spec.page_size_bytes)
    assert rest == 0
    assert (blocks - 1) * spec.block_size < share <= blocks * spec.block_size
    longer = engine.with_max_model_len(length + 1)
    assert spec.max_memory_usage_bytes(longer) >= spec.max_memory_usage_bytes(engine)
