"""A model of vLLM whose windowed layers keep their cache by the family of this distribution."""

from __future__ import annotations

from typing import Any


def register() -> None:
    """vLLM's plugin entry point: name the model; it is imported when it is used."""
    from vllm import ModelRegistry

    ModelRegistry.register_model("LazyWindowForCausalLM", "lazy_window.model:LazyWindowForCausalLM")


def __getattr__(name: str) -> Any:
    """The model's class, made when vLLM asks for it."""
    if name != "LazyWindowForCausalLM":
        raise AttributeError(name)
    from lazy_window.layers import LazyWindowForCausalLM

    return LazyWindowForCausalLM
