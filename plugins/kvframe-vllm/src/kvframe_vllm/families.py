"""Families that only kvframe knows, for vLLM: a spec class and a manager made from the family's lifetime."""

from __future__ import annotations

from typing import Any

from kvframe_vllm.errors import UnknownSpecError


def engine_spec(spec: Any, layer: str = "?") -> Any:
    raise UnknownSpecError(spec=type(spec).__name__, layer=layer, side="vLLM", advice="x")
