"""`kvframe check`, `kvframe doctor`, `kvframe plugins --why`, warnings at load, and --traceback."""

import importlib
import json
import os
import re
import subprocess
import sys

import click
import pytest

import kvframe as package
from kvframe.cli import cli
from kvframe.cli.doctor import ERROR, OK, WARNING, findings
from kvframe.cli.why import why
from kvframe.testing import FAMILY_CHECKS, PLUGIN_CHECKS
from tests.command_line import kvframe
from tests.distributions import Distribution, hook, layout
from tests.distributions import family as family_source

pytestmark = pytest.mark.usefixtures("fresh")


# --- check ------------------------------------------------------------------------------------------------------------


def test_check_runs_every_check_of_a_distribution(capsys):
    answer = kvframe(capsys, "check", "kvframe-hidden-state", "--json")
    assert answer.code == 0
    report = json.loads(answer.out)
    assert report["passed"]
    assert [check["check"] for check in report["checks"]] == [
        c.name for c in (*PLUGIN_CHECKS, *FAMILY_CHECKS)
    ]
    assert {check["plugin"] for check in report["checks"]} == {"hidden_state"}


def test_check_shows_a_table_and_what_failed(capsys, site):
    site.add("good")  # its family has no examples
    answer = kvframe(capsys, "check", "kvtest-good")
    assert answer.code == 1
    assert re.search(r"good \(kvtest-good 1\.0\) +family kvtest_good_family +\d+ +\d+ +\d+", answer.out)
    assert "FAILED family kvtest_good_family: examples_are_of_the_family" in answer.out
    assert "What to do: give `SpecFamily(examples=...)`" in answer.out


def test_check_of_nothing_that_is_installed_is_an_error(capsys):
    answer = kvframe(capsys, "check", "kvframe-mlb")
    assert answer.code == 1
    assert "Did you mean 'kvframe-mla'?" in answer.err


def test_check_of_a_plugin_that_was_set_aside_fails_with_the_reason(capsys, site):
    site.add("crash", "raise ImportError('no module named x')")
    answer = kvframe(capsys, "check", "kvtest-crash", "--json")
    assert answer.code == 1
    failed = [check for check in json.loads(answer.out)["checks"] if check["status"] == "failed"]
    assert "is broken: ImportError: no module named x" in failed[0]["message"]


# --- why --------------------------------------------------------------------------------------------------------------


def said(host, name):
    return [str(answer) for answer in why(host, name)]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("full_attention", "family in use, from kvframe itself"),
        ("NHD", "layout in use, from kvframe itself"),
        ("fp8_e4m3", "cache dtype in use, from kvframe itself"),
        ("mla", "family in use, from mla (kvframe-mla 0.1.0)"),
        ("sliding_attention", "layer kind in use, from sliding_window (kvframe-sliding-window 0.1.0)"),
        ("gemma2", "model type in use, from sliding_window (kvframe-sliding-window 0.1.0)"),
        ("turboquant_k8v4", "cache dtype in use, from turboquant (kvframe-turboquant 0.1.0)"),
        ("kvframe-rswa", "plugin in use, from rswa (kvframe-rswa 0.1.0): brings family rswa"),
    ],
)
def test_why_names_the_provider(site, name, answer):
    assert answer in said(site.host(), name)


def test_why_names_what_was_replaced_and_by_whom(site):
    site.add("old", family_source("strided"))
    site.add("new", family_source("strided_fast", replaces="strided"))
    host = site.host()
    assert said(host, "strided") == [
        "family replaced, from old (kvtest-old 1.0): family 'strided_fast' of new (kvtest-new 1.0) takes its place"
    ]
    assert said(host, "strided_fast") == [
        "family in use, from new (kvtest-new 1.0): it takes the place of family 'strided'"
    ]


def test_why_names_both_of_a_clash(site):
    site.add("one", family_source("strided"))
    site.add("two", family_source("strided"))
    answers = said(site.host(), "strided")
    assert [answer.split(": ")[0] for answer in answers] == [
        "family set aside, from one (kvtest-one 1.0)",
        "family set aside, from two (kvtest-two 1.0)",
    ]
    assert all("family 'strided' is claimed by one (kvtest-one 1.0) and two" in answer for answer in answers)
    assert all("KVFRAME_DISABLE_PLUGINS" in answer for answer in answers)  # what to do


