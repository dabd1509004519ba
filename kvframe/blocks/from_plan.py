"""From a plan to what the block manager is built from: the plan's groups by their lifetimes, and its pool's slabs."""

from __future__ import annotations

from typing import Any

import attrs

from kvframe.blocks.config import BlockConfig, GroupBlocks
from kvframe.config import DEVICE, KVCacheConfig, KVCacheGroupSpec
from kvframe.engine import EngineConfig
from kvframe.errors import PlanError
from kvframe.lifetime import Lifetime
from kvframe.plugins import PluginHost, load_plugins
from kvframe.spec import iter_layer_specs


def block_config(
    config: KVCacheConfig,
    engine: EngineConfig,
    *,
    host: PluginHost | None = None,
    pool: str = DEVICE,
    **limits: Any,
) -> BlockConfig:
    """The manager's configuration for one pool of a plan. Lengths are tokens.

    A group keeps its place among the pool's groups and is named after it and its families ("1-mamba"). Draft layers
    mark all groups with an equal spec (contract 6.6). Prefix caching is off where no group has keyed hits, or one
    forbids hits.

    Args:
        config: the plan of one rank.
        engine: the limits that it was made for.
        host: who knows the families; None: the installed plugins.
        pool: whose groups; each pool of a plan has a manager of its own.
        limits: fields of BlockConfig that neither the plan nor the engine says, or that are to differ.

    Raises:
        PlanError: the pool has no group, or no slab beside the null block's.
        MissingPluginError: a layer is of a family that no plugin provides.
        SpecError: a limit is out of its range.
        TypeError: BlockConfig has no such field.
    """
    host = host or load_plugins()
    members = [(index, group) for index, group in enumerate(config.groups) if group.pool == pool]
    if not members:
        raise PlanError(
            reason=f"no group has its blocks in pool {pool!r}", values={"pools": sorted(config.pools)}
        )
    slabs = config.pools[pool].num_slabs
    if slabs < 2:
        raise PlanError(reason=f"pool {pool!r} has no slab beside the null block's", values={"slabs": slabs})
    zeroed = config.has_mixed_precision_kv_cache
    drafts = [group.kv_cache_spec for _, group in members if group.is_eagle_group]
    groups = tuple(
        GroupBlocks(
            name=f"{index}-{'+'.join(dict.fromkeys(group.family))}",
            lifetime=_lifetime(group, engine, host),
            blocks_per_slab=group.blocks_per_slab,
            draft=group.kv_cache_spec in drafts,
            zeroed=zeroed or group.needs_zeroing,
        )
        for index, group in members
    )
    caching = any(group.keyed for group in groups) and all(g.lifetime.hits != "never" for g in groups)
    given: dict[str, Any] = {
        "groups": groups,
        "num_blocks": slabs,
        "max_model_len": engine.max_model_len,
        "max_in_flight_tokens": engine.max_in_flight_tokens,
        "max_encoder_tokens": engine.max_encoder_tokens,
        "prefix_caching": engine.prefix_caching and caching,
        "retention_interval": config.prefix_cache_retention_interval,
        "draft_drop": engine.draft_drop,
        "prefill_lookahead": engine.prefill_lookahead,
    }
    if engine.max_num_seqs is not None:
        given["max_requests"] = engine.max_num_seqs
    if config.hash_block_size is not None and given["prefix_caching"]:
        given["hash_unit"] = config.hash_block_size
    return BlockConfig(**{**given, **limits})


def _lifetime(group: KVCacheGroupSpec, engine: EngineConfig, host: PluginHost) -> Lifetime:
    """The lifetime that all layers of the group share; hits need nothing of a group that is not prefix-cacheable."""
    spec = iter_layer_specs(group.kv_cache_spec)[0]
    lifetime = host.family(spec).engine_lifetime(spec, engine)
    if lifetime.hits == "keyed" and not group.kv_cache_spec.prefix_cacheable:
        return attrs.evolve(lifetime, hits="free")
    return lifetime
