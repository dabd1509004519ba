"""Plugins that are really installed: they are found, one broken plugin stops no other, and loading happens once."""

import importlib
import re
import sys
import types

import pytest

import kvframe.plugins
from kvframe import (
    AttentionSpec,
    CacheDType,
    FullAttentionSpec,
    LayerReader,
    Lifetime,
    PluginHost,
    SpecFamily,
    hookimpl,
    load_plugins,
)
from kvframe.discovery import ACTIVE, BROKEN, INCOMPATIBLE, Filters, discover, entry_points_by_name
from kvframe.errors import UnknownPluginError
from kvframe.models import model_specs, read_config
from tests.distributions import active, check_that_others_work, dtype, family, hook, reader, records
from tests.model_configs import LLAMA, options

pytestmark = pytest.mark.usefixtures("_no_filters")

# --- a good plugin ----------------------------------------------------------------------------------------------------


def test_a_plugin_is_found_and_its_record_says_what_it_brings(site, installed):
    site.add("good", version="2.3")
    host = site.host()
    record = records(host)["good"]
    assert (record.status, record.reason, record.remedy) == (ACTIVE, None, None)
    assert (record.distribution, record.version, record.module) == ("kvtest-good", "2.3", "kvtest_good")
    assert record.label == "good (kvtest-good 2.3)"
    assert record.hooks == ("kvframe_layer_readers", "kvframe_spec_families")
    assert record.families == ("kvtest_good_family",)
    assert record.layer_kinds == ("kvtest_good_attention",)
    assert (record.cache_dtypes, record.layouts, record.model_types, record.commands) == ((), (), (), ())
    assert record.load_seconds > 0
    assert active(host) == installed | {"good"}
    assert host.families["kvtest_good_family"].spec_type is sys.modules["kvtest_good"].Spec
    assert "kvtest_good_attention" in host.layer_readers


def test_an_entry_point_may_name_an_object_of_its_module(site):
    source = """
        import kvframe

        class Plugin:
            @kvframe.hookimpl
            def kvframe_cache_dtypes(self):
                return [kvframe.CacheDType(name="kvtest_dtype")]

        plugin = Plugin()
    """
    site.add("object", source, points_to="kvtest_object:plugin")
    host = site.host()
    assert records(host)["object"].status == ACTIVE
    assert host.cache_dtypes.get("kvtest_dtype").name == "kvtest_dtype"


def test_a_function_of_another_name_may_implement_a_hook(site):
    mark = '@kvframe.hookimpl(specname="kvframe_cache_dtypes")'
    body = "return [kvframe.CacheDType(name='kvtest_dtype')]"
    site.add("renamed", hook("dtypes", body, mark=mark))
    host = site.host()
    assert records(host)["renamed"].hooks == ("kvframe_cache_dtypes",)
    assert records(host)["renamed"].cache_dtypes == ("kvtest_dtype",)


def test_the_registry_plans_a_model_with_a_plugins_kind(site):
    site.add("good")
    host = site.host()
    config = {**LLAMA, "layer_types": ["full_attention", "kvtest_good_attention"] * 2}
    model = model_specs(read_config(config), host, options(host))
    assert model.layers == {"full_attention": 2, "kvtest_good_attention": 2}


# --- one broken plugin never stops the others -------------------------------------------------------------------------

