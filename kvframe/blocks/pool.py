"""BlockPool: reference counts and the free queue of one set of block ids that all groups share (k = 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from kvframe.blocks.arrays import FEW, Gather, items
from kvframe.blocks.errors import BlockError, not_held
from kvframe.blocks.prefix import PrefixCache
from kvframe.blocks.queues import Blocks, EvictionPolicy, Ids

NULL = 0  # the id of the null block, never handed out
# Arrays for the same reason as `arrays.ONE`.
_NOBODY, _ONE_HOLDER = np.array(0, np.int32), np.array(1, np.int32)


class Pool(Protocol):
    """What the manager asks of a pool: all of it by group, so that groups may or may not share block ids."""

    @property
    def num_free(self) -> int:
        """Units (blocks, or slabs where groups cut them) that nobody holds; cached ones included."""

    @property
    def num_held(self) -> int:
        """Blocks that requests hold."""

    def free_for(self, group: int) -> int:
        """Blocks that the group could get if no other group wanted any."""

    def missing(self, needs: Sequence[int], hits: Sequence[Sequence[int]] = (), spare: int = 0) -> int:
        """Units that lack for all groups to get `needs` and keep `hits`, with `spare` left over; 0: it fits."""

    def reserve(self, needs: Sequence[int]) -> None:
        """Say what the following `take`s will add up to."""

    def take(self, group: int, count: int) -> list[int]:
        """Hand out blocks, whose keys are gone; the caller has asked `missing` and said `reserve`."""

    def touch(self, group: int, blocks: list[int]) -> None:
        """Hold blocks that a request found."""

    def give_back(self, group: int, blocks: list[int]) -> None:
        """Release blocks in this order."""

    def retire(self, group: int, blocks: list[int]) -> None:
        """`give_back` for blocks that are worth little to a later request: they go first where the pool can do so."""

    def seize(self, group: int, blocks: Sequence[int]) -> None:
        """Hold these very blocks, each once, in a pool that has just been made."""

    def idle(self) -> list[tuple[int, int]]:
        """(group, block) of all cached blocks that nobody holds, those that go first in front."""

    def forget(self, group: int, blocks: list[int]) -> None:
        """Blocks that nobody holds have lost their keys: they are handed out next."""

    def check_ids(self, group: int, blocks: Sequence[int]) -> None:
        """Refuse ids that are not blocks of the group."""


class BlockPool:
    """Blocks 1 … num_blocks − 1, each free, cached (free, but a later request may find it), or held.

    Args:
        num_blocks: the null block included.
        policy: the eviction policy.
        cache: the prefix cache that knows the blocks' keys; None without prefix caching.
    """

    def __init__(self, num_blocks: int, policy: EvictionPolicy, cache: PrefixCache | None) -> None:
        self.num_blocks = num_blocks
        self.refs = np.zeros(num_blocks, np.int32)
        self._refs_at, self._refs_of = items(self.refs), Gather(self.refs)
        self._queue = policy.make(num_blocks, np.arange(1, num_blocks))
        self.count_free = self._queue.__len__  # `num_free` in one call instead of three, for every step
        self._cache = cache
        self._keyed = None if cache is None else cache.indices[0].group_at

    # --- questions ---

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return len(self._queue)

    @property
    def num_held(self) -> int:
        """Blocks that requests hold."""
        return self.num_blocks - 1 - len(self._queue)

    def free_for(self, group: int) -> int:
        """Blocks that the group could get if no other group wanted any."""
        return len(self._queue)

    def missing(self, needs: Sequence[int], hits: Sequence[Sequence[int]] = (), spare: int = 0) -> int:
        """Blocks that lack for all groups to get `needs` and keep `hits`, with `spare` left over; 0: it fits.

        Hits that nobody holds yet leave the free queue, so they count.
        """
        idle = sum(self._refs_at[block] == 0 for blocks in hits for block in blocks) if hits else 0
        return max(0, sum(needs) + idle + spare - len(self._queue))

    def in_order(self) -> list[int]:
        """The free blocks, the next to be handed out first."""
        return self._queue.in_order()

    # --- changes ---

    def reserve(self, needs: Sequence[int]) -> None:
        """Nothing to do: one group's choice of a block takes nothing from another but the count."""

    def take(self, group: int, count: int) -> list[int]:
        """Hand out blocks, whose keys are gone; the caller has asked `missing`."""
        if count > FEW:
            many: list[int] = self.take_many(group, count).tolist()
            return many
        evicts = self._cache is not None and self._queue.num_empty < count
        blocks, refs = self._queue.take(count), self._refs_at
        for block in blocks:
            refs[block] = 1
        if evicts and self._cache is not None:
            self._cache.drop_all(group, blocks)
        return blocks

    def touch(self, group: int, blocks: list[int]) -> None:
        """Hold blocks that a request found."""
        if len(blocks) > FEW:
            found = np.array(blocks, np.intp)
            held = self.refs.take(found)
            self._queue.reuse(found[held == 0])
            self.refs[found] = held + 1
            return
        idle = [block for block in blocks if self._refs_at[block] == 0]
        if idle:
            self._queue.reuse(idle)
        for block in blocks:
            self._refs_at[block] += 1

    def give_back(self, group: int, blocks: list[int]) -> None:
        """Release blocks in this order: those without a key are handed out next, cached ones wait at the end.

        Raises:
            BlockError: nobody holds one of them.
        """
        if len(blocks) > FEW and len(set(blocks)) == len(blocks):
            if self.give_back_many(group, np.array(blocks, np.intp)):
                return
        elif self._give_back_cached(blocks):
            return
        free, keyed = let_go(self._refs_at, blocks), self._keyed
        self._queue.push_empty(free if keyed is None else [block for block in free if keyed[block] < 0])
        if keyed is not None:
            self._queue.push_cached([block for block in free if keyed[block] >= 0])

    def _give_back_cached(self, blocks: list[int]) -> bool:
        """The common case, if it is that: each block has a key, and this one holder."""
        refs, keyed = self._refs_at, self._keyed
        if keyed is None:
            return False
        for at, block in enumerate(blocks):
            if refs[block] != 1 or keyed[block] < 0:
                for before in blocks[:at]:
                    refs[before] = 1
                return False
            refs[block] = 0
        self._queue.push_cached(blocks)
        return True

    def retire(self, group: int, blocks: list[int]) -> None:
        """`give_back`: here all blocks wait in one order."""
        self.give_back(group, blocks)

    def take_many(self, group: int, count: int) -> Ids:
        """`take` for many blocks."""
        evicts = self._cache is not None and self._queue.num_empty < count
        ids = self._queue.take_many(count)
        blocks = ids.astype(np.intp)
        if evicts and self._cache is not None:
            self._cache.drop_many(group, blocks)
        self.refs[blocks] = _ONE_HOLDER
        return ids

    def give_back_many(self, group: int, blocks: Blocks) -> bool:
        """`give_back` for many blocks, if each has just this one holder; says whether it did."""
        if self._refs_of.one(blocks) != 1:
            return False
        self.refs[blocks] = _NOBODY
        index = None if self._cache is None else self._cache.index_of[group]
        if index is not None and index.all_keyed(blocks):
            self._queue.push_cached(blocks)
        elif index is None or index.none_keyed(blocks):
            self._queue.push_empty(blocks)
        else:
            keyed = index.keyed(blocks)
            self._queue.push_empty(blocks[~keyed])
            self._queue.push_cached(blocks[keyed])
        return True

    def forget(self, group: int, blocks: list[int]) -> None:
        """Blocks that nobody holds have lost their keys: they are handed out next."""
        self._queue.drop(blocks)
        self._queue.push_empty(blocks)

    # --- for snapshots and resizing ---

    def seize(self, group: int, blocks: Sequence[int]) -> None:
        """Hold these very blocks, each once, in a pool that has just been made."""
        self._queue.drop(list(blocks))
        self.refs[np.asarray(blocks, np.intp)] = 1

    def idle(self) -> list[tuple[int, int]]:
        """(group, block) of all cached blocks that nobody holds, those that go first in front."""
        if self._cache is None:
            return []
        index = self._cache.indices[0]
        return [(index.group(block), block) for block in self._queue.in_order() if block in index]

    def check_ids(self, group: int, blocks: Sequence[int]) -> None:
        """Refuse ids that are not blocks of this pool."""
        check_block_ids(blocks, self.num_blocks)


def let_go(refs: memoryview, blocks: Sequence[int]) -> list[int]:
    """Take a reference from each of the blocks; returns those that nobody holds any more, in this order.

    Raises:
        BlockError: nobody holds one of them; no reference was taken.
    """
    free: list[int] = []
    for at, block in enumerate(blocks):
        left = refs[block] - 1
        if left < 0:
            for before in blocks[:at]:
                refs[before] += 1
            raise not_held(block)
        refs[block] = left
        if not left:
            free.append(block)
    return free


def check_block_ids(blocks: Sequence[int], end: int) -> None:
    """Refuse ids that are not below `end`, and the null block's.

    Raises:
        BlockError: there are such ids.
    """
    wrong = [block for block in blocks if not NULL < block < end]
    if wrong:
        raise BlockError(what="blocks", value=wrong, rule=f"must be ids from 1 to {end - 1}")
