"""HiSparse for kvframe: sparse attention whose latent pages live on the host, with device pages for what is in use.

Two kinds of device pages stand beside the host's: hot regions, a fixed number of pages that a request swaps tokens in
and out of, and resident pages, which hold new tokens until they are written back. Both are raw storage without layer
views.
"""

from __future__ import annotations

from typing import Any

from kvframe import KVCacheConfig, KVCacheGroupSpec, Lifetime, Paging, SpecFamily, Traits, hookimpl
from kvframe_hisparse.planning import (
    INDEXER_ROLE,
    SOURCE_ROLE,
    kvframe_adjust_specs,
    kvframe_group_layers,
    kvframe_place_groups,
    kvframe_plan_options,
)
from kvframe_hisparse.spec import HiSparseHotSpec, HiSparseResidentSpec, ResidentLifetime

__all__ = [
    "INDEXER_ROLE",
    "SOURCE_ROLE",
    "HiSparseHotSpec",
    "HiSparseResidentSpec",
    "ResidentLifetime",
    "hisparse_host_block_stride",
    "hisparse_host_num_blocks",
    "hisparse_shared_host_pool",
    "kvframe_adjust_specs",
    "kvframe_group_layers",
    "kvframe_place_groups",
    "kvframe_plan_options",
    "kvframe_spec_families",
]


def hisparse_host_num_blocks(config: KVCacheConfig) -> int | None:
    """Blocks of the host pool, the null block included; None in a plan without HiSparse (contract 2.23)."""
    source = _source(config)
    return config.blocks_of(source) if source else None


def hisparse_host_block_stride(config: KVCacheConfig) -> int | None:
    """Bytes from one block of the host pool to the next; None in a plan without HiSparse (contract 2.23)."""
    source = _source(config)
    return config.block_bytes_of(source) if source else None


def hisparse_shared_host_pool(config: KVCacheConfig) -> bool:
    """Whether tensor-parallel ranks map one and the same host pool (contract 2.23)."""
    source = _source(config)
    return source is not None and config.pools[source.pool].shared_by_ranks > 1


def _source(config: KVCacheConfig) -> KVCacheGroupSpec | None:
    """The group of host pages, whatever its pool is called."""
    return next((group for group in config.groups if group.role == SOURCE_ROLE), None)


@hookimpl
def kvframe_spec_families() -> list[SpecFamily[Any]]:
    """Hot and resident pages. The host has what they hold, or will: no prefix hit and no transfer needs them."""
    shared: dict[str, Any] = {
        "paging": Paging(scales=False, pads=False),
        "traits": Traits(transferable=False),  # both can be filled again from the host's pages
    }
    return [
        SpecFamily(
            name="hisparse_hot",
            spec_type=HiSparseHotSpec,
            lifetime=lambda spec: Lifetime(block=spec.block_size, fixed=spec.blocks_per_request, hits="free"),
            group_key=lambda spec: "hisparse_hot",
            examples=(
                HiSparseHotSpec(64, page_size=41_984, blocks_per_request=32),
                HiSparseHotSpec(64, page_size=37_440, blocks_per_request=3),
            ),
            **shared,
        ),
        SpecFamily(
            name="hisparse_resident",
            spec_type=HiSparseResidentSpec,
            lifetime=lambda spec: ResidentLifetime(block=spec.block_size, hits="free"),
            group_key=lambda spec: "hisparse_resident",
            examples=(
                HiSparseResidentSpec(64, page_size=41_984),
                HiSparseResidentSpec(64, page_size=37_440),
            ),
            **{**shared, "traits": Traits(transferable=False, freed_by_plugin=True)},
        ),
    ]
