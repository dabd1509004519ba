"""Small plans for tests, built by hand: groups overlay each other from byte 0, each cuts slabs into its own blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from kvframe import FullAttentionSpec, PluginHost, load_plugins
from kvframe.config import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, Pool
from kvframe.planning.grouping import make_group
from kvframe_mla import MLAAttentionSpec

HOST = load_plugins()
FULL = FullAttentionSpec(16, num_kv_heads=2, head_size=8, dtype="bfloat16")  # 16*2*(8+8)*2 = 1,024 bytes
MLA = MLAAttentionSpec(16, num_kv_heads=1, head_size=16, dtype="bfloat16")  # 16*16*2 = 512 bytes


def group_of(specs: Mapping[str, Any], *, host: PluginHost = HOST, **fields: Any) -> KVCacheGroupSpec:
    """A group with the flags that its families ask for; layers of one spec are merged, others keep their pages."""
    return attrs.evolve(make_group(specs, host, uniform=len(set(specs.values())) > 1), **fields)


def placements(groups: tuple[KVCacheGroupSpec, ...], pools: Mapping[str, Pool]) -> tuple[KVCacheTensor, ...]:
    """With blocks outermost: in every block of a group its layers' pages follow each other."""
    tensors = []
    for group in groups:
        pool, offset = pools[group.pool], 0
        for layer in group.layer_names:
            tensor = KVCacheTensor(
                size=pool.size_bytes,
                layers=(layer,),
                layer_stride=group.page_of(layer),
                block_stride=pool.slab_bytes // group.blocks_per_slab,
                offset=offset,
                pool=group.pool,
            )
            tensors.append(tensor)
            offset += group.page_of(layer)
    return tuple(tensors)


def plan_of(
    *groups: KVCacheGroupSpec, slabs: int = 10, layout: str = "BLHNC", **fields: Any
) -> KVCacheConfig:
    """A plan of the groups, each pool with the smallest slab that splits into every group's blocks."""
    splits = math.lcm(*(group.blocks_per_slab for group in groups))
    pools = {}
    for name in ("device", *(group.pool for group in groups)):
        needs = [g.page_size_bytes * g.blocks_per_slab for g in groups if g.pool == name]
        slab = -(-max([1, *needs]) // (256 * splits)) * 256 * splits
        pools[name] = Pool(
            name=name, budget_bytes=slabs * slab, slab_bytes=slab, num_slabs=slabs, layout=layout
        )
    return KVCacheConfig(
        **{
            "pools": pools,
            "groups": groups,
            "tensors": placements(groups, pools),
            "max_model_len": 64,
            **fields,
        }
    )


def mixed() -> KVCacheConfig:
    """Three groups: layers of two page sizes, latent attention with two blocks a slab, and one group on the host."""
    wide = attrs.evolve(FULL, head_size=16)
    return plan_of(
        group_of({"a": FULL, "b": wide}),
        group_of({"c": MLA}, blocks_per_slab=2),
        group_of({"d": FULL}, pool="host", role="tier"),
        slabs=4,
        kv_tp_replicas=2,
        hash_block_size=16,
        prefix_cache_retention_interval=0,
    )
