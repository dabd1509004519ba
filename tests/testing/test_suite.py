"""The kit as pytest classes, run by pytest itself."""

import subprocess
import sys

import pytest

from kvframe.testing import FAMILY_CHECKS, PLUGIN_CHECKS

CONFIGURATION = ("-p", "no:cacheprovider", "--import-mode=importlib", "-q", "-rfs")


@pytest.fixture
def run(tmp_path):
    """Run a test file, and give what pytest printed."""

    def go(text, *words):
        file = tmp_path / "test_it.py"
        file.write_text(text)
        command = [sys.executable, "-m", "pytest", *CONFIGURATION, *words, str(file)]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)

    return go


SINK = """
import kvframe.testing

class TestSink(kvframe.testing.SpecConformance):
    family = "sink"
"""


def test_every_check_is_a_test_of_its_own(run):
    done = run(SINK, "--collect-only")
    assert done.returncode == 0, done.stdout
    assert f"{len(FAMILY_CHECKS)} tests collected" in done.stdout
    assert "test_conforms[merge_ignores_order]" in done.stdout


def test_a_check_is_chosen_by_its_name(run):
    done = run(SINK, "-k", "merge_ignores_order")
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


def test_a_check_that_does_not_apply_is_skipped_with_the_reason(run):
    done = run(SINK, "-k", "retaining_keeps_longer")
    assert "1 skipped" in done.stdout
    assert "the family has no retain" in done.stdout


def test_nothing_of_that_name_is_a_failure_and_not_an_empty_run(run):
    done = run(SINK.replace('"sink"', '"sinc"'), "-k", "merge_ignores_order")
    assert done.returncode == 1
    assert "needs a family 'sinc' (there are " in done.stdout
    assert "sliding_window" in done.stdout


def test_a_family_without_examples_fails(run):
    done = run(SINK + "    examples = []\n", "-k", "examples_are_of_the_family")
    assert done.returncode == 1
    assert "has no examples" in done.stdout


def test_a_failure_says_what_was_found_why_it_matters_and_what_to_do(run):
    wrong = """
import attrs, kvframe, kvframe.testing
from kvframe_sink import SinkFullAttentionSpec

@attrs.frozen(kw_only=True, repr=False)
class Short(SinkFullAttentionSpec):
    def max_memory_usage_bytes(self, engine):
        return self.page_size_bytes

family = kvframe.SpecFamily(
    name="short", spec_type=Short, lifetime=lambda spec: kvframe.Lifetime(block=spec.block_size)
)

class Plugin:
    @kvframe.hookimpl
    def kvframe_spec_families(self):
        return [family]

class TestShort(kvframe.testing.SpecConformance):
    family = "short"
    plugins = [Plugin()]
    examples = [Short(16, num_kv_heads=1, head_size=8, dtype="bfloat16")]
"""
    done = run(wrong, "-k", "sizing_covers_the_need")
    assert done.returncode == 1
    # a page of 16 tokens: 16 * 1 * (8 + 8) * 2 bytes; 17 tokens need two
    assert "asks for 512 bytes and holds 1024 under EngineConfig(max_model_len=17" in done.stdout
    assert "Why: admission and start-up trust it." in done.stdout
    assert "What to do: count the entry" in done.stdout
    assert "Traceback" not in done.stdout


def test_a_plugin_is_named_by_its_distribution_or_its_entry_point(run):
    text = "from kvframe.testing import PluginConformance\n\nclass TestIt(PluginConformance):\n    plugin = {!r}\n"
    for name in ("kvframe_sink", "sink"):
        done = run(text.format(name))
        # it brings no cache dtypes, so one check does not apply
        assert f"{len(PLUGIN_CHECKS) - 1} passed, 1 skipped" in done.stdout
    done = run(text.format("kvframe-sinc"))
    assert done.returncode == 1
    assert "needs a plugin 'kvframe-sinc'" in done.stdout


def test_the_kit_is_imported_without_pytest_and_torch():
    code = "import sys, kvframe.testing; print({'pytest', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
