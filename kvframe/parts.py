"""The parts of a plan: pools, groups of layers, and placements of their pages, and what must hold between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import attrs

from kvframe.checks import at_least
from kvframe.errors import PlanError
from kvframe.spec import iter_layer_specs

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
        shared_by_ranks: tensor-parallel ranks that map this one memory; 1: it is the rank's own.
        reserved_slabs: slabs that no request may count on: the null block's, and what copies need beside it.
    """

    name: str = DEVICE
    budget_bytes: int = attrs.field(validator=at_least(0))
    slab_bytes: int = attrs.field(validator=at_least(1))
    num_slabs: int = attrs.field(validator=at_least(0))
    layout: str
    shared_by_ranks: int = attrs.field(default=1, validator=at_least(1))
    reserved_slabs: int = attrs.field(default=1, validator=at_least(1))

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole backing buffer."""
        return self.slab_bytes * self.num_slabs

    @property
    def usable_slabs(self) -> int:
        """Slabs that requests can hold."""
        return max(self.num_slabs - self.reserved_slabs, 0)


def _names(layers: Iterable[str]) -> tuple[str, ...]:
    return tuple(layers)


@attrs.frozen(kw_only=True)
class LayerGroup:
    """Layers that a plugin wants in one group: an item of `kvframe_group_layers`.

    Args:
        layers: names of the layers, in the order that they are placed in.
        pool: the pool that their blocks come from.
        role: a word of the plugin's choice, kept on the group.
        uniform: whether the group keeps its layers' own specs; None: only where they do not merge.
        by_core: the core makes groups of these layers by its own rule, as many as it needs.
    """

    layers: tuple[str, ...] = attrs.field(converter=_names)
    pool: str = DEVICE
    role: str = "default"
    uniform: bool | None = None
    by_core: bool = False


@attrs.frozen(kw_only=True)
class KVCacheGroupSpec:
    """Layers that share one block table (contract 2.22).

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
    def host_resident(self) -> bool:
        """Whether its blocks live outside the device pool."""
        return self.pool != DEVICE

    @property
    def metadata_key(self) -> Hashable:
        """Equal in groups for which kernels prepare the same: the same specs, pool and blocks a slab."""
        return (frozenset(iter_layer_specs(self.kv_cache_spec)), self.pool, self.blocks_per_slab)

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
    """Where the pages of equal layers lie (contract 2.21).

    Layer l's page of block b starts at offset + l * layer_stride + b * block_stride. Sizes, strides and offset are
    bytes; `size` is the whole pool's, the same for all that lie in it. Placements of different groups may overlap: a
    slab belongs to one group at a time.
    """

    size: int
    layers: tuple[str, ...]
    layer_stride: int
    block_stride: int
    offset: int = 0
    pool: str = DEVICE

    @property
    def host_resident(self) -> bool:
        """Whether it lies outside the device pool."""
        return self.pool != DEVICE

    def address(self, layer: int, block: int) -> int:
        """Byte offset of a page in the pool's buffer."""
        return self.offset + layer * self.layer_stride + block * self.block_stride


Groups = Sequence[KVCacheGroupSpec]
Tensors = Sequence[KVCacheTensor]


def check_parts(pools: Mapping[str, Pool], groups: Groups, tensors: Tensors) -> None:
    """The rules that pools, groups and placements keep together.

    Raises:
        PlanError: there is no device pool, a group or placement names no pool, a slab cannot hold a group's blocks, a
            layer is not in exactly one group and one placement, or a placement leaves its pool.
    """
    _check_pools(pools, groups, tensors)
    _check_once("group", [layer for group in groups for layer in group.layer_specs])
    pages = {layer: group.page_of(layer) for group in groups for layer in group.layer_specs}
    _check_groups(pools, groups, pages)
    _check_placements(pools, groups, tensors, pages)


