"""The plan as data: contract 2.21 to 2.23, 3.12 and 3.13."""

from __future__ import annotations

import pickle

import attrs
import pytest

from kvframe import KVQuantMode, UniformTypeKVCacheSpecs
from kvframe.config import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, Pool
from kvframe.errors import PlanError, SpecError
from kvframe_chunked_local import ChunkedLocalAttentionSpec
from kvframe_circular_buffer import CircularBufferSpec
from kvframe_hisparse import HiSparseHotSpec
from kvframe_mamba import MambaSpec
from tests.plans import FULL, group_of, plan_of

HOT = HiSparseHotSpec(16, page_size=512, blocks_per_request=4)
RING = CircularBufferSpec(16, num_kv_heads=1, head_size=8, dtype="float32")
MAMBA = MambaSpec(16, shapes=((4, 8),), dtypes=("float32",))


def worked_example() -> KVCacheConfig:
    """Contract 3.13: Full(a, b) transferable and cacheable; Hot(h) neither; Ring(r) transferable; Mamba(m) both."""
    return plan_of(
        group_of({"a": FULL, "b": FULL}), group_of({"h": HOT}), group_of({"r": RING}), group_of({"m": MAMBA})
    )


def test_groups_that_are_transferred_and_cached():
    config = worked_example()
    assert config.transfer_group_ids == (0, 2, 3)
    assert config.prefix_cacheable_group_ids == (0, 3)
    assert config.transfer_groups == (config.groups[0], config.groups[2], config.groups[3])
    assert config.prefix_cacheable_groups == (config.groups[0], config.groups[3])
    assert config.transfer_group_index_by_layer == {"a": 0, "b": 0, "r": 1, "m": 2}
    assert config.host_group_ids == ()
    assert [config.num_blocks_of(tensor) for tensor in config.tensors] == [10] * 5
    assert config.has_family("mamba")
    assert config.has_mixed_precision_kv_cache  # bfloat16 and float32
    assert config.needs_kv_cache_zeroing


def test_the_field_s_usual_names():
    config = worked_example()
    assert config.num_blocks == 10
    assert config.kv_cache_groups is config.groups
    assert config.kv_cache_tensors is config.tensors
    assert config.kv_cache_layout == "BLHNC"
    assert config.groups[0].layer_names == ("a", "b")
    assert config.groups[0].block_size == 16
    assert [config.groups[0].block_index(position) for position in (0, 15, 16, 63)] == [0, 0, 1, 3]
    assert config.bytes_per_block == config.pools["device"].slab_bytes == 2_048  # a and b, 1,024 bytes each
    assert config.pools["device"].size_bytes == 20_480


@pytest.mark.parametrize(
    ("specs", "mixed"),
    [
        ([FULL, FULL], False),
        ([FULL, attrs.evolve(FULL, head_size=16)], False),
        ([FULL, attrs.evolve(FULL, dtype="float32")], True),
        ([FULL, attrs.evolve(FULL, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)], True),
    ],
)
def test_stale_bytes_of_another_precision_are_zeroed(specs, mixed):
    groups = [group_of({f"layer {index}": spec}) for index, spec in enumerate(specs)]
    config = plan_of(*groups)
    assert config.has_mixed_precision_kv_cache is mixed
    assert config.needs_kv_cache_zeroing is mixed
    together = plan_of(group_of({f"layer {index}": spec for index, spec in enumerate(specs)}))
    assert together.has_mixed_precision_kv_cache is mixed


def test_what_lies_in_another_pool_does_not_count_for_the_device():
    config = plan_of(group_of({"a": FULL}), group_of({"b": attrs.evolve(FULL, dtype="float32")}, pool="host"))
    assert config.host_group_ids == (1,)
    assert config.groups[1].host_resident
    assert config.tensors[1].host_resident
    assert not config.groups[0].host_resident
    assert not config.has_mixed_precision_kv_cache


