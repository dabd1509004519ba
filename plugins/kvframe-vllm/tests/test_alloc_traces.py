"""vLLM's own block-manager traces through the interface that its scheduler uses; no vLLM is needed for this."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_stand_in import AdapterReplay, served

from kvframe.errors import SpecError
from kvframe_vllm.manager import EngineManager
from tests import vectors
from tests.blocks.replay import config_of

CASES = vectors.load("alloc")
SERVED = [case for case in CASES if served(case)]
TRACES = [case for case in SERVED if "results" in case["expect"]]
REFUSED = [case for case in SERVED if "results" not in case["expect"]]


@pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in TRACES])
def test_trace(case: dict[str, Any]) -> None:
    notes = AdapterReplay(case).run()
    # Only where the reference is limited or wrong is its hit fed in (lifetime.md): the draft drop and its quirks.
    assert not notes or case["input"]["setup"].get("use_draft_drop") or case.get("quirk")


@pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in REFUSED])
def test_a_setup_that_vllm_refuses_is_refused(case: dict[str, Any]) -> None:
    with pytest.raises(SpecError):
        EngineManager(config_of(case), [group["layer"] for group in case["input"]["setup"]["groups"]])


def test_the_traces_are_there() -> None:
    # 137 of the 204 public traces have only groups that the adapter serves.
    assert len(SERVED) >= 137 or len(CASES) < 204
