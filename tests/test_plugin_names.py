"""One owner a name: what two plugins claim, what kvframe has itself, families that replace others, and order."""

import importlib
import sys

import pytest

from kvframe import EngineConfig, FullAttentionSpec, KVQuantMode
from kvframe.discovery import ACTIVE, BLOCKED, CONFLICT
from kvframe.errors import HookError
from tests.distributions import active, check_that_others_work, dtype, family, hook, layout, reader, records

pytestmark = pytest.mark.usefixtures("_no_filters")

# --- one owner a name -------------------------------------------------------------------------------------------------


def test_two_distributions_that_claim_one_entry_point_are_both_named(site, installed):
    site.add("good")
    for project in ("kvtest-one", "kvtest-two"):
        source = "raise AssertionError('imported')"
        site.add("same", source, project=project, module=project.replace("-", "_"))
    host = site.host()
    claimants = [record for record in host.records if record.name == "same"]
    assert [record.distribution for record in claimants] == ["kvtest-one", "kvtest-two"]
    for record in claimants:
        assert record.status == CONFLICT
        assert record.reason == "entry point 'same' is claimed by kvtest-one and kvtest-two"
        assert record.remedy == "uninstall one of them, or leave one out with KVFRAME_DISABLE_PLUGINS"
    check_that_others_work(host, installed)


def test_leaving_out_one_of_two_claimants_lets_the_other_load(site):
    for number in ("one", "two"):
        module = f"kvtest_{number}"
        site.add("same", dtype(module), project=f"kvtest-{number}", module=module)
    for filters in ({"without": ("kvtest-one",)}, {"only": ("kvtest-two",)}):
        host = site.host(**filters)
        states = [(record.distribution, record.status) for record in host.records if record.name == "same"]
        assert states == [("kvtest-one", BLOCKED), ("kvtest-two", ACTIVE)]
        assert "kvtest_two" in host.cache_dtypes.names
        assert "kvtest_one" not in sys.modules


COMMAND = hook("kvframe_commands", "import click; return [click.Command('kvtest')]")
MODEL_READER = hook(
    "kvframe_model_readers",
    "from kvframe import ModelReader; return [ModelReader(model_types=('kvtest', __name__), read=len)]",
)
CLASHES = {
    "family": (family("kvtest"), family("kvtest"), "family 'kvtest'"),
    "spec type": (
        family("kvtest_a"),
        family("kvtest_b", before="import kvtest_a\n", spec_type="kvtest_a.Spec"),
        "spec type kvtest_a.Spec",
    ),
    "cache dtype": (dtype("kvtest"), dtype("kvtest"), "cache dtype 'kvtest'"),
    "layer kind": (reader("kvtest"), reader("kvtest"), "layer kind 'kvtest'"),
    "model type": (MODEL_READER, MODEL_READER, "model type 'kvtest'"),
    "layout": (layout("kvtest"), layout("kvtest"), "layout 'kvtest'"),
    "command": (COMMAND, COMMAND, "command 'kvtest'"),
}


@pytest.mark.parametrize(("first", "second", "claim"), CLASHES.values(), ids=CLASHES)
def test_two_plugins_with_one_name_are_both_set_aside_and_named(site, installed, first, second, claim):
    site.add("good")
    site.add("a", first)
    site.add("b", second)
    host = site.host()
    for name in ("a", "b"):
        assert records(host)[name].status == CONFLICT
        assert records(host)[name].reason == f"{claim} is claimed by a (kvtest-a 1.0) and b (kvtest-b 1.0)"
    assert not set(host.families) & {"kvtest", "kvtest_a", "kvtest_b"}
    assert "kvtest" not in host.cache_dtypes.names
    assert not {"kvtest", "kvtest_a"} & {*host.layer_readers, *host.model_readers, *host.layouts.names}
    assert "kvtest" not in [command.name for command in host.commands]
    check_that_others_work(host, installed)