UNPRINTABLE = """
    class Silent(Exception):
        def __str__(self):
            raise RuntimeError("no text either")

    raise Silent
"""
TWICE = """
    import kvframe

    @kvframe.hookimpl
    def kvframe_cache_dtypes():
        return []

    @kvframe.hookimpl(specname="kvframe_cache_dtypes")
    def more_dtypes():
        return []
"""
LOOKALIKE = """
    import kvframe

    class SpecFamily:
        pass

    @kvframe.hookimpl
    def kvframe_spec_families():
        return [SpecFamily()]
"""
COMMAND_WITHOUT_A_NAME = """
    import kvframe

    class Command:
        pass

    @kvframe.hookimpl
    def kvframe_commands():
        return [Command()]
"""
BROKEN_PLUGINS = {
    "import error": ("import no_such_module_anywhere", "ModuleNotFoundError: .*no_such_module_anywhere"),
    "exit at import": ("raise SystemExit(3)", "SystemExit: 3"),
    "no Python": ("def", "SyntaxError: "),
    "error without a text": (UNPRINTABLE, "Silent"),
    "misspelt hook": (
        hook("kvframe_spec_familys", "return []"),
        "unknown hook 'kvframe_spec_familys': did you mean 'kvframe_spec_families'",
    ),
    "no such hook": (hook("warm_the_cache", "return []"), "unknown hook 'warm_the_cache'$"),
    "unknown argument": (
        hook("kvframe_adjust_specs", "return None", "specs, model"),
        "hook 'kvframe_adjust_specs' takes 'model', which is not one of its arguments: specs, engine",
    ),
    "argument of a hook that has none": (
        hook("kvframe_cache_dtypes", "return []", "engine"),
        "takes 'engine', which is not one of its arguments: none",
    ),
    "default value": (
        hook("kvframe_adjust_specs", "return None", "specs, engine=None"),
        "'kvframe_adjust_specs' gives 'engine' a default value, which hooks may not",
    ),
    "wrapper": (
        hook("kvframe_adjust_specs", "return (yield)", mark="@kvframe.hookimpl(wrapper=True)"),
        "hook 'kvframe_adjust_specs' is a wrapper",
    ),
    "one hook twice": (TWICE, "hook 'kvframe_cache_dtypes' has more than one implementation"),
    "no mark": (hook("kvframe_cache_dtypes", "return []", mark=""), "no hook: mark .* @kvframe.hookimpl"),
    "another project's mark": (
        hook("kvframe_cache_dtypes", "return []", mark="@__import__('pluggy').HookimplMarker('other')"),
        "no hook: mark .* @kvframe.hookimpl",
    ),
    "hook raises": (
        hook("kvframe_cache_dtypes", "raise ValueError('on purpose')"),
        r"hook kvframe_cache_dtypes of plugin bad \(kvtest-bad 1.0\): raised ValueError: on purpose",
    ),
    "hook exits": (hook("kvframe_cache_dtypes", "raise SystemExit('bye')"), "raised SystemExit: bye"),
    "no list": (
        hook("kvframe_cache_dtypes", "return {}"),
        "must return a list of CacheDType, not dict",
    ),
    "generator": (
        hook("kvframe_cache_dtypes", "yield kvframe.CacheDType(name='kvtest')"),
        "must return a list of CacheDType, not generator",
    ),
    "list of others": (
        hook("kvframe_spec_families", "return ['strided']"),
        "must list SpecFamily objects, not str",
    ),
    "class of the same name": (LOOKALIKE, "must list SpecFamily objects, not SpecFamily"),
    "command without a name": (COMMAND_WITHOUT_A_NAME, "a command has no name: AttributeError: .*'name'"),
    "dtype named by a number": (dtype(8), "a cache dtype must be named by text .*, not by .8"),
    "layer kind without a name": (reader(""), "a layer kind must be named by text"),
    "model types as one text": (
        hook(
            "kvframe_model_readers",
            "from kvframe import ModelReader; return [ModelReader(model_types='llama', read=None)]",
        ),
        "a model type must be named by text .*, not by 'llama'",
    ),
    "family of no class": (family(spec_type="'Spec'"), "spec_type of family 'strided' must be a class"),
    "family that replaces a class": (
        family(replaces=["full_attention"]),
        "must name the family that it replaces, not \\['full_attention'\\]",
    ),
}


@pytest.mark.parametrize(("source", "reason"), BROKEN_PLUGINS.values(), ids=BROKEN_PLUGINS)
def test_a_broken_plugin_is_set_aside_with_its_reason(site, installed, source, reason):
    site.add("good")
    site.add("bad", source)
    host = site.host()
    record = records(host)["bad"]
    assert record.status == BROKEN
    assert re.search(reason, record.reason)
    assert record.remedy == "mend it or reinstall it: pip install --force-reinstall kvtest-bad"
    check_that_others_work(host, installed)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("kvtest_absent", "ModuleNotFoundError: No module named 'kvtest_absent'"),
        ("kvtest_bad:plugin", "AttributeError: .*'plugin'"),
        ("not a module", "Error: "),
        ("kvtest_bad:NOTHING", "it has no hook"),
    ],
)
def test_an_entry_point_that_points_nowhere_is_set_aside(site, installed, value, reason):
    site.add("good")
    site.add("bad", "NOTHING = None", points_to=value)
    host = site.host()
    assert records(host)["bad"].status == BROKEN
    assert re.search(reason, records(host)["bad"].reason)
    check_that_others_work(host, installed)


