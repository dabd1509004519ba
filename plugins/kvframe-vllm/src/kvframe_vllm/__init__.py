"""A running vLLM plans and manages its KV cache with kvframe."""

from __future__ import annotations
