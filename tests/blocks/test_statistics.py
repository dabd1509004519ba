"""Statistics and refusals, on pools small enough to count by hand."""

import json

import numpy as np
import pytest

from kvframe.blocks import (
    Admission,
    BlockConfig,
    BlockError,
    Deferred,
    GroupBlocks,
    KVCacheManager,
    Refused,
    Served,
)
from kvframe.lifetime import Lifetime
from tests.blocks.lifetimes import States, Window


def manager_of(*groups, num_blocks=11, max_model_len=64, **limits):
    config = BlockConfig(groups=groups, num_blocks=num_blocks, max_model_len=max_model_len, **limits)
    return KVCacheManager(config)


def full(name="full", block=4, **more):
    return GroupBlocks(name=name, lifetime=Lifetime(block=block), **more)


def admit(manager, tokens, chunk=None):
    request = manager.request(tokens)
    hit = manager.lookup(request).tokens
    (answer,) = manager.admit(
        [Admission(request=request, num_new_tokens=(chunk or len(tokens)) - hit)], busy=False
    )
    return answer


def test_a_fresh_manager_has_only_its_null_block():
    found = manager_of(full()).statistics()
    assert (found.pool_units, found.free_units, found.running) == (11, 10, 0)
    assert found.fragmentation == {
        "tokens": 0.0,
        "empty_tails": 0.0,
        "partly_used_slabs": 0.0,
        "null_block": 1 / 11,
        "free": 10 / 11,
    }
    assert found.hit_rate == 0.0


def test_usage_tails_and_tokens():
    # 10 tokens in blocks of 4: 3 blocks, 2 places empty.
    manager = manager_of(full())
    admit(manager, list(range(10)))
    found = manager.statistics()
    (group,) = found.groups
    assert (group.held_blocks, group.empty_tokens, group.cached_blocks) == (3, 2, 0)
    assert (found.running, found.running_tokens, found.free_units) == (1, 10, 7)
    assert found.usage == pytest.approx(4 / 11)
    assert found.fragmentation["tokens"] == pytest.approx(2.5 / 11)
    assert found.fragmentation["empty_tails"] == pytest.approx(0.5 / 11)
    assert sum(found.fragmentation.values()) == pytest.approx(1)


def test_shared_blocks_are_counted_once():
    manager = manager_of(full())
    admit(manager, [1] * 8 + [2])
    admit(manager, [1] * 8 + [3])
    (group,) = manager.statistics().groups
    assert group.held_blocks == 2 + 1 + 1
    assert group.empty_tokens == 3 + 3


def test_hits_and_evictions():
    manager = manager_of(full(), num_blocks=6)
    first = admit(manager, list(range(12)))  # 3 of 5 blocks, all full: keyed
    manager.release([first.slot])
    found = manager.statistics()
    assert (found.finished, found.groups[0].cached_blocks, found.asked_tokens) == (1, 3, 12)
    again = admit(manager, [*range(8), 90, 91])  # finds 2 blocks
    found = manager.statistics()
    assert (found.hit_tokens, found.asked_tokens) == (8, 22)
    assert (found.groups[0].hit_tokens, found.groups[0].limited_hits) == (8, 0)
    assert found.hit_rate == pytest.approx(8 / 22)
    manager.release([again.slot])
    # 2 shared blocks and the first request's third are cached. 20 tokens take all 5 blocks: 3 cached ones go.
    admit(manager, list(range(100, 120)))
    found = manager.statistics()
    assert (found.groups[0].evicted_blocks, found.groups[0].cached_blocks) == (3, 0)


def test_the_group_that_ends_a_hit_is_named():
    # A state is kept after 8 tokens of the first prompt (and of no shorter part), a document of 6 is shared: the full
    # group alone has 4 tokens, the states none.
    manager = manager_of(full(block=4), GroupBlocks(name="state", lifetime=States(block=4)), num_blocks=40)
    first = admit(manager, list(range(9)), chunk=8)
    assert isinstance(first, Served)
    manager.start_step()
    admit(manager, [0, 1, 2, 3, 50, 51, 52, 53, 54], chunk=8)
    found = manager.statistics()
    by_name = {group.name: group for group in found.groups}
    assert found.hit_tokens == 0
    assert (by_name["full"].hit_tokens, by_name["state"].hit_tokens) == (4, 0)
    assert (by_name["full"].limited_hits, by_name["state"].limited_hits) == (0, 1)


def test_requests_are_counted_as_they_come_and_go():
    manager = manager_of(full(), num_blocks=6, max_requests=2)
    a, b = admit(manager, [1] * 8), admit(manager, [2] * 8)
    assert admit(manager, [3] * 4) == Deferred(reason="no_slot")
    (waiting,) = manager.preempt([b.slot])
    assert isinstance(admit(manager, [4] * 16), Refused)
    (again,) = manager.admit([Admission(request=waiting, num_new_tokens=4)])
    refused = manager.step([a.slot, again.slot], np.array([9, 9], np.int32)).refused
    manager.release([a.slot])
    found = manager.statistics()
    assert (found.admitted, found.preempted, found.finished, found.running) == (3, 1, 1, 1)
    assert (found.deferred, found.refused, found.stuck) == ({"no_slot": 1}, 1, len(refused))
    assert len(refused) == 2


