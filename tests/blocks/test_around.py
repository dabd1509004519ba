"""Pins, resizing and common prefixes, one promise at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvframe.blocks import (
    Admission,
    BlockConfig,
    BlockError,
    Copy,
    Deferred,
    GroupBlocks,
    KVCacheManager,
    Refused,
    Served,
)
from kvframe.blocks.common import CommonPrefix, common_prefix
from kvframe.blocks.pins import Pin
from kvframe.blocks.resize import Shrink, grow, shrink
from kvframe.errors import SpecError
from kvframe.lifetime import Lifetime
from tests.blocks.lifetimes import Window

FULL = Lifetime(block=4)


def manager_of(*rules: Lifetime, cuts: tuple[int, ...] = (), **limits: Any) -> KVCacheManager:
    groups = [
        GroupBlocks(name=f"g{g}", lifetime=rule, blocks_per_slab=cuts[g] if cuts else 1, zeroed=True)
        for g, rule in enumerate(rules)
    ]
    return KVCacheManager(BlockConfig(groups=groups, **{"num_blocks": 20, "max_model_len": 256, **limits}))


def run(manager: KVCacheManager, tokens: Any) -> Any:
    request = manager.request(tokens)
    hit = manager.lookup(request)
    new = request.num_tokens - hit.tokens
    (answer,) = manager.admit([Admission(request=request, num_new_tokens=new, hit=hit)])
    return answer


def found(manager: KVCacheManager, tokens: Any) -> int:
    return manager.lookup(manager.request(tokens)).tokens


def flood(manager: KVCacheManager) -> None:
    """More other prompts than the pool holds."""
    for start in range(1000, 1400, 20):
        answer = run(manager, range(start, start + 20))
        assert isinstance(answer, Served)
        manager.release([answer.slot])


# --- pins ---


def test_eviction_does_not_take_what_is_pinned() -> None:
    manager = manager_of(FULL, Window(block=4, window=5), num_blocks=40)
    system = manager.request(range(18))
    manager.release([run(manager, range(18)).slot])
    pin = manager.pins.pin("system", system)
    # 16 of 18 tokens are whole blocks: 4 of the full group; a window of 5 reads entry 3 at token 16.
    assert isinstance(pin, Pin)
    assert (pin.tokens, [len(row) for row in pin.blocks]) == (16, [4, 1])
    flood(manager)
    assert found(manager, [*range(16), 7, 7]) == 16
    assert "system" in manager.pins
    manager.pins.unpin("system")
    flood(manager)
    assert found(manager, range(18)) == 0


def test_a_prompt_of_whole_blocks_is_pinned_to_its_end() -> None:
    manager = manager_of(FULL)
    manager.release([run(manager, range(16)).slot])
    pin = manager.pins.pin("all", manager.request(range(16)))
    assert isinstance(pin, Pin)
    assert pin.tokens == 16
    assert found(manager, range(17)) == 16


def test_too_much_is_refused_with_the_excess() -> None:
    # A quarter of 19 blocks: 4 may be pinned.
    manager = manager_of(FULL)
    manager.release([run(manager, range(24)).slot])
    assert manager.pins.pin("six", manager.request(range(24))) == Refused(
        missing=2, needed={"g0": 6}, reason="pin_limit"
    )
    assert isinstance(manager.pins.pin("three", manager.request(range(12))), Pin)
    # The same blocks count once.
    assert isinstance(manager.pins.pin("four", manager.request(range(16))), Pin)
    assert manager.pins.num_units == 4
    assert manager.pool.num_held == 4


def test_nothing_cached_nothing_pinned() -> None:
    manager = manager_of(FULL)
    assert manager.pins.pin("x", manager.request(range(16))) == Deferred(reason="not_cached")
    with pytest.raises(BlockError, match="is not pinned"):
        manager.pins.unpin("x")
    run(manager, range(16))
    manager.pins.pin("x", manager.request(range(16)))
    with pytest.raises(BlockError, match="pinned already"):
        manager.pins.pin("x", manager.request(range(16)))
    with pytest.raises(SpecError, match="pin_limit"):
        manager_of(FULL, pin_limit=1.5)


def test_reset_waits_for_pins() -> None:
    manager = manager_of(FULL)
    manager.release([run(manager, range(16)).slot])
    manager.pins.pin("x", manager.request(range(16)))
    assert not manager.reset()
    manager.pins.unpin("x")
    assert manager.reset()


def test_a_draft_group_keeps_the_block_behind_the_pin() -> None:
    # With the draft drop a hit of 12 needs the block up to 16 as well, which is left to be computed again.
    manager = manager_of(FULL, draft_drop=True)
    manager.release([run(manager, range(16)).slot])
    pin = manager.pins.pin("x", manager.request(range(16)))
    assert isinstance(pin, Pin)
    assert (pin.tokens, len(pin.blocks[0])) == (12, 4)
    flood(manager)
    assert found(manager, range(17)) == 12


# --- common prefixes ---


def test_requests_share_tokens_and_blocks() -> None:
    manager = manager_of(FULL, Window(block=4, window=5), num_blocks=60)
    first = run(manager, range(18)).slot
    second = run(manager, [*range(14), 9, 9, 9, 9]).slot
    # 12 tokens in 3 blocks are the same; of the window group the second adopted entries 2 and on: (12 - 4) // 4.
    assert common_prefix(manager, [first, second]) == CommonPrefix(tokens=12, entries=(3, 0))
    twin: Any = manager.fork(second)
    assert common_prefix(manager, [second, twin.slot]) == CommonPrefix(tokens=16, entries=(4, 0))
    assert common_prefix(manager, [first]).tokens == 16
    with pytest.raises(BlockError, match="holds no running request"):
        common_prefix(manager, [first, 9])


# --- resize ---


def test_a_pool_grows_under_running_requests() -> None:
    manager = manager_of(FULL, num_blocks=5)
    run(manager, range(14))
    assert isinstance(run(manager, range(100, 114)), Refused)
    table = manager.block_ids(0)
    grow(manager, 9)
    assert (manager.num_free, manager.config.num_blocks, manager.block_ids(0)) == (4, 9, table)
    assert isinstance(run(manager, range(100, 114)), Served)
    manager.append(2, np.array([1, 2], np.int32))
    assert manager.step(2).served
    with pytest.raises(BlockError, match="must be more than the 9"):
        grow(manager, 9)


def test_a_pool_shrinks_by_moving_what_is_held_beyond_its_end() -> None:
    manager = manager_of(FULL)
    for start in range(0, 100, 20):
        run(manager, range(start, start + 12))  # 3 blocks each: 1 … 15
    manager.release([0, 1, 2])  # 4 … 9 and 1 … 3 are cached, 10 … 15 held
    manager.pins.pin("first", manager.request(range(12)))
    manager.tables.take_dirty()
    answer = shrink(manager, 11)
    assert isinstance(answer, Shrink)
    # Held beyond 10: 11 … 15, into the blocks that go first: the second request's from its tail, then the third's.
    assert answer.moves == tuple(
        Copy(group=0, source=11 + i, target=t) for i, t in enumerate((6, 5, 4, 9, 8))
    )
    assert manager.block_ids(3)[0] == [10, 11, 12]
    answer.commit()
    assert manager.block_ids(3)[0] == [10, 6, 5]
    assert manager.block_ids(4)[0] == [4, 9, 8]
    assert manager.pool.num_free == 1
    # The first request is pinned; of the third only its first block, 7, was not moved into.
    assert [found(manager, range(start, start + 13)) for start in range(0, 100, 20)] == [12, 0, 4, 12, 12]
    changed = {
        (int(s), int(a)) for d in manager.tables.take_dirty() for s, a in zip(d.slots, d.starts, strict=True)
    }
    assert changed == {(3, 1), (3, 2), (4, 0), (4, 1), (4, 2)}


def test_a_pool_does_not_shrink_below_what_is_held() -> None:
    manager = manager_of(FULL)
    run(manager, range(40))
    assert shrink(manager, 8) == Refused(missing=3, needed={"g0": 3})
    with pytest.raises(BlockError, match="must be 1 to 19"):
        shrink(manager, 20)
    assert isinstance(shrink(manager, 11), Shrink)


def test_stale_moves_are_not_committed() -> None:
    manager = manager_of(FULL)
    run(manager, range(60, 100))
    run(manager, range(12))
    manager.release([0])
    answer = shrink(manager, 10)
    assert isinstance(answer, Shrink)
    manager.append([1], [[5]])
    manager.step([1])
    with pytest.raises(BlockError, match="call shrink again"):
        answer.commit()
    manager.fork(1)
    with pytest.raises(BlockError, match="take_copies"):
        shrink(manager, 10)


def test_slabs_move_as_wholes() -> None:
    manager = manager_of(FULL, Window(block=4, window=5), cuts=(2, 3), num_blocks=12)
    run(manager, range(16))  # 4 + 4 blocks: 2 slabs each
    run(manager, range(100, 116))
    manager.release([0])
    held = manager.pool.num_held
    answer = shrink(manager, 7)
    assert isinstance(answer, Shrink)
    assert answer.moves
    cuts = (2, 3)
    for move in answer.moves:
        k = cuts[move.group]
        assert move.source % k == move.target % k
        assert move.source // k >= 7 > move.target // k
    answer.commit()
    assert (manager.pool.num_held, manager.config.num_blocks) == (held, 7)
    assert found(manager, range(100, 117)) == 16
    manager.append([1], [[5]])
    assert manager.step([1]).served
