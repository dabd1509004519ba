"""The block sizes that prefix caching works with: scheduler block, hash unit, hit alignment (contract 5.9)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from kvframe.config import KVCacheGroupSpec
from kvframe.engine import EngineConfig
from kvframe.errors import PlanError
from kvframe.lifetime import Lifetime
from kvframe.plugins import PluginHost


@attrs.frozen(kw_only=True)
class BlockSizes:
    """Tokens: `scheduler` is the unit of whole hits, `hash` the unit of block hashes, `hit_alignment` what hits are
    multiples of."""

    scheduler: int
    hash: int
    hit_alignment: int


def block_sizes(
    groups: Sequence[KVCacheGroupSpec], engine: EngineConfig, host: PluginHost, match_unit: int | None = None
) -> BlockSizes | None:
    """The block sizes of a plan's groups, None without groups.

    Args:
        match_unit: a hash unit asked for, tokens; None: the largest that divides every prefix-cacheable group's block.

    Raises:
        PlanError: the unit does not divide a group's block, or hits would end inside a compressed state.
    """
    kept = [group for group in groups if group.layer_specs]
    if not kept:
        return None
    lifetimes = [_lifetime(group, engine, host) for group in kept]
    if len(kept) == 1:
        return _single(lifetimes[0].block, engine, match_unit)
    scheduler = math.lcm(*(lifetime.block for lifetime in lifetimes))
    cacheable = [
        (group, lifetime)
        for group, lifetime in zip(kept, lifetimes, strict=True)
        if group.kv_cache_spec.prefix_cacheable and group.enable_kv_transfer
    ]
    forbidden = any(lifetime.hits == "never" and lifetime.fixed is not None for lifetime in lifetimes)
    if not engine.prefix_caching or forbidden or not cacheable:
        return BlockSizes(scheduler=scheduler, hash=scheduler, hit_alignment=scheduler)
    unit = match_unit or math.gcd(*(lifetime.block for _, lifetime in cacheable))
    for group, lifetime in cacheable:
        if lifetime.block % unit:
            raise _bad_unit(unit, lifetime.block, group)
    fine = _fine_grained([lifetime for _, lifetime in cacheable], unit, engine)
    alignment = unit if fine else scheduler
    _check_compression(kept, alignment)
    return BlockSizes(scheduler=scheduler, hash=unit, hit_alignment=alignment)


def _single(block: int, engine: EngineConfig, match_unit: int | None) -> BlockSizes:
    if match_unit not in (None, block) and engine.prefix_caching:
        raise PlanError(
            reason="with one group the match unit must be its block size",
            values={"match_unit": match_unit, "block_size": block},
            advice="Leave the match unit out",
        )
    return BlockSizes(scheduler=block, hash=block, hit_alignment=block)


def _lifetime(group: KVCacheGroupSpec, engine: EngineConfig, host: PluginHost) -> Lifetime:
    spec = next(iter(group.layer_specs.values()))
    return host.family(spec).engine_lifetime(spec, engine)


def _fine_grained(lifetimes: Sequence[Lifetime], unit: int, engine: EngineConfig) -> bool:
    """Whether hits may end inside a block: a cached state makes it worth it, and every other group can follow."""
    states = [lifetime for lifetime in lifetimes if lifetime.state]
    wider = any(state.block > unit or (engine.dcp > 1 and state.block == unit) for state in states)
    return wider and all(
        lifetime.state or not lifetime.recycles or lifetime.block == unit for lifetime in lifetimes
    )


def _check_compression(groups: Sequence[KVCacheGroupSpec], alignment: int) -> None:
    for group in groups:
        for layer, spec in group.layer_specs.items():
            if not spec.has_layer_views:
                continue
            per_state = spec.tokens_per_state
            if isinstance(per_state, int) and per_state > 1 and alignment % per_state:
                raise PlanError(
                    reason="prefix hits would end inside a compressed state",
                    layers=[layer],
                    values={"hit alignment": alignment, "tokens per state": per_state},
                    advice="Choose a match unit that is a multiple of it",
                )


def _bad_unit(unit: int, block: int, group: KVCacheGroupSpec) -> PlanError:
    return PlanError(
        reason="the match unit must divide the block of every prefix-cacheable group",
        layers=list(group.layer_names),
        values={"match unit": unit, "block": block},
        advice="Choose a divisor of all groups' blocks",
    )