def test_why_names_what_could_be_installed(site):
    host = site.host(only=())
    assert said(host, "mamba2")[0].startswith(
        "layer kind set aside, from mamba (kvframe-mamba 0.1.0): blocked"
    )
    host.records.clear()
    assert "layer kind not installed, from kvframe-mamba: pip install kvframe-mamba" in said(
        host, "short_conv"
    )
    assert said(host, "whisper") == [
        "model type not installed, from kvframe-cross-attention: pip install kvframe-cross-attention"
    ]


def test_why_of_a_layout_of_a_plugin(site):
    site.add("shapes", layout("ROWS"))
    assert said(site.host(), "ROWS") == ["layout in use, from shapes (kvtest-shapes 1.0)"]


def test_why_of_nothing_says_the_nearest(capsys):
    answer = kvframe(capsys, "plugins", "--why", "slding_window")
    assert answer.code == 2
    assert "nothing that is installed goes by this name (did you mean 'sliding_window'?)" in answer.err


def test_why_of_nothing_says_what_was_set_aside(capsys, site):
    site.add("crash", "raise ImportError('x')")
    answer = kvframe(capsys, "plugins", "--why", "strided")
    assert "plugins that were set aside may bring it: crash (kvtest-crash 1.0)" in answer.err


def test_why_as_json(capsys):
    answer = kvframe(capsys, "plugins", "--why", "rswa", "--json")
    assert answer.code == 0
    found = json.loads(answer.out)
    assert found["name"] == "rswa"
    assert found["answers"][0] == {
        "what": "family",
        "state": "in use",
        "provider": "rswa (kvframe-rswa 0.1.0)",
        "reason": "",
    }


# --- doctor -----------------------------------------------------------------------------------------------------------


def levels(about, environ=None):
    return [(one.level, one.found) for one in findings(environ or {}) if one.about == about]


def test_a_sound_installation_is_healthy(capsys):
    answer = kvframe(capsys, "doctor", "--json")
    assert answer.code == 0
    report = json.loads(answer.out)
    assert report["healthy"]
    about = {finding["about"] for finding in report["findings"]}
    assert {"python", "kvframe", "attrs", "pluggy", "plugin mla (kvframe-mla 0.1.0)"} <= about


def test_the_table_ends_with_the_count(capsys, site):
    site.add("typo", hook("kvframe_spec_familys", "return []"))
    answer = kvframe(capsys, "doctor")
    assert answer.code == 1
    assert "plugin typo (kvtest-typo 1.0)" in answer.out
    assert answer.out.strip().endswith("1 wrong, 0 warnings.")


def test_a_plugin_for_another_kvframe_is_wrong_and_says_what_to_do(site):
    site.add("future", requires=("kvframe>=99,<100",))
    (found,) = [one for one in findings({}) if one.about == "plugin future (kvtest-future 1.0)"]
    assert found.level == ERROR
    assert found.found.startswith("incompatible: requires kvframe<100,>=99")
    assert "pip install --upgrade kvframe kvtest-future" in found.advice


def test_two_copies_of_a_distribution_are_wrong(site, make_site):
    site.add("good")
    Distribution(name="good", version="2.0").unpack(make_site("other").folder)
    importlib.invalidate_caches()
    (level, found) = levels("kvtest-good")[0]
    assert level == ERROR
    assert "installed 2 times" in found
    assert "1.0 in " in found
    assert "2.0 in " in found


def test_a_name_that_two_claim_is_wrong(site):
    site.add("same", project="kvtest-one", module="kvtest_one")
    site.add("same", project="kvtest-two", module="kvtest_two")
    ((level, found),) = levels("plugin same (kvtest-one 1.0)")
    assert level == ERROR
    assert found.startswith("conflict: entry point 'same' is claimed by kvtest-one and kvtest-two")


def test_a_missing_upper_bound_is_a_warning(site):
    site.add("unbound", requires=("kvframe>=0",))
    assert levels("kvtest-unbound") == [(WARNING, "has no upper bound on kvframe (kvframe>=0)")]
    site.add("bound", requires=("kvframe>=0,<2",))
    assert levels("kvtest-bound") == []


def test_variables_in_force_are_listed_and_unknown_ones_are_warned_of(site):
    site.add("good")
    environ = {"KVFRAME_DISABLE_PLUGINS": "good", "KVFRAME_DISABLED": "x", "HOME": "/"}
    assert levels("KVFRAME_DISABLE_PLUGINS", environ) == [(OK, "in force: 'good'")]
    assert levels("KVFRAME_DISABLED", environ) == [(WARNING, "is read by nobody: 'x'")]
    ((level, found),) = levels("plugin good (kvtest-good 1.0)", environ)
    assert (level, found) == (WARNING, "blocked: left out by KVFRAME_DISABLE_PLUGINS")