def test_partly_used_slabs():
    # Slabs of 3 blocks in group "a", of 1 in "b". Slab 0 keeps one of "a"'s blocks as the null block (ceil(3 / 1) = 3:
    # all of it, since "b"'s block is as large), so 3 slabs remain. 5 tokens take 2 blocks of "a" and 2 of "b".
    manager = manager_of(full("a", blocks_per_slab=3), full("b"), num_blocks=4, max_model_len=8)
    admit(manager, list(range(5)))
    found = manager.statistics()
    assert found.fragmentation["partly_used_slabs"] == pytest.approx((1 / 3) / 4)
    assert found.fragmentation["null_block"] == pytest.approx(1 / 4)
    assert found.fragmentation["tokens"] == pytest.approx((2 / 3 + 2) * (5 / 8) / 4)
    assert sum(found.fragmentation.values()) == pytest.approx(1)


def test_statistics_are_json():
    manager = manager_of(full(), GroupBlocks(name="window", lifetime=Window(block=4, window=8)))
    admit(manager, list(range(10)))
    values = json.loads(json.dumps(manager.statistics().as_dict()))
    assert [group["name"] for group in values["groups"]] == ["full", "window"]


def test_without_prefix_caching_there_are_no_hits_to_report():
    manager = manager_of(full(), prefix_caching=False)
    admit(manager, list(range(10)))
    (group,) = manager.statistics().groups
    assert (group.hit_tokens, group.hit_rate, group.cached_blocks) == (None, None, 0)


# --- refusals ---


def test_a_refusal_names_needs_holders_and_victims():
    # 10 blocks: slots 0 and 1 hold 2 and 6, 2 are free. A prompt of 20 tokens needs 5, so 3 lack: slot 1 has enough.
    manager = manager_of(full())
    admit(manager, [1] * 8)
    admit(manager, [2] * 24)
    asked = Admission(request=manager.request(list(range(100, 120))), num_new_tokens=20)
    why = manager.explain_refusal(asked)
    assert (why.missing, why.free_units, why.reason) == (3, 2, "pool")
    assert (why.groups["full"].needed, why.groups["full"].available) == (5, 2)
    assert [(holder.slot, holder.blocks, holder.frees) for holder in why.holders] == [
        (1, {"full": 6}, 6),
        (0, {"full": 2}, 2),
    ]
    assert why.preempt == (1,)
    assert "5 of full" in why.text
    assert "Preempting slots 1 " in why.text
    assert manager.num_free == 2  # asking takes nothing


def test_shared_blocks_are_freed_only_when_all_holders_go():
    manager = manager_of(full())
    admit(manager, [1] * 16)
    admit(manager, [1] * 16 + [2])  # shares 4 blocks, holds 1 of its own
    asked = Admission(request=manager.request(list(range(100, 132))), num_new_tokens=32)
    why = manager.explain_refusal(asked)
    assert why.missing == 8 - 5
    assert [(holder.slot, holder.frees) for holder in why.holders] == [(1, 1), (0, 0)]
    assert why.preempt == (1, 0)


def test_a_request_that_never_fits_says_so():
    manager = manager_of(full(), num_blocks=4)
    why = manager.explain_refusal(Admission(request=manager.request([1] * 16), num_new_tokens=16))
    assert (why.missing, why.preempt) == (1, None)
    assert "larger pool" in why.text


def test_what_fits_needs_nobody_to_leave():
    manager = manager_of(full())
    why = manager.explain_refusal(Admission(request=manager.request([1] * 16), num_new_tokens=16))
    assert (why.missing, why.preempt, why.text) == (0, (), "It fits.")


def test_cached_blocks_that_the_request_finds_are_not_free_for_it():
    # 5 blocks; a released prompt of 12 leaves 3 cached. Asking for 12 + 12 tokens finds 3 and needs 3 more: 1 lacks.
    manager = manager_of(full(), num_blocks=6)
    manager.release([admit(manager, [1] * 12).slot])
    request = manager.request([1] * 12 + [2] * 12)
    why = manager.explain_refusal(Admission(request=request, num_new_tokens=12))
    assert (why.missing, why.free_units, why.groups["full"].needed) == (1, 5, 3)


def test_a_running_request_that_cannot_grow():
    manager = manager_of(full(), num_blocks=6)
    admit(manager, [1] * 8)
    admit(manager, [2] * 12)
    why = manager.explain_refusal(0, 5)
    assert (why.missing, why.groups["full"].needed, why.preempt) == (2, 2, (1,))
    with pytest.raises(BlockError, match="holds no running request"):
        manager.explain_refusal(7)


def test_the_watermark_is_part_of_the_answer():
    manager = manager_of(full(), watermark=0.2)  # int(0.2 * 11) = 2 blocks stay free while something runs
    asked = Admission(request=manager.request([1] * 36), num_new_tokens=36)
    assert manager.explain_refusal(asked, busy=False).missing == 0
    why = manager.explain_refusal(asked)
    assert (why.missing, why.watermark_units) == (1, 2)
    assert "2 of which the watermark keeps" in why.text


def test_slabs_are_freed_as_a_whole():
    # Slabs of 2 blocks in "a", of 1 in "b"; slab 0 is the null block's. Requests of 4 tokens take a block of each.
    manager = manager_of(full("a", blocks_per_slab=2), full("b"), num_blocks=4, max_model_len=16)
    admit(manager, [1] * 4)
    admit(manager, [2] * 4)  # both blocks of "a" lie in one slab; "b" has two slabs
    why = manager.explain_refusal(Admission(request=manager.request([3] * 4), num_new_tokens=4))
    assert why.missing == 2  # a slab for "a" and one for "b"
    assert {holder.slot: holder.frees for holder in why.holders} == {0: 1, 1: 1}
    assert why.preempt == (1, 0)  # one frees a slab of "b" only