def test_a_plugin_that_fails_while_pluggy_registers_it_leaves_nothing_behind(site, monkeypatch):
    site.add("bad", dtype("kvtest_bad"))
    site.add("good", dtype("kvtest_good"))
    register = kvframe.plugins.pluggy.PluginManager.register

    def half(manager, plugin, name=None):
        register(manager, plugin, name=name)
        if name == "bad":
            raise RuntimeError("half registered")

    monkeypatch.setattr(kvframe.plugins.pluggy.PluginManager, "register", half)
    host = site.host()
    assert records(host)["bad"].reason == "RuntimeError: half registered"
    assert records(host)["good"].cache_dtypes == ("kvtest_good",)
    assert "kvtest_bad" not in host.cache_dtypes.names


def test_metadata_that_cannot_be_read_stop_nobody(site, installed):
    site.add("good")
    site.add("bad", "raise ImportError('the rest of it is gone')")
    (site.folder / "kvtest_bad-1.0.dist-info" / "METADATA").unlink()
    importlib.invalidate_caches()
    host = site.host()
    assert records(host)["bad"].status == BROKEN
    check_that_others_work(host, installed)


# --- the version handshake --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("requirement", ["kvframe>=99", "KVFrame >=99", "kvframe<0.1", "kvframe[torch]==7.*"])
def test_a_plugin_for_another_kvframe_is_not_imported(site, installed, requirement):
    site.add("good")
    site.add("other", "raise AssertionError('imported')", requires=("attrs", requirement))
    host = site.host()
    record = records(host)["other"]
    assert record.status == INCOMPATIBLE
    specifier = requirement.partition("]")[2] or re.search("[<>=].*", requirement)[0]
    assert record.reason == f"requires kvframe{specifier}, and this is kvframe {kvframe.__version__}"
    assert record.remedy == "install versions that fit: pip install --upgrade kvframe kvtest-other"
    assert "kvtest_other" not in sys.modules
    check_that_others_work(host, installed)


@pytest.mark.parametrize(
    "requires",
    [
        (),
        ("kvframe",),
        ("kvframe>=0.1,<0.2",),
        ("kvframe-mla>=99",),
        ("kvframe>=99; extra == 'later'",),
        ("kvframe>=99; python_version < '3'",),
        ("kvframe banana",),
    ],
)
def test_what_asks_for_nothing_else_loads(site, requires):
    site.add("good", requires=requires)
    assert records(site.host())["good"].status == ACTIVE


def test_a_prerelease_of_kvframe_meets_an_open_bound(site, monkeypatch):
    monkeypatch.setattr("kvframe.discovery.VERSION", "1.0.dev3")
    site.add("good", requires=("kvframe>=0.1",))
    assert records(site.host())["good"].status == ACTIVE


# --- plugins given in code --------------------------------------------------------------------------------------------


class Dtypes:
    """A plugin object."""

    @hookimpl
    def kvframe_cache_dtypes(self):
        return [CacheDType(name="kvtest_extra")]


class Readers:
    """Another, with names of its own."""

    @hookimpl
    def kvframe_layer_readers(self):
        return [LayerReader(kind="kvtest_extra", read=lambda layer: {})]


def namespace(**hooks):
    return types.SimpleNamespace(**{name: hookimpl(function) for name, function in hooks.items()})


def test_modules_and_objects_may_be_given_in_code(installed):
    module = types.ModuleType("kvtest_given")
    module.kvframe_cache_dtypes = hookimpl(lambda: [CacheDType(name="kvtest_given")])
    host = load_plugins(extra=[module, Dtypes(), Readers()])
    assert active(host) == installed | {"kvtest_given", "extra-1", "extra-2"}
    assert {"kvtest_given", "kvtest_extra"} <= {*host.cache_dtypes.names}
    record = records(host)["kvtest_given"]
    assert (record.label, record.distribution, record.module) == ("kvtest_given", None, "kvtest_given")


def test_an_object_that_cannot_be_hashed_is_set_aside_and_stops_nobody(site, installed):
    site.add("good")
    unhashable = namespace(kvframe_cache_dtypes=lambda: [CacheDType(name="kvtest_unhashable")])
    host = site.host(Dtypes(), unhashable, Readers())
    record = records(host)["extra-1"]
    assert record.status == BROKEN
    assert record.reason == (
        "unhashable type: 'types.SimpleNamespace': give a module, or an object of a class without __eq__"
    )
    assert record.remedy == "mend it"
    assert active(host) == installed | {"good", "extra-0", "extra-2"}
    assert "kvtest_extra" in host.cache_dtypes.names
    assert "kvtest_extra" in host.layer_readers


