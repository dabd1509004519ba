"""The block manager's promises one by one, with the numbers of the shared documents beside them."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvframe.blocks.stepping
from kvframe.blocks import (
    Admission,
    BlockConfig,
    BlockError,
    BlockRequest,
    Copy,
    Deferred,
    EvictionPolicy,
    ExtraKeys,
    GroupBlocks,
    KVCacheManager,
    Refused,
    Served,
    chunk_stops,
)
from kvframe.blocks.publish import prompt_checkpoint, replay_boundaries
from kvframe.blocks.queues import LruQueue
from kvframe.blocks.stepping import Stepper
from kvframe.blocks.wheel import TimingWheel
from kvframe.errors import SpecError
from kvframe.events import BlockRemoved, BlockStored, Recorder
from kvframe.lifetime import Lifetime
from tests.blocks.lifetimes import Chunks, States, Window
from tests.blocks.world import World, random_config

CASES = Path(__file__).parent.parent / "data" / "cases"
FULL = Lifetime(block=16)


def manager_of(*rules: Lifetime, **limits: Any) -> KVCacheManager:
    groups = [GroupBlocks(name=f"g{g}", lifetime=rule) for g, rule in enumerate(rules)]
    return KVCacheManager(BlockConfig(groups=groups, **{"num_blocks": 64, "max_model_len": 512, **limits}))


def admit(manager: KVCacheManager, request: BlockRequest, tokens: int | None = None, **more: Any) -> Any:
    hit = manager.lookup(request)
    new = request.num_tokens - hit.tokens if tokens is None else tokens
    (answer,) = manager.admit([Admission(request=request, num_new_tokens=new, hit=hit, **more)])
    return answer


# --- hits ---


def test_o17_a_hit_is_valid_in_every_group_and_one_below_the_prompt() -> None:
    case = json.loads((CASES / "o17-prefix-hit-window.json").read_text())
    size, expected = case["input"]["block_tokens"], case["expected"]
    full, window = case["input"]["groups"]
    config = BlockConfig(
        groups=[
            GroupBlocks(name="full_attention", lifetime=Lifetime(block=size)),
            GroupBlocks(name="sliding_attention", lifetime=Window(block=size, window=window["window"])),
        ],
        num_blocks=64,
        max_model_len=512,
    )
    manager = KVCacheManager(config)
    request = manager.request(range(case["input"]["prompt_tokens"]))
    assert manager.cache is not None
    for g, group in enumerate((full, window)):
        for entry in group["cached_block_indices"]:
            digest = request.chain.view(size)[entry].tobytes()
            manager.cache.add(g, 1 + 20 * g + entry, digest, size, size)
    hit, why = manager.lookup(request), manager.explain_hit(request)
    assert hit.tokens == expected["hit_tokens"] == 4 * size
    assert hit.blocks[1] == [0, 22, 23, 24]  # ceil((40 - 1) / 16) = 3 blocks: entries 1, 2, 3
    assert why.limited_by == expected["limited_by"]
    assert why.by_group == {
        "full_attention": expected["cap_tokens"],
        "sliding_attention": expected["hit_tokens"],
    }
    assert why.entry == 4  # the next longer hit, of 80 tokens, needs 2, 3, 4
    assert "entry 4 of group sliding_attention" in why.rule


def test_o18_a_key_is_removed_with_its_last_copy() -> None:
    case = json.loads((CASES / "o18-duplicate-block-event.json").read_text())
    recorder = Recorder()
    groups = [GroupBlocks(name="g", lifetime=FULL)]
    manager = KVCacheManager(BlockConfig(groups=groups, num_blocks=16, max_model_len=64), watcher=recorder)
    cache = manager.cache
    assert cache is not None
    key = b"H" * 32
    steps: list[Any] = [
        lambda: cache.add(0, 3, key, 16, 16),
        lambda: cache.add(0, 9, key, 16, 16),
        lambda: cache.drop(0, 3),
        lambda: cache.drop(0, 9),
    ]
    seen = []
    names = {BlockStored: "stored", BlockRemoved: "removed"}
    for number, step in enumerate(steps):
        step()
        batch = recorder.publish()
        seen.append([] if batch is None else [names[type(event)] for event in batch.events])
        if number == 2:
            assert cache.find(0, key) == 9
    assert seen == [
        [word.split()[0]] if not word.startswith("(") else [] for word in case["expected"]["events"]
    ]


def test_the_cap_comes_before_the_alignment() -> None:
    # log.md row 51: 64 tokens, block 16: at most 63, so 48.
    manager = manager_of(FULL)
    admit(manager, manager.request(range(64)))
    assert manager.lookup(manager.request(range(64))).tokens == 48
    assert manager.explain_hit(manager.request(range(64))).limited_by is None


def test_the_draft_drop_needs_one_block_more_of_a_window() -> None:
    # log.md row 52: window 4, block 2: ceil((4 - 1) / 2) = 2 blocks, with one dropped 3.
    manager = manager_of(Window(block=2, window=4), draft_drop=True, retention_interval=0)
    prompt = list(range(12))
    admit(manager, manager.request(prompt))
    # Boundaries of 12 tokens, unit 2: max(11//2*2 - 2, 0) = 8 and max(12//2*2 - 2, 0) = 10. At 8 entries 2, 3 and the
    # dropped 4; at 10 entries 3, 4 and the dropped 5.
    assert manager.num_keys == 4
    hit = manager.lookup(manager.request(prompt))
    assert (hit.tokens, hit.blocks[0][:3]) == (10, [0, 0, 0])


@pytest.mark.parametrize("tokens", [39, 40, 41, 55, 56, 57])
def test_windows_around_their_edge(tokens: int) -> None:
    # log.md row 67: window - 1, window, window + 1. dead(n) = max(0, n - 40 + 1) // 16.
    manager = manager_of(Window(block=16, window=40))
    answer = admit(manager, manager.request(range(tokens)))
    manager.append([answer.slot], [[7]])
    manager.step(1)
    table = manager.block_ids(answer.slot)[0]
    dead = max(0, tokens - 39) // 16
    assert [block == 0 for block in table] == [entry < dead for entry in range(-(-(tokens + 1) // 16))]


def test_salts_never_share_a_block() -> None:
    manager = manager_of(FULL, Window(block=16, window=40))
    prompt, slots = list(range(100)), {}
    for salt in (None, "a", "b", "ab"):
        request = manager.request(prompt, extra=ExtraKeys(salt=salt))
        assert manager.lookup(request).tokens == 0
        slots[salt] = admit(manager, request).slot
    tables = [{b for row in manager.block_ids(slot) for b in row if b} for slot in slots.values()]
    assert sum(map(len, tables)) == len(set.union(*tables))
    # The same salt hits, another does not, whatever is tried in its place.
    for salt in slots:
        assert manager.lookup(manager.request(prompt, extra=ExtraKeys(salt=salt))).tokens == 96
    for other in ("", "A", "a ", "b\0", "cache_salt"):
        assert manager.lookup(manager.request(prompt, extra=ExtraKeys(salt=other))).tokens == 0


def test_a_group_that_forbids_hits_is_named() -> None:
    manager = manager_of(FULL, Lifetime(block=16, source="encoder", hits="never"), max_encoder_tokens=32)
    admit(manager, manager.request(range(64)), encoder_tokens=32)
    why = manager.explain_hit(manager.request(range(64)))
    assert (why.hit_tokens, why.limited_by) == (0, "g1")


def test_a_state_of_this_step_is_adopted_in_the_next() -> None:
    manager = manager_of(Lifetime(block=8), States(block=8))
    prompt = list(range(17))
    admit(manager, manager.request(prompt), 16)
    request = manager.request(prompt)
    assert admit(manager, request) == Deferred(reason="same_step_state")
    manager.start_step()
    answer = admit(manager, request)
    assert isinstance(answer, Served)
    assert answer.hit_tokens == 16


# --- admission and steps ---


def test_a_refused_request_gets_nothing_and_is_told_what_is_missing() -> None:
    manager = manager_of(FULL, num_blocks=6)
    first = admit(manager, manager.request(range(40)))  # 3 of 5 blocks
    answer = admit(manager, manager.request(range(1000, 1060)))
    assert answer == Refused(missing=2, needed={"g0": 4})
    assert manager.num_free == 2
    manager.append([first.slot], [list(range(60))])
    assert manager.step(1, 60).refused == (Refused(missing=2, needed={"g0": 4}, slot=0),)
    assert manager.ledger.computed[0] == 40
    assert manager.num_free == 2


def test_step_serves_in_order_and_says_who_went_without() -> None:
    manager = manager_of(FULL, num_blocks=6, max_requests=4)
    for start in (0, 100, 200):
        admit(manager, manager.request(range(start, start + 16)))
    manager.append(3, np.array([1, 2, 3], np.int32))
    # 2 free blocks for three rows, in the order of the call.
    result = manager.step([2, 0, 1], np.array([1, 1, 1], np.int32))
    assert [answer.slot for answer in result.refused] == [1]
    assert manager.ledger.computed[:3].tolist() == [17, 16, 17]


def test_admission_counts_what_a_window_gives_back() -> None:
    # contract 6.3: w = 6, b = 4, 60 tokens, 6 usable blocks; with 8 tokens in flight the bound is 5 blocks or fewer.
    window = Window(block=4, window=6)
    for in_flight, served in ((None, False), (8, True)):
        manager = manager_of(window, num_blocks=7, max_in_flight_tokens=in_flight)
        answer = admit(manager, manager.request(range(60)), 8, whole_must_fit=True)
        assert isinstance(answer, Served) is served


def test_drafts_are_not_keyed_and_roll_back() -> None:
    # contract 6.2: 7 tokens + 3 looked ahead, b = 4: 3 blocks, one keyed.
    manager = manager_of(Lifetime(block=4))
    slot = admit(manager, manager.request(range(7)), lookahead=3).slot
    assert len(manager.block_ids(slot)[0]) == 3
    assert manager.num_keys == 1
    manager.append([slot], [[9]])
    manager.step([slot], 4, lookahead=3)  # one known token and three drafts
    assert (manager.ledger.computed[slot], manager.num_keys) == (11, 2)
    manager.append([slot], [[5, 6]])  # one draft was right, and a token more is known
    manager.commit([slot], [9])
    assert (manager.ledger.computed[slot], manager.num_keys) == (9, 2)
    with pytest.raises(BlockError, match="has 9 tokens computed"):
        manager.commit([slot], [10])


def test_what_is_in_flight_keeps_its_blocks() -> None:
    manager = manager_of(Window(block=4, window=4))
    slot = admit(manager, manager.request(range(8))).slot
    manager.append([slot], [[1]])
    manager.step([slot], 1, in_flight=4)  # settled 4: max(0, 4 - 3) // 4 = 0 entries are dead
    assert 0 not in manager.block_ids(slot)[0]
    manager.append([slot], [[1]])
    manager.step([slot], 1, in_flight=0)  # settled 9: 6 // 4 = 1
    assert manager.block_ids(slot)[0].count(0) == 1


def test_preempted_requests_resume_with_their_tokens() -> None:
    manager = manager_of(FULL)
    slot = admit(manager, manager.request(range(40))).slot
    manager.append([slot], [[1, 2, 3]])
    (request,) = manager.preempt([slot])
    assert (request.num_tokens, manager.num_free) == (43, 63)
    assert admit(manager, request).hit_tokens == 32
    with pytest.raises(BlockError, match="holds no running request"):
        manager.release([7])


@pytest.mark.parametrize("tokens", [41, 1001])  # loops, numpy
@pytest.mark.parametrize("third", [0, 9000])  # shares blocks with the first request, or not
@pytest.mark.parametrize("caching", [False, True])
def test_a_batch_is_released_as_its_requests_would_be_one_by_one(
    tokens: int, third: int, caching: bool
) -> None:
    def left(batches: list[list[int]]) -> tuple[list[int], int]:
        manager = manager_of(FULL, num_blocks=400, max_model_len=2048, prefix_caching=caching)
        for first in (0, 5000, third):
            admit(manager, manager.request(range(first, first + tokens)))
        for batch in batches:
            manager.release(batch)
        return manager.pool.in_order(), manager.num_keys

    assert left([[0, 1, 2]]) == left([[0], [1], [2]])
    assert left([[1, 2, 0]]) == left([[1], [2], [0]])
    manager = manager_of(FULL)
    slot = admit(manager, manager.request(range(8))).slot
    with pytest.raises(BlockError, match="names a slot twice"):
        manager.release([slot, slot])
    assert manager.pool.num_held


def test_a_request_beyond_the_longest_is_an_error_and_changes_nothing() -> None:
    manager = manager_of(FULL, max_model_len=32)
    slot = admit(manager, manager.request(range(32))).slot
    manager.append([slot], [[1]])
    with pytest.raises(BlockError, match="beyond the longest of 32 tokens"):
        manager.step(1)
    assert manager.ledger.computed[slot] == 32


def test_reset_waits_until_no_block_is_held() -> None:
    manager = manager_of(FULL)
    slot = admit(manager, manager.request(range(40))).slot
    assert not manager.reset()
    manager.release([slot])
    assert manager.reset()
    assert manager.lookup(manager.request(range(40))).tokens == 0


# --- copies ---


def test_a_hit_inside_a_block_is_copied() -> None:
    # contract 6.5: b = 8, h = 4, a prompt of 14: hit 12, blocks [1, 3] and [0, 5]; after admission copies of 3 and 5.
    manager = manager_of(Lifetime(block=8), States(block=8), hash_unit=4)
    prompt = list(range(14))
    slot = admit(manager, manager.request(prompt), 8).slot
    manager.step([slot], 4)
    manager.step([slot], 2)
    manager.take_copies()
    manager.start_step()
    request = manager.request(prompt)
    hit = manager.lookup(request)
    assert hit.tokens == 12
    answer = admit(manager, request)
    tables = manager.block_ids(answer.slot)
    copies = manager.take_copies()
    assert [(copy.source, copy.target) for copy in copies] == [
        (hit.blocks[0][1], tables[0][1]),
        (hit.blocks[1][1], tables[1][1]),
    ]


def test_a_fork_shares_whole_entries_and_copies_the_rest() -> None:
    manager = manager_of(Lifetime(block=8))
    slot = admit(manager, manager.request(range(20))).slot
    twin = manager.fork(slot)
    assert isinstance(twin, Served)
    (left,), (right,) = manager.block_ids(slot), manager.block_ids(twin.slot)
    assert left[:2] == right[:2]
    assert left[2] != right[2]
    assert manager.take_copies() == [Copy(group=0, source=left[2], target=right[2])]
    manager.append([slot, twin.slot], [[1, 2, 3, 4], [1, 2, 9, 9]])
    manager.step([slot, twin.slot], 4)
    assert manager.num_keys == 4  # two shared entries, and one each
    manager.release([slot, twin.slot])
    assert manager.num_free == 63


# --- eviction ---


def test_blocks_are_evicted_tail_first_and_least_recently_used() -> None:
    # contract 6.1: 10 tokens, b = 4, 20 blocks: after the release the queue is 3, 4 … 19, 2, 1.
    manager = manager_of(Lifetime(block=4), num_blocks=20)
    manager.release([admit(manager, manager.request(range(10))).slot])
    assert manager.pool.in_order() == [3, *range(4, 20), 2, 1]


def test_the_frequency_policy_keeps_what_was_found_again() -> None:
    found = {}
    for policy in ("lru", "frequency"):
        manager = manager_of(Lifetime(block=4), num_blocks=14, eviction=policy)
        document = list(range(16))
        for _ in range(2):
            manager.release([admit(manager, manager.request([*document, 99])).slot])
        for flood in range(1, 6):
            manager.release([admit(manager, manager.request(range(1000 * flood, 1000 * flood + 32))).slot])
        found[policy] = manager.lookup(manager.request([*document, 98])).tokens
    assert found == {"lru": 0, "frequency": 16}


def test_a_plugins_policy_is_used_and_names_have_one_owner() -> None:
    own = EvictionPolicy(name="mine", make=LruQueue)
    config = BlockConfig(
        groups=[GroupBlocks(name="g", lifetime=FULL)], num_blocks=8, max_model_len=64, eviction="mine"
    )
    assert KVCacheManager(config, policies={"mine": own}).num_free == 7
    with pytest.raises(SpecError, match="must be one of frequency, lru"):
        KVCacheManager(config)
    with pytest.raises(SpecError, match="kvframe's own policies"):
        KVCacheManager(config, policies={"lru": own})
    with pytest.raises(SpecError, match="did you mean 'lru'"):
        KVCacheManager(attrs.evolve(config, eviction="lur"))


@pytest.mark.parametrize("rows", [3, 50])
def test_groups_with_equal_blocks_grow_together(rows: int) -> None:
    small = Lifetime(block=4)
    lifetimes = {"a": small, "w": Window(block=4, window=5), "wide": Lifetime(block=8), "b": small}
    config = BlockConfig(
        groups=[GroupBlocks(name=name, lifetime=lifetime) for name, lifetime in lifetimes.items()],
        num_blocks=1000,
        max_model_len=32,
        max_requests=rows,
        prefix_caching=False,
    )
    manager = KVCacheManager(config)
    for _ in range(rows):
        admit(manager, manager.request([]), 4)
    # The first free id comes first: a row's four tables take one block each, group by group.
    assert [manager.block_ids(1)[g][0] for g in range(4)] == [5, 6, 7, 8]
    for _ in range(4):
        assert manager.step(rows, 1).served
    # The fifth token takes a block of each row for a, then w, then b; "wide" has room for eight.
    first = 4 * rows + 1
    for row in range(rows):
        tables = manager.block_ids(row)
        assert [len(table) for table in tables] == [2, 2, 1, 2]
        assert [tables[g][1] for g in (0, 1, 3)] == [first + row, first + rows + row, first + 2 * rows + row]
    # The ninth takes one of each group: w gives its first back, whose window is the tokens 5 to 9.
    assert manager.step(rows, 1).served
    assert [len(table) for table in manager.block_ids(0)] == [3, 3, 2, 3]
    assert manager.block_ids(0)[1][0] == 0
    assert manager.num_free == 999 - 4 * rows - 3 * rows - 4 * rows + rows


def test_slabs_serve_one_group_at_a_time() -> None:
    groups = [
        GroupBlocks(name="wide", lifetime=Lifetime(block=16), blocks_per_slab=2),
        GroupBlocks(name="narrow", lifetime=Window(block=16, window=17), blocks_per_slab=6),
    ]
    # 5 slabs: slab 0 has the null blocks (2 of 6: as wide as one of 2), its other 3 narrow blocks go to that group.
    manager = KVCacheManager(BlockConfig(groups=groups, num_blocks=5, max_model_len=512))
    answer = admit(manager, manager.request(range(64)))  # 4 of each
    wide, narrow = manager.block_ids(answer.slot)
    assert {block // 2 for block in wide}.isdisjoint({block // 6 for block in narrow} - {0})
    assert manager.num_free == 5 - 1 - 2 - 1
    # One free slab: 2 wide blocks or 6 narrow ones, and 5 narrow ones in the slab that is theirs.
    assert [manager.pool.free_for(g) for g in (0, 1)] == [2, 5 + 6]
    assert isinstance(admit(manager, manager.request(range(1000, 1048))), Refused)  # 3 wide blocks
    assert isinstance(admit(manager, manager.request(range(1000, 1032))), Served)


# --- rules as functions ---


def test_prompt_checkpoints_and_boundaries() -> None:
    # contract 3.8 and 6.9, run on the reference.
    assert [prompt_checkpoint(n, 16, draft) for n, draft in ((100, False), (96, False), (97, False))] == [
        96,
        80,
        96,
    ]
    assert prompt_checkpoint(97, 16, False, 3) == 80
    assert [prompt_checkpoint(n, 16, True) for n in (96, 97, 20)] == [80, 80, 0]
    assert replay_boundaries(20, 4, False) == (19,)
    assert [replay_boundaries(n, 4, True) for n in (20, 21, 3)] == [(12, 16), (16,), (0,)]


@given(st.integers(0, 200), st.integers(1, 200), st.integers(1, 200), st.sampled_from([4, 8]), st.booleans())
def test_chunks_end_where_states_are_kept(
    start: int, length: int, prompt: int, unit: int, draft: bool
) -> None:
    config = BlockConfig(
        groups=[
            GroupBlocks(name="f", lifetime=Lifetime(block=8)),
            GroupBlocks(name="s", lifetime=States(block=8)),
        ],
        num_blocks=8,
        max_model_len=512,
        hash_unit=unit,
        draft_drop=draft,
    )
    prompt = max(prompt, start + 1)
    stop = min(start + length, prompt)
    end = chunk_stops(config, start, stop, prompt)
    assert start < end <= stop
    if end < prompt and end % 8:
        # Only where not even one boundary was within reach, or at the prompt's checkpoint inside a block.
        inside = prompt_checkpoint(prompt, unit, draft)
        assert end == inside or end // 8 == start // 8
    # contract 9.1: never past the last boundary that can be cached.
    assert not start < prompt // 8 * 8 - (8 if draft else 0) < end


# --- the two ways to do many rows are one ---


def story(seed: int) -> list[Any]:
    """What a random world looks like after each of some steps."""
    choices = random.Random(seed)
    while True:
        try:
            config = random_config(choices)
            break
        except SpecError:
            continue
    config = attrs.evolve(config, max_requests=8, num_blocks=60)
    world = World(config, choices)
    seen = []
    for number in range(60):
        (world.admit if number % 5 == 0 else world.step)()
        world.check()
        seen.append(world.picture())
    return seen


@pytest.mark.parametrize("few", [0, 3, 10**6])
@pytest.mark.parametrize("seed", range(40))
def test_loops_and_numpy_do_the_same(few: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(kvframe.blocks.stepping, "FEW", few)
        other = story(seed)
    assert other == story(seed)


@pytest.mark.parametrize("span", [4, 8, 64])
@pytest.mark.parametrize("seed", range(40))
def test_looking_ahead_wakes_the_rows_that_comparing_wakes(
    span: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "_look_ahead", lambda self, count, in_flight: None)
        compared = story(seed)
    monkeypatch.setattr(kvframe.blocks.stepping, "TimingWheel", partial(TimingWheel, span=span))
    assert story(seed) == compared


def busy_days(seed: int, late: bool) -> list[Any]:
    """A batch of some hundred rows that decodes, with comings and goings in some steps.

    With `late`, a step's tokens are told only when the next step has been asked for, so that hashes come a step late.
    """
    choices = random.Random(seed)
    more = [
        (Window(block=16, window=choices.choice([20, 64])), Chunks(block=16, chunk=64)),
        (States(block=32), Window(block=16, window=20), States(block=16, spare=seed // 4)),
        (Lifetime(block=64), Lifetime(block=32), Window(block=16, window=choices.choice([20, 64]))),
    ]
    manager = manager_of(
        FULL,
        *more[seed % 3],
        num_blocks=4000,
        max_model_len=240,
        max_requests=160,
    )
    running: set[int] = set()
    seen = []
    mirror = [table.copy() for table in manager.tables.tables]
    for _ in range(70):
        for _ in range(choices.choice([0, 0, 0, 1, 3, 60])):
            tokens = [choices.randrange(3) for _ in range(choices.choice([1, 16, 50, 200]))]
            answer = admit(manager, manager.request(tokens))
            if isinstance(answer, Served):
                running.add(answer.slot)
                if not late:
                    manager.append([answer.slot], [[choices.randrange(3)]])
        over = [
            row
            for row in sorted(running)
            if manager.ledger.computed_at[row] >= 239 or choices.random() < 0.003
        ]
        manager.release(over)
        running -= set(over)
        rows = max(running, default=-1) + 1
        assert manager.step(rows).served
        manager.append(rows, np.array([choices.randrange(3) for _ in range(rows)], np.int32))
        if choices.random() < 0.4:  # an engine copies what changed, and not after every step
            for group, slots, starts, stops in manager.tables.take_dirty():
                for slot, start, stop in zip(slots.tolist(), starts.tolist(), stops.tolist(), strict=True):
                    mirror[group][slot, start:stop] = manager.tables.tables[group][slot, start:stop]
            for table, copied in zip(manager.tables.tables, mirror, strict=True):
                assert (table == copied).all()
        blocks = [manager.block_ids(row) for row in sorted(running)]
        seen.append((blocks, manager.num_free, manager.num_keys))
    return seen


@pytest.mark.parametrize("few", [0, 40, 10**6])
@pytest.mark.parametrize("seed", range(9))
@pytest.mark.parametrize("late", [False, True])
def test_a_wheel_bears_comings_and_goings(
    few: int, seed: int, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "_look_ahead", lambda self, count, in_flight: None)
        compared = busy_days(seed, late)
    monkeypatch.setattr(kvframe.blocks.stepping, "FEW", few)
    assert busy_days(seed, late) == compared


def test_a_block_that_nobody_holds_is_refused_and_no_other_is_lost() -> None:
    manager = manager_of(FULL)
    slot = admit(manager, manager.request(range(40))).slot
    held, free = manager.block_ids(slot)[0], manager.num_free
    with pytest.raises(BlockError, match="nobody holds it"):
        manager.pool.give_back(0, [held[0], held[1], held[0]])
    assert (manager.num_free, manager.pool.refs[held].tolist()) == (free, [1] * len(held))
    manager.release([slot])
    assert manager.num_free == free + len(held)
