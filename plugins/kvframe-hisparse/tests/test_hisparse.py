"""HiSparse's device pages: contract 2.15 and 2.16, worked numbers [run]."""

import pickle

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvframe_hisparse
from kvframe import EngineConfig, Refusal, load_plugins
from kvframe.config import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, Pool
from kvframe.errors import SpecError
from kvframe_hisparse import HiSparseHotSpec, HiSparseResidentSpec
from kvframe_mla import MLAAttentionSpec

PAGE = 41_984  # a DeepSeek-V3.2 latent page: 64 tokens of 656 bytes


@pytest.fixture(scope="module")
def host():
    return load_plugins(extra=[kvframe_hisparse])


def hot(**fields):
    return HiSparseHotSpec(64, **{"page_size": PAGE, "blocks_per_request": 64, **fields})


def resident(**fields):
    return HiSparseResidentSpec(64, **{"page_size": PAGE, **fields})


def engine(in_flight, max_model_len):
    return EngineConfig(max_model_len=max_model_len, max_in_flight_tokens=in_flight)


def test_a_hot_region_is_the_same_for_every_request():
    for limits in (engine(1, 1), engine(16_384, 131_072)):
        assert hot().max_memory_usage_bytes(limits) == 2_686_976  # 64 * 41,984
        assert hot().max_num_blocks_per_req(limits, limits.max_model_len) == 64
    assert hot().block_table_token_alignment is None
    assert not hot().uses_slot_mapping


def test_resident_pages_hold_the_tokens_in_flight():
    assert resident().max_admission_blocks_per_request(16_384, 131_072) == 256  # 16,384/64
    assert resident().max_admission_blocks_per_request(16_384, 100) == 2
    assert resident().max_memory_usage_bytes(engine(16_384, 131_072)) == 256 * PAGE
    assert resident().max_num_blocks_per_req(engine(1, 131_072), 131_072) == 2048
    assert resident().block_table_token_alignment == 128
    assert resident().uses_slot_mapping


@pytest.mark.parametrize("spec", [hot(), resident()])
def test_both_are_raw_pages(spec):
    assert spec.page_size_bytes == spec.unpadded_page_size_bytes == PAGE
    assert spec.copy_with_new_block_size(128).page_size_bytes == PAGE
    assert not spec.prefix_cacheable
    assert not spec.has_layer_views
    assert not spec.dcp_sharded
    assert spec.block_stride_bytes_multiple == 1
    assert spec.packed_stride_bytes_multiple == PAGE  # contract 2.15: it joins the packed layouts' alignment
    for member in ("num_heads", "tokens_per_state", "state_content_size_bytes", "num_states"):
        with pytest.raises(SpecError, match="raw pages"):
            getattr(spec, member)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: hot(page_size=0), "page_size"),
        (lambda: resident(page_size=-1), "page_size"),
        (lambda: hot(blocks_per_request=0), "blocks_per_request"),
    ],
)
def test_a_wrong_value_is_refused_at_construction(make, field):
    with pytest.raises(SpecError) as caught:
        make()
    assert caught.value.field == field
    assert "at least 1" in caught.value.rule


@pytest.mark.parametrize("spec", [hot(), resident()])
def test_equal_specs_are_one_value(spec):
    copied = pickle.loads(pickle.dumps(spec))
    assert copied == spec
    assert hash(copied) == hash(spec)
    assert "page_size=41984" in repr(spec)


def test_merging_takes_equal_layers_only(host):
    family = host.family(hot())
    assert family.merge({"a": hot(), "b": hot()}) == hot()
    refused = family.merge({"a": hot(), "b": hot(blocks_per_request=8)})
    assert isinstance(refused, Refusal)
    assert refused == family.merge({"b": hot(blocks_per_request=8), "a": hot()})
    assert refused.field == "blocks_per_request"
    assert isinstance(family.merge({"a": hot(), "b": resident()}), Refusal)


