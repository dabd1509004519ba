"""From groups of the whole model to a KVCacheConfig for every rank (contract 5.8)."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import attrs

from kvframe.config import DEVICE, KVCacheConfig, KVCacheGroupSpec, Pool
from kvframe.engine import EngineConfig
from kvframe.errors import InsufficientMemoryError, PlanError
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


@attrs.frozen(kw_only=True)
class RankBudget:
    """One rank: its layers' specs and the bytes it has for the cache."""

    specs: Mapping[str, Any]
    memory: int


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


def check_memory(
    groups: Sequence[KVCacheGroupSpec],
    engine: EngineConfig,
    bound: Bound,
    *,
    layout: KVCacheLayout,
    memory: int,
) -> None:
    """One request of max_model_len fits beside the null block.

    Raises:
        InsufficientMemoryError: needed and available bytes, and the largest length that fits.
        LayoutError: the layout cannot hold the groups.
    """
    check_layout(groups, layout)
    block = bytes_per_block(groups, layout)
    needed = blocks_per_request(groups, engine, bound) * block
    available = memory - block
    if needed > available or memory <= 0:
        raise InsufficientMemoryError(
            needed_bytes=needed,
            available_bytes=available,
            max_model_len=engine.max_model_len,
            largest_fitting_len=largest_fitting_len(
                groups, engine, bound, block_bytes=block, available_bytes=available
            ),
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
    """A config per rank, all with the number of blocks of the rank that has the fewest.

    Args:
        groups: the whole model's groups.
        ranks: layers and bytes of each rank.
        bound: what one request needs of a group.
        num_blocks: this many blocks whatever the memory, instead of as many as fit.

    Raises:
        InsufficientMemoryError: one request does not fit on some rank.
        LayoutError: the layout cannot hold a rank's groups.
    """
    parts = [project(groups, rank.specs, host) for rank in ranks]
    blocks = [bytes_per_block(part, layout) for part in parts]
    memory = [
        rank.memory if num_blocks is None else num_blocks * block
        for rank, block in zip(ranks, blocks, strict=True)
    ]
    for part, budget in zip(parts, memory, strict=True):
        check_memory(part, engine, bound, layout=layout, memory=budget)
    counts = [budget // block for budget, block in zip(memory, blocks, strict=True) if block]
    common = min(counts, default=1)
    return tuple(
        KVCacheConfig(
            pools={
                DEVICE: Pool(
                    budget_bytes=rank.memory, slab_bytes=max(block, 1), num_slabs=common, layout=layout.name
                )
            },
            groups=part,
            tensors=place(part, num_slabs=common, slab_bytes=block, layout=layout),
            max_model_len=engine.max_model_len,
            kv_tp_replicas=tp_replicas(part, engine),
        )
        for rank, part, block in zip(ranks, parts, blocks, strict=True)
    )
