"""Specs of every installed family, plain ones and ones that use the odd fields, for tests of what all specs do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from kvframe import FullAttentionSpec, KVQuantMode, MultipleOf, load_plugins
from kvframe_chunked_local import ChunkedLocalAttentionSpec
from kvframe_circular_buffer import CircularBufferSpec, KpoolTailSpec
from kvframe_cross_attention import CrossAttentionSpec, EncoderOnlyAttentionSpec
from kvframe_hidden_state import HiddenStateCacheSpec
from kvframe_hisparse import HiSparseHotSpec, HiSparseResidentSpec
from kvframe_mamba import MambaSpec
from kvframe_mla import MLAAttentionSpec, SlidingWindowMLASpec, SparseCacheRole
from kvframe_rswa import RSWASpec
from kvframe_sink import SinkFullAttentionSpec
from kvframe_sliding_window import SlidingWindowSpec

_HEADS: Mapping[str, Any] = {"num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
_LATENT: Mapping[str, Any] = {"num_kv_heads": 1, "head_size": 576, "dtype": "bfloat16"}

EXAMPLES: Mapping[str, Sequence[Any]] = {
    "full_attention": (
        FullAttentionSpec(16, **_HEADS),
        FullAttentionSpec(16, **_HEADS, head_size_v=64, sliding_window=512, non_causal=True, is_draft=True),
        FullAttentionSpec(16, **_HEADS, page_size_padded=81_920, max_tp_shards=8, dcp_sharded=False),
        FullAttentionSpec(16, **_HEADS, block_stride_alignment=256, attention_chunk_size=8_192),
        FullAttentionSpec(64, **_HEADS, block_stride_alignment=MultipleOf(16)),
        FullAttentionSpec(16, **_HEADS, tokens_per_state=Fraction(1, 4)),
        FullAttentionSpec(16, **_HEADS, tokens_per_state=4),
        FullAttentionSpec(
            16,
            num_kv_heads=8,
            head_size=128,
            dtype="int8",
            kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD,
            state_content_bytes=264,  # 128 + 4 + 128 + 4
        ),
        FullAttentionSpec(
            16,
            num_kv_heads=8,
            head_size=128,
            dtype="uint8",
            kv_quant_mode=KVQuantMode.NVFP4,
            state_content_bytes=72,  # 128/2 + 128/16
            num_head_slots=16,
        ),
    ),
    "sliding_window": (SlidingWindowSpec(16, **_HEADS, sliding_window=1_024, extra_retained_tokens=3),),
    "chunked_local": (ChunkedLocalAttentionSpec(16, **_HEADS, attention_chunk_size=8_192),),
    "rswa": (RSWASpec(16, **_HEADS, rswa_window=256),),
    "sink": (SinkFullAttentionSpec(16, **_HEADS, sink_len=4), SinkFullAttentionSpec(16, **_HEADS)),
    "cross_attention": (CrossAttentionSpec(16, **_HEADS),),
    "encoder_only": (EncoderOnlyAttentionSpec(16, **_HEADS),),
    "circular_buffer": (CircularBufferSpec(8, **_HEADS),),
    "kpool_tail": (KpoolTailSpec(8, **_HEADS, sliding_window=128),),
    "hidden_state": (HiddenStateCacheSpec(16, num_kv_heads=1, head_size=7_168, dtype="bfloat16"),),
    "mla": (
        MLAAttentionSpec(64, **_LATENT),
        MLAAttentionSpec(
            64,
            num_kv_heads=1,
            head_size=132,
            dtype="uint8",
            cache_role=SparseCacheRole.INDEXER,
            cache_dtype_str="fp8_ds_mla",
            alignment=576,
            is_index_group_leader=True,
            storage_block_size=64,
            topk_buffer_width=2_048,
        ),
        MLAAttentionSpec(
            256, num_kv_heads=1, head_size=584, dtype="uint8", tokens_per_state=4, model_version="deepseek_v4"
        ),
    ),
    "sliding_window_mla": (
        SlidingWindowMLASpec(64, **_LATENT, sliding_window=512, bounded_replay=True, alignment=128),
    ),
    "mamba": (
        MambaSpec(256, shapes=((3, 4_096), (64, 64, 128)), dtypes=("bfloat16", "float32")),
        MambaSpec(
            16,
            shapes=((4,),),
            dtypes=("float32",),
            page_size_padded=64,
            mamba_type="gdn",
            mamba_cache_mode="align",
            num_speculative_blocks=2,
            num_prefill_checkpoint_blocks=1,
            prefill_checkpoint_alignment=64,
            tp_replicated=True,
        ),
    ),
    "hisparse_hot": (HiSparseHotSpec(64, page_size=41_984, blocks_per_request=64),),
    "hisparse_resident": (HiSparseResidentSpec(64, page_size=41_984),),
}

EVERY: Mapping[str, Sequence[Any]] = {
    name: (*EXAMPLES.get(name, ()), *family.examples) for name, family in load_plugins().families.items()
}
"""Family name to the specs above and those that the family itself gives as examples."""
