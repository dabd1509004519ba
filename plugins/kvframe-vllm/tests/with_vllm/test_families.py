"""A family that vLLM does not know, in vLLM: one distribution brings it to both."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from tiny_models import make_model

HERE = Path(__file__).parent.parent
EXAMPLE = HERE.parent / "examples" / "lazy-window"


@pytest.fixture(scope="module")
def site(tmp_path_factory: Any) -> Path:
    """A folder with the example's distribution."""
    path: Path = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--target", path, EXAMPLE], check=True)
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: Any) -> tuple[str, str]:
    """Gemma-2, and the same weights as the example's model."""
    folder: Path = tmp_path_factory.mktemp("models")
    usual, lazy = make_model("gemma2", folder), make_model("gemma2", folder / "lazy")
    config = json.loads((lazy / "config.json").read_text())
    (lazy / "config.json").write_text(json.dumps(config | {"architectures": ["LazyWindowForCausalLM"]}))
    return str(usual), str(lazy)


def python(site: Path, *words: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_same_tokens_on_either_manager(site: Path, models: tuple[str, str]) -> None:
    usual, lazy = models
    common = {"caching": True, "blocks": 90, "count": 24}
    runs = [
        {"model": usual, "scheduler": "stock", **common},
        {"model": lazy, "scheduler": "stock", **common},
        {"model": lazy, "scheduler": "kvframe", **common},
    ]
    out = python(site, str(HERE / "support" / "serve.py"), json.dumps(runs))
    lines = [json.loads(line[7:]) for line in out.splitlines() if line.startswith("RESULT ")]
    assert [line["manager"] for line in lines] == ["KVCacheManager", "KVCacheManager", "EngineManager"]
    gemma, on_stock, on_kvframe = (line["tokens"] for line in lines)
    assert on_stock == gemma
    assert on_kvframe == gemma


SPEC = """
import pickle, sys
from kvframe_vllm import engine_spec, to_kvframe
from lazy_window import LazyWindowSpec
spec = LazyWindowSpec(16, num_kv_heads=2, head_size=64, dtype="bfloat16", sliding_window=64)
made = engine_spec(spec, "layers.0")
assert made.page_size_bytes == spec.page_size_bytes
assert to_kvframe(made) == spec
assert to_kvframe(made.copy_with_new_block_size(32)).block_size == 32
sys.stdout.write(pickle.dumps(made).hex())
"""
READ = """
import pickle, sys
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry
made = pickle.loads(bytes.fromhex(sys.argv[1]))
print(KVCacheSpecRegistry.get_manager_class(made).__name__, made.block_size)
"""


def test_specs_go_from_a_workers_process_to_the_engines(site: Path) -> None:
    sent = python(site, "-c", SPEC).strip()
    assert python(site, "-c", READ, sent).strip().splitlines()[-1] == "FamilyManager 16"


def test_what_keeps_no_tokens_is_an_error_with_the_layer() -> None:
    from kvframe_circular_buffer import CircularBufferSpec
    from kvframe_vllm import engine_spec
    from kvframe_vllm.errors import UnknownSpecError

    ring = CircularBufferSpec(8, num_kv_heads=1, head_size=64, dtype="bfloat16")
    with pytest.raises(UnknownSpecError, match=r"layers\.3: vLLM has no counterpart of CircularBufferSpec"):
        engine_spec(ring, "layers.3")
    assert (
        pickle.loads(pickle.dumps(UnknownSpecError(spec="a", layer="b", side="c", advice="d"))).layer == "b"
    )
