"""A window for each head for kvframe: heads of one layer keep different numbers of tokens.

Heads with one window live alike, so a layer gives a cache for each of its windows, with as many heads as have it.
"""

from __future__ import annotations

from collections import Counter

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
class HeadWindowSpec(AttentionSpec):
    """The heads of a layer that have one window.

    Args:
        window: tokens that they read, the current one included.
    """

    window: int = kv_field(validator=at_least(1))

    def max_memory_usage_bytes(self, engine: EngineConfig) -> int:
        """Bytes of the most blocks that one request can hold."""
        held = _lifetime(self).peak(engine.max_in_flight_tokens, engine.max_model_len)
        return held * self.page_size_bytes


@attrs.frozen(kw_only=True)
class HeadWindowLifetime(Lifetime):
    """Entries die from the front, once all their tokens are below the window."""

    window: int

    @property
    def steady_from(self) -> int:
        """Once the window is full, each new entry takes the place of one that dies."""
        return self.window + self.block

    def dead(self, n: Tokens, prompt: Tokens) -> tuple[Tokens, Tokens]:
        """The entries [0, max(0, n - window + 1) // block)."""
        return np.zeros_like(n), np.maximum(0, n - self.window + 1) // self.block


def _lifetime(spec: HeadWindowSpec) -> HeadWindowLifetime:
    return HeadWindowLifetime(block=spec.block_size, window=spec.window)


def _read(layer: LayerContext) -> dict[str, HeadWindowSpec]:
    windows, total = layer.config.need("head_windows"), layer.kv_heads_total()
    if not isinstance(windows, list) or len(windows) != total or not all(type(w) is int for w in windows):
        raise layer.config.invalid("head_windows", windows, f"must be {total} whole numbers, one a KV head")
    return {
        f"window_{window}": layer.attention(
            HeadWindowSpec,
            window=window,
            num_kv_heads=layer.split_heads(count, "head_windows"),
            max_tp_shards=count,
        )
        for window, count in sorted(Counter(windows).items())
    }


EXAMPLES = (
    HeadWindowSpec(16, window=256, num_kv_heads=8, head_size=128, dtype="bfloat16"),
    HeadWindowSpec(32, window=50, num_kv_heads=2, head_size=64, dtype="bfloat16"),
)


@hookimpl
def kvframe_spec_families() -> list[SpecFamily[HeadWindowSpec]]:
    """The family of heads with a window."""
    return [
        SpecFamily(
            name="head_window",
            spec_type=HeadWindowSpec,
            lifetime=_lifetime,
            window=lambda spec: spec.window,
            traits=Traits(event_kind="head_window", dcp="unsupported"),
            examples=EXAMPLES,
        )
    ]


@hookimpl
def kvframe_layer_readers() -> list[LayerReader]:
    """The reader of layers that a model's config calls "head_window"."""
    return [LayerReader(kind="head_window", read=_read)]
