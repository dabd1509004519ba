"""Fixtures of several files: a folder of real plugin distributions on sys.path, and hosts of them."""

import importlib
import sys
from pathlib import Path

import pytest

import kvframe.plugins
from kvframe import PluginHost
from kvframe.discovery import Filters
from tests.distributions import GOOD, Distribution, active


class Site:
    """A folder on sys.path, and what is installed in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name, source=GOOD, **fields):
        """Install a distribution."""
        Distribution(name=name, source=source, **fields).unpack(self.folder)
        importlib.invalidate_caches()

    def host(self, *extra, **filters):
        """Load it and what else is installed, whatever the environment says."""
        return PluginHost(extra, Filters(**filters))


@pytest.fixture
def make_site(tmp_path, monkeypatch):
    """Makes folders on sys.path; modules imported from them are forgotten after the test."""

    def make(name="site"):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.syspath_prepend(str(folder))
        return Site(folder)

    yield make
    for name in [name for name in sys.modules if name.startswith("kvtest_")]:
        del sys.modules[name]
    importlib.invalidate_caches()


@pytest.fixture
def site(make_site):
    """One such folder."""
    return make_site()


@pytest.fixture
def fresh():
    """`load_plugins()` looks anew, and again after the test."""
    kvframe.plugins._installed.cache_clear()
    yield
    kvframe.plugins._installed.cache_clear()


@pytest.fixture(scope="session")
def installed():
    """Names of the plugins that work here without the tests' own."""
    return active(PluginHost(filters=Filters()))


@pytest.fixture
def _no_filters(monkeypatch):
    for name in ("KVFRAME_PLUGINS", "KVFRAME_DISABLE_PLUGINS", "KVFRAME_STRICT"):
        monkeypatch.delenv(name, raising=False)
