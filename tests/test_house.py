"""The rules of the house, each as a test that names what breaks it."""

import ast
import functools
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kvframe
from kvframe import FullAttentionSpec, SpecBase, hookspecs, load_plugins

ROOT = Path(__file__).parent.parent
CORE = sorted((ROOT / "kvframe").rglob("*.py"))
PLUGINS = sorted((ROOT / "plugins").glob("*/src/**/*.py"))
PROVIDERS = ROOT / "kvframe" / "models" / "providers.py"

MOST_LINES = 300
# Modules that are longer, and why they are one file nevertheless.
LONG = {
    "kvframe/errors.py": "a catalogue: every error with its fields and its text, looked up by name",
    "kvframe/spec.py": "the protocol, the root and the attention specs are read against one section of the contract",
}


SCREEN = 60
LONG_FUNCTIONS = {"kvframe/cli/plan.py:_plan_options": "the table of options, one after the other"}


def relative(path):
    return path.relative_to(ROOT).as_posix()


def source(path):
    return path.read_text(encoding="utf-8")


@functools.cache
def tree(path):
    return ast.parse(source(path))


def test_there_is_something_to_look_at():
    assert len(CORE) > 20
    assert PLUGINS


# --- what importing costs --------------------------------------------------------------------------------------------

LOOK = """
import json, sys
heavy = ("torch", "click", "rich")
loaded = lambda: [name for name in heavy if name in sys.modules]
import kvframe
steps = {"import kvframe": loaded()}
host = kvframe.load_plugins()
steps["load_plugins()"] = [name for name in loaded() if name == "torch"]
spec = kvframe.FullAttentionSpec(16, num_kv_heads=8, head_size=128, dtype="bfloat16")
from kvframe.planning import plan
plan({"a": spec}, engine=kvframe.EngineConfig(max_model_len=64), memory=1 << 24, host=host)
steps["plan()"] = [name for name in loaded() if name == "torch"]
import kvframe.cli
steps["import kvframe.cli"] = [name for name in loaded() if name != "click"]
print(json.dumps(steps))
"""


def test_torch_click_and_rich_are_not_paid_for_unless_used():
    run = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == {
        "import kvframe": [],
        "load_plugins()": [],
        "plan()": [],
        "import kvframe.cli": [],
    }


# --- the core names no family ----------------------------------------------------------------------------------------


def spec_classes(cls=SpecBase):
    for sub in cls.__subclasses__():
        yield sub
        yield from spec_classes(sub)


def family_names():
    """Names of the installed plugins' spec classes, distributions and modules, full attention's aside."""
    records = [record for record in load_plugins().records if record.distribution]
    modules = {record.module.partition(":")[0] for record in records}
    names = {record.distribution for record in records} | modules
    for cls in spec_classes():
        if cls.__module__.partition(".")[0] in modules and not cls.__name__.startswith("_"):
            names.add(cls.__name__)
    return sorted(names - {FullAttentionSpec.__name__})


def test_the_core_names_no_plugins_class_or_distribution():
    names = family_names()
    assert any(name.endswith("Spec") for name in names)
    pattern = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, names))})(?![\w-])")
    found = [
        f"{relative(path)}:{number}: {match[0]}"
        for path in CORE
        if path != PROVIDERS  # the one table of who provides what
        for number, line in enumerate(source(path).splitlines(), 1)
        for match in pattern.finditer(line)
    ]
    assert found == []


def test_the_pattern_finds_what_it_looks_for():
    pattern = re.compile("|".join(map(re.escape, family_names())))
    assert pattern.search(source(PROVIDERS))


