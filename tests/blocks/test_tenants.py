"""Quotas: what a tenant may hold and have cached, and what happens at the limit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvframe.blocks import Admission, BlockConfig, ExtraKeys, GroupBlocks, KVCacheManager, Refused, Served
from kvframe.blocks.pins import Pin
from kvframe.blocks.pool import BlockPool
from kvframe.blocks.quotas import Quota, Quotas, share_of
from kvframe.blocks.resize import grow
from kvframe.blocks.snapshot import load, save
from kvframe.blocks.tenants import TenantManager, Usage
from kvframe.errors import SpecError
from kvframe.events import PrefixIndex, Recorder
from kvframe.lifetime import Lifetime
from tests.blocks.lifetimes import Window

FULL = Lifetime(block=4)


def manager_of(quotas: Quotas, *rules: Lifetime, cuts: tuple[int, ...] = (), **more: Any) -> TenantManager:
    groups = [
        GroupBlocks(name=f"g{g}", lifetime=rule, blocks_per_slab=cuts[g] if cuts else 1)
        for g, rule in enumerate(rules or (FULL,))
    ]
    watcher = more.pop("watcher", None)
    config = BlockConfig(groups=groups, **{"num_blocks": 41, "max_model_len": 256, **more})
    return TenantManager(config, quotas, watcher=watcher)


def run(manager: KVCacheManager, tokens: Any, salt: str | None) -> Any:
    request = manager.request(tokens, extra=ExtraKeys(salt=salt))
    hit = manager.lookup(request)
    new = request.num_tokens - hit.tokens
    (answer,) = manager.admit([Admission(request=request, num_new_tokens=new, hit=hit)])
    return answer


def found(manager: KVCacheManager, tokens: Any, salt: str | None) -> int:
    return manager.lookup(manager.request(tokens, extra=ExtraKeys(salt=salt))).tokens


def test_a_new_request_beyond_the_running_quota_is_refused() -> None:
    # A quarter of 40 blocks: 10. Two requests of 4 blocks fit, a third does not; of another tenant it does.
    manager = manager_of(Quotas(default=Quota(running=0.25)))
    for start in (0, 100):
        assert isinstance(run(manager, range(start, start + 16), "a"), Served)
    assert run(manager, range(200, 216), "a") == Refused(missing=2, needed={"g0": 4}, reason="tenant")
    assert isinstance(run(manager, range(200, 216), "b"), Served)
    # What both of its requests hold counts once: three blocks are shared, one more is taken.
    assert isinstance(run(manager, range(16), "a"), Served)
    assert manager.usage()["a"] == Usage(running=9.0, cached=0.0)
    assert isinstance(run(manager, range(200, 216), None), Served)


def test_a_running_request_is_refused_its_next_block_and_goes_on_when_there_is_room() -> None:
    manager = manager_of(Quotas(named={"a": Quota(running=0.1)}))  # 4 blocks
    first, second = run(manager, range(8), "a").slot, run(manager, range(100, 108), "a").slot
    other = run(manager, range(8), "b").slot
    manager.append(3, np.array([1, 2, 3], np.int32))
    result = manager.step([second, other, first])
    assert result.refused == tuple(
        Refused(missing=1, needed={"g0": 1}, slot=slot, reason="tenant") for slot in (second, first)
    )
    assert manager.ledger.computed[:3].tolist() == [8, 8, 9]
    manager.preempt([second])
    assert manager.step([first]).served
    assert manager.usage()["a"] == Usage(running=3.0, cached=2.0)
    assert manager.usage()["b"] == Usage(running=3.0, cached=0.0)


def test_what_dies_makes_room_in_the_same_step() -> None:
    # A window of 5 in blocks of 4 needs at most 3 blocks at once: quota 3, and the request runs on.
    manager = manager_of(Quotas(default=Quota(running=0.076)), Window(block=4, window=5))
    slot = run(manager, range(8), "a").slot
    for token in range(40):
        manager.append([slot], [[token]])
        assert manager.step([slot]).served
        assert manager.usage()["a"].running <= 3


def test_forks_and_pins_count() -> None:
    manager = manager_of(Quotas(default=Quota(running=0.125)))  # 5 blocks
    slot = run(manager, range(18), "a").slot  # 5 blocks, the last of them partly used
    assert manager.fork(slot) == Refused(missing=1, needed={"g0": 1}, reason="tenant")
    manager.release([slot])
    assert isinstance(manager.pins.pin("a", manager.request(range(16), extra=ExtraKeys(salt="a"))), Pin)
    assert manager.usage()["a"] == Usage(running=4.0, cached=0.0)
    assert isinstance(run(manager, range(100, 108), "a"), Refused)
    manager.pins.unpin("a")
    assert isinstance(run(manager, range(100, 108), "a"), Served)


def test_beyond_the_cached_quota_its_own_oldest_blocks_go_first() -> None:
    # A tenth: 4 blocks. Three prompts of 2 whole blocks: the first goes, whatever else is in the pool.
    manager = manager_of(Quotas(named={"a": Quota(cached=0.1)}))
    manager.release([run(manager, range(8), "b").slot])  # older than all of the tenant's, and stays
    for start in (0, 100, 200):
        manager.release([run(manager, range(start, start + 9), "a").slot])
    assert [found(manager, range(start, start + 9), "a") for start in (0, 100, 200)] == [0, 8, 8]
    assert found(manager, range(9), "b") == 8
    assert manager.usage()["a"] == Usage(running=0.0, cached=4.0)
    # What is used again is no longer the oldest.
    manager.release([run(manager, range(100, 109), "a").slot])
    manager.release([run(manager, range(300, 309), "a").slot])
    assert [found(manager, range(start, start + 9), "a") for start in (100, 200, 300)] == [8, 0, 8]


def test_a_tenant_that_may_cache_nothing_leaves_nothing() -> None:
    index = PrefixIndex()
    recorder = Recorder([index.apply])
    manager = manager_of(Quotas(named={"a": Quota(cached=0.0)}), watcher=recorder)
    manager.release([run(manager, range(9), "a").slot])
    manager.release([run(manager, range(9), "b").slot])
    recorder.publish()
    assert (manager.num_keys, len(index)) == (2, 2)
    assert (found(manager, range(9), "a"), found(manager, range(9), "b")) == (0, 8)


def test_slabs_count_by_their_shares() -> None:
    # Blocks of the first group are half a slab each, of the second a third.
    manager = manager_of(Quotas(default=Quota(running=0.5)), FULL, Window(block=4, window=9), cuts=(2, 3))
    run(manager, range(12), "a")
    assert manager.usage()["a"].running == pytest.approx(3 / 2 + 3 / 3)


def test_usage_survives_restarts_and_resizes(tmp_path: Any) -> None:
    quotas = Quotas(default=Quota(running=0.5, cached=0.5))
    old = manager_of(quotas)
    old.release([run(old, range(9), "a").slot])
    run(old, range(100, 117), "b")
    old.pins.pin("x", old.request(range(8), extra=ExtraKeys(salt="a")))
    grow(old, 61)
    assert old.usage() == {"a": Usage(running=2.0, cached=0.0), "b": Usage(running=5.0, cached=0.0)}
    save(old, tmp_path / "snap", content="")
    new = TenantManager(old.config, quotas)
    load(new, tmp_path / "snap", content="")
    # What ran is cached, but for the block that was not full.
    assert new.usage() == {"a": Usage(running=2.0, cached=0.0), "b": Usage(running=0.0, cached=4.0)}
    assert new.reset() is False
    new.pins.unpin("x")
    assert new.reset()
    assert all(used == Usage(running=0.0, cached=0.0) for used in new.usage().values())


def test_damaged_blocks_are_not_counted() -> None:
    manager = manager_of(Quotas())
    slot = run(manager, range(9), "a").slot
    blocks = manager.block_ids(slot)[0]
    manager.release([slot])
    manager.evict(blocks[:1])
    assert manager.usage()["a"] == Usage(running=0.0, cached=1.0)


def test_without_quotas_the_manager_has_nothing_of_them() -> None:
    manager = KVCacheManager(manager_of(Quotas()).config)
    assert type(manager.pool) is BlockPool
    assert manager.limits is None


def test_a_share_is_what_people_mean() -> None:
    # 0.29 x 100 is 28.999999999999996 in floating point.
    assert [share_of(share, 100) for share in (0.29, 0.295, 0.07, 0.0, 1.0)] == [29, 29, 7, 0, 100]


def test_shares_are_checked() -> None:
    with pytest.raises(SpecError, match="running"):
        Quota(running=1.1)
    with pytest.raises(SpecError, match="cached"):
        Quota(cached=-0.1)
