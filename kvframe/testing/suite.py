"""The checks as pytest classes. pytest itself is imported when a check fails or does not apply, not before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from packaging.utils import canonicalize_name

from kvframe.discovery import PluginRecord
from kvframe.errors import MissingPluginError
from kvframe.family import SpecFamily
from kvframe.plugins import PluginHost, load_plugins
from kvframe.testing.catalogue import FAMILY_CHECKS, PLUGIN_CHECKS
from kvframe.testing.outcome import FAILED, SKIPPED, Check, Outcome, run
from kvframe.testing.subject import PluginSubject, Subject


class SpecConformance:
    """The checks of one family. Subclass it as `class TestMySpec(SpecConformance)`: every check is then a test.

    Attributes:
        family: the family's name, or the family itself.
        examples: specs to try; None: those that the family registers.
        plugins: modules or objects with hooks to load beside the installed ones.
    """

    family: str | SpecFamily[Any]
    examples: Iterable[Any] | None = None
    plugins: Sequence[Any] = ()

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """One test for each check."""
        _one_test_a_check(metafunc, FAMILY_CHECKS)

    def test_conforms(self, check: Check[Subject]) -> None:
        """The family keeps the law that the check tests."""
        _report(run(check, self.subject()))

    @classmethod
    def subject(cls) -> Subject:
        """The family under test, with its examples and the plugins.

        Raises:
            MissingPluginError: no plugin in use brings a family of that name.
        """
        host = load_plugins(extra=cls.plugins)
        family = cls.family if isinstance(cls.family, SpecFamily) else named_family(host, cls.family)
        examples = family.examples if cls.examples is None else tuple(cls.examples)
        return Subject(family=family, examples=examples, host=host)


class PluginConformance:
    """The checks of one plugin as a whole: how it is installed, imported and marked.

    Attributes:
        plugin: its entry point's name, or its distribution's.
    """

    plugin: str

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """One test for each check."""
        _one_test_a_check(metafunc, PLUGIN_CHECKS)

    def test_conforms(self, check: Check[PluginSubject]) -> None:
        """The plugin keeps the law that the check tests."""
        host = load_plugins()
        _report(run(check, PluginSubject(record=named_plugin(host, self.plugin), host=host)))


def named_family(host: PluginHost, name: str) -> SpecFamily[Any]:
    """The family of that name.

    Raises:
        MissingPluginError: no plugin in use brings it; says which plugins were set aside, and why.
    """
    if name in host.families:
        return host.families[name]
    raise _nothing(host, f"a family {name!r}", host.families)


def named_plugin(host: PluginHost, name: str) -> PluginRecord:
    """What became of the plugin whose entry point or distribution has that name.

    Raises:
        MissingPluginError: none is installed; says which are.
    """
    for record in host.records:
        if canonicalize_name(name) in record.known_as:
            return record
    raise _nothing(host, f"a plugin {name!r}", [record.name for record in host.records])


def _nothing(host: PluginHost, wanted: str, known: Iterable[str]) -> MissingPluginError:
    aside = "; ".join(f"{record.label}: {record.reason}" for record in host.records if record.reason)
    among = (
        f"{wanted} (there are {', '.join(sorted(known)) or 'none'}{f'; set aside: {aside}' if aside else ''})"
    )
    return MissingPluginError(wanted=among, needed_by="the conformance suite")


def _one_test_a_check(metafunc: Any, checks: Sequence[Check[Any]]) -> None:
    if "check" in metafunc.fixturenames:
        metafunc.parametrize("check", checks, ids=[check.name for check in checks])


def _report(outcome: Outcome) -> None:
    import pytest

    if outcome.status == SKIPPED:
        pytest.skip(outcome.message)
    if outcome.status == FAILED:
        pytest.fail(f"{outcome.message}\n\n{outcome.explanation}", pytrace=False)
