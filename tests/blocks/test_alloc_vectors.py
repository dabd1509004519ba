"""The reference's block-manager traces, step by step: one operation is one call."""

from __future__ import annotations

from typing import Any

import pytest

from kvframe.blocks import Admission, BlockError, KVCacheManager, Served
from kvframe.errors import SpecError
from tests import vectors
from tests.blocks.replay import config_of, replay

CASES = vectors.load("alloc")
TRACES = [case for case in CASES if "results" in case["expect"] and "/edge/" not in case["id"]]
EDGES = {case["id"].rsplit("/", 1)[1]: case for case in CASES if "/edge/" in case["id"]}


def named(cases: list[dict[str, Any]]) -> list[Any]:
    return [pytest.param(case, id=case["id"]) for case in cases]


@pytest.mark.parametrize("case", named(TRACES))
def test_trace(case: dict[str, Any]) -> None:
    fed = replay(case)
    # Only where the reference is limited or wrong is its hit fed in; of its rules the draft drop and these quirks are.
    allowed = case["input"]["setup"].get("use_draft_drop") or case.get("quirk")
    assert not fed or allowed


def refused_setup(case: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        config_of(case)


def run_edge(case: dict[str, Any]) -> tuple[KVCacheManager, list[Any]]:
    """An edge case's operations, each lookup with its admission."""
    manager, answers = KVCacheManager(config_of(case)), []
    prompt = list(range(21))  # every edge trace's prompt
    for new in (21, 1):
        request = manager.request(prompt)
        hit = manager.lookup(request)
        answers.append(hit.tokens)
        (answer,) = manager.admit([Admission(request=request, num_new_tokens=min(new, 21 - hit.tokens))])
        answers.append(isinstance(answer, Served))
    return manager, answers


def test_edge_setups_without_a_keyed_group_are_refused() -> None:
    for name in ("only_ring_groups", "mamba_cached_not_align"):
        if name in EDGES:
            case = EDGES[name]
            refused_setup(case if name == "only_ring_groups" else case | {"quirk": []})


def test_edge_intervals_and_units_must_divide() -> None:
    for name in ("ret_not_multiple", "unit_not_divisor", "zero_blocks"):
        if name in EDGES:
            refused_setup(EDGES[name])


def test_edge_a_pool_of_one_block_refuses_everything() -> None:
    if "one_block" in EDGES:
        manager, answers = run_edge(EDGES["one_block"])
        assert answers == [0, False, 0, False]
        assert manager.num_free == 0


def test_edge_cross_attention_forbids_hits_but_not_caching() -> None:
    # The reference raises NotImplementedError at the lookup; kvframe's answer is "no hit", and admission goes on.
    if "cross_cached" in EDGES:
        _, answers = run_edge(EDGES["cross_cached"])
        assert answers == [0, True, 0, True]


def test_edge_a_unit_finer_than_the_blocks_gives_hits_on_the_common_multiple() -> None:
    # Blocks of 8 and 4, unit 4: hits are multiples of 8; 21 tokens: at most 16.
    if "compressed_unit" in EDGES:
        _, answers = run_edge(EDGES["compressed_unit"])
        assert answers == [0, True, 16, True]


def test_a_call_for_nothing_is_an_error() -> None:
    # The reference raises ValueError when there is nothing new and nothing found.
    manager = KVCacheManager(config_of(TRACES[0])) if TRACES else None
    if manager is not None:
        with pytest.raises(BlockError, match="num_new_tokens"):
            manager.admit([Admission(request=manager.request([1, 2, 3]), num_new_tokens=0)])


def test_the_sink_family_is_a_dense_group() -> None:
    # The reference cannot build its manager; by its lifetime nothing dies and hits are found as in full attention.
    if "sink" in EDGES:
        manager = KVCacheManager(config_of(EDGES["sink"]))
        request = manager.request(range(21))
        manager.admit([Admission(request=request, num_new_tokens=21)])
        assert manager.lookup(manager.request(range(21))).tokens == 20