def test_a_variable_that_names_nobody_is_wrong_and_stops_nothing():
    found = levels("plugins", {"KVFRAME_PLUGINS": "nobody"})
    assert [level for level, _ in found] == [ERROR]
    assert "nobody" in found[0][1]


def test_an_editable_installation_says_so(site):
    site.add("good")
    info = next(site.folder.glob("kvtest_good-*.dist-info"))
    (info / "direct_url.json").write_text('{"url": "file:///x", "dir_info": {"editable": true}}')
    ((_, found),) = levels("plugin good (kvtest-good 1.0)")
    assert found.startswith("in use (editable): ")


def test_metadata_of_another_version_of_kvframe_are_wrong(monkeypatch):
    monkeypatch.setattr("kvframe.cli.doctor.VERSION", "9.9.9")
    ((level, found),) = levels("kvframe")
    assert level == ERROR
    assert "is version 9.9.9, its metadata say" in found


# --- warnings and tracebacks ------------------------------------------------------------------------------------------


def call(site, *words):
    environment = {**os.environ, "PYTHONPATH": str(site.folder), "COLUMNS": "200"}
    command = [sys.executable, "-c", "from kvframe.cli import main; main()", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_a_plugin_that_was_set_aside_is_one_line_on_standard_error(site):
    site.add("crash", "raise ImportError('no module\\nnamed x')")
    done = call(site, "plugins", "--json")
    assert done.returncode == 0
    assert done.stderr == "plugin crash (kvtest-crash 1.0) was set aside: ImportError: no module named x\n"
    json.loads(done.stdout)


def test_one_that_was_left_out_on_purpose_is_no_warning(site, monkeypatch):
    site.add("good")
    monkeypatch.setenv("KVFRAME_DISABLE_PLUGINS", "good")
    assert call(site, "plugins", "--json").stderr == ""


def test_a_slow_plugin_is_used_and_warned_of(site, monkeypatch, caplog):
    site.add("good")
    monkeypatch.setattr("kvframe.discovery.SLOW_SECONDS", -1.0)  # everything is too slow
    host = site.host()
    assert "kvtest_good_family" in host.families
    assert re.search(r"plugin good \(kvtest-good 1\.0\) took \d+\.\d s to load", caplog.text)
    ((level, found),) = levels("plugin good (kvtest-good 1.0)")
    assert level == WARNING
    assert found.startswith("took ")


CRASHING = """
import click
import kvframe


@click.command("crash")
def crash():
    raise ZeroDivisionError("no blocks")


@kvframe.hookimpl
def kvframe_commands():
    return [crash]
"""


def test_no_traceback_unless_asked_for(site):
    site.add("crash", CRASHING)
    done = call(site, "crash")
    assert done.returncode == 3
    assert done.stderr == "ZeroDivisionError: no blocks (--traceback shows where)\n"


@pytest.mark.parametrize("words", [("--traceback", "crash"), ("crash", "--traceback")])
def test_a_traceback_that_is_asked_for(site, words):
    site.add("crash", CRASHING)
    done = call(site, *words)
    assert done.returncode == 3
    assert "Traceback (most recent call last)" in done.stderr
    assert "kvtest_crash.py" in done.stderr


def test_an_error_of_kvframe_may_be_traced_too(capsys):
    words = ("plan", "no such file", "--memory", "1GiB")
    plain = kvframe(capsys, *words)
    assert "Traceback" not in plain.err
    traced = kvframe(capsys, "--traceback", *words)
    assert traced.code == plain.code


def test_a_machine_gets_unknown_errors_as_json(capsys, site):
    option = '@click.option("--json", "as_json", is_flag=True)'
    site.add(
        "crash",
        CRASHING.replace("def crash():", "def crash(as_json):").replace("def crash", f"{option}\ndef crash"),
    )
    answer = kvframe(capsys, "crash", "--json")
    assert json.loads(answer.out)["error"] == {
        "kind": "internal",
        "type": "ZeroDivisionError",
        "message": "no blocks",
        "fields": {},
    }


def test_every_command_of_the_core_has_help_and_an_example():
    context = click.Context(cli)
    for name in ("check", "doctor", "new-plugin", "plugins"):
        command = cli.get_command(context, name)
        assert command is not None
        assert command.help
        assert str(command.epilog).startswith("Example:")
    assert package.__version__
