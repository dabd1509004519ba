"""A new user's road, three times: kinds that kvframe does not have, made outside the repository.

Each is scaffolded by `kvframe new-plugin`, its module is then written by hand (tests/testing/kinds), and it is
installed beside kvframe. Nothing else is done for it: it is listed, it passes `kvframe check`, and it plans a model.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command_line import kvframe

pytest.importorskip("copier", reason="new plugins are made with copier: pip install 'kvframe[new-plugin]'")

KINDS = Path(__file__).parent / "kinds"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
RUN = [sys.executable, "-c", "from kvframe.cli import main; main()"]
# What the scaffold is asked for: the nearest to the kind.
ASKED = {
    "strided": ("per-token", "window"),
    "two-page": ("per-token", "own"),
    "head-window": ("per-token", "window"),
}
FAMILIES = {
    "strided": ["strided", "strides"],
    "two-page": ["two_page"],
    "head-window": ["head_window"],
}
# One layer of the kind and one of full attention: 2 KV heads of 64 in float32, so 2 * 2 * 64 * 4 = 1,024 bytes a token.
MODEL = {
    "model_type": "new-kind",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}
FIELDS = {
    "strided": {"sliding_window": 64, "stride": 8},
    "two-page": {},
    "head-window": {"head_windows": [64, 512]},
}
LENGTH, BLOCK, TOKEN = 4096, 16, 1024
FULL = LENGTH * TOKEN
# Bytes that the kind's caches of one layer need for a request of 4,096 tokens, a token at a time. A window of w holds
# w tokens from inside a block: ceil(w / 16) + 1 blocks at most.
NEEDED = {
    "strided": (64 // BLOCK + 1) * BLOCK * TOKEN + LENGTH // 8 * TOKEN,
    # keys and values, and the bounds of each block: 2 vectors of 2 heads of 64 float32 numbers
    "two-page": FULL + LENGTH // BLOCK * 2 * 2 * 64 * 4,
    # one head each: half a token's bytes
    "head-window": (64 // BLOCK + 1 + 512 // BLOCK + 1) * BLOCK * TOKEN // 2,
}


class Road:
    """What a new user has: a folder, a place where the plugin is installed, and the command line."""

    def __init__(self, folder, capsys):
        self.folder, self.capsys, self.site = folder, capsys, folder / "site"

    def make(self, name):
        storage, lifetime = ASKED[name]
        words = ("--storage", storage, "--lifetime", lifetime, "--no-input", "--output", self.folder)
        answer = kvframe(self.capsys, "new-plugin", name, *words)
        assert answer.code == 0, answer.err
        module = name.replace("-", "_")
        source = (KINDS / f"{module}.py").read_text()
        project = self.folder / f"kvframe-{name}"
        (project / "src" / f"kvframe_{module}" / "__init__.py").write_text(source)
        subprocess.run([*PIP, "--no-build-isolation", "--target", self.site, project], check=True)

    def run(self, *words):
        paths = [str(self.site), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*RUN, *words], capture_output=True, text=True, check=False, env=environment, cwd=self.folder
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)


@pytest.fixture
def road(tmp_path, capsys):
    return Road(tmp_path, capsys)


@pytest.mark.parametrize("name", ASKED)
def test_a_kind_is_made_listed_checked_and_planned(road, name):
    road.make(name)
    kind = name.replace("-", "_")

    listed = {plugin["distribution"]: plugin for plugin in road.run("plugins", "--json")["plugins"]}
    mine = listed[f"kvframe-{name}"]
    assert (mine["status"], mine["families"], mine["layer_kinds"]) == ("active", FAMILIES[name], [kind])

    report = road.run("check", f"kvframe-{name}", "--json")
    assert report["passed"]
    subjects = {f"plugin {kind}", *(f"family {family}" for family in FAMILIES[name])}
    assert {check["subject"] for check in report["checks"]} == subjects

    model = {**MODEL, "layer_types": [kind, "full_attention"], **FIELDS[name]}
    (road.folder / "config.json").write_text(json.dumps(model))
    words = ("config.json", "--memory", "1GiB", "--in-flight-tokens", "1", "--json")
    planned = road.run("plan", *words)
    kinds = {word for group in planned["groups"] for word in group["kinds"]}
    assert kinds == {kind, "full_attention"}
    # A request's bytes are those of its caches, and little more: pages are padded, blocks begun.
    needed = FULL + NEEDED[name]
    (pool,) = planned["pools"]
    held = pool["slabs_per_request"] * pool["slab_bytes"]
    assert needed <= held <= 1.1 * needed


def test_each_of_them_is_new():
    """None of the three is a family that kvframe or its plugins have."""
    import kvframe as package

    known = package.load_plugins().families
    assert not known.keys() & {family for families in FAMILIES.values() for family in families}
