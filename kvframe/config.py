"""The plan as data: pools, groups of layers, and where each layer's pages lie. What workers and schedulers are given.

A plan that contradicts itself cannot be made. `kvframe.verify` also looks at single bytes; `kvframe.serialise` writes
plans as JSON and reads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs

from kvframe.checks import at_least, optional_at_least
from kvframe.errors import PlanError
from kvframe.parts import DEVICE, KVCacheGroupSpec, KVCacheTensor, LayerGroup, Pool, check_parts
from kvframe.spec import AttentionSpec, iter_layer_specs

__all__ = ["DEVICE", "KVCacheConfig", "KVCacheGroupSpec", "KVCacheTensor", "LayerGroup", "Pool"]


@attrs.frozen(kw_only=True)
class KVCacheConfig:
    """The KV cache of one rank (contract 2.23): pools, groups and placements.

    Args:
        pools: the pools by name.
        groups: the groups; a group's position is its id.
        tensors: placements of all layers.
        max_model_len: the longest request the plan was made for, tokens.
        kv_tp_replicas: consecutive tensor-parallel ranks that hold identical bytes.
        prefix_cache_retention_interval: None caches every block; 0 only replay boundaries; else a tail every so many
            tokens.
        hash_block_size: tokens of one hash unit, None without a prefix-cacheable group.
        cache_hit_alignment_tokens: tokens that a prefix hit is a multiple of, None where nobody has settled it.

    Raises:
        PlanError: pools, groups and placements contradict each other (`kvframe.parts.check_parts`).
        SpecError: a number is out of its range.
    """

    pools: Mapping[str, Pool]
    groups: tuple[KVCacheGroupSpec, ...]
    tensors: tuple[KVCacheTensor, ...]
    max_model_len: int = attrs.field(validator=at_least(1))
    kv_tp_replicas: int = attrs.field(default=1, validator=at_least(1))
    prefix_cache_retention_interval: int | None = attrs.field(default=None, validator=optional_at_least(0))
    hash_block_size: int | None = attrs.field(default=None, validator=optional_at_least(1))
    cache_hit_alignment_tokens: int | None = attrs.field(default=None, validator=optional_at_least(1))

    def __attrs_post_init__(self) -> None:
        check_parts(self.pools, self.groups, self.tensors)

    @property
    def num_blocks(self) -> int:
        """Slabs of the device pool: the number of blocks where every group cuts one block from a slab."""
        return self.pools[DEVICE].num_slabs

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a slab of the device pool: of a block, where every group cuts one block from a slab."""
        return self.pools[DEVICE].slab_bytes

    def block_bytes_of(self, group: KVCacheGroupSpec) -> int:
        """Bytes of its pool that a block of a group takes over all its layers, what is lost to padding included."""
        return self.pools[group.pool].slab_bytes // group.blocks_per_slab

    @property
    def kv_cache_groups(self) -> tuple[KVCacheGroupSpec, ...]:
        """The groups, under the field's usual name."""
        return self.groups

    @property
    def kv_cache_tensors(self) -> tuple[KVCacheTensor, ...]:
        """The placements, under the field's usual name."""
        return self.tensors

    @property
    def kv_cache_layout(self) -> str:
        """The device pool's layout."""
        return self.pools[DEVICE].layout

    def blocks_of(self, group: KVCacheGroupSpec) -> int:
        """Blocks that a group can address, the null block included."""
        return self.pools[group.pool].num_slabs * group.blocks_per_slab

    def num_blocks_of(self, tensor: KVCacheTensor) -> int:
        """Blocks that a placement addresses: those of its layers' group."""
        return self.blocks_of(self.group_of(tensor.layers[0]))

    def group_of(self, layer: str) -> KVCacheGroupSpec:
        """The group of a layer.

        Raises:
            PlanError: no group has such a layer.
        """
        for group in self.groups:
            if layer in group.layer_specs:
                return group
        raise PlanError(reason=f"no group holds layer {layer!r}", layers=[layer])

    def has_family(self, name: str) -> bool:
        """Whether any layer is of the family."""
        return any(name in group.family for group in self.groups)

    @property
    def has_mixed_precision_kv_cache(self) -> bool:
        """Whether device layers with K and V use more than one (dtype, quantisation) pair."""
        precisions = {
            (spec.dtype, spec.kv_quant_mode)
            for group in self.groups
            if not group.host_resident
            for spec in iter_layer_specs(group.kv_cache_spec)
            if isinstance(spec, AttentionSpec)
        }
        return len(precisions) > 1

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        """Whether new blocks must be zeroed: a family asks, or stale bytes could be read in another precision."""
        return any(group.needs_zeroing for group in self.groups) or self.has_mixed_precision_kv_cache

    @property
    def transfer_group_ids(self) -> tuple[int, ...]:
        """Groups whose blocks are moved to other engines."""
        return tuple(index for index, group in enumerate(self.groups) if group.enable_kv_transfer)

    @property
    def transfer_groups(self) -> tuple[KVCacheGroupSpec, ...]:
        """The transfer groups themselves."""
        return tuple(self.groups[index] for index in self.transfer_group_ids)

    @property
    def prefix_cacheable_group_ids(self) -> tuple[int, ...]:
        """Transfer groups whose blocks later requests may find."""
        return tuple(
            index for index in self.transfer_group_ids if self.groups[index].kv_cache_spec.prefix_cacheable
        )

    @property
    def prefix_cacheable_groups(self) -> tuple[KVCacheGroupSpec, ...]:
        """The prefix-cacheable groups themselves."""
        return tuple(self.groups[index] for index in self.prefix_cacheable_group_ids)

    @property
    def transfer_group_index_by_layer(self) -> dict[str, int]:
        """Layer to position inside the transfer groups (not the group id)."""
        return {
            layer: position
            for position, group in enumerate(self.transfer_groups)
            for layer in group.layer_names
        }

    @property
    def host_group_ids(self) -> tuple[int, ...]:
        """Groups whose blocks live outside the device pool."""
        return tuple(index for index, group in enumerate(self.groups) if group.host_resident)

    def select_transfer_block_ids(self, block_ids: Sequence[Sequence[int]]) -> tuple[Sequence[int], ...]:
        """The transfer groups' entries of per-group block ids.

        Raises:
            PlanError: not one list a group.
        """
        if len(block_ids) != len(self.groups):
            raise PlanError(
                reason="block ids must be given for every group",
                values={"groups": len(self.groups), "lists": len(block_ids)},
            )
        return tuple(block_ids[index] for index in self.transfer_group_ids)