BUILTIN_NAMES = {
    "dtype": (dtype("fp8"), "cache dtype 'fp8'"),
    "family": (family("full_attention"), "family 'full_attention'"),
    "spec type": (
        family("mine", spec_type="kvframe.FullAttentionSpec"),
        "spec type kvframe.spec.FullAttentionSpec",
    ),
    "layer kind": (reader("full_attention"), "layer kind 'full_attention'"),
    "layout": (layout("BLHNC"), "layout 'BLHNC'"),
    "alias of a layout": (layout("NHD"), "layout 'NHD'"),
}


@pytest.mark.parametrize(("source", "claim"), BUILTIN_NAMES.values(), ids=BUILTIN_NAMES)
def test_what_kvframe_has_itself_cannot_be_claimed(site, installed, source, claim):
    site.add("good")
    site.add("bad", source)
    host = site.host()
    record = records(host)["bad"]
    assert (record.status, record.reason) == (
        CONFLICT,
        f"{claim} is claimed by kvframe itself and bad (kvtest-bad 1.0)",
    )
    assert host.families["full_attention"].spec_type is FullAttentionSpec
    assert host.cache_dtypes.get("fp8").mode is KVQuantMode.FP8_PER_TENSOR
    check_that_others_work(host, installed)


def test_a_plugin_that_claims_one_name_twice_is_set_aside(site):
    body = "return [kvframe.CacheDType(name='kvtest'), kvframe.CacheDType(name='kvtest')]"
    site.add("bad", hook("kvframe_cache_dtypes", body))
    host = site.host()
    assert records(host)["bad"].status == CONFLICT
    assert "kvtest" not in host.cache_dtypes.names


def test_a_plugin_that_loses_one_name_brings_nothing(site):
    both = dtype("fp8") + hook("kvframe_layouts", "from kvframe.layout import KVCacheLayout; return []")
    site.add("bad", both + "\n\n" + reader("kvtest_kind"))
    host = site.host()
    assert records(host)["bad"].status == CONFLICT
    assert "kvtest_kind" not in host.layer_readers


# --- taking the place of a family -------------------------------------------------------------------------------------


def test_a_family_may_take_the_place_of_another_plugins(site):
    site.add("a", family("strided"))
    site.add("b", family("faster", replaces="strided", before="import kvtest_a\n", spec_type="kvtest_a.Spec"))
    host = site.host()
    assert (records(host)["a"].status, records(host)["b"].status) == (ACTIVE, ACTIVE)
    spec = sys.modules["kvtest_a"].Spec(16, num_kv_heads=1, head_size=8, dtype="float16")
    assert host.family(spec).name == "faster"
    assert "strided" not in host.families


@pytest.mark.parametrize(("old", "new"), [("a", "b"), ("b", "a")])
def test_a_family_may_keep_the_name_of_the_one_it_replaces(site, old, new):
    site.add(old, family("strided"))
    module = f"kvtest_{old}"
    site.add(
        new, family("strided", replaces="strided", before=f"import {module}\n", spec_type=f"{module}.Spec")
    )
    host = site.host()
    assert (records(host)["a"].status, records(host)["b"].status) == (ACTIVE, ACTIVE)
    assert host.families["strided"].replaces == "strided"


def test_full_attention_may_be_replaced(site):
    site.add(
        "mine", family("full_attention", replaces="full_attention", spec_type="kvframe.FullAttentionSpec")
    )
    host = site.host()
    spec = FullAttentionSpec(16, num_kv_heads=1, head_size=8, dtype="float16")
    assert records(host)["mine"].status == ACTIVE
    assert host.family(spec).replaces == "full_attention"
    assert host.families["full_attention"] is host.family(spec)


@pytest.mark.parametrize(("one", "two"), [("strided", "strided"), ("faster", "smaller")])
def test_two_plugins_that_replace_one_family_are_both_set_aside(site, installed, one, two):
    site.add("good")
    site.add("old", family("strided"))
    site.add("one", family(one, replaces="strided"))
    site.add("two", family(two, replaces="strided"))
    host = site.host()
    claim = "family 'strided'" if one == two else "the place of family 'strided'"
    for name in ("one", "two"):
        assert records(host)[name].status == CONFLICT
        assert (
            records(host)[name].reason
            == f"{claim} is claimed by one (kvtest-one 1.0) and two (kvtest-two 1.0)"
        )
    assert active(host) == installed | {"good", "old"}
    assert host.families["strided"].spec_type is sys.modules["kvtest_old"].Spec


