"""Plugins that are wrong on purpose, really installed: the kit's checks of plugins catch each."""

import sys

import pytest

from kvframe.testing import FAILED, PASSED, PLUGIN_CHECKS, SKIPPED, PluginSubject, run
from tests.distributions import GOOD, records

CHECKS = {check.name: check for check in PLUGIN_CHECKS}

HEAVY = "import torch\n" + GOOD
UNMARKED = GOOD + "\n\ndef kvframe_adjust_specs(specs, engine):\n    return None\n"
ONCE = GOOD.replace(
    '    CALLS.append("kvframe_layer_readers")\n',
    '    CALLS.append("readers")\n    if len(CALLS) > 2:\n        return []\n',
)
WIDE_PIECES = """
import kvframe
from kvframe.dtypes import CellPart


@kvframe.hookimpl
def kvframe_cache_dtypes():
    return [
        kvframe.CacheDType(
            name="wide",
            pack=lambda cell: kvframe.PackedCell(content_bytes=cell.head_size, head_slots=cell.num_kv_heads),
            parts=lambda cell: (CellPart(name="key", dtype="uint8", offset=8, width=cell.head_size),),
        )
    ]
"""

FAULTS = {
    "imports torch": ("it_imports_no_heavy_library", {"source": HEAVY}, "importing it imports torch"),
    "cannot be imported": (
        "it_imports_no_heavy_library",
        {"source": "raise OSError('no disk')"},
        "OSError: no disk",
    ),
    "set aside": ("the_plugin_is_in_use", {"source": "import kvframe\n"}, "is broken: it has no hook"),
    "no upper bound": (
        "it_bounds_its_kvframe",
        {"requires": ["kvframe>=0"]},
        "which any later kvframe meets",
    ),
    "no lower bound": (
        "it_bounds_its_kvframe",
        {"requires": ["kvframe<2"]},
        "which any earlier kvframe meets",
    ),
    "no requirement": ("it_bounds_its_kvframe", {"requires": ["attrs"]}, "does not require kvframe"),
    "a hook without its mark": (
        "its_hooks_are_marked",
        {"source": UNMARKED},
        "kvframe_adjust_specs is not marked",
    ),
    "registers once": (
        "it_loads_the_same_twice",
        {"source": ONCE},
        "layer_kinds ('kvtest_wrong_attention',) at first",
    ),
    "pieces outside their cell": ("its_dtypes_pack_their_cells", {"source": WIDE_PIECES}, "ends at byte 72"),
}


def outcome(site, monkeypatch, name, check):
    # the check of imports starts a new process, which must find the plugin too
    monkeypatch.setenv("PYTHONPATH", str(site.folder))
    host = site.host()
    return run(CHECKS[check], PluginSubject(record=records(host)[name], host=host))


@pytest.mark.parametrize("check", CHECKS)
def test_a_right_plugin_passes(site, monkeypatch, check):
    site.add("good")
    found = outcome(site, monkeypatch, "good", check)
    assert found.status == (SKIPPED if check == "its_dtypes_pack_their_cells" else PASSED), found.message


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_plugin_is_caught(site, monkeypatch, fault):
    check, distribution, said = FAULTS[fault]
    site.add("wrong", **distribution)
    found = outcome(site, monkeypatch, "wrong", check)
    assert found.status == FAILED
    assert said in found.message


def test_a_family_that_another_plugin_replaces_is_named(site, monkeypatch):
    site.add("good")
    name = "kvtest_good_family"
    site.add("newer", GOOD.replace("name=__name__", f"replaces={name!r}, name=__name__"))
    found = outcome(site, monkeypatch, "good", "its_families_are_the_ones_in_use")
    assert found.status == FAILED
    assert f"family {name!r} is replaced" in found.message


def test_every_check_of_plugins_has_a_plugin_that_fails_it():
    proved = {check for check, _, _ in FAULTS.values()} | {"its_families_are_the_ones_in_use"}
    assert proved == set(CHECKS)


def test_importing_torch_here_does_not_count():
    # the checks look at a new process, since this one may have imported anything
    assert "pytest" in sys.modules
