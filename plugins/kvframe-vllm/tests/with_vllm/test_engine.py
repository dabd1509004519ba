"""A whole vLLM on the CPU, on its own manager and on kvframe's: every token of every request is the same.

64 requests of mixed lengths with shared prefixes, and a pool so small that some are preempted. Log-probabilities are
equal to the last bit where both runs made the same batches.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tiny_models import MODELS, make_model

SERVE = Path(__file__).parent.parent / "support" / "serve.py"
BLOCKS = {"llama": 70, "mla": 70}  # of 32 tokens; the others have more groups


@pytest.fixture(scope="session")
def folder(tmp_path_factory: Any) -> Path:
    path: Path = tmp_path_factory.mktemp("models")
    for name in MODELS:
        make_model(name, path)
    return path


def serve(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, SERVE, json.dumps(runs)], capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == len(runs), done.stderr[-3000:]
    return [json.loads(line[len("RESULT ") :]) for line in lines]


def settings(folder: Path, name: str, scheduler: str, **more: Any) -> dict[str, Any]:
    given = {"model": str(folder / name), "scheduler": scheduler, "count": 64, "caching": True}
    return given | {"blocks": BLOCKS.get(name, 90)} | more


def assert_equal(stock: dict[str, Any], ours: dict[str, Any]) -> None:
    assert stock["manager"] in ("KVCacheManager", None)
    assert ours["manager"] in ("EngineManager", None)
    assert ours["tokens"] == stock["tokens"]
    if ours["batches"] == stock["batches"]:
        assert ours["logprobs"] == stock["logprobs"]


@pytest.mark.parametrize("name", MODELS)
def test_synchronous_with_and_without_a_cache(folder: Path, name: str) -> None:
    sides = ("stock", "kvframe")
    runs = [settings(folder, name, side, caching=on) for on in (False, True) for side in sides]
    plain_stock, plain, cached_stock, cached = serve(runs)
    assert_equal(plain_stock, plain)
    assert_equal(cached_stock, cached)
    assert plain["batches"] == plain_stock["batches"]
    assert plain["preemptions"] == plain_stock["preemptions"] > 0
    assert cached["preemptions"] > 0
    assert cached["hits"] > 0 or name != "llama"


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_asynchronous(folder: Path, name: str) -> None:
    more = {"async": True, "blocks": 70 if name == "llama" else 160}
    stock, ours = serve([settings(folder, name, side, **more) for side in ("stock", "kvframe")])
    assert stock["scheduler"] == ours["scheduler"] == "AsyncScheduler"
    assert_equal(stock, ours)


def test_the_engine_in_a_process_of_its_own(folder: Path) -> None:
    runs = [settings(folder, "llama", side, multiprocessing=True) for side in ("stock", "kvframe")]
    (stock,), (ours,) = (serve([run]) for run in runs)
    assert_equal(stock, ours)
    assert ours["preemptions"] > 0


def test_by_the_schedulers_name_and_with_the_planner(folder: Path) -> None:
    runs = [
        settings(folder, "gemma3", "stock", blocks=160),
        settings(folder, "gemma3", "named", blocks=160, scheduler_cls="kvframe_vllm.Scheduler"),
        settings(folder, "gemma3", "kvframe", blocks=160, ask="manager,planner"),
    ]
    stock, named, planned = serve(runs)
    assert_equal(stock, named)
    assert_equal(stock, planned)


def test_a_block_handed_out_twice_is_caught(folder: Path) -> None:
    # The negative control: the comparison above sees a manager that is wrong.
    runs = [settings(folder, "llama", side, caching=False) for side in ("stock", "faulty")]
    stock, faulty = serve(runs)
    assert faulty["tokens"] != stock["tokens"]
