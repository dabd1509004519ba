"""The documentation's code runs: every page's Python blocks, in order, in one module, and prints what is shown."""

import contextlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", flags=re.M | re.S)
TITLE = re.compile(r'title="([^"]+)"')


def fences(page):
    """Language, words after it, and text of every fenced block."""
    return FENCE.findall(page.read_text(encoding="utf-8"))


PAGES = [page for page in sorted(DOCS.rglob("*.md")) if any(kind == "python" for kind, *_ in fences(page))]
SIGNATURES = {"reference/hooks.md"}  # generated: it shows what to implement, and nothing to run
BRIDGE = re.compile(r"^\s*from kvframe_transformers", flags=re.M)
# Libraries that a page may need and an installation may lack, and what brings them.
EXTRAS = {
    "torch": "kvframe[torch]",
    "transformers": "kvframe-transformers",
    "kvframe_transformers": "kvframe-transformers",
    "vllm": "kvframe-vllm",
}
IMPORT = re.compile(r"^\s*(?:import|from) (\w+)", flags=re.M)
TORCH = re.compile(r"^\s*from kvframe\.(ops|views|buffers)", flags=re.M)


def name_of(page):
    return page.relative_to(DOCS).as_posix()


def squeezed(text):
    return [line.rstrip() for line in text.strip().splitlines()]


@pytest.fixture
def module(monkeypatch):
    """The module that a page's code runs in; it can be imported by name, as a script can be as `__main__`."""
    made = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", made)
    return made


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("page", [p for p in PAGES if name_of(p) not in SIGNATURES], ids=name_of)
def test_a_pages_code_runs_and_prints_what_is_shown(page, module, tmp_path, monkeypatch):
    blocks = fences(page)
    code = "".join(text for kind, _, text in blocks if kind == "python")
    imported = {*IMPORT.findall(code), *(["torch"] if TORCH.search(code) else [])}
    for library in sorted(imported & EXTRAS.keys()):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"the page's code needs {library}: pip install '{EXTRAS[library]}'")
    if any(BRIDGE.search(text) for kind, _, text in blocks if kind == "python"):
        pytest.importorskip(
            "kvframe_transformers", reason="the page's code needs kvframe-transformers, and torch"
        )
    monkeypatch.chdir(tmp_path)
    printed = None
    for kind, words, text in blocks:
        if kind == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(text, name_of(page), "exec"), module.__dict__)
            printed = out.getvalue()
        elif kind == "text" and printed is not None:
            assert squeezed(printed) == squeezed(text)
            printed = None
        elif kind == "json" and words.strip():  # a file that the code reads
            Path(TITLE.search(words)[1]).write_text(text, encoding="utf-8")


def test_every_kind_of_page_is_there():
    assert {name_of(page).partition("/")[0] for page in PAGES} >= {"tutorial", "how-to", "explanation"}


def test_what_the_pages_import_is_in_the_reference():
    """Only what is listed there is public (docs/explanation/stability.md)."""
    listed = re.findall(
        r"^::: (\S+)", (DOCS / "reference" / "api.md").read_text(encoding="utf-8"), flags=re.M
    )
    imported = {
        name
        for page in PAGES
        for kind, _, text in fences(page)
        if kind == "python"
        for name in re.findall(r"^\s*from (kvframe\.[\w.]+) import", text, flags=re.M)
    }
    assert len(imported) > 10
    missing = {name for name in imported if not any(f"{module}.".startswith(f"{name}.") for module in listed)}
    assert missing == set()


# --- the tutorial's plugin, made as the page says -------------------------------------------------------------------

TUTORIAL = DOCS / "tutorial" / "cache-kind-from-paper.md"


def files_of(page):
    """The files that a page's titled blocks make up, one after the other."""
    files = {}
    for _, words, text in fences(page):
        title = TITLE.search(words)
        if title is not None:
            files[title[1]] = "\n\n".join(filter(None, (files.get(title[1]), text)))
    return files


def test_the_tutorials_plugin_is_made_installed_checked_and_plans(tmp_path, capsys):
    pytest.importorskip("copier", reason="the plugin begins as a scaffold: pip install 'kvframe[new-plugin]'")
    from tests.command_line import kvframe

    options = ("--storage", "per-token", "--lifetime", "own", "--no-input", "--output", tmp_path)
    assert " ".join(map(str, options[:5])) in TUTORIAL.read_text()
    assert kvframe(capsys, "new-plugin", "digest", *options).code == 0
    project, target = tmp_path / "kvframe-digest", tmp_path / "site"
    for path, text in files_of(TUTORIAL).items():
        assert (project / path).is_file()  # the page replaces files of the scaffold
        (project / path).write_text(text, encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--target", target, project], check=True)
    run = [sys.executable, "-c", "from kvframe.cli import main; main()"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(target), os.environ.get("PYTHONPATH", "")]),
    }
    environment |= {"OMP_NUM_THREADS": "1"}

    def call(*words, cwd=tmp_path):
        return subprocess.run(words, capture_output=True, text=True, check=False, env=environment, cwd=cwd)

    listed = json.loads(call(*run, "plugins", "--json").stdout)["plugins"]
    found = [plugin for plugin in listed if plugin["distribution"] == "kvframe-digest"]
    assert [(one["status"], one["families"]) for one in found] == [("active", ["digest", "digest_summary"])]
    checked = call(*run, "check", "kvframe-digest", "--json")
    report = json.loads(checked.stdout)
    assert [check for check in report["checks"] if check["status"] == "failed"] == []
    collected = call(
        sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", cwd=project
    )
    assert "test_conforms[tokens_survive_a_thousand_steps]" in collected.stdout
    config = re.search(r"^config = (\{.*?^\})", TUTORIAL.read_text(), flags=re.M | re.S)[1]
    (tmp_path / "config.json").write_text(json.dumps(eval(config)))
    planned = call(*run, "plan", "config.json", "--memory", "4MiB", "--max-model-len", "1024", "--json")
    assert planned.returncode == 0, planned.stderr
    kinds = {kind for group in json.loads(planned.stdout)["groups"] for kind in group["kinds"]}
    assert kinds == {"digest", "full_attention"}
