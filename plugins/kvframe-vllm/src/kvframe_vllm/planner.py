"""The planner: vLLM's `get_kv_cache_configs` from kvframe, by vLLM's own rule or by kvframe's optimal plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from kvframe.config import DEVICE, KVCacheConfig, KVCacheGroupSpec
from kvframe.engine import EngineConfig
from kvframe.errors import InsufficientMemoryError, KVFrameError
from kvframe.planning import plan
from kvframe.planning.grouping import engine_groups, with_lookahead
from kvframe.planning.ranks import RankBudget, configs_for_ranks, merge_ranks, project, rank_pools
from kvframe.planning.sizing import engine_bound, largest_fitting_len
from kvframe.plugins import load_plugins
from kvframe_vllm.specs import to_kvframe, to_vllm

Ranks = list[RankBudget]


def plan_for_vllm(
    vllm_config: Any,
    kv_cache_specs: Sequence[Mapping[str, Any]],
    available_memory: Sequence[int],
    *,
    stock: Callable[..., Any],
    strategy: str,
) -> Any:
    """vLLM's `get_kv_cache_configs`.

    Args:
        vllm_config: the engine's whole configuration; auto-fit lowers its max_model_len, as vLLM's own does.
        kv_cache_specs: layer to spec, of each worker.
        available_memory: bytes for the cache, of each worker.
        stock: vLLM's own function, for what kvframe does not plan.
        strategy: "engine" or "optimal".

    Raises:
        InsufficientMemoryError: one request does not fit; a ValueError, as vLLM's.
        PlanError: the workers disagree about a layer, or the layers cannot be planned.
    """
    reason = _unplanned(vllm_config)
    ranks: Ranks = []
    if reason is None:
        try:
            ranks = _ranks(kv_cache_specs, available_memory)
        except KVFrameError as error:
            reason = str(error).rstrip(".")
    if reason is not None:
        _warn("kvframe does not plan this KV cache: %s. vLLM's own planner does.", reason)
        return stock(vllm_config, kv_cache_specs, available_memory)
    _check_registered(kv_cache_specs)
    if not any(rank.specs for rank in ranks):
        return stock(vllm_config, kv_cache_specs, available_memory)
    engine = engine_config(vllm_config)
    configs = _optimal(ranks, engine, vllm_config) if strategy == "optimal" else None
    if configs is None:
        configs = _by_the_engines_rule(ranks, engine, vllm_config)
    return [_config(config, vllm_config) for config in configs]


def engine_config(vllm_config: Any) -> EngineConfig:
    """kvframe's limits from vLLM's configuration."""
    parallel, limits = vllm_config.parallel_config, vllm_config.scheduler_config
    return EngineConfig(
        max_model_len=vllm_config.model_config.max_model_len,
        max_in_flight_tokens=vllm_config.max_in_flight_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_encoder_tokens=limits.max_num_encoder_input_tokens or 0,
        tp=parallel.tensor_parallel_size,
        dcp=parallel.decode_context_parallel_size,
        pcp=parallel.prefill_context_parallel_size,
        state_cache_mode=vllm_config.cache_config.mamba_cache_mode,
        prefix_caching=bool(vllm_config.cache_config.enable_prefix_caching),
        prefill_lookahead=vllm_config.num_prefill_lookahead_tokens,
    )


def _unplanned(vllm_config: Any) -> str | None:
    reasons = {
        "HiSparse is on": vllm_config.attention_config.hisparse_config is not None,
        "speculative decoding is on": vllm_config.speculative_config is not None,
        "states are cached in a mode of their own": vllm_config.cache_config.mamba_cache_mode
        not in ("none", "align"),
    }
    return next((text for text, holds in reasons.items() if holds), None)


def _ranks(specs: Sequence[Mapping[str, Any]], memory: Sequence[int]) -> Ranks:
    ranks = [
        RankBudget(specs={layer: to_kvframe(spec, layer) for layer, spec in worker.items()}, memory=size)
        for worker, size in zip(specs, memory, strict=True)
    ]
    for layer, spec in merge_ranks(ranks).items():
        load_plugins().family(spec)
        to_vllm(spec, layer)
    return ranks


def _check_registered(specs: Sequence[Mapping[str, Any]]) -> None:
    """vLLM's own check: every layer's class has a manager."""
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    for worker in specs:
        KVCacheSpecRegistry.check_kv_cache_spec_registry(dict(worker))


# --- vLLM's rule ---


def _by_the_engines_rule(ranks: Ranks, engine: EngineConfig, vllm_config: Any) -> Sequence[KVCacheConfig]:
    host = load_plugins()
    layout = host.layouts.get(vllm_config.cache_config.get_resolved_kv_cache_layout().name)
    model = with_lookahead(merge_ranks(ranks), host, engine)
    groups = engine_groups(
        model,
        host=host,
        layout=layout,
        hybrid=not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager,
    )
    ranks = [_as_planned(rank, groups) for rank in ranks]
    override = vllm_config.cache_config.num_gpu_blocks_override
    if vllm_config.model_config.original_max_model_len == -1:
        engine = _fitted(groups, ranks, engine, layout, override)
        vllm_config.model_config.max_model_len = engine.max_model_len
    return configs_for_ranks(
        groups,
        ranks,
        host=host,
        layout=layout,
        engine=engine,
        bound=engine_bound,
        num_blocks=override,
    )


def _as_planned(rank: RankBudget, groups: Sequence[KVCacheGroupSpec]) -> RankBudget:
    """A rank whose layers have the specs that grouping gave them."""
    planned = {layer: spec for group in groups for layer, spec in group.layer_specs.items()}
    return RankBudget(specs={layer: planned[layer] for layer in rank.specs}, memory=rank.memory)


def _fitted(
    groups: Sequence[KVCacheGroupSpec], ranks: Ranks, engine: EngineConfig, layout: Any, override: int | None
) -> EngineConfig:
    """The limits at the longest request that fits on every rank: vLLM was asked for max_model_len = -1.

    Raises:
        InsufficientMemoryError: not even one token fits.
    """
    host, longest = load_plugins(), engine.max_model_len
    for rank in ranks:
        part = project(groups, rank.specs, host)
        pools = rank_pools(part, rank, host=host, layout=layout, engine=engine)
        if DEVICE not in pools:
            continue
        pool = attrs.evolve(pools[DEVICE], num_slabs=override) if override else pools[DEVICE]
        fits = largest_fitting_len(part, engine, engine_bound, pools=[pool])
        if not fits:
            raise InsufficientMemoryError(
                needed_bytes=2 * pool.slab_bytes,
                available_bytes=rank.memory,
                max_model_len=1,
                largest_fitting_len=0,
                pool=DEVICE,
            )
        longest = min(longest, fits)
    return engine.with_max_model_len(longest)


# --- kvframe's ---


def _optimal(ranks: Ranks, engine: EngineConfig, vllm_config: Any) -> Sequence[KVCacheConfig] | None:
    """kvframe's optimal plan, if vLLM's worker can hold it; else why not, as a warning, and None."""
    reason = _no_optimum(ranks, vllm_config)
    if reason is None:
        layout = vllm_config.cache_config.get_resolved_kv_cache_layout().name
        try:
            found = plan(
                ranks[0].specs,
                engine=engine,
                memory=min(rank.memory for rank in ranks),
                layout=layout,
                strategy="optimal",
            )
            reason = _not_held(found.config, ranks[0].specs)
            if reason is None:
                return [found.config] * len(ranks)
        except KVFrameError as error:
            reason = str(error).rstrip(".")
    _warn("kvframe's optimal plan is not used: %s. The engine strategy is.", reason)
    return None


def _no_optimum(ranks: Ranks, vllm_config: Any) -> str | None:
    from vllm.platforms import current_platform

    reasons = {
        "workers hold different layers": any(rank.specs != ranks[0].specs for rank in ranks),
        "num_gpu_blocks_override is set": vllm_config.cache_config.num_gpu_blocks_override is not None,
        "max_model_len is to be found": vllm_config.model_config.original_max_model_len == -1,
        "this platform's workers group layers once more when they capture graphs": (
            not current_platform.is_cpu()
        ),
    }
    return next((text for text, holds in reasons.items() if holds), None)


def _not_held(config: KVCacheConfig, specs: Mapping[str, Any]) -> str | None:
    """Why vLLM's worker cannot hold a plan."""
    if set(config.pools) != {DEVICE}:
        return "it has a second pool"
    if any(group.blocks_per_slab > 1 for group in config.groups):
        return "its groups cut slabs into blocks of their own sizes, and vLLM has one block id for all groups"
    for group in config.groups:
        for layer, spec in group.layer_specs.items():
            if layer not in specs:
                return f"it has a layer of its own, {layer}"
            if spec.block_size % specs[layer].block_size:
                return f"layer {layer} would have blocks of {spec.block_size} tokens, which its kernels may not take"
            to_vllm(spec, layer)
    return None


# --- to vLLM's objects ---


def _config(config: KVCacheConfig, vllm_config: Any) -> Any:
    from vllm.v1 import kv_cache_interface as interface

    return interface.KVCacheConfig(
        num_blocks=config.num_blocks,
        kv_cache_tensors=[
            interface.KVCacheTensor(
                size=tensor.size,
                layers=list(tensor.layers),
                layer_stride=tensor.layer_stride,
                block_stride=tensor.block_stride,
                offset=tensor.offset,
            )
            for tensor in config.tensors
        ],
        kv_cache_groups=[
            interface.KVCacheGroupSpec(
                list(group.layer_names),
                to_vllm(group.kv_cache_spec, next(iter(group.layer_names), "?")),
                is_eagle_group=group.is_eagle_group,
            )
            for group in config.groups
        ],
        prefix_cache_retention_interval=vllm_config.cache_config.prefix_cache_retention_interval,
        kv_tp_replicas=config.kv_tp_replicas,
    )


def _warn(text: str, *values: object) -> None:
    from vllm.logger import init_logger

    init_logger("vllm.kvframe").warning(text, *values)
