"""What a pool holds, in bytes: useful ones are those of tokens and states that some later step reads."""

from __future__ import annotations

import attrs

from kvframe.blocks import KVCacheManager
from kvframe.blocks.statistics import empty_tokens, held_blocks
from kvframe.config import DEVICE, KVCacheConfig


@attrs.frozen(kw_only=True)
class Meter:
    """Bytes of the blocks of a plan.

    Args:
        pool_bytes: the pool's budget, what no slab uses included.
        block_bytes: what the layers of a group need of a block, without the planner's padding, by group.
    """

    pool_bytes: int
    block_bytes: tuple[int, ...]

    @classmethod
    def of(cls, config: KVCacheConfig, pool: str = DEVICE) -> Meter:
        """The meter of one pool of a plan."""
        return cls(
            pool_bytes=config.pools[pool].budget_bytes,
            block_bytes=tuple(
                sum(int(spec.unpadded_page_size_bytes) for spec in group.layer_specs.values())
                for group in config.groups
                if group.pool == pool
            ),
        )

    def useful_share(self, manager: KVCacheManager) -> float:
        """The share of the pool that running requests make use of: their blocks, each once, without empty ends."""
        return sum(self.useful_bytes(manager)) / self.pool_bytes

    def useful_bytes(self, manager: KVCacheManager) -> list[float]:
        """The same in bytes, by group."""
        config = manager.config
        return [
            size * (held_blocks(manager, g) - empty_tokens(manager, g) / config.groups[g].lifetime.block)
            for g, size in enumerate(self.block_bytes)
        ]
