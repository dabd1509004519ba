"""From groups of the whole model to a KVCacheConfig for every rank (contract 5.8)."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import attrs

from kvframe.config import DEVICE, KVCacheConfig, KVCacheGroupSpec, Pool
from kvframe.engine import EngineConfig
from kvframe.errors import HookError, InsufficientMemoryError, PlanError
from kvframe.layout import KVCacheLayout
from kvframe.planning.grouping import make_group
from kvframe.planning.placement import check_layout, place
from kvframe.planning.sizing import (
    Bound,
    blocks_per_request,
    bytes_per_block,
    largest_fitting_len,
    tp_replicas,
)
from kvframe.plugins import PluginHost
from kvframe.spec import UniformTypeKVCacheSpecs

OTHER_LAYOUT = "LBNHC"  # of pools beside the device's, whose pages no kernel packs; plugins may say otherwise


@attrs.frozen(kw_only=True)
class RankBudget:
    """One rank: its layers' specs, and bytes for the cache.

    Args:
        specs: layer name to spec.
        memory: bytes of the device pool.
        pools: bytes of further pools, by name.
    """

    specs: Mapping[str, Any]
    memory: int
    pools: Mapping[str, int] = attrs.field(factory=dict)

    @property
    def budgets(self) -> dict[str, int]:
        """Bytes of all pools, by name."""
        return {**self.pools, DEVICE: self.memory}


def merge_ranks(ranks: Sequence[RankBudget]) -> dict[str, Any]:
    """All ranks' layers as one model, in order of appearance.

    Raises:
        PlanError: two ranks hold one layer with different specs.
    """
    model: dict[str, Any] = {}
    for number, rank in enumerate(ranks):
        for layer, spec in rank.specs.items():
            if model.setdefault(layer, spec) != spec:
                raise PlanError(
                    reason=f"rank {number} holds a layer with another spec than the ranks before it",
                    layers=[layer],
                    values={"before": model[layer], f"rank {number}": spec},
                )
    return model


def project(
    groups: Sequence[KVCacheGroupSpec], layers: Container[str], host: PluginHost
) -> tuple[KVCacheGroupSpec, ...]:
    """The model's groups with only one rank's layers; a group may become empty and keeps its place."""
    projected = []
    for group in groups:
        kept = {layer: spec for layer, spec in group.layer_specs.items() if layer in layers}
        if len(kept) == len(group.layer_specs) or not kept:
            projected.append(attrs.evolve(group, layer_specs=kept))
            continue
        uniform = isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
        part = make_group(kept, host, uniform=uniform)
        spec = part.kv_cache_spec if uniform else group.kv_cache_spec
        projected.append(attrs.evolve(group, layer_specs=kept, kv_cache_spec=spec, family=part.family))
    return tuple(projected)


def rank_pools(
    groups: Sequence[KVCacheGroupSpec],
    rank: RankBudget,
    *,
    host: PluginHost,
    layout: KVCacheLayout,
    engine: EngineConfig,
) -> dict[str, Pool]:
    """The pools in which a rank has layers, the device's first, each with as many slabs as its budget holds.

    Args:
        groups: the rank's groups.
        layout: of the device pool.

    Raises:
        PlanError: a group's pool has no budget.
        HookError: a plugin's answer is no pools of these groups.
        LayoutError: a pool's layout cannot hold its groups.
    """
    budgets = rank.budgets
    pools: dict[str, Pool] = {}
    for name in dict.fromkeys([DEVICE, *(group.pool for group in groups)]):
        if name not in budgets:
            raise PlanError(
                reason=f"there is no budget for pool {name!r}",
                layers=[layer for group in groups if group.pool == name for layer in group.layer_names],
                values={"budgets": sorted(budgets)},
                advice="Give its bytes on one rank: --host-memory for the host's, `pools` of kvframe.plan for any",
            )
        order = layout if name == DEVICE else host.layouts.get(OTHER_LAYOUT)
        slab = bytes_per_block(groups, order, name)
        if slab:
            budget = max(budgets[name], 0)  # below 0 where the weights alone are too large
            pools[name] = Pool(
                name=name, budget_bytes=budget, slab_bytes=slab, num_slabs=0, layout=order.name
            )
    pools |= _placed_by_plugin(groups, pools, host=host, engine=engine)
    for name, pool in pools.items():
        check_layout(groups, host.layouts.get(pool.layout), name)
        pools[name] = attrs.evolve(pool, num_slabs=pool.budget_bytes // pool.slab_bytes)
    return pools


def _placed_by_plugin(
    groups: Sequence[KVCacheGroupSpec], pools: Mapping[str, Pool], *, host: PluginHost, engine: EngineConfig
) -> dict[str, Pool]:
    """The pools that a plugin changes."""
    answers = host.call_all("kvframe_place_groups", groups=groups, pools=pools, engine=engine)
    answer: Any = next(iter(answers), {})
    if not isinstance(answer, Mapping) or not all(
        _may_replace(answer[name], pools.get(name)) for name in answer
    ):
        raise HookError(
            hook="kvframe_place_groups",
            plugin="that answered first",
            reason=f"must answer pools of {sorted(pools)} by name, none with smaller slabs, not {answer!r}",
        )
    return {name: attrs.evolve(pool, budget_bytes=pools[name].budget_bytes) for name, pool in answer.items()}


def _may_replace(pool: object, own: Pool | None) -> bool:
    if not isinstance(pool, Pool) or own is None:
        return False
    return pool.name == own.name and pool.slab_bytes >= own.slab_bytes


def check_memory(
    groups: Sequence[KVCacheGroupSpec],
    engine: EngineConfig,
    bound: Bound,
    *,
    budgets: Mapping[str, int],
    pools: Mapping[str, Pool],
) -> None:
    """One request of max_model_len fits in every pool, beside what the pool reserves.

    Args:
        groups: a rank's groups.
        budgets: bytes by pool.
        pools: the pools in which the rank has layers.

    Raises:
        InsufficientMemoryError: the pool, needed and available bytes, and the largest length that fits.
    """
    for name, pool in pools.items():
        needed = blocks_per_request(groups, engine, bound, name)
        if needed + pool.reserved_slabs <= pool.num_slabs:
            continue
        raise InsufficientMemoryError(
            needed_bytes=needed * pool.slab_bytes,
            available_bytes=budgets[name] - pool.reserved_slabs * pool.slab_bytes,
            max_model_len=engine.max_model_len,
            largest_fitting_len=largest_fitting_len(groups, engine, bound, pools=pools.values()),
            pool=name,
        )


def configs_for_ranks(
    groups: Sequence[KVCacheGroupSpec],
    ranks: Sequence[RankBudget],
    *,
    host: PluginHost,
    layout: KVCacheLayout,
    engine: EngineConfig,
    bound: Bound,
    num_blocks: int | None = None,
) -> tuple[KVCacheConfig, ...]:
    """A config per rank, all with the number of slabs of the rank that has the fewest, in each pool.

    Args:
        groups: the whole model's groups.
        ranks: layers and bytes of each rank.
        layout: of the device pool.
        bound: what one request needs of a group.
        num_blocks: this many blocks of the device pool whatever the memory, instead of as many as fit.

    Raises:
        InsufficientMemoryError: one request does not fit on some rank.
        LayoutError: the layout cannot hold a rank's groups.
        PlanError: a group's pool has no budget.
    """
    parts = [project(groups, rank.specs, host) for rank in ranks]
    found = []
    for part, rank in zip(parts, ranks, strict=True):
        pools = rank_pools(part, rank, host=host, layout=layout, engine=engine)
        budgets = rank.budgets
        if num_blocks is not None and DEVICE in pools:
            budgets[DEVICE] = num_blocks * pools[DEVICE].slab_bytes
            fixed = attrs.evolve(pools[DEVICE], budget_bytes=budgets[DEVICE], num_slabs=num_blocks)
            pools[DEVICE] = fixed
        check_memory(part, engine, bound, budgets=budgets, pools=pools)
        found.append(pools)
    return tuple(
        _config(part, _common(pools, found, rank, layout), host=host, engine=engine)
        for part, rank, pools in zip(parts, ranks, found, strict=True)
    )


def _common(
    pools: Mapping[str, Pool], found: Sequence[Mapping[str, Pool]], rank: RankBudget, layout: KVCacheLayout
) -> dict[str, Pool]:
    """A rank's pools with the number of slabs that all ranks have, since block ids are common to all.

    A rank without device layers has that number too, of the smallest slab there is.
    """
    empty = Pool(budget_bytes=max(rank.memory, 0), slab_bytes=1, num_slabs=1, layout=layout.name)
    return {
        name: attrs.evolve(
            pool, num_slabs=min((other[name].num_slabs for other in found if name in other), default=1)
        )
        for name, pool in ({DEVICE: empty} | dict(pools)).items()
    }


def _config(
    part: tuple[KVCacheGroupSpec, ...],
    pools: Mapping[str, Pool],
    *,
    host: PluginHost,
    engine: EngineConfig,
) -> KVCacheConfig:
    return KVCacheConfig(
        pools=pools,
        groups=part,
        tensors=place(part, pools, host.layouts),
        max_model_len=engine.max_model_len,
        kv_tp_replicas=tp_replicas(part, engine),
    )
