"""The attention layer, and the model that has it: Gemma-2 in all but its cache."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.gemma2 import Gemma2ForCausalLM

from kvframe import replace_as
from kvframe_vllm import engine_spec, to_kvframe
from lazy_window import LazyWindowSpec


class LazyWindowAttention(Attention):
    """vLLM's attention layer with another kind of cache."""

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """The layer's spec: what the window needs, by the family's rule."""
        window = to_kvframe(super().get_kv_cache_spec(vllm_config))
        return engine_spec(replace_as(window, LazyWindowSpec, drop={"extra_retained_tokens"}, stride=2))


class LazyWindowForCausalLM(Gemma2ForCausalLM):
    """Gemma-2 whose sliding layers are lazy."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for module in self.modules():
            if isinstance(module, Attention) and module.sliding_window is not None:
                module.__class__ = LazyWindowAttention
