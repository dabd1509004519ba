"""The spec of recurrent state, its family and its lifetime."""

import pickle

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvframe_mamba
from kvframe import EngineConfig, Refusal, load_plugins
from kvframe.config import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, Pool
from kvframe.errors import SpecError
from kvframe_mamba import MambaSpec

# Contract 2.17 [run]: 3*4096*2 + 64*64*128*4 = 24,576 + 2,097,152 bytes.
SHAPES = ((3, 4096), (64, 64, 128))
DTYPES = ("bfloat16", "float32")
REAL = 2_121_728


def spec(block_size=256, **fields):
    return MambaSpec(block_size, **{"shapes": SHAPES, "dtypes": DTYPES, **fields})


def engine(mode, max_model_len=4096):
    return EngineConfig(max_model_len=max_model_len, state_cache_mode=mode)


@pytest.fixture(scope="module")
def family():
    return load_plugins(extra=[kvframe_mamba]).family(spec())


def test_the_page_is_the_states_side_by_side():
    layer = spec()
    assert layer.state_content_size_bytes == layer.unpadded_page_size_bytes == layer.page_size_bytes == REAL
    assert layer.real_page_size_bytes == REAL
    assert (layer.num_heads, layer.num_states, layer.tokens_per_state) == (1, 1, -1)
    assert layer.kernel_states(1) == layer.kernel_states(4096) == 1
    assert layer.block_table_token_alignment is None
    assert layer.dcp_sharded is False


def test_a_request_keeps_the_running_state_and_its_drafts():
    assert spec(num_speculative_blocks=2).max_memory_usage_bytes(engine("none")) == 6_365_184  # 3 pages
    assert spec(num_speculative_blocks=2).max_num_blocks_per_req(engine("none"), 4096) == 3
    assert spec(num_prefill_checkpoint_blocks=1).max_memory_usage_bytes(engine("none")) == REAL


def test_a_cached_request_also_keeps_the_state_before_and_a_saved_one():
    assert spec(num_speculative_blocks=2).max_memory_usage_bytes(engine("align")) == 8_486_912  # 4 pages
    padded = spec(num_speculative_blocks=2, num_prefill_checkpoint_blocks=1, page_size_padded=2_162_688)
    assert padded.max_memory_usage_bytes(engine("align")) == 10_813_440  # 5 padded pages
    assert spec(num_speculative_blocks=2).max_num_blocks_per_req(engine("align"), 4096) == 18  # 4096/256 + 2


def test_the_block_size_does_not_change_the_page():
    padded = spec(page_size_padded=2_162_688).copy_with_new_block_size(400)
    assert (padded.block_size, padded.page_size_bytes, padded.unpadded_page_size_bytes) == (
        400,
        2_162_688,
        REAL,
    )


@pytest.mark.parametrize(
    ("fields", "field", "value"),
    [
        ({"block_size": 0}, "block_size", 0),
        ({"shapes": (), "dtypes": ()}, "shapes", ()),
        ({"shapes": ((),), "dtypes": ("float32",)}, "shapes", ((),)),
        ({"shapes": ((3, 0), (2,))}, "shapes", ((3, 0), (2,))),
        ({"shapes": ((3, 2.0), (2,))}, "shapes", ((3, 2.0), (2,))),
        ({"dtypes": ("bfloat16",)}, "dtypes", ("bfloat16",)),
        ({"page_size_padded": 5}, "page_size_padded", 5),
        ({"mamba_cache_mode": "all"}, "mamba_cache_mode", "all"),
        ({"num_speculative_blocks": -1}, "num_speculative_blocks", -1),
        ({"num_prefill_checkpoint_blocks": -1}, "num_prefill_checkpoint_blocks", -1),
        ({"prefill_checkpoint_alignment": 0}, "prefill_checkpoint_alignment", 0),
    ],
)
def test_a_wrong_value_is_refused_at_construction(fields, field, value):
    with pytest.raises(SpecError) as caught:
        spec(**fields)
    assert (caught.value.spec, caught.value.field, caught.value.value) == ("MambaSpec", field, value)
    assert caught.value.rule


def test_an_unknown_dtype_is_refused_at_construction():
    with pytest.raises(SpecError, match="float99"):
        spec(dtypes=("float99", "float32"))


def test_equal_specs_are_one_value():
    layer = spec(shapes=[[3, 4096], [64, 64, 128]], dtypes=["torch.bfloat16", "float32"])
    assert layer == spec()
    assert hash(layer) == hash(spec())
    assert pickle.loads(pickle.dumps(layer)) == layer
    assert repr(spec(mamba_cache_mode="align")) == (
        "MambaSpec(256, shapes=((3, 4096), (64, 64, 128)), dtypes=('bfloat16', 'float32'), mamba_cache_mode='align')"
    )


