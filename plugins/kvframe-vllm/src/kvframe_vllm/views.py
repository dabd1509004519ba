"""What vLLM reads of a manager's insides, and what it asks that groups without states never have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import attrs

from kvframe.blocks import BlockPool, KVCacheManager


@attrs.frozen(kw_only=True)
class GroupView:
    """What vLLM reads of a group's manager.

    Args:
        block_size: tokens of a block.
        kv_cache_spec: the group's spec, vLLM's own object.
        req_to_blocks: the requests that hold blocks, by id.
    """

    block_size: int
    kv_cache_spec: Any
    req_to_blocks: Mapping[str, Any]

    @property
    def num_cached_block(self) -> Mapping[str, Any]:
        """The requests whose blocks may be cached: the same."""
        return self.req_to_blocks


@attrs.frozen(kw_only=True)
class Coordinator:
    """What vLLM reads of the coordinator of all groups.

    Args:
        single_type_managers: one view a group.
        enable_partial_hash_hits: whether a hit may end inside a block: only with groups that keep states.
    """

    single_type_managers: tuple[GroupView, ...]
    enable_partial_hash_hits: bool = False


class HeldBlock(NamedTuple):
    """A block and its holders."""

    block_id: int
    ref_cnt: int


class PoolView:
    """What vLLM, its tests and its tools read of the block pool."""

    def __init__(self, core: KVCacheManager) -> None:
        self._core = core
        self.num_gpu_blocks = core.config.num_blocks

    def get_num_free_blocks(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return self._core.num_free

    @property
    def num_free_blocks(self) -> int:
        """The same, by the name that vLLM's queue of free blocks has for it."""
        return self._core.num_free

    @property
    def free_block_queue(self) -> PoolView:
        """Who knows how many blocks are free: the pool itself."""
        return self

    @property
    def blocks(self) -> list[HeldBlock]:
        """Every block with the number of requests that hold it."""
        pool = self._core.pool
        holders = pool.refs.tolist() if isinstance(pool, BlockPool) else []
        return [HeldBlock(block, count) for block, count in enumerate(holders)]

    def get_usage(self) -> float:
        """The share of the blocks that requests hold, 0 to 1."""
        usable = self.num_gpu_blocks - 1
        return 1.0 - self._core.num_free / usable if usable > 0 else 0.0


class Stateless:
    """The questions of vLLM's scheduler that only states, events and connectors have answers to."""

    num_kv_cache_groups: int

    def take_events(self) -> list[Any]:
        """Block events: none, since engines that want them run without this manager."""
        return []

    def take_kv_cache_block_copies(self) -> tuple[list[Any], list[Any]]:
        """Copies on write: none, since no hit ends inside a block."""
        return [], []

    def take_boundary_state_offloads(self) -> dict[str, list[Any]]:
        """States for a connector: none."""
        return {}

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Always 0, as in vLLM."""
        return [0] * self.num_kv_cache_groups
