"""What events say, to whom, and what a router can make of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvframe
from kvframe import hookimpl
from kvframe.blocks import (
    Admission,
    BlockConfig,
    ExtraKeys,
    GroupBlocks,
    KVCacheManager,
    MultiModalItem,
)
from kvframe.blocks.hashing import block_hash
from kvframe.errors import HookError
from kvframe.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventConfig,
    EventSinkError,
    PrefixIndex,
    Recorder,
    start,
)
from kvframe.lifetime import Lifetime
from kvframe.plugins import PluginHost
from tests.blocks.lifetimes import States, Window


def watched(*rules: Lifetime, sinks: Any = (), **limits: Any) -> tuple[KVCacheManager, Recorder]:
    recorder = Recorder(sinks)
    groups = [GroupBlocks(name=f"g{g}", lifetime=rule) for g, rule in enumerate(rules)]
    config = BlockConfig(groups=groups, **{"num_blocks": 64, "max_model_len": 512, **limits})
    return KVCacheManager(config, watcher=recorder), recorder


def run(manager: KVCacheManager, tokens: Any, **extra: Any) -> int:
    """Admit a whole prompt; returns its slot."""
    request = manager.request(tokens, extra=ExtraKeys(**extra))
    hit = manager.lookup(request)
    new = request.num_tokens - hit.tokens
    (answer,) = manager.admit([Admission(request=request, num_new_tokens=new, hit=hit)])
    return answer.slot


def events(recorder: Recorder) -> tuple[Any, ...]:
    batch = recorder.publish()
    return () if batch is None else batch.events


def chained(parent: bytes, *units: range) -> list[bytes]:
    """The hashes of units of tokens, one after the other."""
    hashes = []
    for unit in units:
        parent = block_hash("sha256").unit(parent, np.array(unit, np.uint32), None)
        hashes.append(parent)
    return hashes


ROOT = block_hash("sha256").root


def test_a_prompt_is_one_event_with_its_tokens_and_hashes() -> None:
    manager, recorder = watched(Lifetime(block=4))
    run(manager, range(10))
    first, second = chained(ROOT, range(4), range(4, 8))
    assert events(recorder) == (
        BlockStored(
            block_hashes=(first, second),
            parent_block_hash=None,
            token_ids=tuple(range(8)),
            block_size=4,
            medium="GPU",
        ),
    )


def test_decoding_adds_a_block_behind_its_parent() -> None:
    manager, recorder = watched(Lifetime(block=4))
    run(manager, range(6))
    recorder.publish()
    for token in (6, 7, 8):
        manager.append(1, np.array([token], np.int32))
        manager.step(1)
    first, second = chained(ROOT, range(4), range(4, 8))
    (event,) = events(recorder)
    assert (event.parent_block_hash, event.block_hashes) == (first, (second,))
    assert event.token_ids == (4, 5, 6, 7)
    assert recorder.publish() is None


def test_the_first_copy_is_stored_and_the_last_one_removed() -> None:
    # Two copies of one block: admitted at once, so that neither finds the other's.
    manager, recorder = watched(Lifetime(block=4), num_blocks=5)
    requests = [manager.request([*range(4), 9]) for _ in range(2)]
    miss = manager.lookup(requests[0])
    manager.admit([Admission(request=request, num_new_tokens=5, hit=miss) for request in requests])
    (stored,) = events(recorder)
    assert stored.block_hashes == tuple(chained(ROOT, range(4)))
    manager.release([0])
    run(manager, range(100, 107))  # takes two of four blocks, one of them a copy
    assert [type(event) for event in events(recorder)] == [BlockStored]
    manager.release([0, 1])
    run(manager, range(200, 216))
    removed, _ = events(recorder)
    assert isinstance(removed, BlockRemoved)
    assert set(removed.block_hashes) == {*chained(ROOT, range(4)), *chained(ROOT, range(100, 104))}
    assert removed.group_idx == 0


def test_sparse_groups_say_which_entries_they_have() -> None:
    # Window 5 in blocks of 4, only the end of the prompt is worth keeping: 20 tokens, resumable at 16, which reads from
    # token 12 on: entry 3.
    manager, recorder = watched(Lifetime(block=4), Window(block=4, window=5), retention_interval=0)
    run(manager, range(20))
    full, window = events(recorder)
    assert (full.group_idx, full.block_positions, len(full.block_hashes)) == (0, None, 5)
    assert (window.group_idx, window.block_positions) == (1, (3,))
    assert window.token_ids == (12, 13, 14, 15)
    assert window.parent_block_hash == full.block_hashes[2]
    assert window.block_hashes == full.block_hashes[3:4]


def test_a_key_inside_a_block_covers_one_hash_unit() -> None:
    # contract 6.5: blocks of 8, units of 4, a prompt of 14: keys at 8 (whole) and 12 (inside entry 1), in both groups.
    manager, recorder = watched(Lifetime(block=8), States(block=8), hash_unit=4)
    request = manager.request(range(14))
    manager.admit([Admission(request=request, num_new_tokens=8)])
    manager.step(1, 4)
    at_4, at_8, at_12 = chained(ROOT, range(4), range(4, 8), range(8, 12))
    found = {(e.group_idx, e.block_hashes[0]): e for e in events(recorder)}
    assert at_4 not in {digest for _, digest in found}
    for group, position in ((0, None), (1, (1,))):
        assert found[group, at_8].token_ids == tuple(range(8))
        inside = found[group, at_12]
        assert (inside.block_size, inside.token_ids) == (4, (8, 9, 10, 11))
        assert (inside.parent_block_hash, inside.block_positions) == (at_8, position)


def test_a_partial_key_that_becomes_whole_is_removed_and_stored() -> None:
    manager, recorder = watched(Lifetime(block=8), States(block=8), hash_unit=4)
    manager.admit([Admission(request=manager.request(range(14)), num_new_tokens=8)])
    manager.step(1, 4)
    manager.step(1, 2)
    recorder.publish()
    manager.append(1, [[14, 15]])
    manager.step(1, 2)
    at_12, at_16 = chained(ROOT, range(4), range(4, 8), range(8, 12), range(12, 16))[2:]
    kinds = [(type(e), e.block_hashes) for e in events(recorder) if e.group_idx == 0]
    # The block's own key is now the longer one; the prompt's end stays as a further key.
    assert kinds == [(BlockRemoved, (at_12,)), (BlockStored, (at_16,)), (BlockStored, (at_12,))]


def test_salts_stay_secret_and_the_other_extra_keys_are_told() -> None:
    manager, recorder = watched(Lifetime(block=4))
    image = MultiModalItem(identifier="cat", offset=2, length=4)
    run(manager, range(13), salt="tenant-7", lora_name="law", items=(image,))
    (event,) = events(recorder)
    assert event.lora_name == "law"
    assert event.extra_keys == (("law", ("cat", 2)), ("law", ("cat", -2)), ("law",))
    run(manager, range(13), salt="tenant-7")
    (event,) = events(recorder)
    assert event.extra_keys is None
    assert "tenant-7" not in repr(event)


def test_reset_clears_and_eviction_removes() -> None:
    manager, recorder = watched(Lifetime(block=4))
    slot = run(manager, range(9))
    first, _ = chained(ROOT, range(4), range(4, 8))
    recorder.publish()
    manager.evict(manager.block_ids(slot)[0][:1])
    assert events(recorder) == (BlockRemoved(block_hashes=(first,), medium="GPU"),)
    manager.release([slot])
    assert manager.reset()
    assert events(recorder) == (AllBlocksCleared(),)


def test_nothing_is_told_where_nothing_can_be_looked_up() -> None:
    # log.md row 66: a group that forbids hits makes every key useless.
    manager, recorder = watched(Lifetime(block=4), Lifetime(block=4, source="encoder", hits="never"))
    run(manager, range(20))
    assert recorder.publish() is None


def test_tokens_survive_preemption_and_forks() -> None:
    manager, recorder = watched(Lifetime(block=4))
    slot = run(manager, range(6))
    twin: Any = manager.fork(slot)
    manager.append([slot, twin.slot], np.array([50, 60], np.int32))
    (request,) = manager.preempt([slot])
    request.extend([51])
    recorder.publish()
    manager.admit([Admission(request=request, num_new_tokens=4)])
    manager.append([twin.slot], [[61]])
    manager.step([twin.slot], 2)
    told = {event.token_ids for event in events(recorder)}
    assert told == {(4, 5, 50, 51), (4, 5, 60, 61)}


def test_a_failing_sink_is_named_and_costs_the_others_nothing() -> None:
    got: list[EventBatch] = []

    def broken(batch: EventBatch) -> None:
        raise OSError("disk full")

    manager, recorder = watched(Lifetime(block=4), sinks=[broken, got.append])
    run(manager, range(5))
    with pytest.raises(EventSinkError, match="broken failed at batch 0: OSError: disk full"):
        recorder.publish()
    assert [batch.sequence for batch in got] == [0]


def test_a_thread_makes_the_records_and_its_failures_are_told() -> None:
    index, got = PrefixIndex(), []

    def broken(batch: EventBatch) -> None:
        if batch.sequence == 1:
            raise OSError("disk full")

    recorder = Recorder([index.apply, got.append, broken], background=True)
    manager = KVCacheManager(
        BlockConfig(
            groups=[GroupBlocks(name="g", lifetime=Lifetime(block=4))], num_blocks=64, max_model_len=512
        ),
        watcher=recorder,
    )

    def six_batches() -> None:
        for first in range(0, 120, 20):
            run(manager, range(first, first + 9))
            assert recorder.publish() is None
        recorder.close()

    with pytest.raises(
        EventSinkError, match="broken failed at batch 1: OSError: disk full"
    ):  # soon, or at the end
        six_batches()
    recorder.close()
    assert [batch.sequence for batch in got] == list(range(len(got)))
    assert len(index) == manager.num_keys == 2 * len(got)


def test_an_index_knows_gaps_and_passes_over_what_it_has_seen() -> None:
    index = PrefixIndex()
    stored = BlockStored(block_hashes=(b"a",), parent_block_hash=None, token_ids=(1,), block_size=1)
    batches = [
        EventBatch(sequence=n, time=0.0, events=(event,))
        for n, event in enumerate((stored, BlockRemoved(block_hashes=(b"a",)), AllBlocksCleared()))
    ]
    assert index.apply(batches[0])
    assert not index.apply(batches[0])
    assert ((0, b"a") in index, len(index), index.event_of(0, b"a")) == (True, 1, stored)
    late = PrefixIndex()
    late.apply(batches[1])
    assert not late.complete
    late.apply(batches[2])
    assert (late.complete, late.next_sequence) == (True, 3)


# --- sinks from configuration and plugins ---


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    recorder = start(EventConfig(jsonl=path, medium="CPU", data_parallel_rank=3))
    config = BlockConfig(
        groups=[GroupBlocks(name="g", lifetime=Lifetime(block=4))], num_blocks=8, max_model_len=64
    )
    manager = KVCacheManager(config, watcher=recorder)
    run(manager, range(5))
    recorder.publish()
    manager.release([0])
    manager.reset()
    recorder.close()
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert (first["seq"], first["data_parallel_rank"], second["seq"]) == (0, 3, 1)
    (event,) = first["events"]
    assert event["type"] == "BlockStored"
    assert event["block_hashes"] == [chained(ROOT, range(4))[0].hex()]
    assert (event["token_ids"], event["medium"], event["lora_id"]) == ([0, 1, 2, 3], "CPU", None)
    assert second["events"] == [{"type": "AllBlocksCleared"}]


def plugin(answer: Any) -> ModuleType:
    class Plugin:
        @hookimpl
        def kvframe_block_event_sinks(self, config: Any) -> Any:
            return answer(config)

    return Plugin()  # type: ignore[return-value]


def test_plugins_bring_sinks_and_find_their_settings() -> None:
    got: list[EventBatch] = []
    host = PluginHost([plugin(lambda config: [got.append] if config.extras.get("mine") else [])])
    assert start(EventConfig(), host).sinks == []
    manager_events = start(EventConfig(extras={"mine": True}), host)
    assert len(manager_events.sinks) == 1
    with pytest.raises(HookError, match="cannot be called"):
        start(EventConfig(), PluginHost([plugin(lambda config: [SimpleNamespace()])]))


def test_without_the_extra_the_error_says_what_to_install() -> None:
    script = (
        "import sys; sys.modules['zmq'] = sys.modules['msgspec'] = None\n"
        "from kvframe.events import EventConfig, ZmqConfig, start\n"
        "start(EventConfig())\n"
        "start(EventConfig(zmq=ZmqConfig(endpoint='inproc://x')))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "MissingDependencyError" in done.stderr
    assert "pip install 'kvframe[events]'" in done.stderr


def test_importing_kvframe_imports_no_event_library() -> None:
    script = (
        "import sys, kvframe; print([n for n in ('zmq', 'msgspec', 'kvframe.events') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert kvframe.__version__
