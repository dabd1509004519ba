"""kvframe as a pytest plugin: found by its entry point, light, with a fixture and a marker."""

import importlib.metadata
import subprocess
import sys

import pytest

TESTS = """
import kvframe
import kvframe.testing
from kvframe.testing import SpecConformance


class TestSink(SpecConformance):
    family = "sink"


class Plugin:
    @kvframe.hookimpl
    def kvframe_cache_dtypes(self):
        return [kvframe.CacheDType(name="mine")]


def test_of_my_own(kvframe_host):
    host = kvframe_host(Plugin())
    assert "mine" in host.cache_dtypes.names
    assert set(host.families) == {"full_attention"}
"""
OPTIONS = ("-q", "--strict-markers", "-W", "error", "-p", "no:cacheprovider", "--import-mode=importlib")


@pytest.fixture
def run(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)

    def go(*words):
        command = [sys.executable, "-m", "pytest", *OPTIONS, *words, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)

    return go


def test_pytest_finds_it_by_its_entry_point():
    points = importlib.metadata.entry_points(group="pytest11", name="kvframe")
    assert {point.value for point in points} == {"kvframe_pytest"}


def test_a_plugins_own_tests_run_without_the_kit(run):
    done = run("-m", "not kvframe_conformance")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_the_kit_runs_alone(run):
    done = run("-m", "kvframe_conformance", "-k", "merge_ignores_order or test_of_my_own")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_it_is_no_burden_to_others():
    code = "import sys, kvframe_pytest; print(sorted({'kvframe', 'numpy', 'attrs'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("[]", "['attrs']")  # pytest itself has attrs in some versions
