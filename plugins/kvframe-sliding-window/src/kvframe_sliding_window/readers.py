"""Sliding-window layers, and model types that alternate between them and full ones by a rule that files leave out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvframe import Layer, LayerContext, LayerReader, ModelConfig, ModelReader, hookimpl
from kvframe.spelling import FULL, SLIDING, Pattern, common_layers, every_nth, listed
from kvframe_sliding_window.spec import SlidingWindowSpec

# Every n-th layer is full where the file has neither a list nor a pattern.
_FULL_EVERY: Mapping[str, int] = {
    "cohere2": 4,
    "gemma2": 2,
    "gemma3_text": 6,
    "gemma3n_text": 5,
    "gpt_oss": 2,
    "olmo3": 4,
}


def _sliding_attention(layer: LayerContext) -> dict[str, SlidingWindowSpec]:
    window = layer.config.integer("sliding_window")
    return {"attn": layer.attention(SlidingWindowSpec, sliding_window=window)}


@hookimpl
def kvframe_layer_readers() -> list[LayerReader]:
    """The reader of sliding-window layers."""
    return [LayerReader(kind="sliding_attention", read=_sliding_attention)]


@hookimpl
def kvframe_model_readers() -> list[ModelReader]:
    """The readers of model types that alternate."""
    return [
        *(ModelReader(model_types=(name,), read=_alternating(n)) for name, n in _FULL_EVERY.items()),
        ModelReader(model_types=("gemma4_text",), read=_gemma4),
        ModelReader(model_types=("mimo_v2_flash",), read=_mimo),
    ]


def _alternating(n: int) -> Callable[[ModelConfig], Sequence[Layer]]:
    return lambda config: common_layers(config, pattern=lambda _: every_nth(n))


def _sixth_and(index: int) -> Pattern:
    """Every 6th layer is full, and one more."""
    sixth = every_nth(6)
    return lambda i: FULL if i == index else sixth(i)


def _gemma4(config: ModelConfig) -> Sequence[Layer]:
    """The last layer is always full; full layers have heads of their own size, and where K is V of their own number."""
    full = {"head_dim": config.integer("global_head_dim", default=512)}
    if config.flag("attention_k_eq_v") and config.get("num_global_key_value_heads") is not None:
        full["num_key_value_heads"] = config.integer("num_global_key_value_heads")
    return common_layers(
        config, pattern=lambda _: _sixth_and(config.num_layers - 1), facts={"full_attention": full}
    )


def _mimo(config: ModelConfig) -> Sequence[Layer]:
    """Sliding layers have heads of their own number and sizes; `attention_chunk_size` means nothing here."""
    own = ("num_key_value_heads", "head_dim", "v_head_dim")
    sliding = {name: config.integer(f"swa_{name}") for name in own if config.get(f"swa_{name}") is not None}
    return common_layers(config, pattern=_mimo_pattern, facts={"sliding_attention": sliding})


def _mimo_pattern(config: ModelConfig) -> Pattern:
    if config.get("hybrid_layer_pattern") is None:
        return _sixth_and(0)
    return listed(config, "hybrid_layer_pattern", {0: FULL, 1: SLIDING})
