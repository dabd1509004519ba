"""KVFRAME_PLUGINS, KVFRAME_DISABLE_PLUGINS and KVFRAME_STRICT, what a model that needs the plugin is told, case o16."""

import json
import os
import sys
from pathlib import Path

import pytest

from kvframe import KVFrameError, PluginHost, load_plugins
from kvframe.discovery import ACTIVE, BLOCKED, Filters
from kvframe.errors import MissingPluginError, PluginLoadError, UnknownCacheDTypeError, UnknownPluginError
from kvframe.models import read_config, read_layers
from tests.command_line import kvframe as command
from tests.distributions import GOOD, active, dtype, records
from tests.model_configs import LATENT

pytestmark = pytest.mark.usefixtures("_no_filters")

# --- filters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["good_one", "good-one", "Good.One", "kvtest-good-one", "KVTest_Good_One"])
def test_a_filter_takes_entry_points_and_distributions_however_they_are_spelt(site, installed, name):
    site.add("good_one")
    site.add("other", "raise AssertionError('imported')")
    host = site.host(only=(name,))
    assert active(host) == {"good_one"}
    assert "kvtest_other" not in sys.modules
    assert records(host)["other"].status == BLOCKED
    assert records(host)["other"].reason == "left out: KVFRAME_PLUGINS does not name it"
    assert records(host)["other"].remedy == "add it to KVFRAME_PLUGINS"
    host = site.host(without=(name, "other"))
    assert active(host) == installed
    assert records(host)["good_one"].reason == "left out by KVFRAME_DISABLE_PLUGINS"
    assert records(host)["good_one"].remedy == "take it out of KVFRAME_DISABLE_PLUGINS"


def test_what_is_named_and_left_out_is_left_out(site):
    site.add("good")
    assert active(site.host(only=("good",), without=("kvtest-good",))) == set()


@pytest.mark.parametrize(
    ("environment", "filters"),
    [
        ({}, Filters()),
        ({"KVFRAME_PLUGINS": "a"}, Filters(only=("a",))),
        ({"KVFRAME_PLUGINS": " a, kvframe-b ,,"}, Filters(only=("a", "kvframe-b"))),
        ({"KVFRAME_PLUGINS": ""}, Filters(only=())),
        ({"KVFRAME_DISABLE_PLUGINS": "a,b"}, Filters(without=("a", "b"))),
        ({"KVFRAME_DISABLE_PLUGINS": ""}, Filters()),
        ({"KVFRAME_STRICT": "1"}, Filters(strict=True)),
        ({"KVFRAME_STRICT": "0"}, Filters()),
        ({"KVFRAME_STRICT": ""}, Filters()),
    ],
)
def test_filters_are_read_from_the_environment(environment, filters):
    assert Filters.from_environment(environment) == filters


def test_the_environment_filters(site, monkeypatch, installed):
    site.add("good")
    site.add("other")
    monkeypatch.setenv("KVFRAME_PLUGINS", "good, kvtest-other")
    monkeypatch.setenv("KVFRAME_DISABLE_PLUGINS", "other")
    assert active(PluginHost()) == {"good"}
    assert active(PluginHost(filters=Filters())) == installed | {"good", "other"}  # those in code win


@pytest.mark.parametrize("variable", ["KVFRAME_PLUGINS", "KVFRAME_DISABLE_PLUGINS"])
def test_an_unknown_name_in_a_filter_is_an_error_with_the_names_found(site, monkeypatch, installed, variable):
    site.add("good")
    monkeypatch.setenv(variable, "good,goood,nothing-like-it")
    with pytest.raises(UnknownPluginError) as caught:
        PluginHost()
    error = caught.value
    assert isinstance(error, LookupError)
    assert (error.kind, error.source, [*error.unknown]) == (
        "unknown_plugin",
        variable,
        ["goood", "nothing-like-it"],
    )
    assert {"good", "kvtest-good", *installed} <= {*error.found}
    assert variable in str(error)
    assert "Did you mean 'good'?" in str(error)
    assert "kvtest-good" in str(error)
    assert "kvtest_good" not in sys.modules


