"""Why kvframe's manager does not serve an engine; asked before anything is changed."""

from __future__ import annotations

import math
from typing import Any

from kvframe.errors import KVFrameError
from kvframe.spec import iter_layer_specs
from kvframe_vllm.making import block_config
from kvframe_vllm.specs import is_interface_class, to_kvframe

SERVED = frozenset(
    {
        "FullAttentionSpec",
        "MLAAttentionSpec",
        "SlidingWindowSpec",
        "SlidingWindowMLASpec",
        "ChunkedLocalAttentionSpec",
    }
)
KINDS = {
    "MambaSpec": "Mamba layers",
    "CrossAttentionSpec": "cross attention",
}


def why_not(vllm_config: Any, kv_cache_config: Any, *, block_size: int, hash_block_size: int) -> str | None:
    """The first reason for which the stock manager must run, None if kvframe's can.

    Args:
        vllm_config: the engine's whole configuration.
        kv_cache_config: the groups and the number of blocks.
        block_size: the scheduler's, tokens.
        hash_block_size: tokens of one block hash.
    """
    return _engine_reason(vllm_config) or _group_reason(
        vllm_config, kv_cache_config, block_size=block_size, hash_block_size=hash_block_size
    )


def _engine_reason(vllm_config: Any) -> str | None:
    parallel, events = vllm_config.parallel_config, vllm_config.kv_events_config
    reasons = {
        "a KV connector is configured": vllm_config.kv_transfer_config is not None,
        "speculative decoding is on": vllm_config.speculative_config is not None,
        "decode context parallelism is on": parallel.decode_context_parallel_size > 1,
        "prefill context parallelism is on": parallel.prefill_context_parallel_size > 1,
        "KV cache events are on": events is not None and events.enable_kv_cache_events,
        "KV cache residency metrics are on": vllm_config.observability_config.kv_cache_metrics,
        "the model has cross attention": vllm_config.model_config.is_encoder_decoder,
        "the model is a diffusion model": vllm_config.model_config.is_diffusion,
        "HiSparse is on": vllm_config.attention_config.hisparse_config is not None,
    }
    return next((text for text, holds in reasons.items() if holds), None)


def _group_reason(
    vllm_config: Any, kv_cache_config: Any, *, block_size: int, hash_block_size: int
) -> str | None:
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        return "the model has no KV cache"
    for group in groups:
        if group.host_resident or group.role.value != "default":
            return f"a group has the role {group.role.value}"
        reason = _spec_reason(group.kv_cache_spec)
        if reason:
            return reason
    blocks = [group.kv_cache_spec.block_size for group in groups]
    if block_size != math.lcm(*blocks):
        return f"the scheduler's block is {block_size} tokens, and the groups' are {blocks}"
    try:
        block_config(
            kv_cache_config,
            max_model_len=vllm_config.model_config.max_model_len,
            hash_block_size=hash_block_size,
            enable_caching=bool(vllm_config.cache_config.enable_prefix_caching),
        )
    except KVFrameError as error:
        return str(error).rstrip(".")
    return None


def _spec_reason(spec: Any) -> str | None:
    layers = getattr(spec, "kv_cache_specs", None)
    for one in layers.values() if layers else (spec,):
        name = type(one).__name__
        if is_interface_class(type(one)) and name not in SERVED:
            return f"the model has {KINDS.get(name, f'layers of {name}')}"
        if one.prefix_replay_tokens:
            return "the model has windows that a prefix hit replays"
        if not is_interface_class(type(one)):
            reason = _family_reason(one)
            if reason:
                return reason
    return None


def _family_reason(spec: Any) -> str | None:
    """A class that is not vLLM's own is served by its lifetime, if that is one of tokens."""
    from kvframe.plugins import load_plugins

    try:
        (made,) = iter_layer_specs(to_kvframe(spec))
        lifetime = load_plugins().family(made).lifetime(made)
    except KVFrameError as error:
        return str(error).rstrip(".")
    if lifetime.state or lifetime.fixed is not None or lifetime.source != "decoder":
        return f"{type(spec).__name__} keeps states, or a fixed number of blocks"
    return None