def _check_pools(pools: Mapping[str, Pool], groups: Groups, tensors: Tensors) -> None:
    misfiled = sorted(name for name, pool in pools.items() if name != pool.name)
    if DEVICE not in pools or misfiled:
        raise PlanError(
            reason=f"pools must be named as they are filed, one of them {DEVICE!r}",
            values={"pools": sorted(pools), "misfiled": misfiled},
        )
    users = [(group.pool, group.layer_names) for group in groups]
    users += [(tensor.pool, tensor.layers) for tensor in tensors]
    for pool, layers in users:
        if pool not in pools:
            raise PlanError(
                reason=f"there is no pool {pool!r}", layers=layers, values={"pools": sorted(pools)}
            )


def _check_groups(pools: Mapping[str, Pool], groups: Groups, pages: Mapping[str, int]) -> None:
    """Every group's blocks fit into slabs, so that no count of bytes leaves layers out."""
    for index, group in enumerate(groups):
        if not group.layer_specs:
            continue  # a rank without layers of the group: the group keeps its place
        slab, per_slab = pools[group.pool].slab_bytes, group.blocks_per_slab
        needed = sum(pages[layer] for layer in group.layer_specs)
        if slab % per_slab or needed * per_slab > slab:
            raise PlanError(
                reason=f"a slab must split into the blocks of group {index}, each with a page of every layer",
                layers=group.layer_names,
                values={"slab bytes": slab, "blocks a slab": per_slab, "bytes of the layers' pages": needed},
            )
        if len(group.family) != len(group.layer_specs):
            raise PlanError(
                reason=f"group {index} must name a family for each layer",
                layers=group.layer_names,
                values={"families": group.family},
            )


def _check_placements(
    pools: Mapping[str, Pool], groups: Groups, tensors: Tensors, pages: Mapping[str, int]
) -> None:
    """Every layer in one placement; every placement holds equal pages of one group and stays in its pool."""
    placed = [layer for tensor in tensors for layer in tensor.layers]
    _check_once("placement", placed)
    group_of = {layer: group for group in groups for layer in group.layer_specs}
    if group_of.keys() != set(placed):
        raise PlanError(
            reason="groups and placements must hold the same layers",
            layers=sorted(group_of.keys() ^ set(placed)),
        )
    for tensor in tensors:
        owners = [group_of[layer] for layer in tensor.layers]
        sizes = {pages[layer] for layer in tensor.layers}
        shared = all(group is owners[0] and group.pool == tensor.pool for group in owners)
        if len(sizes) != 1 or not shared:
            raise PlanError(
                reason="a placement must hold layers of one group, with equal pages, in that group's pool",
                layers=tensor.layers,
                values={"page bytes": sorted(sizes), "pool": tensor.pool},
            )
        _check_extent(pools[tensor.pool], tensor, owners[0].blocks_per_slab, sizes.pop())


def _check_extent(pool: Pool, tensor: KVCacheTensor, per_slab: int, page: int) -> None:
    """Contract 2.21, for whole pages; those that a layout takes apart are looked at by `kvframe.verify`."""
    last_block = pool.num_slabs * per_slab - 1
    if last_block < 0:
        return
    end = tensor.address(len(tensor.layers) - 1, last_block) + page
    forward = tensor.offset >= 0 and tensor.layer_stride > 0 and tensor.block_stride > 0
    if tensor.size != pool.size_bytes or not forward or end > pool.size_bytes:
        raise PlanError(
            reason=f"a placement must lie in its pool of {pool.size_bytes:,} bytes, and its size be the pool's",
            layers=tensor.layers,
            values={
                "size": tensor.size,
                "offset": tensor.offset,
                "strides of layers and blocks": (tensor.layer_stride, tensor.block_stride),
                "end": end,
            },
        )


def _check_once(what: str, layers: Sequence[str]) -> None:
    repeated = sorted(layer for layer, count in Counter(layers).items() if count > 1)
    if repeated:
        raise PlanError(reason=f"a layer must be in one {what} only", layers=repeated)
