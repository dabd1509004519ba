"""vLLM's scheduler on its own manager and on kvframe's, step by step: the same batches, hits, preemptions, tables."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from simulated import SHAPES, Engine, Workload, kv_cache_config, make_scheduler, vllm_config
from tiny_models import make_model
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

import kvframe_vllm
from kvframe.blocks.pool import BlockPool
from kvframe_vllm.scheduler import _managers_made_by

STEPS = 250
STOCK = {False: Scheduler, True: AsyncScheduler}
OURS = {False: kvframe_vllm.Scheduler, True: kvframe_vllm.AsyncScheduler}
EITHER = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
CACHING = pytest.mark.parametrize("caching", [False, True], ids=["plain", "caching"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> str:
    return str(make_model("llama", tmp_path_factory.mktemp("models")))


def only_the_manager(asynchronous: bool) -> Any:
    """vLLM's own scheduler with kvframe's manager: nothing is allocated ahead."""

    def make(**kwargs: Any) -> Any:
        with _managers_made_by(kvframe_vllm.KVCacheManager):
            return STOCK[asynchronous](**kwargs)

    return make


def engine(model: str, cls: Any, shape: str, blocks: int, *, asynchronous: bool, **more: Any) -> Engine:
    specs = SHAPES[shape]
    config = vllm_config(model, async_scheduling=asynchronous, **more)
    groups = kv_cache_config(specs, blocks, more.get("retention", 0))
    unit = min(spec.block_size for spec in specs)
    return Engine(make_scheduler(cls, config, groups), depth=int(asynchronous), unit=unit)


def play(stock: Engine, ours: Engine, seed: int) -> dict[str, int]:
    assert type(stock.manager).__name__ == "KVCacheManager"
    assert type(ours.manager).__name__ == "EngineManager"
    workload, seen = Workload(seed), {"preempted": 0, "hits": 0, "tokens": 0}
    for step in range(STEPS):
        for kind, *words in workload.events() if step < STEPS - 60 else ():
            for side in (stock, ours):
                getattr(side, kind)(*words)
        wanted, got = stock.step(), ours.step()
        assert got == wanted, f"step {step}"
        assert ours.state() == stock.state(), f"step {step}"
        seen["preempted"] += len(wanted["preempted"])
        seen["hits"] += sum(tokens for _, tokens in wanted["hits"])
        seen["tokens"] += sum(tokens for _, tokens in wanted["scheduled"])
    return seen


def scarce(shape: str) -> int:
    """A pool that is too small for all that want to run."""
    return 50 * len(SHAPES[shape])


@EITHER
@CACHING
@pytest.mark.parametrize("shape", SHAPES)
def test_only_the_manager_replaced(model: str, shape: str, caching: bool, asynchronous: bool) -> None:
    words: Any = {"shape": shape, "blocks": scarce(shape), "asynchronous": asynchronous, "caching": caching}
    stock = engine(model, STOCK[asynchronous], **words)
    ours = engine(model, only_the_manager(asynchronous), **words)
    seen = play(stock, ours, seed=len(shape))
    assert seen["tokens"] > 3000
    assert seen["hits"] > 0 or not caching


# Several groups allocate ahead in another order than request by request, which evicts other cached blocks
# (fewer, in most steps): hits then differ, and with them what runs. Without a cache nothing does.
AHEAD = [
    (shape, caching)
    for shape in SHAPES
    for caching in (False, True)
    if not caching or len(SHAPES[shape]) == 1
]


@EITHER
@pytest.mark.parametrize(("shape", "caching"), AHEAD)
def test_allocated_ahead(model: str, shape: str, caching: bool, asynchronous: bool) -> None:
    words: Any = {"shape": shape, "blocks": scarce(shape), "asynchronous": asynchronous, "caching": caching}
    stock = engine(model, STOCK[asynchronous], **words)
    ours = engine(model, OURS[asynchronous], **words)
    seen = play(stock, ours, seed=len(shape) + 1)
    assert seen["preempted"] > 0


@EITHER
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if len(SHAPES[shape]) > 1])
def test_allocated_ahead_with_a_cache(model: str, shape: str, asynchronous: bool) -> None:
    words: Any = {"shape": shape, "blocks": scarce(shape), "asynchronous": asynchronous}
    sides = [engine(model, cls[asynchronous], **words) for cls in (STOCK, OURS)]
    hits = []
    for side in sides:
        workload, found = Workload(seed=3), 0
        for step in range(STEPS):
            for kind, *words_of in workload.events() if step < STEPS - 100 else ():
                getattr(side, kind)(*words_of)
            found += sum(tokens for _, tokens in side.step()["hits"])
            written = written_blocks(side)
            assert len(written) == len(set(written)), f"step {step}: two requests write one block"
        side.drain()
        hits.append(found)
    assert hits[0] > 0
    assert hits[1] >= 0.8 * hits[0]


def written_blocks(side: Engine) -> list[int]:
    """The last block of every running request in every group: the one that it writes."""
    rows = (side.manager.get_block_ids(request.request_id) for request in side.scheduler.running)
    return [row[-1] for tables in rows for row in tables if row]


@pytest.mark.parametrize("retention", [None, 64])
def test_other_retention_intervals(model: str, retention: int | None) -> None:
    words: Any = {
        "shape": "gemma2",
        "blocks": scarce("gemma2"),
        "asynchronous": False,
        "retention": retention,
    }
    stock, ours = (engine(model, cls, **words) for cls in (STOCK[False], only_the_manager(False)))
    assert play(stock, ours, seed=5)["hits"] > 0


def test_priorities_and_a_watermark(model: str) -> None:
    words: Any = {
        "shape": "gemma2",
        "blocks": 110,
        "asynchronous": False,
        "policy": "priority",
        "watermark": 0.05,
    }
    stock, ours = (engine(model, cls, **words) for cls in (STOCK[False], only_the_manager(False)))
    assert play(stock, ours, seed=6)["preempted"] > 0


def test_a_block_handed_out_twice_is_seen(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The negative control of the comparison above.
    take, broken = BlockPool.take, False

    def twice(pool: BlockPool, group: int, count: int) -> list[int]:
        taken = take(pool, group, count)
        if not broken:
            return taken
        held = [block for block in range(1, pool.num_blocks) if pool.refs[block] and block not in taken]
        pool.refs[held[-1]] += count
        return held[-1:] * count

    monkeypatch.setattr(BlockPool, "take", twice)
    side = engine(model, OURS[False], "llama", 200, asynchronous=False)
    for number in range(4):
        side.add(f"r{number}", [number] * 40, 60)
    side.step()
    broken = True
    for _ in range(40):
        side.step()
    written = written_blocks(side)
    assert len(written) > len(set(written))