def test_a_group_can_cut_several_blocks_from_a_slab():
    quarter = attrs.evolve(FULL, block_size=4)  # 256 bytes
    config = plan_of(group_of({"a": FULL}), group_of({"b": quarter}, blocks_per_slab=4), slabs=10)
    assert [config.blocks_of(group) for group in config.groups] == [10, 40]
    assert [config.num_blocks_of(tensor) for tensor in config.tensors] == [10, 40]
    assert [config.block_bytes_of(group) for group in config.groups] == [1_024, 256]
    # contract 2.21: block 39 of layer b starts 39 * 256 bytes into the pool
    assert config.tensors[1].address(0, 39) == 9_984


def test_addresses_are_those_of_the_contract():
    # contract 5.7 [run]: pages of 65,536 and 16,384 bytes, 10 blocks, LBHNC
    first = KVCacheTensor(size=819_200, layers=("a",), layer_stride=655_360, block_stride=65_536)
    second = KVCacheTensor(
        size=819_200, layers=("b",), layer_stride=163_840, block_stride=16_384, offset=655_360
    )
    assert first.address(0, 9) == 589_824
    assert second.address(0, 9) + 16_384 == 819_200


def test_block_ids_of_transfer_groups_are_picked():
    # contract 3.12 [run]: flags (T, F, T, T)
    flags = (True, False, True, True)
    groups = [group_of({f"layer {index}": FULL}, enable_kv_transfer=flag) for index, flag in enumerate(flags)]
    config = plan_of(*groups)
    assert config.select_transfer_block_ids([[1], [2], [3], [4]]) == ([1], [3], [4])
    with pytest.raises(PlanError, match="every group") as caught:
        config.select_transfer_block_ids([[1]])
    assert caught.value.values == {"groups": 4, "lists": 1}


def test_groups_of_equal_specs_share_what_kernels_prepare():
    # log.md row 40: 36 chunked layers in three groups of 12 need one preparation, not three
    chunk = ChunkedLocalAttentionSpec(
        16, num_kv_heads=2, head_size=8, dtype="bfloat16", attention_chunk_size=32
    )
    groups = [group_of({f"{part}.{layer}": chunk for layer in range(12)}) for part in range(3)]
    keys = [group.metadata_key for group in plan_of(*groups, group_of({"full": FULL})).groups]
    assert len({*keys[:3]}) == 1
    assert keys[3] != keys[0]
    split = group_of({"x": FULL}, blocks_per_slab=2)
    assert split.metadata_key != group_of({"x": FULL}).metadata_key
    wide = attrs.evolve(FULL, head_size=16)
    uniform = [group_of({f"{part}.narrow": FULL, f"{part}.wide": wide}) for part in range(2)]
    assert all(isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs) for group in uniform)
    assert uniform[0].metadata_key == uniform[1].metadata_key


def test_a_layer_s_group_is_found_or_named_as_missing():
    config = worked_example()
    assert config.group_of("r") is config.groups[2]
    with pytest.raises(PlanError, match="'x'"):
        config.group_of("x")


def test_a_plan_is_one_frozen_value():
    config = worked_example()
    assert pickle.loads(pickle.dumps(config)) == config == worked_example()
    assert attrs.evolve(config, max_model_len=65) != config
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        config.max_model_len = 1


def test_a_rank_without_layers_has_a_plan():
    whole = worked_example()
    empty = plan_of(*(attrs.evolve(group, layer_specs={}) for group in whole.groups))
    assert empty.tensors == ()
    assert empty.transfer_group_ids == whole.transfer_group_ids


# --- a plan that contradicts itself cannot be made ---


def one_layer(**fields):
    return plan_of(group_of({"a": FULL}), **fields)


POOL = Pool(budget_bytes=10_240, slab_bytes=1_024, num_slabs=10, layout="BLHNC")
TENSOR = KVCacheTensor(size=10_240, layers=("a",), layer_stride=1_024, block_stride=1_024)
GROUP = group_of({"a": FULL})
TWO = group_of({"a": FULL, "b": FULL})


def tensor(**fields):
    return attrs.evolve(TENSOR, **fields)


