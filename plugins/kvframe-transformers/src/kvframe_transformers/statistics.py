"""What a pool holds and what it has saved, as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping

import attrs


@attrs.define(kw_only=True)
class Counts:
    """Sums over a pool's life, in tokens; padding does not count.

    Args:
        prompts: sequences that were looked up.
        prompt: tokens of their prompts.
        hit: of these, tokens served from cached blocks.
        resumed: of these, tokens of conversations that were kept and went on.
        computed: tokens that models were called for.
    """

    prompts: int = 0
    prompt: int = 0
    hit: int = 0
    resumed: int = 0
    computed: int = 0


@attrs.frozen(kw_only=True)
class GroupStatistics:
    """One group of layers that share a block table.

    Args:
        layers: its layers' caches.
        block_tokens: tokens of a block.
        block_bytes: bytes that a block takes over all its layers.
        held_blocks: blocks that sequences hold now, shared ones counted once.
        peak_blocks: the most that they held after any forward pass.
    """

    layers: tuple[str, ...]
    block_tokens: int
    block_bytes: int
    held_blocks: int
    peak_blocks: int

    @property
    def held_bytes(self) -> int:
        """Bytes of the held blocks."""
        return self.held_blocks * self.block_bytes

    @property
    def peak_bytes(self) -> int:
        """Bytes of the most blocks that were held."""
        return self.peak_blocks * self.block_bytes


@attrs.frozen(kw_only=True)
class PoolStatistics:
    """A pool at one moment.

    Args:
        prompts, prompt_tokens, hit_tokens, resumed_tokens, computed_tokens: as of `Counts`.
        parked: conversations that are kept for their next turn.
        cached_prefixes: keys of blocks that later prompts can find.
        groups: by name.
        pool_bytes: bytes of the whole pool.
    """

    prompts: int
    prompt_tokens: int
    hit_tokens: int
    resumed_tokens: int
    computed_tokens: int
    parked: int
    cached_prefixes: int
    groups: Mapping[str, GroupStatistics]
    pool_bytes: int

    @property
    def saved_tokens(self) -> int:
        """Prompt tokens for which no model was called."""
        return self.hit_tokens + self.resumed_tokens

    @property
    def held_bytes(self) -> int:
        """Bytes of all blocks that sequences hold."""
        return sum(group.held_bytes for group in self.groups.values())
