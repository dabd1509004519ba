"""Chunked layers, and Llama 4, whose files mark them as the layers with a rotary embedding."""

from __future__ import annotations

from collections.abc import Sequence

from kvframe import Layer, LayerContext, LayerReader, ModelConfig, ModelReader, hookimpl
from kvframe.spelling import CHUNKED, FULL, Pattern, common_layers, every_nth, listed
from kvframe_chunked_local.spec import ChunkedLocalAttentionSpec


def _chunked_attention(layer: LayerContext) -> dict[str, ChunkedLocalAttentionSpec]:
    chunk = layer.config.integer("attention_chunk_size")
    return {"attn": layer.attention(ChunkedLocalAttentionSpec, attention_chunk_size=chunk)}


@hookimpl
def kvframe_layer_readers() -> list[LayerReader]:
    """The reader of chunked layers."""
    return [LayerReader(kind="chunked_attention", read=_chunked_attention)]


@hookimpl
def kvframe_model_readers() -> list[ModelReader]:
    """The reader of Llama 4."""
    return [ModelReader(model_types=("llama4_text",), read=_llama4)]


def _llama4(config: ModelConfig) -> Sequence[Layer]:
    return common_layers(config, pattern=_pattern)


def _pattern(config: ModelConfig) -> Pattern:
    if config.get("no_rope_layers"):  # published files hold an empty list for "none given"
        return listed(config, "no_rope_layers", {1: CHUNKED, 0: FULL})
    return every_nth(config.integer("no_rope_layer_interval", default=4), others=CHUNKED)
