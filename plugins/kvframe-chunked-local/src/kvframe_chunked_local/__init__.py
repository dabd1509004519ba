"""Chunked local attention for kvframe: tokens attend inside their own chunk, and a chunk dies when the next begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvframe import FullAttentionSpec, SpecFamily, Traits, hookimpl, replace_as
from kvframe_chunked_local.readers import kvframe_layer_readers, kvframe_model_readers
from kvframe_chunked_local.spec import ChunkedLocalAttentionSpec, ChunkLifetime

__all__ = [
    "ChunkLifetime",
    "ChunkedLocalAttentionSpec",
    "kvframe_layer_readers",
    "kvframe_model_readers",
    "kvframe_spec_families",
]


def _promote(spec: ChunkedLocalAttentionSpec, block_size: int | None) -> FullAttentionSpec:
    return replace_as(spec.copy_with_new_block_size(block_size or spec.block_size), FullAttentionSpec)


_HEADS: Mapping[str, Any] = {"num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
_EXAMPLES = (
    ChunkedLocalAttentionSpec(16, attention_chunk_size=512, **_HEADS),
    ChunkedLocalAttentionSpec(16, attention_chunk_size=40, **_HEADS),  # chunks that start inside a block
)


@hookimpl
def kvframe_spec_families() -> list[SpecFamily[ChunkedLocalAttentionSpec]]:
    """The family of chunked local layers."""
    return [
        SpecFamily(
            name="chunked_local",
            spec_type=ChunkedLocalAttentionSpec,
            lifetime=lambda spec: ChunkLifetime(block=spec.block_size, chunk=spec.attention_chunk_size),
            promote=_promote,
            traits=Traits(event_kind="chunked_local_attention", dcp="unsupported"),
            examples=_EXAMPLES,
        )
    ]
