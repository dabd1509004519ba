"""vLLM's own block-manager traces through the interface that its scheduler uses; no vLLM is needed for this."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_stand_in import AdapterReplay, served

from tests import vectors

CASES = vectors.load("alloc")
TRACES = [case for case in CASES if "results" in case["expect"] and served(case)]


@pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in TRACES])
def test_trace(case: dict[str, Any]) -> None:
    notes = AdapterReplay(case).run()
    # Only where the reference is limited or wrong is its hit fed in (lifetime.md): the draft drop and its quirks.
    assert not notes or case["input"]["setup"].get("use_draft_drop") or case.get("quirk")
