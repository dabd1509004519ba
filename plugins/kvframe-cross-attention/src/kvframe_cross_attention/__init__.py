"""Attention of encoder-decoder models for kvframe: keys of the encoder's output, and layers that keep nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvframe import Lifetime, SpecFamily, Traits, hookimpl
from kvframe_cross_attention.readers import kvframe_layer_readers, kvframe_model_readers
from kvframe_cross_attention.spec import CrossAttentionSpec, EncoderOnlyAttentionSpec

__all__ = [
    "CrossAttentionSpec",
    "EncoderOnlyAttentionSpec",
    "kvframe_layer_readers",
    "kvframe_model_readers",
    "kvframe_spec_families",
]


_HEADS: Mapping[str, Any] = {"head_size": 64, "dtype": "bfloat16"}


@hookimpl
def kvframe_spec_families() -> list[SpecFamily[Any]]:
    """The families of cross attention and of encoder-only layers.

    Both forbid prefix hits: what the encoder computed, or a layer that looks forward, cannot be found by a prefix.
    """
    return [
        SpecFamily(
            name="cross_attention",
            spec_type=CrossAttentionSpec,
            lifetime=lambda spec: Lifetime(block=spec.block_size, source="encoder", hits="never"),
            traits=Traits(event_kind="cross_attention"),
            examples=(
                CrossAttentionSpec(16, num_kv_heads=20, **_HEADS),
                CrossAttentionSpec(16, num_kv_heads=6, dcp_sharded=False, **_HEADS),
            ),
        ),
        SpecFamily(
            name="encoder_only",
            spec_type=EncoderOnlyAttentionSpec,
            lifetime=lambda spec: Lifetime(block=spec.block_size, fixed=0, hits="never"),
            traits=Traits(event_kind="encoder_only_attention"),
            examples=(
                EncoderOnlyAttentionSpec(16, num_kv_heads=12, **_HEADS),
                EncoderOnlyAttentionSpec(64, num_kv_heads=12, **_HEADS),
            ),
        ),
    ]
