"""Latent attention for kvframe: one joint vector a token, its sliding-window form, and the sparse indexer's cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvframe import KVQuantMode, Lifetime, Paging, SpecFamily, Traits, hookimpl, replace_as
from kvframe_mla.readers import kvframe_layer_readers, kvframe_model_readers
from kvframe_mla.rows import kvframe_cache_dtypes, row_bytes
from kvframe_mla.spec import MLAAttentionSpec, SlidingWindowMLASpec, SparseCacheRole, merge_latent
from kvframe_mla.views import make_views
from kvframe_sliding_window import WindowLifetime, window_lifetime

__all__ = [
    "MLAAttentionSpec",
    "SlidingWindowMLASpec",
    "SparseCacheRole",
    "kvframe_cache_dtypes",
    "kvframe_layer_readers",
    "kvframe_model_readers",
    "kvframe_spec_families",
    "make_views",
    "merge_latent",
    "row_bytes",
]


def _promote_window(spec: SlidingWindowMLASpec, block_size: int | None) -> MLAAttentionSpec:
    resized = spec.copy_with_new_block_size(block_size or spec.block_size)
    return replace_as(resized, MLAAttentionSpec, drop={"extra_retained_tokens", "bounded_replay"})


def _window_lifetime(spec: SlidingWindowMLASpec) -> WindowLifetime:
    return window_lifetime(spec, hits="free" if spec.bounded_replay else "keyed")


_LATENT: Mapping[str, Any] = {"num_kv_heads": 1, "head_size": 576, "dtype": "bfloat16"}
# Opaque rows of 584 bytes, four tokens a row, pages rounded up to whole 576 bytes.
_V4: Mapping[str, Any] = {
    "num_kv_heads": 1,
    "head_size": 512,
    "dtype": "uint8",
    "state_content_bytes": 584,
    "alignment": 576,
    "model_version": "deepseek_v4",
    "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR,
}


@hookimpl
def kvframe_spec_families() -> list[SpecFamily[Any]]:
    """The families of latent layers and of their sliding-window form."""
    return [
        SpecFamily(
            name="mla",
            spec_type=MLAAttentionSpec,
            lifetime=lambda spec: Lifetime(block=spec.block_size),
            merge=merge_latent,
            promote=lambda spec, block_size: spec,
            make_views=make_views,
            paging=Paging(pads=False, kernel_block=128),
            traits=Traits(event_kind="mla_attention"),
            examples=(
                MLAAttentionSpec(64, **_LATENT),
                MLAAttentionSpec(256, tokens_per_state=4, **_V4),
            ),
        ),
        SpecFamily(
            name="sliding_window_mla",
            spec_type=SlidingWindowMLASpec,
            lifetime=_window_lifetime,
            merge=merge_latent,
            # A row of latent vectors is no row of K and V: the two window kinds do not mix, in any order (Q15).
            group_key=lambda spec: "latent",
            promote=_promote_window,
            retain=lambda spec, tokens: attrs.evolve(spec, extra_retained_tokens=tokens),
            window=lambda spec: spec.sliding_window,
            make_views=make_views,
            paging=Paging(bucket="window"),
            traits=Traits(event_kind="sliding_window_mla", dcp="unsupported"),
            examples=(
                SlidingWindowMLASpec(64, sliding_window=128, **_LATENT),
                SlidingWindowMLASpec(64, sliding_window=128, bounded_replay=True, **_V4),
            ),
        ),
    ]
