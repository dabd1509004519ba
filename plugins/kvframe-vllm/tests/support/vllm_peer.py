"""A pytest plugin for vLLM's own scheduler tests: every scheduler that they make runs on kvframe, or steps back.

`-p vllm_peer`, with KVFRAME_PEER naming the file that outcomes are written to: one JSON line a test, with why kvframe
stepped back, if it did.
"""

from __future__ import annotations

import importlib
import json
import os
from typing import Any

import pytest

REASONS: list[str] = []
MADE: list[str] = []


def pytest_configure(config: Any) -> None:
    if os.environ.get("KVFRAME_PEER_SIDE") != "kvframe":
        return
    importlib.import_module("vllm.v1.core.sched.diffusion_scheduler")  # derives from vLLM's own schedulers
    from vllm.v1.core.sched import async_scheduler
    from vllm.v1.core.sched import scheduler as sync_scheduler

    from kvframe_vllm import scheduler as ours

    reason = ours._reason

    def noted(*args: Any, **kwargs: Any) -> str | None:
        found = reason(*args, **kwargs)
        (MADE if found is None else REASONS).append(found or "kvframe")
        return found

    ours._reason = noted
    sync_scheduler.Scheduler = ours.Scheduler
    async_scheduler.AsyncScheduler = ours.AsyncScheduler


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Any:
    report = (yield).get_result()
    if report.when == "setup":
        REASONS.clear()
        MADE.clear()
    if report.when == "call" or report.outcome != "passed":
        line = {
            "test": item.nodeid.partition("/v1/core/")[2],
            "outcome": report.outcome,
            "on_kvframe": len(MADE),
            "stepped_back": sorted(set(REASONS)),
            "why": str(report.longrepr)[-300:] if report.failed else "",
        }
        with open(os.environ["KVFRAME_PEER"], "a", encoding="utf-8") as out:
            out.write(json.dumps(line) + "\n")