def test_layers_share_a_table_when_they_need_the_same_blocks(host):
    def key(spec):
        return host.family(spec).table_key(spec)

    assert key(hot()) == key(hot(page_size=8448))
    assert key(hot()) != key(hot(blocks_per_request=8))  # rows of 64 and of 8 entries
    assert key(resident()) == key(resident(page_size=8448))
    assert key(resident()) != key(hot())


def test_neither_takes_part_in_prefix_hits_or_transfers(host):
    for spec in (hot(), resident()):
        family = host.family(spec)
        assert family.lifetime(spec).hits == "free"
        assert not family.traits.transferable
        assert (family.paging.scales, family.paging.pads) == (False, False)
        assert isinstance(family.promote(spec, None), Refusal)


@given(regions=st.integers(1, 100), in_flight=st.integers(1, 50), max_len=st.integers(1, 200))
def test_a_request_never_holds_more_than_the_peak(host, regions, in_flight, max_len):
    spec = attrs.evolve(hot(), block_size=4, blocks_per_request=regions)
    assert host.family(spec).lifetime(spec).peak(in_flight, max_len) == regions
    # Two pages at the end stay, and those of the tokens in flight, which may begin inside a page (contract 6.13).
    pages = HiSparseResidentSpec(4, page_size=PAGE)
    peak = host.family(pages).lifetime(pages).peak(in_flight, max_len)
    assert peak == min(-(-max_len // 4), -(-(in_flight - 1) // 4) + 2)
    assert pages.max_admission_blocks_per_request(in_flight, max_len) <= -(-max_len // 4)


def test_the_groups_beside_them_have_names():
    assert (kvframe_hisparse.SOURCE_ROLE, kvframe_hisparse.INDEXER_ROLE) == (
        "hisparse_source",
        "hisparse_indexer",
    )


def tiered(role, ranks=1):
    """Contract 5.10 [run]: 8 latent layers of 41,984 bytes a page; 1 GiB / 335,872 = 3,196 host blocks."""
    spec = MLAAttentionSpec(64, num_kv_heads=1, head_size=656, dtype="uint8")
    layers = tuple(f"layers.{index}.attn" for index in range(8))
    host = Pool(
        name="host",
        budget_bytes=1 << 30,
        slab_bytes=335_872,
        num_slabs=3_196,
        layout="LBNHC",
        shared_by_ranks=ranks,
    )
    group = KVCacheGroupSpec(
        layer_specs=dict.fromkeys(layers, spec),
        kv_cache_spec=spec,
        family=("mla",) * 8,
        pool="host",
        role=role,
    )
    tensor = KVCacheTensor(
        size=host.size_bytes, layers=layers, layer_stride=PAGE * 3_196, block_stride=PAGE, pool="host"
    )
    return KVCacheConfig(
        pools={"device": Pool(budget_bytes=0, slab_bytes=1, num_slabs=1, layout="BLHNC"), "host": host},
        groups=(group,),
        tensors=(tensor,),
        max_model_len=131_072,
    )


def test_a_plan_says_how_its_host_pool_is_cut():
    config = tiered(kvframe_hisparse.SOURCE_ROLE)
    assert kvframe_hisparse.hisparse_host_num_blocks(config) == 3_196
    assert kvframe_hisparse.hisparse_host_block_stride(config) == 335_872
    assert not kvframe_hisparse.hisparse_shared_host_pool(config)
    assert kvframe_hisparse.hisparse_shared_host_pool(tiered(kvframe_hisparse.SOURCE_ROLE, ranks=8))


def test_a_plan_without_host_pages_of_its_own_has_no_host_pool():
    config = tiered("default", ranks=8)  # another plugin's tier
    assert kvframe_hisparse.hisparse_host_num_blocks(config) is None
    assert kvframe_hisparse.hisparse_host_block_stride(config) is None
    assert not kvframe_hisparse.hisparse_shared_host_pool(config)
