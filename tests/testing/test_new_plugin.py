"""`kvframe new-plugin`: every kind that it can make is right at once, installs, and plans a model."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvframe.cli.new_plugin import LIFETIMES, STORAGES, TEMPLATE, answers, command
from kvframe.discovery import core_requirements
from kvframe.testing import FAILED, FAMILY_CHECKS, Subject, isolated_host, run
from kvframe.version import VERSION
from tests.command_line import kvframe

pytest.importorskip("copier", reason="new plugins are made with copier: pip install 'kvframe[new-plugin]'")

KINDS = [kind for kind in product(STORAGES, LIFETIMES) if kind[0] != "state" or kind[1] in ("fixed", "own")]
# These take the longest, and are run on the installed ones below.
FAST_CHECKS = [c for c in FAMILY_CHECKS if not re.search("views|moved|come_back|thousand", c.name)]


def make(capsys, folder, name, *words):
    answer = kvframe(capsys, "new-plugin", name, "--no-input", "--output", folder, *words)
    assert answer.code == 0, answer.err
    return folder / f"kvframe-{name}"


def imported(project):
    module = f"{project.name.replace('-', '_')}"
    spec = importlib.util.spec_from_file_location(module, project / "src" / module / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[module] = made
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize(("storage", "lifetime"), KINDS)
def test_every_kind_conforms_as_it_is_made(capsys, tmp_path, storage, lifetime):
    project = make(capsys, tmp_path, "made-here", "--storage", storage, "--lifetime", lifetime)
    module = imported(project)
    try:
        host = isolated_host(module)
        family = host.families["made_here"]
        subject = Subject(family=family, examples=family.examples, host=host)
        outcomes = [run(check, subject) for check in FAST_CHECKS]
        assert [outcome for outcome in outcomes if outcome.status == FAILED] == []
    finally:
        del sys.modules[module.__name__]


@pytest.mark.parametrize(
    ("storage", "lifetime", "fields"),
    [
        ("per-token", "prefix-window", {"sliding_window": 64}),
        ("compressed", "chunk", {"attention_chunk_size": 128}),
        ("state", "own", {"state_size": 4096}),
    ],
)
def test_a_new_plugin_installs_passes_and_plans_a_model(capsys, tmp_path, storage, lifetime, fields):
    project = make(capsys, tmp_path, "made-here", "--storage", storage, "--lifetime", lifetime)
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--target", target, project], check=True)
    assert (target / "kvframe_made_here" / "py.typed").is_file()

    def call(*words, cwd=tmp_path):
        environment = {**os.environ, "PYTHONPATH": str(target), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, check=False, env=environment, cwd=cwd
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run_kvframe = ("-c", "from kvframe.cli import main; main()")
    listed = json.loads(call(*run_kvframe, "plugins", "--json"))["plugins"]
    assert [p["families"] for p in listed if p["distribution"] == "kvframe-made-here"] == [["made_here"]]

    checked = json.loads(call(*run_kvframe, "check", "kvframe-made-here", "--json"))
    assert checked["passed"]
    assert {check["subject"] for check in checked["checks"]} == {"plugin made_here", "family made_here"}

    # its own tests run too; the checks that take longest have just been run
    chosen = ("-k", "not views and not moved and not come_back and not thousand")
    call("-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, "tests", cwd=project)

    config = {
        "model_type": "made",
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "num_hidden_layers": 4,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
        "layer_types": ["made_here", "made_here", "made_here", "full_attention"],
        **fields,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    planned = json.loads(call(*run_kvframe, "plan", "config.json", "--memory", "1GiB", "--json"))
    kinds = [kind for group in planned["groups"] for kind in group["kinds"]]
    assert set(kinds) == {"made_here", "full_attention"}
    assert planned["tokens"] > 0


def test_a_new_plugin_is_complete(capsys, tmp_path):
    project = make(capsys, tmp_path, "strided-window")
    files = {str(path.relative_to(project)) for path in project.rglob("*") if path.is_file()}
    assert files == {
        ".github/workflows/ci.yml",
        ".gitignore",
        "LICENSE",
        "README.md",
        "pyproject.toml",
        "src/kvframe_strided_window/__init__.py",
        "src/kvframe_strided_window/py.typed",
        "tests/test_strided_window.py",
    }
    assert not [
        path for path in project.rglob("*") if path.is_file() and "{{" in path.read_text().replace("${{", "")
    ]
    manifest = (project / "pyproject.toml").read_text()
    assert 'name = "kvframe-strided-window"' in manifest
    assert '[project.entry-points."kvframe.plugins"]\nstrided_window = "kvframe_strided_window"\n' in manifest


def test_a_new_plugin_is_bound_to_this_kvframe(capsys, tmp_path):
    given = answers("x", "per-token", "all")
    major, minor = VERSION.split(".")[:2]
    assert (given["core"], given["next_core"]) == (f"{major}.{minor}", f"{major}.{int(minor) + 1}")

    class Made:
        requires = (f"kvframe>={given['core']},<{given['next_core']}",)

    (requirement,) = core_requirements(Made())
    assert requirement.specifier.contains(VERSION)


def test_the_template_offers_what_the_command_offers():
    text = (TEMPLATE / "copier.yml").read_text()
    assert f"choices: [{', '.join(STORAGES)}]" in text
    assert f"choices: [{', '.join(LIFETIMES)}]" in text


def test_what_is_not_given_is_asked(tmp_path):
    asked = CliRunner().invoke(
        command, ["asked-for", "--output", str(tmp_path)], input="compressed\nwindow\n"
    )
    assert asked.exit_code == 0, asked.output
    assert "What does a layer store?" in asked.output
    assert "one vector for several tokens" in asked.output
    text = (tmp_path / "kvframe-asked-for" / "src" / "kvframe_asked_for" / "__init__.py").read_text()
    assert "tokens_per_state" in text
    assert "class AskedForLifetime" in text


def test_states_are_asked_only_for_lifetimes_that_mean_something(tmp_path):
    asked = CliRunner().invoke(command, ["asked-for", "--output", str(tmp_path)], input="state\n\n")
    assert asked.exit_code == 0, asked.output
    assert "the last tokens stay" not in asked.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["Strided Window"], "NAME Strided Window: must be lower-case words"),
        (["mla"], "a family or layer kind 'mla' exists already, from mla (kvframe-mla"),
        (["full-attention"], "exists already, from kvframe itself"),
        (["x", "--storage", "state", "--lifetime", "window"], "its lifetime is one of fixed, own"),
    ],
)
def test_what_cannot_be_made_is_wrong_usage(capsys, tmp_path, words, said):
    answer = kvframe(capsys, "new-plugin", *words, "--no-input", "--output", tmp_path)
    assert answer.code == 2
    assert said in answer.err
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(capsys, tmp_path):
    project = make(capsys, tmp_path, "mine")
    answer = kvframe(capsys, "new-plugin", "mine", "--no-input", "--output", tmp_path)
    assert answer.code == 2
    assert "exists and is not empty" in answer.err
    assert project.is_dir()


def test_without_copier_the_extra_is_named(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "copier", None)
    answer = kvframe(capsys, "new-plugin", "mine", "--no-input", "--output", tmp_path)
    assert answer.code == 1
    assert "pip install 'kvframe[new-plugin]'" in answer.err


def test_the_licence_is_that_of_kvframe():
    assert (TEMPLATE / "LICENSE").read_bytes() == (Path(__file__).parents[2] / "LICENSE").read_bytes()
