"""Subscribers that see only events hold exactly the keys that the manager can serve."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvframe.errors import SpecError
from kvframe.events import EventBatch, PrefixIndex, ZmqSink, decode
from kvframe.events.wire import encoder
from tests.blocks.world import OPERATIONS, World, random_config

SUBSCRIBER = Path(__file__).parent / "subscriber.py"


def watched_world(choices: random.Random) -> World:
    """A world with events; most of them with hits."""
    while True:
        try:
            config = random_config(choices)
        except SpecError:
            continue
        if config.reads_cache or choices.random() < 0.1:
            return World(config, choices, watched=True)


def test_after_each_of_10000_operations_the_index_is_the_cache() -> None:
    """`World.check` compares the two after every operation; here the stream also goes through its wire form."""
    choices, encode = random.Random(20261129), encoder()
    done = stored = 0
    while done < 10_000:
        world = watched_world(choices)
        index = PrefixIndex()

        def hear(batch: EventBatch, index: PrefixIndex = index) -> None:
            received = decode(batch.sequence, encode(batch))
            assert received == batch
            index.apply(received)

        assert world.recorder is not None
        world.recorder.sinks.append(hear)
        for _ in range(100):
            getattr(world, choices.choice(OPERATIONS))()
            world.check()
            assert index.keys() == world.servable()
            done += 1
        stored += len(index)
    assert stored > 500  # most worlds end with keys, so this compares something


@contextmanager
def subscriber(sink: ZmqSink) -> Iterator[Any]:
    command = [sys.executable, str(SUBSCRIBER), sink.endpoint, str(sink.replay_endpoint)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.communicate("end\n", timeout=20)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


def keys_of(process: Any, batches: int) -> dict[str, Any]:
    process.stdin.write(f"wait {batches}\n")
    process.stdin.flush()
    answer: dict[str, Any] = json.loads(process.stdout.readline())
    return answer


def served(world: World) -> list[list[Any]]:
    return sorted([group, digest.hex()] for group, digest in world.servable())


@pytest.mark.parametrize("seed", range(2))
def test_a_subscriber_in_another_process_and_one_that_joins_late(seed: int, tmp_path: Path) -> None:
    choices = random.Random(seed)
    sink = ZmqSink(f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay", topic="kv")
    world = watched_world(choices)
    seen = []
    assert world.recorder is not None
    world.recorder.sinks += [sink, seen.append]
    with subscriber(sink) as early:
        for _ in range(10):
            for _ in range(20):
                getattr(world, choices.choice(OPERATIONS))()
                world.check()
            answer = keys_of(early, len(seen))
            assert answer["keys"] == served(world)
        with subscriber(sink) as late:
            answer = keys_of(late, len(seen))
            assert (answer["keys"], answer["replayed"]) == (served(world), len(seen))
            for _ in range(40):
                getattr(world, choices.choice(OPERATIONS))()
                world.check()
            for process in (early, late):
                assert keys_of(process, len(seen))["keys"] == served(world)
    world.recorder.close()


def test_what_is_no_longer_kept_is_seen_as_a_gap(tmp_path: Path) -> None:
    zmq = pytest.importorskip("zmq")
    sink = ZmqSink(f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/replay", kept=2)
    for number in range(5):
        sink(EventBatch(sequence=number, time=0.0, events=()))
    context = zmq.Context()
    asking = context.socket(zmq.DEALER)
    asking.connect(sink.replay_endpoint)
    asking.send_multipart((b"", b"nonsense", b"that is no request"))
    asking.send_multipart((b"", (0).to_bytes(8, "big")))
    index, answered = PrefixIndex(), []
    while True:
        _, number, payload = asking.recv_multipart()
        answered.append(int.from_bytes(number, "big", signed=True))
        if answered[-1] < 0:
            break
        index.apply(decode(answered[-1], payload))
    assert answered == [3, 4, -1]
    assert not index.complete
    context.destroy(linger=0)
    sink.close()


def test_an_address_that_is_taken_is_an_error(tmp_path: Path) -> None:
    first = ZmqSink("tcp://127.0.0.1:*")
    with pytest.raises(OSError, match=r"127\.0\.0\.1"):
        ZmqSink(first.endpoint)
    first.close()


def test_a_field_decoder_reads_the_stream() -> None:
    """The structures that routers decode into: tagged maps in an array, unknown fields passed over."""
    msgspec = pytest.importorskip("msgspec")
    stored = msgspec.defstruct(
        "BlockStored",
        [
            ("block_hashes", list[bytes]),
            ("parent_block_hash", bytes | None),
            ("token_ids", list[int]),
            ("block_size", int),
            ("lora_id", int | None),
            ("medium", str | None),
            ("lora_name", str | None),
            ("extra_keys", list[tuple[Any, ...] | None] | None, None),
            ("group_idx", int | None, None),
        ],
        tag=True,
    )
    removed = msgspec.defstruct(
        "BlockRemoved",
        [("block_hashes", list[bytes]), ("medium", str | None), ("group_idx", int | None, None)],
        tag=True,
    )
    cleared = msgspec.defstruct("AllBlocksCleared", [], tag=True)
    batch = msgspec.defstruct(
        "Batch",
        [("ts", float), ("events", list[stored | removed | cleared]), ("rank", int | None, None)],
        array_like=True,
    )
    world = watched_world(random.Random(5))
    encode, received = encoder(), []
    decoder = msgspec.msgpack.Decoder(batch)
    assert world.recorder is not None
    world.recorder.sinks.append(lambda one: received.append(decoder.decode(encode(one))))
    for number in range(60):
        getattr(world, OPERATIONS[number % len(OPERATIONS)])()
        world.check()
    kinds = {type(event).__name__ for one in received for event in one.events}
    assert "BlockStored" in kinds
