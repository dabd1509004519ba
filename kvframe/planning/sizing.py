"""Sizing: what one request needs, what a block costs, how long a request fits. Pure functions of specs and limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from kvframe.checks import cdiv, round_up
from kvframe.config import DEVICE, KVCacheGroupSpec, Pool
from kvframe.engine import EngineConfig
from kvframe.layout import KVCacheLayout
from kvframe.planning.slabs import smallest_slab
from kvframe.plugins import PluginHost
from kvframe.spec import KVCacheSpec, iter_layer_specs

STRIDE_ALIGNMENT = 256  # bytes; what copies and kernels like where a layer asks for nothing

Bound = Callable[[KVCacheGroupSpec, EngineConfig], int]
"""Group and limits to the blocks that one request of max_model_len holds at most in that group."""


def exact_bound(host: PluginHost) -> Bound:
    """kvframe's own bound: the peak of the group's lifetime (contract 5.9), never above full attention's."""

    def bound(group: KVCacheGroupSpec, engine: EngineConfig) -> int:
        spec = iter_layer_specs(group.kv_cache_spec)[0]
        lifetime = host.family(spec).engine_lifetime(spec, engine)
        return lifetime.peak(
            engine.max_in_flight_tokens,
            engine.max_model_len,
            max_encoder_tokens=engine.max_encoder_tokens,
        )

    return bound


def engine_bound(group: KVCacheGroupSpec, engine: EngineConfig) -> int:
    """The engines' bound: the spec methods' formulas, a block looser for windows (contract 2.7, 2.18)."""
    return max(
        (
            cdiv(spec.max_memory_usage_bytes(engine), spec.page_size_bytes)
            for spec in iter_layer_specs(group.kv_cache_spec)
        ),
        default=0,
    )


def bytes_per_block(groups: Sequence[KVCacheGroupSpec], layout: KVCacheLayout, pool: str = DEVICE) -> int:
    """Bytes of one slab of a pool: with one block a slab, what a block id occupies (contract 5.6). 0 without layers.

    Args:
        groups: a rank's groups; those of other pools do not count.
        layout: the pool's layout.
        pool: its name.
    """
    members = [group for group in groups if group.pool == pool]
    own = [group for group in members if group.layer_specs]
    if not own:
        return 0
    per_slab = [group.blocks_per_slab for group in own]
    if max(per_slab) > 1:
        pages = [group.page_size_bytes for group in own]
        return smallest_slab(
            pages, per_slab, [stride_alignment_of(group.layer_specs.values()) for group in own]
        )
    if layout.block_outermost:
        # Ranks agree on where packed pages may start, so groups of which this one holds no layer speak as well.
        specs = [s for g in members for s in (*g.layer_specs.values(), *iter_layer_specs(g.kv_cache_spec))]
        multiple = math.lcm(*(spec.packed_stride_bytes_multiple for spec in specs))
        return round_up(max(group.page_size_bytes for group in own), multiple)
    return max(
        sum(
            round_up(spec.page_size_bytes, spec.block_stride_bytes_multiple)
            for spec in group.layer_specs.values()
        )
        for group in own
    )


def stride_alignment_of(specs: Iterable[KVCacheSpec]) -> int:
    """Bytes that the distance between two blocks of a slab is a multiple of: what the layers' kernels ask, or 256."""
    asked = math.lcm(*(spec.packed_stride_bytes_multiple for spec in specs))
    return asked if asked > 1 else STRIDE_ALIGNMENT


def blocks_per_request(
    groups: Sequence[KVCacheGroupSpec], engine: EngineConfig, bound: Bound, pool: str = DEVICE
) -> int:
    """Slabs of a pool that one request of max_model_len takes at most; with one block a slab, blocks over all groups.

    Groups without layers on this rank count too: a block id that a group takes is taken on every rank.
    """
    return sum(cdiv(bound(group, engine), group.blocks_per_slab) for group in groups if group.pool == pool)


def largest_fitting_len(
    groups: Sequence[KVCacheGroupSpec],
    engine: EngineConfig,
    bound: Bound,
    *,
    pools: Iterable[Pool],
    longest: int | None = None,
) -> int:
    """The largest max_model_len, in tokens, of which one request fits in every pool; 0 if not even one token does.

    A bisection over [1, longest or max_model_len]: needs never fall as the length grows.
    """
    pools = tuple(pools)

    def fits(length: int) -> bool:
        shorter = engine.with_max_model_len(length)
        return all(
            blocks_per_request(groups, shorter, bound, pool.name) + pool.reserved_slabs <= pool.num_slabs
            for pool in pools
        )

    low, high = 0, longest or engine.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def tp_replicas(groups: Sequence[KVCacheGroupSpec], engine: EngineConfig) -> int:
    """Consecutive tensor-parallel ranks that hold identical bytes in every layer (contract 5.8); 1 without layers.

    Layers that are never moved to another engine do not count: nobody asks whose copy to take. A layer whose shards do
    not divide the ranks evenly has no replicas that line up, so it counts as 1 (Q20).
    """
    replicas = engine.tp
    layers = 0
    for group in groups:
        for spec in group.layer_specs.values() if group.enable_kv_transfer else ():
            layers += 1
            replicas = math.gcd(replicas, _layer_replicas(spec, engine))
    return replicas if layers else 1


def _layer_replicas(spec: object, engine: EngineConfig) -> int:
    shards = getattr(spec, "max_tp_shards", None)
    if shards is None or (getattr(spec, "dcp_sharded", False) and engine.dcp > 1):
        return 1
    return 1 if engine.tp % int(shards) else engine.tp // int(shards)
