"""Grouping as engines do it (contract 5.2): which layers share a block table, and at which page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvframe.config import KVCacheGroupSpec
from kvframe.engine import EngineConfig
from kvframe.errors import PlanError
from kvframe.layout import KVCacheLayout
from kvframe.merge import Refusal
from kvframe.planning.packing import packed_groups
from kvframe.planning.paging import place_own_groups, unify_pages
from kvframe.planning.promotion import promote_all, promote_local
from kvframe.plugins import PluginHost
from kvframe.spec import UniformTypeKVCacheSpecs

Specs = Mapping[str, Any]


def make_group(specs: Specs, host: PluginHost, *, uniform: bool = False) -> KVCacheGroupSpec:
    """A group of layers whose specs merge, or (`uniform`) of layers that keep their own pages.

    Raises:
        MergeError: the specs do not merge.
    """
    families = [host.family(spec) for spec in specs.values()]
    spec: Any = UniformTypeKVCacheSpecs(specs) if uniform else merged(specs, host)
    if isinstance(spec, Refusal):
        raise spec.error()
    return KVCacheGroupSpec(
        layer_specs=dict(specs),
        kv_cache_spec=spec,
        family=tuple(family.name for family in families),
        is_eagle_group=any(getattr(spec, "is_draft", False) for spec in specs.values()),
        enable_kv_transfer=all(family.traits.transferable for family in families),
        needs_zeroing=any(family.traits.needs_zeroing for family in families),
    )


def merged(specs: Specs, host: PluginHost) -> Any:
    """The layers' merged spec, or a Refusal. Any layer's family may decide, since kinds never merge with others."""
    return host.family(next(iter(specs.values()))).merge(specs)


def same_table(specs: Specs, host: PluginHost) -> bool:
    """Whether all layers need the same blocks for every request, so that they may share a block table."""
    return len({host.family(spec).table_key(spec) for spec in specs.values()}) == 1


def engine_groups(
    specs: Specs, *, host: PluginHost, layout: KVCacheLayout, hybrid: bool = True
) -> tuple[KVCacheGroupSpec, ...]:
    """The groups of a whole model, by the engines' decision tree.

    Args:
        specs: layer name to spec, in layer order.
        host: who knows the families.
        layout: block-outermost layouts pack mixed pages, the others need one page size.
        hybrid: False where an engine keeps one kind only: local kinds are promoted to full attention first.

    Raises:
        PlanError: pages cannot be brought together; names layers, pages and why.
    """
    if not hybrid:
        specs = promote_local(specs, host)
    if not specs:
        return ()
    for layer, spec in specs.items():
        _check_plannable(layer, spec, host)
    if not isinstance(merged(specs, host), Refusal):
        return (make_group(specs, host),)
    if same_table(specs, host):
        return (make_group(specs, host, uniform=True),)
    own = {layer: spec for layer, spec in specs.items() if host.family(spec).paging.own_group}
    shared = {layer: spec for layer, spec in specs.items() if layer not in own}
    return _hybrid_groups(shared, own, host=host, layout=layout)


def _hybrid_groups(
    shared: Specs, own: Specs, *, host: PluginHost, layout: KVCacheLayout
) -> tuple[KVCacheGroupSpec, ...]:
    if layout.block_outermost and len({spec.page_size_bytes for spec in shared.values()}) > 1:
        rows = packed_groups(shared, host)
        groups = [make_group(row, host, uniform=True) for row in rows]
        return (*groups, *(make_group({layer: spec}, host) for layer, spec in own.items()))
    unified = unify_pages(shared, host)
    if isinstance(unified, Refusal):
        promoted = promote_all(shared, host) if not own and _may_fall_back(shared, host) else unified
        if isinstance(promoted, Refusal) or not same_table(promoted, host):
            raise PlanError(
                reason="the layers' pages cannot be brought to one size",
                layers=list(shared),
                values={unified.field: dict(unified.layers), "rule": unified.rule},
                advice="Use a block-outermost layout such as --layout BLHNC, which packs mixed pages",
            )
        return (make_group(promoted, host, uniform=True),)
    groups = [make_group(row, host) for row in equal_page_groups(unified, host)]
    if not own:
        return tuple(groups)
    regrouped, placed = place_own_groups([group.layer_specs for group in groups], own, host)
    return tuple(make_group(row, host) for row in (*regrouped, *placed))


def _may_fall_back(specs: Specs, host: PluginHost) -> bool:
    families = [host.family(spec) for spec in specs.values()]
    return all(
        f.paging.fallback or not f.lifetime(spec).recycles
        for f, spec in zip(families, specs.values(), strict=True)
    )


def equal_page_groups(specs: Specs, host: PluginHost) -> list[dict[str, Any]]:
    """Layers of one page size to groups of about equal layer counts (contract 5.5b).

    The group size g is the smallest bucket's, or the largest's if it is below 1.5 times that. A bucket of n layers
    becomes ceil(n / g) groups, dealt round-robin so that every pipeline stage gets a share of each.
    """
    buckets: list[dict[str, Any]] = []
    for layer, spec in specs.items():
        for bucket in buckets:
            if next(iter(bucket.values())) == spec:
                bucket[layer] = spec
                break
        else:
            buckets.append({layer: spec})
    joined: list[dict[str, Any]] = []
    for bucket in buckets:
        for target in joined:
            if not isinstance(merged({**target, **bucket}, host), Refusal):
                target.update(bucket)
                break
        else:
            joined.append(dict(bucket))
    smallest, largest = min(map(len, joined)), max(map(len, joined))
    size = largest if largest < 1.5 * smallest else smallest
    return [row for bucket in joined for row in deal(bucket, -(-len(bucket) // size))]


def deal(specs: Specs, count: int) -> list[dict[str, Any]]:
    """Layers dealt round-robin to `count` groups: group i gets layers i, i + count, …"""
    layers = list(specs.items())
    return [dict(layers[index::count]) for index in range(count)]


def _check_plannable(layer: str, spec: Any, host: PluginHost) -> None:
    lifetime = host.family(spec).lifetime(spec)
    if lifetime.fixed == 0:
        raise PlanError(
            reason="a layer that keeps nothing cannot be planned",
            layers=[layer],
            values={"spec": type(spec).__name__},
            advice="Leave such layers out of the specs",
        )


def with_draft_flags(groups: Sequence[KVCacheGroupSpec], draft_drop: bool) -> tuple[KVCacheGroupSpec, ...]:
    """Groups with the draft flag only where the engine drops a unit for the draft model."""
    if draft_drop:
        return tuple(groups)
    return tuple(attrs.evolve(group, is_eagle_group=False) for group in groups)


def with_lookahead(specs: Specs, host: PluginHost, engine: EngineConfig) -> dict[str, Any]:
    """Specs that keep the lookahead - 1 tokens more that several draft modules prefill again."""
    extra = max(0, engine.prefill_lookahead - 1)
    families = {layer: host.family(spec) for layer, spec in specs.items()}
    return {
        layer: family.retain(specs[layer], extra) if family.retain is not None else specs[layer]
        for layer, family in families.items()
    }
