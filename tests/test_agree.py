"""`agree` with four real processes: all ranks end with the same plan, or the same error that says whose fault it is."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvframe import EngineConfig
from kvframe.errors import MissingDependencyError
from kvframe.planning import agree

ROOT = Path(__file__).parent.parent
RANKS = 4
MIB = 1 << 20
PAGE = 2 * 16 * 8 * 128 * 2  # K and V, 16 tokens, 8 heads of 128 elements of 2 bytes: 65,536 bytes

Outcomes = dict[str, list[dict[str, Any]]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    """Each scenario's outcome on each rank; all scenarios run in one start of four processes."""
    pytest.importorskip("torch")
    common = {name: value for name, value in os.environ.items() if not name.startswith("KVFRAME_")} | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(RANKS),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.agree_worker"],
            cwd=ROOT,
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        said = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, err) in zip(ranks, said, strict=True):
        assert rank.returncode == 0, err
    results = [json.loads(out) for out, _ in said]
    return {name: [result[name] for result in results] for name in results[0]}


def error_of(outcomes: Outcomes, scenario: str) -> dict[str, Any]:
    """The one error that all ranks ended with."""
    errors = [found["error"] for found in outcomes[scenario]]
    assert all(error == errors[0] for error in errors)
    assert errors[0]["type"] == "AgreementError"
    assert errors[0]["kind"] == "ranks_disagree"
    error: dict[str, Any] = errors[0]
    return error


def test_equal_ranks_end_with_one_plan(outcomes: Outcomes) -> None:
    found = outcomes["equal"]
    assert all(plan == found[0] for plan in found)
    assert len(found[0]["fingerprint"]) == len(hashlib.sha256().hexdigest())
    assert found[0]["slabs"] == 512 * MIB // found[0]["slab_bytes"]
    assert found[0]["layers"] == [f"layers.{n}.attn" for n in range(6)]


def test_the_rank_with_the_least_memory_decides_for_all(outcomes: Outcomes) -> None:
    found = outcomes["less_memory"]
    assert all(plan == found[0] for plan in found)
    assert found[0]["slabs"] == 300 * MIB // found[0]["slab_bytes"]
    assert found[0]["fingerprint"] != outcomes["equal"][0]["fingerprint"]


def test_ranks_with_the_same_layers_are_one_pipeline_stage(outcomes: Outcomes) -> None:
    found = outcomes["pipeline"]
    assert [plan["stage"] for plan in found] == [0, 0, 1, 1]
    assert {plan["fingerprint"] for plan in found} == {found[0]["fingerprint"]}
    assert [len(plan["layers"]) for plan in found] == [6, 6, 6, 6]
    assert not set(found[0]["layers"]) & set(found[2]["layers"])
    # both stages hold 4 sliding and 2 full layers, so the slab is the same; stage 0 has 512 MiB, stage 1 has 514
    assert {plan["slabs"] for plan in found} == {512 * MIB // found[0]["slab_bytes"]}


def test_too_little_memory_on_one_rank_is_an_error_on_all(outcomes: Outcomes) -> None:
    error = error_of(outcomes, "too_little")
    assert error["fields"]["ranks"] == [1]
    assert error["message"].startswith("rank 1: one request of 4,096 tokens needs ")
    cause = error["fields"]["cause"]
    assert cause["kind"] == "insufficient_memory"
    # 2 full layers keep 4096 / 16 blocks, 4 sliding ones ceil((512 - 1 + 1) / 16) + 1 = 33
    assert cause["fields"]["needed_bytes"] >= (2 * 256 + 4 * 33) * PAGE
    assert cause["fields"]["available_bytes"] < 8 * MIB


def test_a_missing_plugin_is_named_with_its_rank(outcomes: Outcomes) -> None:
    error = error_of(outcomes, "missing_plugin")
    assert error["fields"]["ranks"] == [3]
    absent = "not in use (left out by KVFRAME_DISABLE_PLUGINS)"
    assert error["fields"]["held"] == {"kvframe-sliding-window": {"0.1.0": [0, 1, 2], absent: [3]}}
    assert f"kvframe-sliding-window: 0.1.0 on ranks 0, 1, 2, {absent} on rank 3" in error["message"]


def test_another_version_of_a_plugin_is_named_with_its_rank(outcomes: Outcomes) -> None:
    error = error_of(outcomes, "other_version")
    assert error["fields"]["ranks"] == [1]
    assert error["fields"]["held"] == {"kvframe-sliding-window": {"0.1.0": [0, 2, 3], "9.9": [1]}}


def test_other_limits_are_named_with_their_rank(outcomes: Outcomes) -> None:
    error = error_of(outcomes, "other_limits")
    assert error["fields"]["ranks"] == [0]
    assert error["fields"]["held"] == {"max_model_len": {"8192": [0], "4096": [1, 2, 3]}}


def test_other_pools_are_named_with_their_rank(outcomes: Outcomes) -> None:
    error = error_of(outcomes, "other_pools")
    assert error["fields"]["ranks"] == [3]
    assert error["fields"]["held"] == {"pools": {'["device", "host"]': [0, 1, 2], '["device"]': [3]}}


def test_another_spec_of_a_layer_is_named_with_its_rank(outcomes: Outcomes) -> None:
    error = error_of(outcomes, "other_spec")
    assert error["fields"]["ranks"] == [2]
    assert "head_size=64" in error["message"]


def test_ranks_share_all_layers_or_none(outcomes: Outcomes) -> None:
    error = error_of(outcomes, "overlapping_layers")
    assert error["fields"]["ranks"] == [0, 1]
    assert "layers.0.attn" in error["message"]


def test_a_rank_that_cannot_tell_its_layers_stops_all(outcomes: Outcomes) -> None:
    error = error_of(outcomes, "unreadable_layer")
    assert error["fields"]["ranks"] == [1]
    assert "MissingPluginError" in error["message"]


def test_a_group_of_some_ranks_plans_without_the_others(outcomes: Outcomes) -> None:
    found = outcomes["smaller_group"]
    for outsider in (found[0], found[2]):
        assert outsider["error"]["type"] == "UsageError"
    assert found[1] == found[3]
    assert found[1]["slabs"] == 301 * MIB // found[1]["slab_bytes"]


def test_without_a_process_group_it_says_how_to_get_one(outcomes: Outcomes) -> None:
    for found in outcomes["no_group"]:
        assert found["error"]["type"] == "UsageError"
        assert "init_process_group" in found["error"]["message"]


def test_without_torch_it_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'kvframe\[torch\]'"):
        agree({}, engine=EngineConfig(max_model_len=64), memory=0)
