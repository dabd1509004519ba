"""Kills writers of snapshots at random moments and looks at what the next start finds. Prints its counts as JSON.

A process of its own, so that it may fork without threads. Each child writes snapshots of two states in turns until it
is killed with SIGKILL.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from kvframe.blocks import Admission, BlockConfig, GroupBlocks, KVCacheManager
from kvframe.blocks.snapshot import Restored, load, save
from kvframe.lifetime import Lifetime

CONFIG = BlockConfig(
    groups=[GroupBlocks(name="full", lifetime=Lifetime(block=4))],
    num_blocks=4_000,
    max_model_len=16_000,
    max_requests=2,
)
PROMPTS = ((0, 4_000), (1_000_000, 12_000))  # first token, length


def state(first: int, length: int) -> KVCacheManager:
    """A manager that has cached one prompt."""
    manager = KVCacheManager(CONFIG)
    manager.admit([Admission(request=manager.request(range(first, first + length)), num_new_tokens=length)])
    manager.release([0])
    return manager


def main(folder: Path, kills: int) -> None:
    """Kill that many writers."""
    choices, path = random.Random(kills), folder / "snapshot"
    states = tuple(state(*prompt) for prompt in PROMPTS)
    keys = [manager.num_keys for manager in states]
    started = time.perf_counter()
    for manager in states:
        save(manager, path, content="")
    span = time.perf_counter() - started
    seen = {"kills": 0, "first": 0, "second": 0, "broken": 0, "half_written": 0}
    while seen["kills"] < kills:
        child = os.fork()
        if child == 0:
            while True:
                for manager in states:
                    save(manager, path, content="")
        time.sleep(choices.random() * 2 * span)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        seen["kills"] += 1
        seen["half_written"] += (folder / ".snapshot.writing").exists()
        found = KVCacheManager(CONFIG)
        answer = load(found, path, content="")
        whole = isinstance(answer, Restored) and answer.num_keys in keys and found.num_keys == answer.num_keys
        if not whole:
            seen["broken"] += 1
            continue
        which = keys.index(answer.num_keys)
        start, length = PROMPTS[which]
        request = found.request(range(start, start + length))
        right = found.lookup(request).tokens == length - 4
        seen[("first", "second")[which] if right else "broken"] += 1
    sys.stdout.write(json.dumps(seen))


main(Path(sys.argv[1]), int(sys.argv[2]))
