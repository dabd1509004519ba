"""Strided attention for kvframe: the last tokens, and before them every k-th token for good.

Every block would hold some k-th token, so one store could give nothing back. A layer has two: its window, whose tokens
die, and its strides, one cell for `tokens_per_state` tokens, which stay.
"""

from __future__ import annotations

from fractions import Fraction

import attrs
import numpy as np

from kvframe import (
    AttentionSpec,
    EngineConfig,
    LayerContext,
    LayerReader,
    SpecFamily,
    Traits,
    hookimpl,
    kv_field,
)
from kvframe.checks import at_least
from kvframe.lifetime import Lifetime, Tokens


@attrs.frozen(kw_only=True, repr=False)
class StridedSpec(AttentionSpec):
    """The last `window` tokens of a layer.

    Args:
        window: tokens that are read, the current one included.
    """

    window: int = kv_field(validator=at_least(1))

    def max_memory_usage_bytes(self, engine: EngineConfig) -> int:
        """Bytes of the most blocks that one request can hold."""
        held = _window(self).peak(engine.max_in_flight_tokens, engine.max_model_len)
        return held * self.page_size_bytes


@attrs.frozen(kw_only=True, repr=False)
class StridesSpec(AttentionSpec):
    """Every `tokens_per_state`-th token of a layer."""

    tokens_per_state: int | Fraction = kv_field(validator=at_least(2))

    def max_memory_usage_bytes(self, engine: EngineConfig) -> int:
        """Bytes of the longest request's blocks."""
        held = Lifetime(block=self.block_size).scaled(engine.dcp if self.dcp_sharded else 1)
        return held.peak(engine.max_in_flight_tokens, engine.max_model_len) * self.page_size_bytes


@attrs.frozen(kw_only=True)
class StridedLifetime(Lifetime):
    """Entries die from the front, once all their tokens are below the window."""

    window: int

    @property
    def steady_from(self) -> int:
        """Once the window is full, each new entry takes the place of one that dies."""
        return self.window + self.block

    def dead(self, n: Tokens, prompt: Tokens) -> tuple[Tokens, Tokens]:
        """The entries [0, max(0, n - window + 1) // block)."""
        return np.zeros_like(n), np.maximum(0, n - self.window + 1) // self.block


def _window(spec: StridedSpec) -> StridedLifetime:
    return StridedLifetime(block=spec.block_size, window=spec.window)


def _read(layer: LayerContext) -> dict[str, AttentionSpec]:
    window, stride = layer.config.integer("sliding_window"), layer.config.integer("stride")
    return {
        "window": layer.attention(StridedSpec, window=window),
        "strides": layer.attention(StridesSpec, tokens_per_state=stride),
    }


EXAMPLES = (
    StridedSpec(16, window=256, num_kv_heads=8, head_size=128, dtype="bfloat16"),
    StridedSpec(32, window=50, num_kv_heads=2, head_size=64, dtype="bfloat16"),
)
STRIDES_EXAMPLES = (
    StridesSpec(64, tokens_per_state=8, num_kv_heads=8, head_size=128, dtype="bfloat16"),
    StridesSpec(16, tokens_per_state=2, num_kv_heads=2, head_size=64, dtype="bfloat16"),
)


@hookimpl
def kvframe_spec_families() -> list[SpecFamily[StridedSpec] | SpecFamily[StridesSpec]]:
    """The windows and the strides of strided layers."""
    return [
        SpecFamily(
            name="strided",
            spec_type=StridedSpec,
            lifetime=_window,
            window=lambda spec: spec.window,
            traits=Traits(event_kind="strided", dcp="unsupported"),
            examples=EXAMPLES,
        ),
        SpecFamily(
            name="strides",
            spec_type=StridesSpec,
            lifetime=lambda spec: Lifetime(block=spec.block_size),
            traits=Traits(event_kind="strides"),
            examples=STRIDES_EXAMPLES,
        ),
    ]


@hookimpl
def kvframe_layer_readers() -> list[LayerReader]:
    """The reader of layers that a model's config calls "strided"."""
    return [LayerReader(kind="strided", read=_read)]
