"""What events, quotas and metrics cost a decode step: the same requests with and without, in turns, thread CPU time.

`step` is the allocation of one token for every running request, on the scheduler's thread. `all` adds appending and
hashing the new tokens. `publish` is what an engine does while the device computes: making the records of a step's
events, and handing them to the sinks. Here a thread does the most of it, and what remains for the scheduler's thread is
measured; the sink encodes for the wire.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from blocks import BLOCK, CONTEXT, SPREAD, WARM_UP, groups_of, lifetime_of  # noqa: E402

from kvframe.blocks import Admission, BlockConfig, ExtraKeys, GroupBlocks, KVCacheManager  # noqa: E402
from kvframe.blocks.quotas import Quota, Quotas  # noqa: E402
from kvframe.blocks.tenants import TenantManager  # noqa: E402
from kvframe.events import Recorder  # noqa: E402
from kvframe.events.wire import encoder  # noqa: E402

BAR = 2.0  # step with everything on / off, at 1,024 running
TENANTS = 16


def timed(work: Callable[[], Any]) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


def filled(name: str, running: int, steps: int, *, events: bool, quotas: bool) -> tuple[KVCacheManager, Any]:
    """A manager with that many requests of several tenants, and its recorder."""
    groups = groups_of(name)
    rules = [lifetime_of(kind) for kind in groups]
    length = CONTEXT + SPREAD + steps + 64
    config = BlockConfig(
        groups=[GroupBlocks(name=str(g), lifetime=rule) for g, rule in enumerate(rules)],
        num_blocks=len(groups) * running * (length // BLOCK + 2) + 64,
        max_model_len=length,
        max_requests=running,
    )
    recorder = Recorder([encoder()], background=True) if events else None
    if quotas:
        limits = Quotas(default=Quota(running=0.5, cached=0.5))
        manager: KVCacheManager = TenantManager(config, limits, watcher=recorder)
    else:
        manager = KVCacheManager(config, watcher=recorder)
    random = np.random.default_rng(running)
    for number in range(running):
        tokens = random.integers(0, 1 << 17, CONTEXT + int(random.integers(0, SPREAD)), dtype=np.int32)
        request = manager.request(tokens, extra=ExtraKeys(salt=f"tenant {number % TENANTS}"))
        manager.admit([Admission(request=request, num_new_tokens=len(tokens))])
    if recorder is not None:
        recorder.publish()
    return manager, recorder


def decode(name: str, running: int, steps: int, *, events: bool, quotas: bool) -> dict[str, float]:
    """Ratios on / off of a decode step, alone, with what publishing leaves to do, and with the new tokens."""
    sides = [
        filled(name, running, steps, events=False, quotas=False),
        filled(name, running, steps, events=events, quotas=quotas),
    ]
    random = np.random.default_rng(0)
    spent: list[list[list[float]]] = [[], []]
    gc.collect()
    gc.freeze()
    for number in range(WARM_UP + steps):
        tokens = random.integers(0, 1 << 17, running, dtype=np.int32)
        for side in ((0, 1), (1, 0))[number % 2]:  # neither is always the first to find cold caches
            manager, recorder = sides[side]
            parts = [
                timed(lambda m=manager, t=tokens: m.append(running, t)),
                timed(lambda m=manager: m.step(running)),
                timed(recorder.publish) if recorder is not None else 0.0,
            ]
            if number >= WARM_UP:
                spent[side].append(parts)
    gc.unfreeze()
    if sides[1][1] is not None:
        sides[1][1].close()
    off, on = (np.array(parts).sum(axis=0) for parts in spent)
    if not all(manager.ledger.computed[0] == sides[0][0].ledger.computed[0] for manager, _ in sides):
        raise AssertionError("a request was refused, so the two sides did not do the same")
    return {
        "step": on[1] / off[1],
        "all": on[:2].sum() / off[:2].sum(),
        "with_publish": on[1:].sum() / off[1],
        "off_us": off[1] / steps * 1e6,
    }


FEATURES = {
    "events": {"events": True, "quotas": False},
    "quotas": {"events": False, "quotas": True},
    "events and quotas": {"events": True, "quotas": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--repeats", type=int, default=3, help="measurements to take the median of")
    parser.add_argument("--steps", type=int, default=48, help="timed steps")
    options = parser.parse_args()
    rows = []
    for name in ("full", "full+window"):
        for feature, on in FEATURES.items():
            found = [decode(name, 1024, options.steps, **on) for _ in range(options.repeats)]
            figures = {key: round(statistics.median(one[key] for one in found), 2) for key in found[0]}
            rows.append({"groups": name, "running": 1024, "on": feature, **figures})
    if options.json:
        print(json.dumps({"bar": BAR, "rows": rows}))
        return
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"{'groups':<12} {'on':<18} {'step':>11} {'bar':>5} {'with publish':>12} {'all':>10} {'off us':>7}")
    for row in rows:
        mark = "" if row["step"] <= BAR else "  above"
        print(
            f"{row['groups']:<12} {row['on']:<18} {row['step']:>11} {BAR:>5} {row['with_publish']:>12} "
            f"{row['all']:>10} {row['off_us']:>7}{mark}"
        )


if __name__ == "__main__":
    main()
