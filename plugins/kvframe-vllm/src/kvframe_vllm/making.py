"""Making of a manager from what vLLM's scheduler knows: groups to lifetimes, limits to a BlockConfig."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvframe.blocks import BlockConfig, GroupBlocks
from kvframe.lifetime import Lifetime
from kvframe.plugins import load_plugins
from kvframe.spec import iter_layer_specs
from kvframe_vllm.errors import UntranslatableError
from kvframe_vllm.manager import EngineManager
from kvframe_vllm.specs import to_kvframe

DEFAULT_REQUESTS = 1024  # rows, where nobody says how many requests can run


def group_lifetime(spec: Any, layer: str) -> Lifetime:
    """The lifetime of a group of vLLM, from its spec.

    Args:
        spec: the group's spec.
        layer: one of its layers, for errors.

    Raises:
        UnknownSpecError: kvframe has no such class.
        UntranslatableError: a spec has no counterpart, or the layers of the group do not live alike.
    """
    host = load_plugins()
    lifetimes = {host.family(one).lifetime(one) for one in iter_layer_specs(to_kvframe(spec, layer))}
    if len(lifetimes) > 1:
        reason = "the layers of this group need different blocks"
        raise UntranslatableError(spec=type(spec).__name__, layer=layer, reason=reason)
    return lifetimes.pop()


def block_config(
    kv_cache_config: Any,
    *,
    max_model_len: int,
    hash_block_size: int,
    enable_caching: bool,
    max_in_flight_tokens: int | None = None,
    use_eagle: bool = False,
    num_prefill_lookahead: int = 0,
    watermark: float = 0.0,
    max_requests: int = DEFAULT_REQUESTS,
) -> BlockConfig:
    """kvframe's configuration of vLLM's groups and limits.

    Args:
        kv_cache_config: vLLM's.
        max_model_len: the longest request, tokens.
        hash_block_size: tokens of one of vLLM's block hashes.
        enable_caching: whether prefixes are found by later requests.
        max_in_flight_tokens: tokens scheduled and not settled; None: max_model_len.
        use_eagle: hits leave out the last unit of draft groups.
        num_prefill_lookahead: tokens after a chunk that a draft module reads.
        watermark: share of the blocks that admission leaves free.
        max_requests: requests that can hold blocks at once.

    Raises:
        KVFrameError: kvframe cannot serve these groups; the text says why.
    """
    groups: Any = tuple(
        GroupBlocks(
            name=f"{number}",
            lifetime=group_lifetime(group.kv_cache_spec, next(iter(group.layer_names), f"of group {number}")),
            draft=group.is_eagle_group,
            zeroed=kv_cache_config.needs_kv_cache_zeroing,
        )
        for number, group in enumerate(kv_cache_config.kv_cache_groups)
    )
    unit: dict[str, Any] = {"hash_unit": hash_block_size} if enable_caching else {}
    return BlockConfig(
        groups=groups,
        num_blocks=kv_cache_config.num_blocks,
        max_model_len=max_model_len,
        max_in_flight_tokens=max_in_flight_tokens,
        max_requests=max_requests,
        prefix_caching=enable_caching,
        draft_drop=use_eagle,
        prefill_lookahead=num_prefill_lookahead,
        retention_interval=_retention(kv_cache_config) if enable_caching else None,
        watermark=watermark,
        **unit,
    )


def _retention(kv_cache_config: Any) -> int | None:
    """vLLM's interval, which it heeds for windows only: chunks publish all that can serve a hit."""
    groups = kv_cache_config.kv_cache_groups
    windows = any(
        type(group.kv_cache_spec).__name__ != "ChunkedLocalAttentionSpec" for group in _thinning(groups)
    )
    interval: int | None = kv_cache_config.prefix_cache_retention_interval
    return interval if windows else None


def _thinning(groups: Sequence[Any]) -> list[Any]:
    return [group for group in groups if group_lifetime(group.kv_cache_spec, "?").thins]


def make_manager(
    kv_cache_config: Any,
    max_model_len: int,
    scheduler_block_size: int,
    hash_block_size: int,
    max_in_flight_tokens: int | None = None,
    enable_caching: bool = True,
    use_eagle: bool = False,
    num_prefill_lookahead: int = 0,
    log_stats: bool = False,
    enable_kv_cache_events: bool = False,
    dcp_world_size: int = 1,
    pcp_world_size: int = 1,
    metrics_collector: Any = None,
    watermark: float = 0.0,
    enable_mamba_shared_prefix_checkpoint: bool = False,
    *,
    max_requests: int = DEFAULT_REQUESTS,
) -> EngineManager:
    """A manager in the place of vLLM's `KVCacheManager`: its arguments, by its names.

    Raises:
        KVFrameError: kvframe cannot serve this; `kvframe_vllm.reasons` says so before.
        NotImplementedError: events, context parallelism, or residency metrics are on.
    """
    unserved = {
        "KV cache events": enable_kv_cache_events,
        "context parallelism": dcp_world_size > 1 or pcp_world_size > 1,
        "KV cache residency metrics": metrics_collector is not None,
    }
    on = [name for name, value in unserved.items() if value]
    if on:
        raise NotImplementedError(f"kvframe's manager does not serve {', '.join(on)}")
    config = block_config(
        kv_cache_config,
        max_model_len=max_model_len,
        hash_block_size=hash_block_size,
        enable_caching=enable_caching,
        max_in_flight_tokens=max_in_flight_tokens,
        use_eagle=use_eagle,
        num_prefill_lookahead=num_prefill_lookahead,
        watermark=watermark,
        max_requests=max_requests,
    )
    specs: Sequence[Any] = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return EngineManager(config, specs, _new_stats(log_stats))


def _new_stats(log_stats: bool) -> Callable[[], Any] | None:
    if not log_stats:
        return None
    from vllm.v1.metrics.stats import PrefixCacheStats

    new: Callable[[], Any] = PrefixCacheStats
    return new