def test_strict_makes_a_plugin_that_was_set_aside_an_error(site, monkeypatch):
    site.add("good")
    site.add("left_out", "raise AssertionError('imported')")
    site.add("bad", "raise ImportError('on purpose')")
    site.add("old", requires=("kvframe>=99",))
    site.add("fp8", dtype("fp8"))
    monkeypatch.setenv("KVFRAME_STRICT", "1")
    monkeypatch.setenv("KVFRAME_DISABLE_PLUGINS", "left-out")
    with pytest.raises(PluginLoadError) as caught:
        PluginHost()
    # what a filter leaves out is no failure
    assert {*caught.value.failures} == {
        "bad (kvtest-bad 1.0)",
        "old (kvtest-old 1.0)",
        "fp8 (kvtest-fp8 1.0)",
    }
    assert "ImportError: on purpose" in str(caught.value)
    assert caught.value.kind == "plugin_load"
    monkeypatch.setenv("KVFRAME_DISABLE_PLUGINS", "left-out,bad,old,fp8")
    assert "good" in active(PluginHost())


# --- what a model that needs the plugin is told -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("filters", "said"),
    [
        ({"without": ("mla",)}, "left out by KVFRAME_DISABLE_PLUGINS. To use it, take it out of"),
        (
            {"only": ("sliding-window",)},
            "left out: KVFRAME_PLUGINS does not name it. To use it, add it to KVFRAME_PLUGINS",
        ),
    ],
)
def test_a_plugin_that_a_filter_left_out_is_not_to_be_reinstalled(filters, said):
    host = PluginHost(filters=Filters(**filters))
    with pytest.raises(MissingPluginError) as caught:
        read_layers(read_config(LATENT), host)
    text = str(caught.value)
    assert text.startswith(
        f"model needs layer kind 'mla', provided by kvframe-mla, which was set aside: {said}"
    )
    assert "install" not in text


def test_a_plugin_that_is_broken_is_to_be_mended(make_site, monkeypatch):
    make_site().add("mla", "raise ImportError('no cuda')", project="kvframe-mla", version="9.9")
    host = PluginHost(filters=Filters())
    with pytest.raises(MissingPluginError) as caught:
        read_layers(read_config(LATENT), host)
    assert str(caught.value) == (
        "model needs layer kind 'mla', provided by kvframe-mla, which was set aside: ImportError: no cuda. "
        "To use it, mend it or reinstall it: pip install --force-reinstall kvframe-mla"
    )


def test_a_plugin_for_another_kvframe_is_to_be_upgraded(make_site):
    make_site().add("mla", project="kvframe-mla", version="9.9", requires=("kvframe>=99",))
    with pytest.raises(MissingPluginError) as caught:
        read_layers(read_config(LATENT), PluginHost(filters=Filters()))
    assert str(caught.value).endswith(
        "To use it, install versions that fit: pip install --upgrade kvframe kvframe-mla"
    )


def test_a_spec_without_a_family_is_an_error_of_the_plan():
    class Foreign:
        pass

    with pytest.raises(MissingPluginError, match="a family for spec 'Foreign', which no installed plugin"):
        load_plugins().family(Foreign())


def test_a_cache_dtype_of_a_plugin_that_was_left_out_is_unknown(site):
    site.add("odd", dtype("kvtest_odd"))
    assert site.host().cache_dtypes.get("kvtest_odd")
    with pytest.raises(UnknownCacheDTypeError):
        site.host(without=("odd",)).cache_dtypes.get("kvtest_odd")


# --- the case of three plugins ----------------------------------------------------------------------------------------