def test_a_replacement_settles_no_clash_between_others(site):
    site.add("a", family("strided"))
    site.add("b", family("strided"))
    site.add("new", family("strided", replaces="strided"))
    host = site.host()
    assert {name: records(host)[name].status for name in ("a", "b", "new")} == {
        "a": CONFLICT,
        "b": CONFLICT,
        "new": ACTIVE,
    }


def test_a_replacement_that_is_set_aside_leaves_the_family_in_its_place(site):
    site.add("a", family("strided"))
    site.add("b", family("faster", replaces="strided") + "\n\n" + dtype("fp8"))
    host = site.host()
    assert records(host)["b"].status == CONFLICT
    assert host.families["strided"].spec_type is sys.modules["kvtest_a"].Spec


# --- the order on sys.path --------------------------------------------------------------------------------------------


def test_the_loaded_set_does_not_depend_on_the_order_of_sys_path(make_site):
    far, near = make_site("far"), make_site("near")
    far.add("zebra", dtype("kvtest_z"))
    far.add("same", project="kvtest-one", module="kvtest_one")
    far.add("clash", dtype("kvtest_c"))
    near.add("ant", dtype("kvtest_a"))
    near.add("same", project="kvtest-two", module="kvtest_two")
    near.add("crash", dtype("kvtest_c"))
    one = far.host()
    sys.path.remove(str(far.folder))
    sys.path.insert(0, str(far.folder))
    importlib.invalidate_caches()
    other = far.host()
    assert [(r.label, r.status, r.reason) for r in one.records] == [
        (r.label, r.status, r.reason) for r in other.records
    ]
    assert [*one.families] == [*other.families]
    assert one.cache_dtypes.names == other.cache_dtypes.names
    names = [record.name for record in one.records]
    assert names == sorted(names)


def test_hooks_are_called_in_the_order_of_names(site):
    for name in ("zebra", "ant", "mouse"):
        site.add(name, hook("kvframe_adjust_specs", "return {**specs, __name__: len(specs)}", "specs"))
    host = site.host()
    engine = EngineConfig(max_model_len=16)
    assert host.fold("kvframe_adjust_specs", "specs", {}, engine=engine) == {
        "kvtest_ant": 0,
        "kvtest_mouse": 1,
        "kvtest_zebra": 2,
    }
    assert list(host.call_all("kvframe_adjust_specs", specs={}, engine=engine)) == [
        {"kvtest_ant": 0},
        {"kvtest_mouse": 0},
        {"kvtest_zebra": 0},
    ]


def test_an_answer_of_none_leaves_the_value(site):
    site.add("shy", hook("kvframe_adjust_specs", "return None"))
    host = site.host()
    engine = EngineConfig(max_model_len=16)
    assert host.fold("kvframe_adjust_specs", "specs", {"a": 1}, engine=engine) == {"a": 1}
    assert list(host.call_all("kvframe_adjust_specs", specs={}, engine=engine)) == []


def test_a_hook_that_raises_while_planning_is_named(site):
    site.add("bad", hook("kvframe_adjust_specs", "raise KeyError('layer 3')"))
    host = site.host()
    with pytest.raises(HookError) as caught:
        list(host.call_all("kvframe_adjust_specs", specs={}, engine=EngineConfig(max_model_len=16)))
    assert (caught.value.hook, caught.value.plugin) == ("kvframe_adjust_specs", "bad (kvtest-bad 1.0)")
    assert str(caught.value) == (
        "hook kvframe_adjust_specs of plugin bad (kvtest-bad 1.0): raised KeyError: 'layer 3'."
    )
    assert isinstance(caught.value.__cause__, KeyError)