@pytest.mark.parametrize(
    ("fields", "reason", "layers"),
    [
        ({"pools": {}}, "one of them 'device'", []),
        ({"pools": {"device": POOL, "disk": POOL}}, "named as they are filed", []),
        ({"groups": (attrs.evolve(GROUP, pool="disk"),)}, "no pool 'disk'", ["a"]),
        ({"tensors": (tensor(pool="disk"),)}, "no pool 'disk'", ["a"]),
        ({"groups": (GROUP, GROUP)}, "one group only", ["a"]),
        ({"tensors": (TENSOR, TENSOR)}, "one placement only", ["a"]),
        ({"tensors": ()}, "must hold the same layers", ["a"]),
        ({"tensors": (TENSOR, tensor(layers=("b",)))}, "must hold the same layers", ["b"]),
        ({"tensors": (TENSOR, tensor(layers=()))}, "layers of one group", []),
        ({"groups": (attrs.evolve(GROUP, blocks_per_slab=2),)}, "split into the blocks", ["a"]),
        ({"groups": (attrs.evolve(GROUP, blocks_per_slab=3),)}, "split into the blocks", ["a"]),
        # log.md row 111: bytes per block that leave layers out
        ({"groups": (TWO,), "tensors": (tensor(layers=("a", "b")),)}, "a page of every layer", ["a", "b"]),
        ({"groups": (attrs.evolve(GROUP, family=()),)}, "a family for each layer", ["a"]),
        ({"tensors": (tensor(size=20_480),)}, "lie in its pool", ["a"]),
        ({"tensors": (tensor(offset=-1),)}, "lie in its pool", ["a"]),
        ({"tensors": (tensor(offset=1),)}, "lie in its pool", ["a"]),
        ({"tensors": (tensor(block_stride=1_025),)}, "lie in its pool", ["a"]),
        ({"tensors": (tensor(block_stride=0),)}, "lie in its pool", ["a"]),
    ],
)
def test_parts_that_contradict_each_other_are_refused(fields, reason, layers):
    with pytest.raises(PlanError, match=reason) as caught:
        one_layer(**fields)
    assert list(caught.value.layers) == layers


def test_a_placement_holds_equal_pages_of_one_group_in_its_pool():
    wide = attrs.evolve(FULL, head_size=16)  # 2,048 bytes
    groups = (group_of({"a": FULL, "b": wide}), group_of({"c": FULL}))
    apart = plan_of(*groups)
    both = attrs.evolve(apart.tensors[0], layers=("a", "b"))
    with pytest.raises(PlanError, match="equal pages") as caught:
        attrs.evolve(apart, tensors=(both, apart.tensors[2]))
    assert caught.value.values["page bytes"] == [1_024, 2_048]
    across = attrs.evolve(apart.tensors[0], layers=("a", "c"))
    with pytest.raises(PlanError, match="layers of one group"):
        attrs.evolve(apart, tensors=(apart.tensors[1], across))
    pools = {**apart.pools, "host": attrs.evolve(apart.pools["device"], name="host")}
    moved = attrs.evolve(apart.tensors[2], pool="host")
    with pytest.raises(PlanError, match="that group's pool"):
        attrs.evolve(apart, pools=pools, tensors=(*apart.tensors[:2], moved))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_model_len": 0}, "max_model_len"),
        ({"kv_tp_replicas": 0}, "kv_tp_replicas"),
        ({"prefix_cache_retention_interval": -1}, "prefix_cache_retention_interval"),
        ({"hash_block_size": 0}, "hash_block_size"),
        ({"cache_hit_alignment_tokens": 0}, "cache_hit_alignment_tokens"),
    ],
)
def test_numbers_out_of_range_are_refused(fields, field):
    with pytest.raises(SpecError) as caught:
        one_layer(**fields)
    assert (caught.value.spec, caught.value.field) == ("KVCacheConfig", field)


@pytest.mark.parametrize("field", ["slab_bytes", "shared_by_ranks"])
def test_a_pool_s_numbers_are_checked(field):
    with pytest.raises(SpecError) as caught:
        attrs.evolve(POOL, **{field: 0})
    assert (caught.value.spec, caught.value.field) == ("Pool", field)


def test_a_group_s_split_is_checked():
    with pytest.raises(SpecError, match="blocks_per_slab"):
        KVCacheGroupSpec(layer_specs={}, kv_cache_spec=FULL, family=(), blocks_per_slab=0)
