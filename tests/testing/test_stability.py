"""The promises of hooks: since when they are there, what is deprecated, and that the reference says the same."""

import inspect
import warnings

import pytest

from kvframe import hookimpl, hookspecs
from kvframe.errors import KVFrameDeprecationWarning
from kvframe.hookspecs import HookInfo
from kvframe.testing import isolated_host
from tests.distributions import records
from tools.hooks_reference import PAGE, page, sections

HOOKS = [name for name in dir(hookspecs) if name.startswith("kvframe_")]


class Grouping:
    @hookimpl
    def kvframe_group_layers(self, specs):
        return None


@pytest.fixture
def deprecate(monkeypatch):
    """Deprecate a hook or its arguments for the test."""

    def change(name, **info):
        monkeypatch.setattr(getattr(hookspecs, name), "kvframe_info", HookInfo(since="0.1", **info))

    return change


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_says_since_when_it_is_there_and_what_its_contract_is(name):
    assert hookspecs.hook_info(name).since
    assert "Runs" in (inspect.getdoc(getattr(hookspecs, name)) or "")


def test_the_reference_is_made_from_the_hooks():
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tools/hooks_reference.py"
    assert sorted(name for names in sections().values() for name in names) == sorted(HOOKS)


def test_a_deprecated_argument_warns_with_the_plugins_name(deprecate):
    deprecate("kvframe_group_layers", deprecated_arguments={"specs": "goes in 2.0, use 'layers'"})
    with pytest.warns(KVFrameDeprecationWarning) as warned:
        isolated_host(Grouping())
    assert str(warned[0].message) == (
        "plugin extra-0: argument 'specs' of hook 'kvframe_group_layers' is deprecated: goes in 2.0, use 'layers'"
    )


def test_a_plugin_that_leaves_the_argument_out_is_not_warned_of(deprecate):
    deprecate("kvframe_group_layers", deprecated_arguments={"engine": "goes in 2.0"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        isolated_host(Grouping())


def test_a_deprecated_hook_warns_and_still_works(deprecate):
    deprecate("kvframe_group_layers", deprecated="goes in 2.0, use kvframe_place_groups")
    with pytest.warns(
        KVFrameDeprecationWarning, match="hook 'kvframe_group_layers' is deprecated: goes in 2.0"
    ):
        host = isolated_host(Grouping())
    assert records(host)["extra-0"].hooks == ("kvframe_group_layers",)


def test_the_warning_names_the_distribution(site, deprecate):
    deprecate("kvframe_spec_families", deprecated="goes in 2.0")
    site.add("good")
    with pytest.warns(KVFrameDeprecationWarning) as warned:
        site.host(only=("good",))
    assert str(warned[0].message).startswith("plugin good (kvtest-good 1.0): hook 'kvframe_spec_families'")


def test_a_deprecation_is_in_the_reference(deprecate):
    deprecate(
        "kvframe_group_layers",
        deprecated="goes in 2.0",
        deprecated_arguments={"engine": "is no longer given"},
    )
    assert "**Deprecated:** goes in 2.0." in page()
    assert "**Argument `engine` deprecated:** is no longer given." in page()


@pytest.mark.parametrize(
    ("requirement", "in_use"), [("kvframe>=0.1,<0.2", True), ("kvframe<0.1", False), ("kvframe>=1", False)]
)
def test_plugins_for_older_and_newer_versions_meet_the_handshake(site, requirement, in_use):
    site.add("good", requires=(requirement,))
    record = records(site.host())["good"]
    assert (record.status == "active") is in_use
    assert in_use or "requires kvframe" in str(record.reason)
