"""Start-up: `kvframe plan` as a whole process, against importing the libraries that it stands on.

Both sides start from bytecode: pip compiles the libraries when it installs them, and this compiles kvframe and its
plugins first, as pip does for anyone who does not install them editable.

Run by `make bench`. Both are timed in one run, in turns, after a warm-up. The exit code is 1 when the bar is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAIRS = 10
BAR = 3.0
# fmt: off
PLAN = [
    str(Path(sys.executable).with_name("kvframe")), "plan", "examples/models/gemma-3-27b.json",
    "--memory", "64GiB", "--max-model-len", "131072", "--json",
]
# fmt: on
IMPORTS = [sys.executable, "-c", "import attrs, pluggy, numpy, rich, click"]


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    as_json = parser.parse_args().json

    sources = [ROOT / "kvframe", *ROOT.glob("plugins/*/src")]
    subprocess.run([sys.executable, "-m", "compileall", "-q", *map(str, sources)], check=True)
    for command in (PLAN, IMPORTS):
        seconds(command)
    pairs = [(seconds(PLAN), seconds(IMPORTS)) for _ in range(PAIRS)]
    plan, imports = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = plan / imports
    passed = ratio <= BAR

    if as_json:
        result = {
            "plan_s": plan,
            "imports_s": imports,
            "ratio": ratio,
            "bar": BAR,
            "pairs": PAIRS,
            "passed": passed,
        }
        print(json.dumps(result))
    else:
        print(f"kvframe plan    {plan:.3f} s  (median of {PAIRS})")
        print(f"the imports     {imports:.3f} s")
        print(f"ratio           {ratio:.2f}    bar: at most {BAR:g}: {'met' if passed else 'MISSED'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
