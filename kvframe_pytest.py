"""kvframe's pytest plugin: a fixture for plugins' own tests, and a marker on the conformance kit's.

pytest imports this at every start, wherever kvframe is installed. So it stands beside the package, and imports it only
for tests that ask for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kvframe import PluginHost

MARKER = "kvframe_conformance"


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known, also under --strict-markers."""
    config.addinivalue_line("markers", f"{MARKER}: a check of kvframe's conformance kit")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the kit's tests: `-m kvframe_conformance` runs these alone, `-m 'not kvframe_conformance'` all others."""
    kit = sys.modules.get("kvframe.testing")  # who has not imported it has none of its tests
    owner = getattr(item, "cls", None)
    if (
        kit is not None
        and owner is not None
        and issubclass(owner, (kit.SpecConformance, kit.PluginConformance))
    ):
        item.add_marker(MARKER)


@pytest.fixture
def kvframe_host() -> Callable[..., PluginHost]:
    """Makes hosts of the plugins that it is given, modules or objects with hooks, and of none that is installed."""

    def make(*plugins: Any) -> PluginHost:
        from kvframe.testing import isolated_host

        return isolated_host(*plugins)

    return make
