"""The command line: what it accepts, what it says when something is wrong, and that its numbers are documented."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvframe.cli import main
from kvframe.cli.options import parse_numbers, parse_size, size_text

ROOT = Path(__file__).parent.parent
LLAMA = str(ROOT / "examples" / "models" / "llama-3.1-8b.json")
GEMMA = str(ROOT / "examples" / "models" / "gemma-3-27b.json")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(list(words))
        printed = capsys.readouterr()
        return int(left.value.code or 0), printed.out, printed.err

    return call


def planned(run: Run, *words: str) -> dict[str, Any]:
    code, out, err = run("plan", *words, "--json")
    assert code == 0, err
    result: dict[str, Any] = json.loads(out)
    return result


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("123", 123),
        ("64GiB", 64 * 2**30),
        ("64 gib", 64 * 2**30),
        ("80GB", 80 * 10**9),
        ("1.5KiB", 1536),
        ("0.1KB", 100),
    ],
)
def test_sizes_are_bytes_or_have_a_unit(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "64 parsecs", "1,000"])
def test_a_size_that_cannot_be_read_is_wrong_usage(text: str, run: Run) -> None:
    code, _, err = run("plan", LLAMA, f"--memory={text}")
    assert code == 2
    assert "KiB" in err


def test_numbers_and_sizes_as_text() -> None:
    assert parse_numbers("20, 22") == (20, 22)
    assert size_text(512) == "512 B"
    assert size_text(3 * 2**30) == "3.00 GiB"


def test_device_memory_less_weights_and_reserve_is_the_budget(run: Run) -> None:
    words = ("--gpu-memory", "80GiB", "--weights", "16GiB", "--reserve", "2GiB")
    result = planned(run, LLAMA, *words)
    assert result["memory_bytes"] == 62 * 2**30
    assert result["memory_source"] == "--gpu-memory less --weights and --reserve"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ((), "--memory"),
        (("--memory", "1GiB", "--gpu-memory", "1GiB"), "not both"),
        (("--gpu-memory", "80GiB"), "--weights"),
        (("--memory", "1GiB", "--weights", "1GiB"), "--weights"),
        (("--gpu-memory", "16GiB", "--weights", "16GiB"), "leaves 0"),
        (("--memory", "1GiB", "--requests", "4"), "--requests"),
        (("--memory", "64GiB", "--pipeline-layers", "20,13"), "32 layers"),
        (("--memory", "64GiB", "--strategy", "best"), "best"),
        (("--memory", "64GiB", "--block-size", "0"), "block-size"),
    ],
)
def test_options_that_contradict_each_other_are_wrong_usage(
    words: Sequence[str], named: str, run: Run
) -> None:
    code, out, err = run("plan", LLAMA, *words, "--json")
    assert code == 2
    assert named in err
    error = json.loads(out)["error"]
    assert error["kind"] == "usage"
    assert named in error["message"]


def test_a_model_without_a_maximum_length_asks_for_one(run: Run) -> None:
    code, _, err = run("plan", GEMMA, "--memory", "64GiB")
    assert code == 2
    assert "--max-model-len" in err


def test_a_refusal_has_code_1_and_says_what_fits(run: Run) -> None:
    code, out, err = run("plan", LLAMA, "--memory", "1GiB", "--json")
    error = json.loads(out)["error"]
    assert (code, error["kind"]) == (1, "insufficient_memory")
    # 1 GiB is 512 blocks of 32 * 65,536 bytes; one is the null block: 511 * 16 tokens
    assert error["fields"]["largest_fitting_len"] == 511 * 16
    assert "8,176 tokens" in err


def test_unknown_names_are_refused_with_the_known_and_the_nearest(run: Run) -> None:
    code, out, _ = run("plan", LLAMA, "--memory", "64GiB", "--cache-dtype", "fp8_e4m4", "--json")
    error = json.loads(out)["error"]
    assert (code, error["kind"]) == (1, "unknown_cache_dtype")
    assert "'fp8_e4m3'" in error["message"]
    code, out, _ = run("plan", LLAMA, "--memory", "64GiB", "--layout", "LBHN", "--json")
    assert json.loads(out)["error"]["kind"] == "layout"


@pytest.mark.parametrize(("scales", "policy", "warned"), [("yes", None, False), ("unknown", None, True)])
def test_scales_that_nobody_vouches_for_are_warned_of(
    scales: str, policy: str | None, warned: bool, run: Run
) -> None:
    result = planned(
        run, LLAMA, "--memory", "64GiB", "--cache-dtype", "fp8", "--scales-in-checkpoint", scales
    )
    assert bool(result["warnings"]) is warned


def test_missing_scales_are_an_error_without_a_policy(run: Run) -> None:
    words = ("--memory", "64GiB", "--cache-dtype", "fp8", "--scales-in-checkpoint", "no")
    code, out, _ = run("plan", LLAMA, *words, "--json")
    assert (code, json.loads(out)["error"]["kind"]) == (1, "missing_scales")
    code, out, _ = run("plan", LLAMA, *words, "--scale-policy", "checkpoint", "--json")
    assert (code, json.loads(out)["error"]["kind"]) == (1, "missing_scales")
    assert planned(run, LLAMA, *words, "--scale-policy", "unit")["warnings"]
    assert not planned(run, LLAMA, *words, "--scale-policy", "computed")["warnings"]


def test_requests_asked_for_are_answered_at_both_lengths(run: Run) -> None:
    words = ("--memory", "64GiB", "--max-num-seqs", "16", "--mean-len", "8192")
    requested = planned(run, LLAMA, *words)["requested"]
    # 32,768 blocks, one null: 32,767 // 8,192 = 3 of 131,072 tokens, 32,767 // 512 = 63 of 8,192
    assert requested["at_max_model_len"] == 3
    assert requested["at_mean_len"] == 63
    assert not requested["fits_at_max_model_len"]
    assert requested["fits_at_mean_len"]


def test_inverse_questions(run: Run) -> None:
    fitted = planned(run, LLAMA, "--memory", "4GiB", "--fit-max-model-len")
    # 2,048 blocks, one null: 2,047 * 16 tokens
    assert fitted["max_model_len"] == 2047 * 16
    sized = planned(run, LLAMA, "--requests", "4", "--max-model-len", "8192")
    # 4 * 512 blocks and the null block, 2 MiB each
    assert sized["memory_bytes"] == (4 * 512 + 1) * 2 * 2**20


def test_output_has_no_colours_when_it_is_no_terminal(run: Run) -> None:
    for words in (("plan", LLAMA, "--memory", "64GiB", "--explain"), ("inspect", LLAMA), ("plugins",)):
        code, out, _ = run(*words)
        assert code == 0
        assert "\x1b" not in out


def test_every_key_of_the_plan_is_documented(run: Run) -> None:
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "reference" / "cli.md").read_text()))
    result = planned(run, GEMMA, "--memory", "64GiB", "--max-model-len", "8192", "--max-num-seqs", "2")
    keys = set(result) | set(result["groups"][0]) | set(result["waste"]) | set(result["alternatives"][0])
    assert keys - documented - {"kinds", "name"} == set()


def test_plugins_lists_all_and_says_the_same_to_a_machine(run: Run) -> None:
    _, table, _ = run("plugins")
    _, text, _ = run("plugins", "--json")
    plugins = json.loads(text)["plugins"]
    assert {"mla", "mamba", "sliding_window"} <= {plugin["name"] for plugin in plugins}
    for plugin in plugins:
        assert plugin["name"] in table
        assert plugin["status"] in table


@pytest.mark.parametrize("command", ["plan", "inspect", "plugins"])
def test_help_has_an_example(command: str, run: Run) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert re.search(rf"kvframe {command}", out.split("Usage:")[1].split("\n", 1)[1])