@pytest.mark.parametrize("plugin", [None, 7, "kvframe_mla", object(), Dtypes, lambda: None])
def test_what_is_no_plugin_is_set_aside_when_given(plugin, installed):
    host = load_plugins(extra=[plugin])
    (record,) = (record for record in host.records if record.name not in installed)
    assert record.status == BROKEN
    assert active(host) == installed


def test_a_module_that_is_installed_may_be_given_too(site):
    site.add("good")
    host = site.host(sys.modules.setdefault("kvtest_good", importlib.import_module("kvtest_good")))
    assert [record.name for record in host.records].count("good") == 1
    assert records(host)["good"].status == ACTIVE
    assert "kvtest_good" not in records(host)


def test_one_module_under_two_names_is_loaded_once(site):
    site.add("good")
    site.add("good_fork", project="kvtest-fork", module="kvtest_good")
    host = site.host()
    assert records(host)["good"].status == ACTIVE
    assert records(host)["good_fork"].status == BROKEN
    assert records(host)["good_fork"].reason == (
        "it is the same object as plugin 'good', which is loaded already"
    )


def test_given_plugins_of_one_name_are_told_apart():
    def named_mla():
        made = types.ModuleType("mla")
        made.kvframe_adjust_specs = hookimpl(lambda specs: None)
        return made

    host = load_plugins(extra=[named_mla(), named_mla()])
    names = [record.name for record in host.records if record.name.startswith("mla")]
    assert names == ["mla", "mla#0", "mla#1"]
    assert all(records(host)[name].status == ACTIVE for name in names)


def test_filters_leave_given_plugins_alone():
    host = PluginHost([Dtypes()], Filters(only=()))
    assert active(host) == {"extra-0"}


def test_a_given_plugin_that_clashes_with_an_installed_one_sets_both_aside(site, installed):
    site.add("a", dtype("kvtest_extra"))
    host = site.host(Dtypes())
    assert active(host) == installed
    assert records(host)["extra-0"].reason == (
        "cache dtype 'kvtest_extra' is claimed by a (kvtest-a 1.0) and extra-0"
    )


def test_a_subclass_of_a_known_spec_has_its_family():
    class Mine(FullAttentionSpec):
        pass

    spec = Mine(16, num_kv_heads=1, head_size=8, dtype="float16")
    assert load_plugins().family(spec).name == "full_attention"


def test_the_nearest_class_decides_the_family(site):
    class Near(AttentionSpec):
        pass

    class Nearer(Near):
        pass

    def brings(name, spec_type):
        made = SpecFamily(name=name, spec_type=spec_type, lifetime=lambda spec: Lifetime(block=1))
        plugin = types.ModuleType(name)
        plugin.kvframe_spec_families = hookimpl(lambda: [made])
        return plugin

    host = load_plugins(extra=[brings("near", Near), brings("nearer", Nearer)])
    fields = {"num_kv_heads": 1, "head_size": 8, "dtype": "float16"}
    assert host.family(Near(16, **fields)).name == "near"
    assert host.family(Nearer(16, **fields)).name == "nearer"


# --- loading once -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh")
def test_loading_twice_is_loading_once(site):
    site.add("good")
    first = load_plugins()
    assert load_plugins() is first
    assert sorted(sys.modules["kvtest_good"].CALLS) == ["kvframe_layer_readers", "kvframe_spec_families"]


@pytest.mark.usefixtures("fresh")
def test_an_error_is_not_kept(site, monkeypatch):
    monkeypatch.setenv("KVFRAME_PLUGINS", "nobody")
    with pytest.raises(UnknownPluginError):
        load_plugins()
    monkeypatch.delenv("KVFRAME_PLUGINS")
    assert load_plugins().records


def test_the_registry_cannot_be_changed_after_loading():
    host = load_plugins()
    with pytest.raises(TypeError):
        host.layer_readers["mine"] = None
    with pytest.raises(TypeError):
        host.model_readers["mine"] = None


def test_discovery_imports_nothing(site):
    site.add("good", "raise AssertionError('imported')")
    found = {record.name: record for record in discover(entry_points_by_name(), Filters())}
    assert found["good"].status == ACTIVE
    assert "kvtest_good" not in sys.modules