def test_merging_takes_equal_layers_only(family):
    layers = {"a": spec(), "b": spec(), "c": spec(is_draft=True)}
    merged = family.merge(layers)
    assert merged == spec()
    assert merged.is_draft
    assert family.merge({"x": merged}) == merged
    refused = family.merge({"b": spec(mamba_type="GDN_ATTN"), "a": spec()})
    assert refused == family.merge({"a": spec(), "b": spec(mamba_type="GDN_ATTN")})
    assert isinstance(refused, Refusal)
    assert refused.layers == {"GDN_ATTN": ("b",), "mamba2": ("a",)}


def test_layers_share_a_table_when_their_blocks_and_pages_are_the_same(family):
    def shared(**fields):
        return family.table_key(spec()) == family.table_key(spec(**fields))

    assert shared(shapes=SHAPES[::-1], dtypes=DTYPES[::-1])  # other states of the same size
    assert shared(mamba_type="GDN_ATTN")
    assert not shared(num_speculative_blocks=2)
    assert not shared(num_prefill_checkpoint_blocks=1)
    assert not shared(prefill_checkpoint_alignment=64)
    assert not shared(tp_replicated=True)
    assert not shared(page_size_padded=REAL + 1)
    assert not shared(mamba_cache_mode="align")  # one keeps its states for later requests, the other does not


def test_an_uncached_state_is_one_entry_for_life(family):
    lifetime = family.lifetime(spec(num_speculative_blocks=2))
    assert (lifetime.fixed, lifetime.hits) == (3, "never")
    assert lifetime.peak(1, 131_072) == lifetime.peak(8192, 1) == 3


def test_a_cached_state_is_read_by_the_next_step_only(family):
    lifetime = family.lifetime(spec(4, mamba_cache_mode="align"))
    # Contract 6.4 [run]: chunks of 8, 4 and 1 tokens; at 12 settled tokens entry 2 holds the state, 0 and 1 are dead.
    assert [tuple(map(int, lifetime.dead(n, 13))) for n in (0, 4, 8, 12, 13)] == [
        (0, 0),
        (0, 0),
        (0, 1),
        (0, 2),
        (0, 3),
    ]
    assert lifetime.state
    assert lifetime.hits == "keyed"
    assert lifetime.export is None


def test_a_state_is_saved_inside_a_chunk_only_if_there_is_a_block_for_it(family):
    align = {"mamba_cache_mode": "align", "prefill_checkpoint_alignment": 64}
    assert family.lifetime(spec(**align)).export is None
    assert family.lifetime(spec(**align, num_prefill_checkpoint_blocks=1)).export == 64


@given(st.integers(1, 9), st.lists(st.integers(0, 200), min_size=1))
def test_the_rule_of_a_batch_is_that_of_each_request(block, settled):
    lifetime = kvframe_mamba.StateLifetime(block=block)
    lo, hi = lifetime.dead(np.array(settled), np.array(settled))
    assert [(int(a), int(b)) for a, b in zip(lo, hi, strict=True)] == [lifetime.dead(n, n) for n in settled]


@given(
    block=st.integers(1, 8),
    spare=st.integers(0, 3),
    saves=st.booleans(),
    chunks=st.lists(st.integers(1, 30), min_size=1, max_size=12),
)
def test_no_request_holds_more_than_the_peak(block, spare, saves, chunks):
    # A step writes the entry of its end, its drafts, and perhaps one saved state; what died before it is given back.
    lifetime = kvframe_mamba.StateLifetime(block=block, spare=spare, export=block if saves else None)
    peak = lifetime.peak(max(chunks), sum(chunks))

    def most_held(chunks):
        held, settled, most = set(), 0, 0
        for chunk in chunks:
            lo, hi = lifetime.dead(settled, sum(chunks))
            held -= set(range(lo, hi))
            settled += chunk
            held.add(-(-settled // block) - 1)
            most = max(most, len(held) + spare + saves)
        return most

    assert most_held(chunks) <= peak
    assert most_held([1] * sum(chunks)) == peak


def test_the_family_says_what_other_parts_ask_for(family):
    assert family.name == "mamba"
    assert (family.traits.event_kind, family.traits.needs_zeroing) == ("mamba", True)
    assert (family.paging.scales, family.paging.pads, family.paging.bucket) == (False, True, "state")
    assert isinstance(family.promote(spec(), None), Refusal)


def test_a_plan_says_whether_it_keeps_states(family):
    def config(name):
        return KVCacheConfig(
            pools={"device": Pool(budget_bytes=REAL, slab_bytes=REAL, num_slabs=1, layout="LBHNC")},
            groups=(KVCacheGroupSpec(layer_specs={"a": spec()}, kv_cache_spec=spec(), family=(name,)),),
            tensors=(KVCacheTensor(size=REAL, layers=("a",), layer_stride=REAL, block_stride=REAL),),
            max_model_len=16,
        )

    assert kvframe_mamba.has_mamba_layers(config(family.name))
    assert not kvframe_mamba.has_mamba_layers(config("full_attention"))


def test_every_field_says_how_it_merges():
    assert all("kvframe.merge" in field.metadata for field in attrs.fields(MambaSpec))
