"""Ten sorts of broken plugins, installed: none takes the engine down, and each has its message."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from kvframe.discovery import ACTIVE, BROKEN, CONFLICT, INCOMPATIBLE
from tests.distributions import GOOD, check_that_others_work, family, hook, records

LLAMA = Path(__file__).parents[2] / "examples" / "models" / "llama-3.1-8b.json"
SLOW = "import time\n\ntime.sleep(2.1)\n" + GOOD


@attrs.frozen(kw_only=True)
class Sort:
    """One sort of broken plugin.

    Args:
        status: what becomes of it.
        reason: what is said of it, as a pattern.
        source: its module.
        fields: of its distribution.
        rival: the module of a second plugin, for sorts that take two.
    """

    status: str
    reason: str
    source: str = GOOD
    fields: dict = attrs.field(factory=dict)
    rival: str | None = None


SORTS = {
    "import-error": Sort(
        status=BROKEN, reason="ImportError: cannot open it", source="raise ImportError('cannot open it')"
    ),
    "exit-at-import": Sort(status=BROKEN, reason="SystemExit: 3", source="import sys; sys.exit(3)"),
    "slow-import": Sort(status=ACTIVE, reason=r"took \d\.\d s to load", source=SLOW),
    "hook-raises": Sort(
        status=BROKEN,
        reason=r"hook kvframe_spec_families of plugin hook-raises \(.*\): raised KeyError: 'heads'",
        source=hook("kvframe_spec_families", "return [{}['heads']]"),
    ),
    "wrong-types": Sort(
        status=BROKEN,
        reason="must list SpecFamily objects, not str",
        source=hook("kvframe_spec_families", "return ['mine']"),
    ),
    "duplicate-names": Sort(
        status=CONFLICT,
        reason=r"family 'twin' is claimed by duplicate-names \(.*\) and rival \(kvtest-rival 1\.0\)",
        source=family("twin"),
        rival=family("twin"),
    ),
    "unknown-hook": Sort(
        status=BROKEN,
        reason="unknown hook 'kvframe_spec_familys': did you mean 'kvframe_spec_families'",
        source=hook("kvframe_spec_familys", "return []"),
    ),
    "core-too-new": Sort(
        status=INCOMPATIBLE,
        reason="requires kvframe>=99, and this is kvframe",
        source="raise AssertionError('it was imported')",
        fields={"requires": ["kvframe>=99"]},
    ),
    "missing-dependency": Sort(
        status=BROKEN,
        reason="ModuleNotFoundError: No module named 'kvtest_not_there'",
        source="import kvtest_not_there\n" + GOOD,
        fields={"requires": ["kvframe>=0,<2", "kvtest-not-there"]},
    ),
    "entry-point-to-nothing": Sort(
        status=BROKEN,
        reason="ModuleNotFoundError: No module named 'kvtest_nothing'",
        fields={"points_to": "kvtest_nothing"},
    ),
}


def install(site, name):
    sort = SORTS[name]
    site.add(name, sort.source, **sort.fields)
    if sort.rival is not None:
        site.add("rival", sort.rival)
    return sort


@pytest.mark.parametrize("name", SORTS)
def test_it_is_set_aside_with_its_message_and_the_others_work(site, installed, caplog, name):
    site.add("good")
    sort = install(site, name)
    host = site.host()
    record = records(host)[name]
    assert record.status == sort.status
    label = re.escape(f"plugin {name} (kvtest-{name} 1.0) ")
    assert re.search(f"{label}.*{sort.reason}" if record.reason else label + sort.reason, caplog.text)
    if record.status != ACTIVE:
        assert re.search(sort.reason, record.reason)
        assert record.remedy
        check_that_others_work(host, installed)


def test_all_ten_at_once_do_not_take_the_command_down(site):
    assert len(SORTS) == 10
    site.add("good")
    for name in SORTS:
        install(site, name)
    paths = [str(site.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}

    def call(*words):
        command = [sys.executable, "-c", "from kvframe.cli import main; main()", *map(str, words)]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    planned = call("plan", LLAMA, "--memory", "64GiB", "--json")
    assert planned.returncode == 0
    assert json.loads(planned.stdout)["tokens"] > 0
    said = planned.stderr.splitlines()
    assert "Traceback" not in planned.stderr
    for name, sort in SORTS.items():
        (line,) = [line for line in said if line.startswith(f"plugin {name} ")]
        assert re.search(sort.reason, line)
    assert len(said) == len(SORTS) + 1  # and the second one of the duplicate

    listed = {plugin["name"]: plugin for plugin in json.loads(call("plugins", "--json").stdout)["plugins"]}
    assert {name: listed[name]["status"] for name in SORTS} == {
        name: sort.status for name, sort in SORTS.items()
    }
    assert listed["good"]["status"] == ACTIVE
