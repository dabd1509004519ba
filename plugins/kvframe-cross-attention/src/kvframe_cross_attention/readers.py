"""Encoder-decoder models: every decoder layer attends to itself and to the encoder's output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvframe import Layer, LayerReader, ModelConfig, ModelReader, hookimpl
from kvframe_cross_attention.spec import CrossAttentionSpec


@hookimpl
def kvframe_layer_readers() -> list[LayerReader]:
    """The reader of cross attention, beside the layer's own attention."""
    return [
        LayerReader(
            kind="cross_attention", read=lambda layer: {"cross_attn": layer.attention(CrossAttentionSpec)}
        )
    ]


@hookimpl
def kvframe_model_readers() -> list[ModelReader]:
    """The readers of Whisper and T5, which name the decoder's fields each in a way of their own."""
    return [ModelReader(model_types=("whisper",), read=_whisper), ModelReader(model_types=("t5",), read=_t5)]


def _decoder(layers: int, facts: Mapping[str, Any]) -> Sequence[Layer]:
    kinds = ("full_attention", "cross_attention")
    return [Layer(index=index, kinds=kinds, facts=facts) for index in range(layers)]


def _whisper(config: ModelConfig) -> Sequence[Layer]:
    heads = config.integer("decoder_attention_heads")
    facts = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "hidden_size": config.integer("d_model"),
    }
    return _decoder(config.integer("decoder_layers"), facts)


def _t5(config: ModelConfig) -> Sequence[Layer]:
    facts = {"num_key_value_heads": config.integer("num_heads"), "head_dim": config.integer("d_kv")}
    return _decoder(config.integer("num_decoder_layers", "num_layers"), facts)
