"""vLLM's own scheduler tests, from its source distribution, on its manager and on kvframe's; prints the counts.

    python peer_tests.py FOLDER

FOLDER keeps the source distribution. A case counts if it passes on vLLM's own manager here; it must then pass with
kvframe's schedulers, on kvframe's manager or stepped back for a reason of the list.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

VERSION = "0.32.0"
CASES = ("tests/v1/core/test_scheduler.py", "tests/v1/core/test_async_scheduler.py")
HERE = Path(__file__).parent
# What the tests' model says of itself: they need its configuration only, and must not ask the network.
OPT = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "ffn_dim": 3072,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
    "torch_dtype": "float16",
}


def fetch(folder: Path) -> Path:
    """The unpacked tests; pip asks the package for its metadata, which needs two tools and a version."""
    root = folder / f"vllm-{VERSION}"
    if (root / CASES[0]).exists():
        return root
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "install", "setuptools-rust", "setuptools-scm", "wheel"], check=True)
    override = {
        "VLLM_TARGET_DEVICE": "empty",
        "VLLM_VERSION_OVERRIDE": VERSION,
        "SETUPTOOLS_SCM_PRETEND_VERSION": VERSION,
    }
    words = ["download", "--no-deps", "--no-binary", "vllm", "--no-build-isolation", "-d", folder]
    subprocess.run([*pip, *words, f"vllm=={VERSION}"], check=True, env=os.environ | override)
    with tarfile.open(folder / f"vllm-{VERSION}.tar.gz") as archive:
        inside = [one for one in archive.getmembers() if one.name.startswith(f"vllm-{VERSION}/tests/")]
        archive.extractall(folder, members=inside, filter="data")
    return root


def offline_model(folder: Path) -> Path:
    """A Hugging Face cache with the configuration of the tests' model."""
    home, commit = folder / "hf", "0" * 40
    model = home / "hub" / "models--facebook--opt-125m"
    snapshot = model / "snapshots" / commit
    snapshot.mkdir(parents=True, exist_ok=True)
    (model / "refs").mkdir(exist_ok=True)
    (model / "refs" / "main").write_text(commit, encoding="utf-8")
    (snapshot / "config.json").write_text(json.dumps(OPT), encoding="utf-8")
    return home


def run(root: Path, home: Path, side: str) -> dict[str, dict[str, Any]]:
    out = root.parent / f"{side}.jsonl"
    out.unlink(missing_ok=True)
    environment = os.environ | {
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "KVFRAME_VLLM": "",
        "KVFRAME_PEER": str(out),
        "KVFRAME_PEER_SIDE": side,
        "PYTHONPATH": str(HERE),
    }
    pytest = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "vllm_peer",
        "-p",
        "no:cacheprovider",
        "--noconftest",
    ]
    subprocess.run([*pytest, *CASES], cwd=root, env=environment, capture_output=True, check=False)
    found: dict[str, dict[str, Any]] = {}
    for line in out.read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        if case["test"] not in found or case["outcome"] != "passed":
            found[case["test"]] = case
    return found


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    root, home = fetch(folder), offline_model(folder)
    stock, ours = run(root, home, "stock"), run(root, home, "kvframe")
    counted = [name for name, case in stock.items() if case["outcome"] == "passed"]
    rest = [name for name in counted if ours.get(name, {}).get("outcome") != "passed"]
    passed = [ours[name] for name in counted if name not in rest]
    on_kvframe = sum(case["on_kvframe"] > 0 and not case["stepped_back"] for case in passed)
    back = Counter(reason for case in passed for reason in case["stepped_back"])
    say = sys.stdout.write
    say(
        f"vLLM {VERSION}'s own scheduler tests: {len(stock)} cases, {len(counted)} pass here on its own manager\n"
    )
    say(f"with kvframe's schedulers {len(passed)} of these pass: {on_kvframe} on kvframe's manager,\n")
    for reason, count in back.most_common():
        say(f"  {count:4} stepped back: {reason}\n")
    say(
        f"  {len(passed) - on_kvframe - sum(bool(case['stepped_back']) for case in passed):4} make no scheduler\n"
    )
    for name in rest:
        say(f"NOT PASSED: {name}: {ours.get(name, {}).get('why', 'did not run')[-200:]!r}\n")
    sys.exit(1 if rest else 0)


if __name__ == "__main__":
    main()
