"""Snapshots: what is kept, what is refused, and that a crash leaves the old one or the new one."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvframe.blocks import Admission, BlockConfig, BlockError, ExtraKeys, GroupBlocks, KVCacheManager
from kvframe.blocks.snapfile import MAGIC, VERSION
from kvframe.blocks.snapshot import NotRestored, Restored, load, save
from kvframe.lifetime import Lifetime
from tests.blocks.lifetimes import Window

ROOT = Path(__file__).parent.parent.parent


def config(**changes: Any) -> BlockConfig:
    groups = [
        GroupBlocks(name="full", lifetime=Lifetime(block=4)),
        GroupBlocks(name="window", lifetime=Window(block=4, window=5)),
    ]
    return BlockConfig(**{"groups": groups, "num_blocks": 40, "max_model_len": 256, **changes})


def run(manager: KVCacheManager, tokens: Any, **extra: Any) -> Any:
    request = manager.request(tokens, extra=ExtraKeys(**extra))
    hit = manager.lookup(request)
    (answer,) = manager.admit(
        [Admission(request=request, num_new_tokens=request.num_tokens - hit.tokens, hit=hit)]
    )
    return answer


def hit(manager: KVCacheManager, tokens: Any, **extra: Any) -> int:
    return manager.lookup(manager.request(tokens, extra=ExtraKeys(**extra))).tokens


def test_a_new_manager_finds_what_the_old_one_had(tmp_path: Path) -> None:
    old = KVCacheManager(config())
    for start, salt in ((0, None), (100, "a")):
        old.release([run(old, range(start, start + 17), salt=salt).slot])
    running = run(old, range(200, 217))
    old.pins.pin("system", old.request(range(16)))
    save(old, tmp_path / "snap", content="model")
    new = KVCacheManager(config())
    answer = load(new, tmp_path / "snap", content="model")
    assert answer == Restored(num_keys=old.num_keys, pins=("system",))
    for start, salt in ((0, None), (100, "a"), (200, None)):
        assert hit(new, range(start, start + 17), salt=salt) == 16
    assert hit(new, range(100, 117)) == 0  # the other tenant's
    # Nobody runs, and the pin holds 4 blocks of the full group and 1 of the window: max(0, 16 - 4) // 4 = 3 are dead.
    assert new.pool.num_held == 5
    assert new.block_ids(run(new, range(200, 217)).slot) != old.block_ids(
        running.slot
    )  # the last block is fresh
    new.pins.unpin("system")


def test_what_goes_first_still_goes_first(tmp_path: Path) -> None:
    def evicting(manager: KVCacheManager) -> list[int]:
        """Which of three prompts are still cached after each further request."""
        left = []
        for start in range(1000, 1400, 50):
            manager.release([run(manager, range(start, start + 20)).slot])
            left.append(sum(hit(manager, range(s, s + 17)) > 0 for s in (0, 100, 200)))
        return left

    def used() -> KVCacheManager:
        manager = KVCacheManager(config(groups=[config().groups[0]], num_blocks=20))
        for start in (0, 100, 200, 0):
            manager.release([run(manager, range(start, start + 17)).slot])
        return manager

    old = used()
    save(old, tmp_path / "snap", content="")
    new = KVCacheManager(old.config)
    load(new, tmp_path / "snap", content="")
    assert new.pool.idle() == old.pool.idle()
    assert evicting(new) == evicting(old)


def snapshot(tmp_path: Path) -> tuple[Path, bytes]:
    manager = KVCacheManager(config())
    manager.release([run(manager, range(17)).slot])
    path = tmp_path / "snap"
    save(manager, path, content="model")
    return path, path.read_bytes()


def refused(path: Path, settings: BlockConfig | None = None, content: str = "model") -> str:
    manager = KVCacheManager(settings or config())
    run(manager, range(900, 917))
    manager.release([0])
    answer = load(manager, path, content=content)
    assert isinstance(answer, NotRestored)
    assert answer.detail
    # It starts empty, and works.
    assert (manager.num_keys, manager.num_free) == (0, manager.config.num_blocks - 1)
    run(manager, range(17))
    assert hit(manager, range(17)) == 16
    return answer.reason


def test_truncated_files_are_refused(tmp_path: Path) -> None:
    path, data = snapshot(tmp_path)
    for length in [*range(0, len(data), 97), len(data) - 1]:
        path.write_bytes(data[:length])
        assert refused(path) == "truncated"


def test_altered_files_are_refused(tmp_path: Path) -> None:
    path, data = snapshot(tmp_path)
    for at in [0, 7, *range(30, len(data), 61), len(data) - 1]:
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert refused(path) == "altered"
    path.write_bytes(data + b"more")
    assert refused(path) == "altered"


def test_other_versions_configurations_and_contents_are_refused(tmp_path: Path) -> None:
    path, data = snapshot(tmp_path)
    assert refused(path, content="model, other weights") == "config"
    assert refused(path, config(num_blocks=41)) == "config"
    assert refused(path, config(hash_name="sha256_cbor")) == "config"
    wider = [*config().groups[:1], attrs.evolve(config().groups[1], lifetime=Window(block=4, window=9))]
    assert refused(path, config(groups=wider)) == "config"
    path.write_bytes(struct.pack("<8sI", MAGIC, VERSION + 1) + data[12:])
    assert refused(path) == "version"
    path.unlink()
    assert refused(path) == "missing"


def test_the_policy_may_change(tmp_path: Path) -> None:
    path, _ = snapshot(tmp_path)
    assert isinstance(load(KVCacheManager(config(eviction="frequency")), path, content="model"), Restored)


def test_a_manager_in_use_is_not_overwritten(tmp_path: Path) -> None:
    path, _ = snapshot(tmp_path)
    manager = KVCacheManager(config())
    run(manager, range(17))
    with pytest.raises(BlockError, match="must run nothing"):
        load(manager, path, content="model")
    assert manager.num_keys > 0


def test_waiting_copies_come_first(tmp_path: Path) -> None:
    manager = KVCacheManager(config())
    run(manager, range(10))
    manager.fork(0)
    with pytest.raises(BlockError, match="take_copies"):
        save(manager, tmp_path / "snap", content="")
    manager.take_copies()
    save(manager, tmp_path / "snap", content="")


def test_a_failed_write_leaves_the_old_snapshot(tmp_path: Path) -> None:
    path, data = snapshot(tmp_path)
    (tmp_path / ".snap.writing").mkdir()  # in the way
    with pytest.raises(OSError, match="writing"):
        save(KVCacheManager(config()), path, content="model")
    assert path.read_bytes() == data


def test_kill_9_while_writing_leaves_the_old_or_the_new_one(tmp_path: Path) -> None:
    """200 children write snapshots of two states in turns, and are killed at random moments; see the script."""
    script = Path(__file__).parent / "kill_writers.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), "200"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["kills"] == 200
    assert seen["broken"] == 0
    # Both states were found, and kills left files half written; how many of each is the machine's speed.
    assert seen["first"]
    assert seen["second"]
    assert seen["half_written"]
