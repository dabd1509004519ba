"""The environment's words, and versions; no vLLM is needed for this."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvframe_vllm
from kvframe_vllm.errors import SettingError, VersionError
from kvframe_vllm.settings import check_version, strategy, wanted


def test_off_unless_asked_for() -> None:
    assert wanted({}) == frozenset()
    assert wanted({"KVFRAME_VLLM": " "}) == frozenset()


@pytest.mark.parametrize(
    ("text", "parts"),
    [("manager", {"manager"}), ("planner", {"planner"}), ("manager, planner", {"manager", "planner"})],
)
def test_parts(text: str, parts: set[str]) -> None:
    assert wanted({"KVFRAME_VLLM": text}) == parts


def test_unknown_words_are_errors_that_name_the_variable() -> None:
    with pytest.raises(SettingError, match="KVFRAME_VLLM='managr'"):
        wanted({"KVFRAME_VLLM": "managr"})
    with pytest.raises(SettingError, match="engine, optimal"):
        strategy({"KVFRAME_VLLM_STRATEGY": "best"})


def test_the_engines_strategy_is_the_default() -> None:
    assert strategy({}) == "engine"
    assert strategy({"KVFRAME_VLLM_STRATEGY": "optimal"}) == "optimal"


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1.dev3+gabc", "0.32"])
def test_versions_it_was_tested_with(version: str) -> None:
    check_version(version, {})


@pytest.mark.parametrize("version", ["0.31.0", "0.33.0", "1.32.0", "dev"])
def test_other_versions_are_refused_by_name_and_can_be_forced(version: str) -> None:
    with pytest.raises(VersionError, match=f"0.32, and this is {version}.*KVFRAME_VLLM_ANY_VERSION=1"):
        check_version(version, {})
    with pytest.raises(VersionError):
        check_version(version, {"KVFRAME_VLLM_ANY_VERSION": "0"})
    check_version(version, {"KVFRAME_VLLM_ANY_VERSION": "1"})


def test_importing_and_registering_pays_for_nothing_that_is_off() -> None:
    look = (
        "import sys, kvframe_vllm; kvframe_vllm.register(); "
        "print([name for name in ('vllm', 'torch', 'kvframe.blocks') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True, env={})
    assert done.stdout.strip() == "[]"


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="Schduler"):
        kvframe_vllm.Schduler  # noqa: B018
