"""Time of a plan, and the share of a request's bytes that holds nothing: the engines' rule and the optimal plan.

    python benchmarks/planner.py [--json] [--memory-gib 40] [--runs 7]

Every model of tests/data/models is planned from its specs (bfloat16, blocks of 16 tokens, requests of up to 131,072
tokens). The bar is 50 ms a plan, median of the runs in thread CPU time. Exit code 1 when a model misses it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import kvframe
from kvframe.models import encoder_positions, model_dtype, model_specs, read_config
from kvframe.readers import ReadOptions

BAR_MS = 50.0
LENGTH = 131072
FOLDER = Path(__file__).parent.parent / "tests" / "data" / "models"


def specs_of(path: Path, host: kvframe.PluginHost) -> tuple[Any, kvframe.EngineConfig]:
    config = read_config(json.loads(path.read_text(encoding="utf-8"))["hf_config"])
    options = ReadOptions(
        block_size=16,
        cache_dtype=host.cache_dtypes.get("bfloat16"),
        model_dtype=model_dtype(config),
        max_model_len=LENGTH,
    )
    engine = kvframe.EngineConfig(
        max_model_len=LENGTH, max_encoder_tokens=encoder_positions(config) or 0, state_cache_mode="align"
    )
    return model_specs(config, host, options).specs, engine


def measure(path: Path, host: kvframe.PluginHost, memory: int, runs: int) -> dict[str, Any]:
    specs, engine = specs_of(path, host)
    plans = {
        name: kvframe.plan(specs, engine=engine, memory=memory, host=host, strategy=name)
        for name in ("engine", "optimal")
    }
    times = []
    for _ in range(runs):
        started = time.thread_time()
        kvframe.plan(specs, engine=engine, memory=memory, host=host)
        times.append((time.thread_time() - started) * 1000)
    report = plans["optimal"].report
    return {
        "model": path.stem,
        "kinds": len(report.groups_by_kind),
        "ms": statistics.median(times),
        "engine_share": plans["engine"].report.waste.structural_share,
        "optimal_share": report.waste.structural_share,
        "chosen": report.chosen,
        "slab_mib": report.pool_block_bytes / 2**20,
        "tables": len(report.groups),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--memory-gib", type=int, default=40, help="the pool")
    parser.add_argument("--runs", type=int, default=7, help="timed plans a model")
    options = parser.parse_args()
    host = kvframe.load_plugins()
    rows = []
    for path in sorted(FOLDER.glob("*.json")):
        try:
            rows.append(measure(path, host, options.memory_gib << 30, options.runs))
        except kvframe.KVFrameError as error:
            print(f"{path.stem}: {error}", file=sys.stderr)
    slow = [row["model"] for row in rows if row["ms"] > BAR_MS]
    if options.json:
        print(
            json.dumps(
                {"memory_gib": options.memory_gib, "bar_ms": BAR_MS, "slow": slow, "rows": rows}, indent=2
            )
        )
        return bool(slow)
    print("| model | kinds | engines' rule | optimal | plan | slab MiB | tables | ms |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row['model']} | {row['kinds']} | {row['engine_share']:.2%} | {row['optimal_share']:.2%} "
            f"| {row['chosen']} | {row['slab_mib']:.2f} | {row['tables']} | {row['ms']:.1f} |"
        )
    several = [row["optimal_share"] for row in rows if row["kinds"] > 1]
    print(f"\nmedian share of models with several kinds: {statistics.median(several):.3%}")
    print(f"slower than {BAR_MS:.0f} ms: {', '.join(slow) or 'none'}")
    return bool(slow)


if __name__ == "__main__":
    sys.exit(main())
