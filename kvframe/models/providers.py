"""The one table that names plugins: who provides a layer kind, or reads a model type. For messages only.

Nothing here takes part in reading: a kind or model type that an installed plugin owns needs no entry.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

DISTRIBUTIONS: Mapping[str, str] = MappingProxyType(
    {
        "sliding_attention": "kvframe-sliding-window",
        "chunked_attention": "kvframe-chunked-local",
        "mla": "kvframe-mla",
        "indexer": "kvframe-mla",
        "mamba1": "kvframe-mamba",
        "mamba2": "kvframe-mamba",
        "linear_attention": "kvframe-mamba",
        "short_conv": "kvframe-mamba",
        "cross_attention": "kvframe-cross-attention",
    }
)
"""Layer kind to the distribution that brings it."""

NEEDED_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "cohere2": "sliding_attention",
        "gemma2": "sliding_attention",
        "gemma3_text": "sliding_attention",
        "gemma3n_text": "sliding_attention",
        "gemma4_text": "sliding_attention",
        "gpt_oss": "sliding_attention",
        "mimo_v2_flash": "sliding_attention",
        "olmo3": "sliding_attention",
        "llama4_text": "chunked_attention",
        "glm_moe_dsa": "mla",
        "bamba": "mamba2",
        "falcon_h1": "mamba2",
        "granitemoehybrid": "mamba2",
        "jamba": "mamba1",
        "kimi_linear": "linear_attention",
        "lfm2": "short_conv",
        "mamba2": "mamba2",
        "minimax_m1": "linear_attention",
        "nemotron_h": "mamba2",
        "qwen3_5_text": "linear_attention",
        "qwen3_next": "linear_attention",
        "t5": "cross_attention",
        "whisper": "cross_attention",
    }
)
"""Model type that only a plugin can read to the layer kind that it needs: without it, it is never read as plain."""
