"""From a plan to the block manager: groups, slabs, pools and draft flags."""

import attrs
import pytest

from kvframe import EngineConfig, load_plugins
from kvframe.blocks import Admission, KVCacheManager, Served, block_config
from kvframe.errors import PlanError, SpecError
from kvframe.planning import plan
from kvframe_mamba import MambaSpec
from kvframe_sliding_window import SlidingWindowSpec
from tests.plans import FULL, MLA, group_of, mixed, plan_of

HOST = load_plugins()
ENGINE = EngineConfig(max_model_len=64)
WINDOW = SlidingWindowSpec(16, sliding_window=32, num_kv_heads=2, head_size=8, dtype="bfloat16")
STATE = MambaSpec(32, mamba_cache_mode="align", shapes=((4, 64),), dtypes=("float32",))


def test_groups_keep_their_order_splits_and_lifetimes():
    made = plan_of(group_of({"a": FULL}), group_of({"b": MLA, "c": MLA}, blocks_per_slab=3), slabs=7)
    config = block_config(made, ENGINE, host=HOST)
    assert [group.name for group in config.groups] == ["0-full_attention", "1-mla"]
    assert [group.blocks_per_slab for group in config.groups] == [1, 3]
    assert [group.lifetime.block for group in config.groups] == [16, 16]
    assert (config.num_blocks, config.max_model_len, config.prefix_caching) == (7, 64, True)


def test_a_lifetime_is_the_familys_with_blocks_as_wide_as_context_parallelism_makes_them():
    engine = EngineConfig(max_model_len=256, dcp=4)
    sharded = attrs.evolve(FULL, dcp_sharded=True)
    config = block_config(plan_of(group_of({"a": sharded})), engine, host=HOST)
    assert config.groups[0].lifetime.block == 16 * 4


def test_limits_of_the_engine_and_the_plan_are_taken_over():
    engine = EngineConfig(max_model_len=64, max_in_flight_tokens=48, max_num_seqs=5, prefill_lookahead=1)
    made = plan_of(
        group_of({"a": FULL}), group_of({"b": WINDOW}), prefix_cache_retention_interval=32, hash_block_size=8
    )
    config = block_config(made, engine, host=HOST)
    assert (config.max_in_flight_tokens, config.max_requests, config.prefill_lookahead) == (48, 5, 1)
    assert (config.retention_interval, config.hash_unit) == (32, 8)
    assert block_config(made, engine, host=HOST, max_requests=9, eviction="frequency").eviction == "frequency"


def test_a_draft_layer_marks_every_group_of_an_equal_spec():
    # Groups 0 and 1 are full attention with equal specs, of which 1 holds the draft's layer; 2 is a window.
    groups = [group_of({name: spec}) for name, spec in (("a", FULL), ("b", FULL), ("c", WINDOW))]
    groups[1] = attrs.evolve(groups[1], is_eagle_group=True)
    config = block_config(plan_of(*groups), EngineConfig(max_model_len=64, draft_drop=True), host=HOST)
    assert [group.draft for group in config.groups] == [True, True, False]
    assert config.draft_groups == {0, 1}


def test_each_pool_has_its_own_configuration():
    made = mixed()  # two device groups, one on the host
    assert [g.name for g in block_config(made, ENGINE, host=HOST).groups] == ["0-full_attention", "1-mla"]
    assert [g.name for g in block_config(made, ENGINE, host=HOST, pool="host").groups] == ["2-full_attention"]
    with pytest.raises(PlanError, match="no group has its blocks in pool 'disk'"):
        block_config(made, ENGINE, host=HOST, pool="disk")


def test_a_pool_of_one_slab_is_refused():
    with pytest.raises(PlanError, match="no slab beside the null block's"):
        block_config(plan_of(group_of({"a": FULL}), slabs=1), ENGINE, host=HOST)


def test_zeroed_where_the_family_asks_or_precisions_mix():
    state, full = group_of({"s": STATE}), group_of({"a": FULL})
    assert [g.zeroed for g in block_config(plan_of(full, state), ENGINE, host=HOST).groups] == [False, True]
    other = group_of({"b": attrs.evolve(FULL, dtype="float16")})
    assert [g.zeroed for g in block_config(plan_of(full, other), ENGINE, host=HOST).groups] == [True, True]


def test_without_keyed_groups_there_is_no_prefix_cache():
    uncached = attrs.evolve(STATE, mamba_cache_mode="none")
    assert not block_config(plan_of(group_of({"s": uncached})), ENGINE, host=HOST).prefix_caching
    # a running state forbids hits beside it too, and its block of the longest request is nobody's hash unit
    beside = plan_of(group_of({"s": uncached}), group_of({"a": FULL}), hash_block_size=uncached.block_size)
    assert not block_config(beside, ENGINE, host=HOST).prefix_caching
    engine = EngineConfig(max_model_len=64, prefix_caching=False)
    assert not block_config(plan_of(group_of({"a": FULL})), engine, host=HOST).prefix_caching


def test_an_unknown_or_wrong_limit_is_refused():
    made = plan_of(group_of({"a": FULL}))
    with pytest.raises(TypeError, match="colour"):
        block_config(made, ENGINE, host=HOST, colour="red")
    with pytest.raises(SpecError, match="max_requests"):
        block_config(made, ENGINE, host=HOST, max_requests=0)


@pytest.mark.parametrize("strategy", ["optimal", "engine"])
def test_a_manager_serves_requests_in_a_plans_blocks(strategy):
    specs = {**{f"full.{i}": FULL for i in range(3)}, **{f"window.{i}": WINDOW for i in range(5)}}
    engine = EngineConfig(max_model_len=256)
    made = plan(specs, engine=engine, memory=1 << 20, host=HOST, strategy=strategy)
    config = block_config(made.config, engine, host=HOST)
    manager = KVCacheManager(config)
    tokens = list(range(100))
    (first,) = manager.admit([Admission(request=manager.request(tokens), num_new_tokens=100)])
    assert first == Served(slot=0)
    for group, ids in zip(config.groups, manager.block_ids(0), strict=True):
        assert len(ids) == 7  # ceil(100 / 16)
        assert max(ids) < config.num_blocks * group.blocks_per_slab
    # 99 tokens may be found, in whole blocks: 96.
    assert manager.lookup(manager.request(tokens)).tokens == 96
