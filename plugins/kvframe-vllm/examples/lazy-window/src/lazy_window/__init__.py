"""A window that gives its blocks back some at a time: a family of kvframe, and of vLLM through kvframe-vllm."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from kvframe import AttentionSpec, EngineConfig, SpecFamily, hookimpl, kv_field
from kvframe.checks import at_least
from kvframe.lifetime import Lifetime


@attrs.frozen(kw_only=True, repr=False)
class LazyWindowSpec(AttentionSpec):
    """A sliding window whose blocks go back `stride` at a time.

    Args:
        sliding_window: tokens that a token attends to, itself included.
        stride: blocks that go back together.
    """

    sliding_window: int = kv_field(validator=at_least(1))
    stride: int = kv_field(default=2, validator=at_least(1))

    def max_memory_usage_bytes(self, engine: EngineConfig) -> int:
        """The peak of the lifetime, in bytes."""
        return lifetime(self).peak(engine.max_in_flight_tokens, engine.max_model_len) * self.page_size_bytes


@attrs.frozen(kw_only=True)
class LazyWindowLifetime(Lifetime):
    """Entries below the window die, `stride` of them at a time."""

    window: int
    stride: int

    def dead(self, n: Any, prompt: Any) -> tuple[Any, Any]:
        """The entries [0, whole strides below the window)."""
        below = np.maximum(0, n - self.window + 1) // self.block
        return np.zeros_like(n), below // self.stride * self.stride


def lifetime(spec: LazyWindowSpec) -> LazyWindowLifetime:
    """The rule of one layer."""
    return LazyWindowLifetime(block=spec.block_size, window=spec.sliding_window, stride=spec.stride)


@hookimpl
def kvframe_spec_families() -> list[SpecFamily[LazyWindowSpec]]:
    """The family."""
    return [SpecFamily(name="lazy_window", spec_type=LazyWindowSpec, lifetime=lifetime)]
