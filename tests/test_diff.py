"""`kvframe diff`: causes before consequences, each number with what it comes from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvframe.cli.differences import Change, Difference, difference
from tests.command_line import kvframe

MODELS = Path(__file__).parent.parent / "examples" / "models"
GEMMA, LLAMA = MODELS / "gemma-3-27b.json", MODELS / "llama-3.1-8b.json"
BASE = ("--memory", "64GiB", "--max-model-len", "131072")

Planner = Callable[..., dict[str, Any]]


@pytest.fixture
def planned(capsys: pytest.CaptureFixture[str]) -> Planner:
    def call(*words: str, model: Path = GEMMA) -> dict[str, Any]:
        answer = kvframe(capsys, "plan", model, *words, "--json")
        assert answer.code == 0, answer.err
        result: dict[str, Any] = json.loads(answer.out)
        return result

    return call


@pytest.fixture
def files(tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    def write(a: Any, b: Any) -> tuple[Path, Path]:
        for name, result in (("a.json", a), ("b.json", b)):
            text = result if isinstance(result, str) else json.dumps(result)
            (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / "a.json", tmp_path / "b.json"

    return write


def causes(found: Difference) -> dict[str, tuple[Any, Any]]:
    return {change.what: (change.a, change.b) for change in found.causes}


def consequence(found: Difference, what: str, group: str = "", pool: str = "device") -> Change:
    where = (what, group, pool)
    (change,) = [c for c in found.consequences if (c.what, c.group, c.pool) == where]
    return change


def test_half_the_memory_is_the_only_cause(planned: Planner) -> None:
    a = planned("--memory", "64GiB", "--max-model-len", "131072", "--strategy", "engine")
    b = planned("--memory", "32GiB", "--max-model-len", "131072", "--strategy", "engine")
    found = difference(a, b)
    assert causes(found) == {"memory_bytes": (64 << 30, 32 << 30)}
    assert consequence(found, "num_slabs").because == ("memory_bytes",)
    assert consequence(found, "requests").because == ("num_slabs",)
    assert consequence(found, "max_concurrency", pool="").because == ("requests",)
    assert consequence(found, "tokens", pool="").because == ("max_concurrency",)
    assert not [change for change in found.consequences if change.group]
    assert found.factors["budget"] == 0.5
    assert found.factors["bytes_per_request"] == 1
    assert found.factors["requests"] == pytest.approx(0.5, rel=1e-3)


def test_another_cache_dtype_halves_pages_and_says_why(planned: Planner) -> None:
    a = planned(*BASE)
    b = planned(*BASE, "--cache-dtype", "fp8_e4m3", "--scale-policy", "unit")
    found = difference(a, b)
    assert causes(found)["options.cache_dtype"] == ("auto", "fp8_e4m3")
    # 16 KV heads of 128 elements for K and V: 4,096 elements of 2 bytes and of 1
    per_token = "bytes_per_token_per_layer.full_attention"
    assert causes(found)[per_token] == (8192, 4096)
    page = consequence(found, "natural_page_bytes", "full_attention")
    assert (page.a, page.b) == (10 * 16 * 8192, 10 * 16 * 4096)  # 10 layers, 16 tokens
    assert page.because == (per_token,)  # not what belongs to the sliding layers
    assert found.factors["bytes_per_request"] == pytest.approx(0.5, rel=1e-2)


def test_a_shorter_request_changes_only_the_groups_that_grow(planned: Planner) -> None:
    found = difference(planned(*BASE), planned("--memory", "64GiB", "--max-model-len", "32768"))
    assert causes(found) == {"engine.max_model_len": (131072, 32768)}
    blocks = consequence(found, "blocks_per_request", "full_attention")
    assert (blocks.a, blocks.b) == (131072 // 16, 32768 // 16)
    assert blocks.because == ("engine.max_model_len",)
    assert "sliding_attention" not in {
        change.group for change in found.consequences if change.what == "blocks_per_request"
    }


def test_another_strategy_shows_how_the_groups_changed(planned: Planner) -> None:
    found = difference(planned(*BASE), planned(*BASE, "--strategy", "engine"))
    assert causes(found) == {"strategy": ("optimal", "engine")}
    groups = consequence(found, "groups", "sliding_attention")
    assert groups.b == 6  # 52 sliding layers in groups of 10, as many as the full ones
    assert groups.because[0] == "strategy"
    layers = consequence(found, "layers_per_group", "sliding_attention")
    assert layers.b == [9, 9, 9, 9, 8, 8]
    assert consequence(found, "layout", pool="").because == ("chosen",)


def test_another_model_names_the_kinds_that_came_and_went(planned: Planner) -> None:
    found = difference(planned(*BASE), planned(*BASE, model=LLAMA))
    assert causes(found)["layers.sliding_attention"] == (52, None)
    gone = consequence(found, "groups", "sliding_attention")
    assert gone.b == 0
    assert "layers.sliding_attention" in gone.because


def test_what_moved_to_another_pool_is_told_by_pool(planned: Planner, tmp_path: Path) -> None:
    config = json.loads(
        (MODELS.parents[1] / "tests/data/models/deepseek-v3.2.json").read_text(encoding="utf-8")
    )
    model = tmp_path / "config.json"
    model.write_text(json.dumps(config["hf_config"]), encoding="utf-8")
    words = ("--memory", "64GiB", "--max-model-len", "32768")
    found = difference(
        planned(*words, model=model),
        planned(*words, "--hisparse", "--host-memory", "400GiB", model=model),
    )
    assert causes(found) == {
        "engine.extras.hisparse": (False, True),
        "options.host_memory": (None, 400 << 30),
    }
    moved = consequence(found, "groups", "mla", pool="host")
    assert (moved.a, moved.b) == (0, 1)
    assert "engine.extras.hisparse" in moved.because
    # 61 layers of 16 tokens of 576 values of 2 bytes, 2,048 blocks a request
    assert consequence(found, "bytes_per_request", pool="host").b == 61 * 16 * 576 * 2 * 2048
    assert consequence(found, "slab_bytes", pool="host").a is None


def test_another_version_of_a_plugin_is_a_cause(planned: Planner) -> None:
    a = planned(*BASE)
    b = json.loads(json.dumps(a))
    b["versions"]["kvframe-sliding-window"] = "9.9"
    found = difference(a, b)
    assert causes(found) == {
        "versions.kvframe-sliding-window": (a["versions"]["kvframe-sliding-window"], "9.9")
    }
    assert not found.consequences


def test_report_101_a_jump_without_a_cause_is_told_with_its_group(
    planned: Planner,
    files: Callable[..., tuple[Path, Path]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two releases plan the same model into the same memory, and one reports ten times the tokens."""
    a = planned(*BASE)
    b = json.loads(json.dumps(a))
    b["groups"][2]["blocks_per_request"] //= 10
    b["tokens"] *= 10
    b["max_concurrency"] *= 10
    b["pools"][0]["max_concurrency"] *= 10
    del a["versions"]
    answer = kvframe(capsys, "diff", *files(a, b))
    assert answer.code == 0
    assert "Nothing that was asked differs (the files do not tell versions)" in answer.out
    assert "full_attention" in answer.out
    assert "blocks_per_request" in answer.out
    assert "Tokens × 10: requests at once × 10, length of a request × 1." in answer.out


