"""Churn by the simulator: useful share of a full pool, time of 100,000 requests, hits of shared documents.

    python benchmarks/churn.py [--json] [--requests 100000] [--memory-gib 40]

Each hybrid is planned by both strategies and run with chats of 16 to 1,024 tokens; then three hybrids with shared
documents, beside a byte-wise LRU of the same bytes. The bars are the design's (issue 7): the exit code is 1 when one is
missed. Times are thread CPU time: on a busy machine they are up to twice as long.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from kvframe.planning import Limits
from kvframe.simulate import Lengths, Pace, RandomStream, run_case
from tests.simulate.bytewise import bytewise
from tests.simulate.models import GIB, HYBRIDS, chats, hybrid_case

BARS = {
    "gemma-3-27b": 0.975,
    "qwen3-next-80b": 0.985,
    "20 full + 30 sliding": 0.98,
    "nemotron-h-8b": 0.99,
}
SECONDS = 60.0
FILL = Pace(ramp=0.1)  # the pool is full after some thousand requests
DOCUMENTS = {
    "gemma-3-27b": 10,
    "20 full + 30 sliding": 10,
    "mimo-v2-flash": 6,
    "qwen3-next-80b": 10,
    "jamba-v0.1": 4,
}
POINTS = 0.03  # at most so far below a byte-wise LRU
STATES = ("qwen3-next-80b", "jamba-v0.1")  # shown, not judged: docs/performance.md says why


def churn(name: str, requests: int, memory: int) -> dict[str, Any]:
    found: dict[str, Any] = {"model": name, "bar": BARS[name]}
    for strategy in ("engine", "optimal"):
        start = time.thread_time()
        case = hybrid_case(name, chats(requests), memory=memory, strategy=strategy, pace=FILL)
        result = run_case(case)
        found[strategy] = {
            "seconds": time.thread_time() - start,
            "alive": result.alive_at_first_refusal,
            "useful": result.useful_at_first_refusal,
            "useful_later": result.useful_at_refusals,
        }
    found["met"] = found["optimal"]["useful"] >= BARS[name] and found["optimal"]["seconds"] <= SECONDS
    return found


def documents(name: str) -> dict[str, Any]:
    stream = RandomStream(
        requests=600,
        prompt=Lengths(low=16, high=128),
        output=Lengths(low=16, high=256),
        rate=1.5,
        documents=100,
        document=Lengths(low=512, high=2048),
        skew=1.0,
    )
    limits = Limits(groups=8 if name == "jamba-v0.1" else 4)
    shape: dict[str, Any] = {"memory": DOCUMENTS[name] * GIB, "length": 32_768, "limits": limits}
    rates = {
        strategy: run_case(hybrid_case(name, stream, strategy=strategy, **shape)).hit_rate
        for strategy in ("engine", "optimal")
    }
    with bytewise():
        rates["bytewise"] = run_case(hybrid_case(name, stream, **shape)).hit_rate
    met = rates["optimal"] >= max(rates["engine"], rates["bytewise"] - POINTS)
    return {"model": name, "gib": DOCUMENTS[name], **rates, "met": met or name in STATES}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--memory-gib", type=int, default=40)
    options = parser.parse_args()
    shares = [churn(name, options.requests, options.memory_gib * GIB) for name in HYBRIDS]
    rates = [documents(name) for name in DOCUMENTS]
    if options.json:
        print(json.dumps({"churn": shares, "documents": rates}, indent=2))
    else:
        for row in shares:
            ours, engines = row["optimal"], row["engine"]
            print(
                f"{row['model']:22} useful {engines['useful']:.1%} -> {ours['useful']:.1%} (bar {row['bar']:.1%}), "
                f"alive {engines['alive']} -> {ours['alive']}, {ours['seconds']:.0f} s"
            )
        for row in rates:
            print(
                f"{row['model']:22} {row['gib']:3} GiB, hits: engines {row['engine']:.1%}, slabs {row['optimal']:.1%}, "
                f"byte-wise LRU {row['bytewise']:.1%}"
            )
    return 0 if all(row["met"] for row in (*shares, *rates)) else 1


if __name__ == "__main__":
    sys.exit(main())
