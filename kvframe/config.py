"""The plan as data: pools, groups of layers, and where each layer's pages lie. What workers and schedulers are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvframe.checks import at_least
from kvframe.errors import PlanError
from kvframe.spec import AttentionSpec, iter_layer_specs

DEVICE = "device"


@attrs.frozen(kw_only=True)
class Pool:
    """An array of equal slabs in one memory.

    Args:
        name: "device", "host", or a name of your own.
        budget_bytes: the memory that was given for it.
        slab_bytes: bytes of one slab.
        num_slabs: slabs that fit, the null slab included.
        layout: name of the pool's memory layout.
    """

    name: str = DEVICE
    budget_bytes: int = attrs.field(validator=at_least(0))
    slab_bytes: int = attrs.field(validator=at_least(1))
    num_slabs: int = attrs.field(validator=at_least(0))
    layout: str

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole backing buffer."""
        return self.slab_bytes * self.num_slabs


@attrs.frozen(kw_only=True)
class KVCacheGroupSpec:
    """Layers that share one block table.

    Args:
        layer_specs: layer name to that layer's own spec, in layer order; facts of a layer stay on the layer.
        kv_cache_spec: the spec of the group: the merged one, or UniformTypeKVCacheSpecs where pages differ.
        family: names of the layers' families, in the order of layers.
        pool: the pool that the group's blocks come from.
        blocks_per_slab: how many of its blocks the group cuts from one slab.
        is_eagle_group: holds draft layers, whose prefix hits are one unit shorter.
        enable_kv_transfer: its blocks are part of what is moved to another engine.
        needs_zeroing: new blocks must be zeroed before kernels read them.
        role: a word that plugins choose.
    """

    layer_specs: Mapping[str, Any]
    kv_cache_spec: Any
    family: tuple[str, ...]
    pool: str = DEVICE
    blocks_per_slab: int = attrs.field(default=1, validator=at_least(1))
    is_eagle_group: bool = False
    enable_kv_transfer: bool = True
    needs_zeroing: bool = False
    role: str = "default"

    @property
    def layer_names(self) -> tuple[str, ...]:
        """The layers, in order."""
        return tuple(self.layer_specs)

    @property
    def block_size(self) -> int:
        """Tokens of one block."""
        return int(self.kv_cache_spec.block_size)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block over all layers, padding included."""
        return sum(int(self.page_of(layer)) for layer in self.layer_specs)

    def page_of(self, layer: str) -> int:
        """Bytes of one layer's page."""
        return int(self.layer_specs[layer].page_size_bytes)

    def block_index(self, position: int) -> int:
        """The block-table entry that holds a token position; block sizes differ by group, so only groups know."""
        return position // self.block_size


@attrs.frozen(kw_only=True)
class KVCacheTensor:
    """Where the pages of equal layers lie: layer l's page of block b starts at offset + l * layer_stride + b * block_stride.

    Sizes, strides and offset are bytes. Tensors of different groups may overlap: a block belongs to one group at a time.
    """

    size: int
    layers: tuple[str, ...]
    layer_stride: int
    block_stride: int
    offset: int = 0
    pool: str = DEVICE

    def address(self, layer: int, block: int) -> int:
        """Byte offset of a page in the pool's buffer."""
        return self.offset + layer * self.layer_stride + block * self.block_stride


@attrs.frozen(kw_only=True)
class KVCacheConfig:
    """The KV cache of one rank (contract 2.23): pools, groups and placements.

    Args:
        pools: the pools by name.
        groups: the groups; a group's position is its id.
        tensors: placements of all layers.
        max_model_len: the longest request the plan was made for, tokens.
        kv_tp_replicas: consecutive tensor-parallel ranks that hold identical bytes.
        prefix_cache_retention_interval: None caches every block; 0 only replay boundaries; else one tail each so many tokens.
        hash_block_size: tokens of one hash unit, None without a prefix-cacheable group.
    """

    pools: Mapping[str, Pool]
    groups: tuple[KVCacheGroupSpec, ...]
    tensors: tuple[KVCacheTensor, ...]
    max_model_len: int
    kv_tp_replicas: int = 1
    prefix_cache_retention_interval: int | None = None
    hash_block_size: int | None = None

    @property
    def num_blocks(self) -> int:
        """Slabs of the device pool: the number of blocks where every group cuts one block from a slab."""
        return self.pools[DEVICE].num_slabs

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

    def num_blocks_of(self, tensor: KVCacheTensor) -> int:
        """Blocks that a placement addresses."""
        group = self.group_of(tensor.layers[0])
        return self.pools[tensor.pool].num_slabs * group.blocks_per_slab

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
            if group.pool == DEVICE
            for spec in iter_layer_specs(group.kv_cache_spec)
            if isinstance(spec, AttentionSpec)
        }
        return len(precisions) > 1

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        """Whether new blocks must be zeroed: a family asks for it, or stale bytes could be read in another precision."""
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
        return tuple(index for index, group in enumerate(self.groups) if group.pool != DEVICE)

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