def test_equal_plans_are_the_same(
    planned: Planner,
    files: Callable[..., tuple[Path, Path]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = planned(*BASE)
    assert difference(result, result).same
    assert kvframe(capsys, "diff", *files(result, result)).out == "The plans are the same.\n"


def test_people_read_causes_first_and_sizes_in_their_units(
    planned: Planner,
    files: Callable[..., tuple[Path, Path]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    pair = files(planned(*BASE), planned("--memory", "48GiB", "--max-model-len", "131072"))
    answer = kvframe(capsys, "diff", *pair)
    assert answer.code == 0
    assert answer.out.index("What was asked differently") < answer.out.index("What follows")
    assert "64.00 GiB" in answer.out
    assert "48.00 GiB" in answer.out
    assert "budget × 0.75" in answer.out


def test_machines_get_the_same(
    planned: Planner,
    files: Callable[..., tuple[Path, Path]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    a, b = planned(*BASE), planned(*BASE, "--strategy", "engine")
    plain = json.loads(kvframe(capsys, "diff", *files(a, b), "--json").out)
    found = difference(a, b)
    assert plain["same"] is False
    assert plain["causes"] == [
        {"what": "strategy", "a": "optimal", "b": "engine", "pool": "", "group": "", "because": []}
    ]
    assert [change["what"] for change in plain["consequences"]] == [c.what for c in found.consequences]
    assert plain["factors"] == dict(found.factors)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("not json", "holds no JSON"),
        ("[1]", "holds a JSON list"),
        ('{"error": {"message": "one request needs more"}}', "was refused: one request needs more"),
        ('{"format": "kvframe-plan/1"}', "a plan for engines"),
        ('{"model_type": "llama"}', "a model's config.json"),
        ('{"layers": {}, "bytes": {}}', "output of `kvframe inspect`"),
        ('{"groups": []}', "lacks memory_bytes, strategy"),
    ],
)
def test_a_file_that_is_no_plan_is_wrong_usage(
    text: str,
    why: str,
    planned: Planner,
    files: Callable[..., tuple[Path, Path]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second = files(planned(*BASE), text)
    answer = kvframe(capsys, "diff", first, second, "--json")
    assert answer.code == 2
    error = json.loads(answer.out)["error"]
    assert error["kind"] == "usage"
    assert why in error["message"]
    assert str(second) in error["message"]


def test_a_missing_file_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = kvframe(capsys, "diff", tmp_path / "a.json", tmp_path / "b.json")
    assert answer.code == 2
    assert "No such file" in answer.err