def imports(path):
    """Names of the modules that a file imports, anywhere in it."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def test_the_core_imports_no_plugin():
    assert [
        (relative(path), name) for path in CORE for name in imports(path) if name.startswith("kvframe_")
    ] == []


# --- how it is written -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ast.Assert, ast.Global], ids=["assert", "global"])
def test_no_such_statement_outside_tests(kind):
    found = [
        f"{relative(path)}:{node.lineno}"
        for path in [*CORE, *PLUGINS]
        for node in ast.walk(tree(path))
        if isinstance(node, kind)
    ]
    assert found == []


def test_a_core_module_fits_into_a_sitting():
    lengths = {relative(path): len(source(path).splitlines()) for path in CORE}
    too_long = {path: lines for path, lines in lengths.items() if lines > MOST_LINES and path not in LONG}
    assert too_long == {}
    no_longer = [path for path in LONG if lengths.get(path, 0) <= MOST_LINES]
    assert no_longer == [], "these are short now, or gone: take them off the list"
    assert all(LONG.values())


def code_lines(node):
    """Lines of a function without its docstring."""
    documented = ast.get_docstring(node) is not None
    text = node.body[0].end_lineno - node.body[0].lineno + 1 if documented else 0
    return node.end_lineno - node.lineno + 1 - text


def test_a_function_fits_on_a_screen():
    lengths = {
        f"{relative(path)}:{node.name}": code_lines(node)
        for path in [*CORE, *PLUGINS]
        for node in ast.walk(tree(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    too_long = {name for name, lines in lengths.items() if lines > SCREEN}
    assert too_long == LONG_FUNCTIONS.keys()


def test_every_public_name_exists_and_has_a_docstring():
    for name in kvframe.__all__:
        member = getattr(kvframe, name)
        if inspect.isclass(member) or inspect.isfunction(member):
            assert member.__doc__, name
    assert len(set(kvframe.__all__)) == len(kvframe.__all__)


def test_every_module_says_what_it_is():
    silent = [relative(path) for path in [*CORE, *PLUGINS] if ast.get_docstring(tree(path)) is None]
    assert silent == []


def test_no_file_names_a_machines_path():
    folders = ("kvframe", "plugins", "docs", "examples", "tests", "benchmarks")
    texts = [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".md", ".toml"} and ".egg-info" not in str(path)
    ]
    home = re.compile(r"(?<![\w.])/(work|home|root|Users)/\w")
    assert [relative(path) for path in texts if home.search(source(path))] == []


# --- hooks -----------------------------------------------------------------------------------------------------------

HOOKS = {name: getattr(hookspecs, name) for name in dir(hookspecs) if name.startswith("kvframe_")}


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_says_when_it_runs_and_how_results_combine(name):
    text = inspect.getdoc(HOOKS[name])
    assert text
    assert "Runs " in text
    assert re.search(r"collected|wins|chain", text)


@pytest.mark.parametrize("name", HOOKS)
def test_a_hooks_arguments_are_annotated_and_have_no_defaults(name):
    signature = inspect.signature(HOOKS[name])
    assert signature.return_annotation is not inspect.Signature.empty
    for parameter in signature.parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty
        assert parameter.default is inspect.Parameter.empty


def test_every_hook_is_in_the_reference():
    page = ROOT / "docs" / "reference" / "hooks.md"
    if not page.exists():
        pytest.skip("docs/reference has no page of hooks yet: it shows kvframe.hookspecs as a whole")
    text = source(page)
    assert [name for name in HOOKS if name not in text] == []


def test_every_hook_is_called_by_the_core():
    called = "".join(source(path) for path in CORE if path.name != "hookspecs.py")
    assert [name for name in HOOKS if f'"{name}"' not in called] == []


# --- plugins ---------------------------------------------------------------------------------------------------------


def test_every_plugin_of_the_house_is_installed_and_works():
    records = {record.distribution: record for record in load_plugins().records}
    # bridges to other libraries are no plugins of kvframe: they have no entry point
    manifests = (ROOT / "plugins").glob("*/pyproject.toml")
    folders = {path.parent.name for path in manifests if '"kvframe.plugins"' in source(path)}
    packaged = {name for name in folders if list((ROOT / "plugins" / name / "src").glob("*/__init__.py"))}
    assert {name: records[name].reason for name in packaged & records.keys()} == dict.fromkeys(packaged)