CASES = Path(os.environ.get("KVFRAME_CASES") or Path(__file__).parent / "data" / "cases")
PLUGIN_CASES = [
    case
    for case in (json.loads(path.read_text(encoding="utf-8")) for path in sorted(CASES.glob("*.json")))
    if "entry_points" in case.get("input", {})
]
# The case's core is version 1.0. The running core meets the same bounds: it is in >=0,<2 and not in >=9.


def set_up(case, site):
    """Install what the case has installed."""
    for point in case["input"]["entry_points"]:
        source = GOOD
        for kind in point.get("kinds", ()):
            source = source.replace('KIND = __name__ + "_attention"', f"KIND = {kind!r}")
        if not point["loads"]:
            error, text = point["raises"].split(": ", 1)
            source = f"raise {error}({text!r})"
        site.add(
            point["name"],
            source,
            requires=[f"kvframe{point['requires_core']}"] if "requires_core" in point else (),
        )


def own_records(host):
    """Those of the case's plugins, by name, whatever else is installed here."""
    return {r.name: r for r in host.records if (r.distribution or "").startswith("kvtest-")}


def own_loaded(host):
    return [name for name, record in own_records(host).items() if record.status == ACTIVE]


@pytest.mark.parametrize("case", PLUGIN_CASES, ids=lambda case: case["id"])
def test_case_the_good_plugin_loads_and_the_others_say_why(case, site):
    set_up(case, site)
    host = site.host()
    assert own_loaded(host) == case["expected"]["loaded"]
    skipped = {name: record for name, record in own_records(host).items() if record.status != ACTIVE}
    assert skipped.keys() == case["expected"]["skipped"].keys()
    for name, wanted in case["expected"]["skipped"].items():
        assert wanted["reason_contains"] in skipped[name].reason


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("case", PLUGIN_CASES, ids=lambda case: case["id"])
def test_case_planning_works_beside_the_broken_plugins(case, site, tmp_path, capsys):
    set_up(case, site)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(case["input"]["plan_for_config"]), encoding="utf-8")
    answer = command(capsys, "plan", config, "--memory", "64GiB", "--json")
    assert (answer.code == 0) is case["expected"]["plan_works"]
    assert json.loads(answer.out)["num_blocks"] > 0
    listed = json.loads(command(capsys, "plugins", "--json").out)["plugins"]
    reasons = {plugin["name"]: plugin["reason"] for plugin in listed if plugin["status"] != ACTIVE}
    for name, wanted in case["expected"]["skipped"].items():
        assert wanted["reason_contains"] in reasons[name]


VARIANTS = [
    pytest.param(case, variant, id=f"{case['id']}-{number}")
    for case in PLUGIN_CASES
    for number, variant in enumerate(case["expected"].get("variants", ()))
]


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(("case", "variant"), VARIANTS)
def test_case_variant(case, variant, site, monkeypatch):
    unchecked = variant["expect"].keys() - {
        "loaded",
        "not_imported",
        "error",
        "error_kind",
        "must_mention",
        "each_hook_called_once",
    }
    assert not unchecked
    set_up(case, site)
    if variant.get("filter") is not None:
        monkeypatch.setenv("KVFRAME_PLUGINS", ",".join(variant["filter"]))
    if variant.get("strict"):
        monkeypatch.setenv("KVFRAME_STRICT", "1")
    expect = variant["expect"]
    if "error" in expect:
        with pytest.raises(KVFrameError) as caught:
            load_plugins()
        assert (type(caught.value).__name__, caught.value.kind) == (expect["error"], expect["error_kind"])
        said = json.dumps(caught.value.as_dict())
        assert [word for word in expect["must_mention"] if word not in said] == []
        return
    host = load_plugins()
    if variant.get("load_called_twice"):
        assert load_plugins() is host
    assert own_loaded(host) == expect["loaded"]
    assert not [name for name in expect.get("not_imported", ()) if f"kvtest_{name}" in sys.modules]
    if expect.get("each_hook_called_once"):
        for name in expect["loaded"]:
            assert sorted(sys.modules[f"kvtest_{name}"].CALLS) == [*own_records(host)[name].hooks]
