"""Sliding-window attention for kvframe: a token is read by the `window` positions from itself on, then never again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvframe import FullAttentionSpec, Paging, SpecFamily, Traits, hookimpl, replace_as
from kvframe_sliding_window.readers import kvframe_layer_readers, kvframe_model_readers
from kvframe_sliding_window.spec import SlidingWindowSpec, WindowLifetime, window_lifetime

__all__ = [
    "SlidingWindowSpec",
    "WindowLifetime",
    "kvframe_layer_readers",
    "kvframe_model_readers",
    "kvframe_spec_families",
    "window_lifetime",
]


def _promote(spec: SlidingWindowSpec, block_size: int | None) -> FullAttentionSpec:
    resized = spec.copy_with_new_block_size(block_size or spec.block_size)
    return replace_as(resized, FullAttentionSpec, drop={"extra_retained_tokens"})


_HEADS: Mapping[str, Any] = {"num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
_EXAMPLES = (
    SlidingWindowSpec(16, sliding_window=1024, **_HEADS),
    SlidingWindowSpec(64, sliding_window=100, extra_retained_tokens=2, **_HEADS),  # no multiple of the block
    SlidingWindowSpec(16, sliding_window=1, **_HEADS),
)


@hookimpl
def kvframe_spec_families() -> list[SpecFamily[SlidingWindowSpec]]:
    """The family of sliding-window layers."""
    return [
        SpecFamily(
            name="sliding_window",
            spec_type=SlidingWindowSpec,
            lifetime=window_lifetime,
            promote=_promote,
            retain=lambda spec, tokens: attrs.evolve(spec, extra_retained_tokens=tokens),
            window=lambda spec: spec.sliding_window,
            paging=Paging(bucket="window", fallback=True),
            traits=Traits(event_kind="sliding_window", dcp="unsupported"),
            examples=_EXAMPLES,
        )
    ]
