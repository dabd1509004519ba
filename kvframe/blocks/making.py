"""Making of a pool and its prefix cache from the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvframe.blocks.config import BlockConfig
from kvframe.blocks.pool import BlockPool, Pool
from kvframe.blocks.prefix import KeyWatcher, PrefixCache
from kvframe.blocks.queues import EvictionPolicy, builtin_policies
from kvframe.blocks.slabs import SlabPool
from kvframe.checks import name_rule
from kvframe.errors import SpecError


class Pools(NamedTuple):
    """The classes of pools: where a slab is a block for every group, and where groups cut slabs."""

    blocks: type[BlockPool] = BlockPool
    slabs: type[SlabPool] = SlabPool


def make_pool(
    config: BlockConfig,
    policies: Mapping[str, EvictionPolicy],
    watcher: KeyWatcher | None,
    pools: Pools = Pools(),  # noqa: B008, a constant
) -> tuple[Pool, PrefixCache | None]:
    """The pool, and the cache of what its blocks hold; None without prefix caching.

    Raises:
        SpecError: the eviction policy is unknown, or a plugin's has a name of kvframe's own.
    """
    policy = _policy(config, policies)
    cuts = [group.blocks_per_slab for group in config.groups]
    if config.uniform:
        cache = PrefixCache([config.num_blocks], [0] * len(cuts), watcher) if config.prefix_caching else None
        return pools.blocks(config.num_blocks, policy, cache), cache
    sizes = [config.num_blocks * k for k in cuts]
    cache = PrefixCache(sizes, range(len(cuts)), watcher) if config.prefix_caching else None
    return pools.slabs(config.num_blocks, cuts, policy, cache), cache


def _policy(config: BlockConfig, policies: Mapping[str, EvictionPolicy]) -> EvictionPolicy:
    own = {policy.name: policy for policy in builtin_policies()}
    taken = sorted(own.keys() & policies.keys())
    if taken:
        raise SpecError(
            spec="KVCacheManager", field="policies", value=taken, rule="are names of kvframe's own policies"
        )
    known = {**own, **policies}
    if config.eviction not in known:
        raise SpecError(
            spec="BlockConfig",
            field="eviction",
            value=config.eviction,
            rule=name_rule(config.eviction, known),
        )
    return known[config.eviction]
