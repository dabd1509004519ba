"""Whole environments: broken distributions that pip installed, and one without the plugin that a model needs.

An environment is a virtual environment of its own whose site-packages links to everything that is installed here,
except what the test leaves out. Nothing is downloaded.
"""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.distributions import Distribution, hook

MODELS = Path(__file__).parent.parent / "examples" / "models"
LLAMA, DEEPSEEK = MODELS / "llama-3.1-8b.json", MODELS / "deepseek-v3.json"
FILTERS = ("KVFRAME_PLUGINS", "KVFRAME_DISABLE_PLUGINS", "KVFRAME_STRICT")

BROKEN = [
    Distribution(name="crash", source="raise ImportError('no module named x')"),
    Distribution(name="typo", source=hook("kvframe_spec_familys", "return []")),
    Distribution(name="future", source="raise AssertionError('imported')", requires=("kvframe>=99",)),
]
REASONS = {
    "crash": ("broken", "ImportError: no module named x"),
    "typo": ("broken", "unknown hook 'kvframe_spec_familys': did you mean 'kvframe_spec_families'?"),
    "future": ("incompatible", r"requires kvframe>=99, and this is kvframe \d+\.\d+\.\d+"),
}


def installed_files(distribution):
    """The topmost names in site-packages that a distribution brought."""
    names = {path.parts[0] for path in importlib.metadata.distribution(distribution).files or ()}
    assert any(name.endswith(".dist-info") for name in names)
    return names - {".."}


class Environment:
    """A virtual environment with what is installed here, less some distributions."""

    def __init__(self, folder: Path, without: tuple[str, ...] = ()) -> None:
        venv.create(folder, with_pip=False, symlinks=os.name != "nt")
        self.python = (
            next(folder.glob("bin/python")) if os.name != "nt" else folder / "Scripts" / "python.exe"
        )
        self.site = Path(
            self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
        )
        left_out = {name for distribution in without for name in installed_files(distribution)}
        here = Path(str(importlib.metadata.distribution("kvframe").locate_file("")))
        for entry in here.iterdir():
            if entry.name not in left_out and not (self.site / entry.name).exists():
                (self.site / entry.name).symlink_to(entry)

    def run(self, *arguments):
        environment = {
            name: value for name, value in os.environ.items() if name not in (*FILTERS, "PYTHONPATH")
        }
        return subprocess.run(
            [str(self.python), *map(str, arguments)],
            capture_output=True,
            text=True,
            env={**environment, "NO_COLOR": "1", "COLUMNS": "200"},
            check=False,
        )

    def kvframe(self, *arguments):
        return self.run("-c", "from kvframe.cli import main; main()", *arguments)


@pytest.fixture(scope="module")
def with_broken(tmp_path_factory):
    """Three broken distributions beside everything else."""
    folder = tmp_path_factory.mktemp("broken")
    made = Environment(folder / "env")
    wheels = [distribution.wheel(folder) for distribution in BROKEN]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index"]
    # --no-deps: as pip is told to ignore that kvframe>=99 is not there
    subprocess.run(
        [*pip, "--no-deps", "--no-compile", "--target", str(made.site), *map(str, wheels)], check=True
    )
    return made


@pytest.fixture(scope="module")
def without_mla(tmp_path_factory):
    """Everything but one plugin."""
    return Environment(tmp_path_factory.mktemp("without") / "env", without=("kvframe-mla",))


def plugins(environment):
    answer = environment.kvframe("plugins", "--json")
    assert answer.returncode == 0, answer.stderr
    return {record["name"]: record for record in json.loads(answer.stdout)["plugins"]}


def blocks(answer):
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)["num_blocks"]


def test_all_three_are_listed_with_their_reason_and_the_others_work(with_broken, installed):
    listed = plugins(with_broken)
    for name, (status, reason) in REASONS.items():
        record = listed[name]
        assert record["status"] == status
        assert re.search(reason, record["reason"])
        assert (record["distribution"], record["version"]) == (f"kvtest-{name}", "1.0")
        assert record["families"] == []
    assert {name for name, record in listed.items() if record["status"] == "active"} == installed


def test_the_table_shows_them_too(with_broken):
    answer = with_broken.kvframe("plugins")
    assert answer.returncode == 0, answer.stderr
    for name, (status, reason) in REASONS.items():
        assert re.search(rf"^{name}: {status}: .*{reason}.*kvtest-{name} 1\.0", answer.stdout, re.MULTILINE)


def test_models_are_planned_beside_broken_plugins(with_broken):
    # 64 GiB / (32 layers * 2 * 8 heads * 128 * 2 bytes * 16 tokens)
    assert blocks(with_broken.kvframe("plan", LLAMA, "--memory", "64GiB", "--json")) == (64 << 30) // 2097152


def test_strict_refuses_to_start(with_broken, monkeypatch):
    answer = with_broken.run(
        "-c", "import os; os.environ['KVFRAME_STRICT'] = '1'; from kvframe.cli import main; main()", "plugins"
    )
    assert answer.returncode == 1
    assert all(f"kvtest-{name}" in answer.stderr for name in REASONS)


def test_a_model_that_needs_a_missing_plugin_says_which(without_mla):
    answer = without_mla.kvframe("plan", DEEPSEEK, "--memory", "64GiB")
    assert answer.returncode == 1
    assert answer.stdout == ""
    # above it there may be warnings of plugins that build on the missing one
    assert answer.stderr.splitlines()[-1] == (
        "MissingPluginError: model needs layer kind 'mla', provided by kvframe-mla: pip install kvframe-mla"
    )


def test_a_machine_is_told_the_same(without_mla):
    answer = without_mla.kvframe("plan", DEEPSEEK, "--memory", "64GiB", "--json")
    assert answer.returncode == 1
    error = json.loads(answer.stdout)["error"]
    assert (error["kind"], error["type"]) == ("missing_plugin", "MissingPluginError")
    assert (
        error["message"] == "model needs layer kind 'mla', provided by kvframe-mla: pip install kvframe-mla"
    )
    assert error["fields"]["distribution"] == "kvframe-mla"
    assert error["fields"]["reason"] is None


def test_other_models_are_planned_without_it(without_mla):
    assert "mla" not in plugins(without_mla)
    assert blocks(without_mla.kvframe("plan", LLAMA, "--memory", "64GiB", "--json")) == (64 << 30) // 2097152


def test_plugins_that_build_on_the_missing_one_are_set_aside_with_the_reason(without_mla, installed):
    for name, record in plugins(without_mla).items():
        if record["status"] != "active":
            assert (record["status"], "kvframe_mla" in record["reason"]) == ("broken", True), name
