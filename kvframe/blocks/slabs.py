"""SlabPool: slabs that groups cut into blocks of their own size (k > 1). The same questions and changes as BlockPool.

A slab belongs to one group at a time; slab s holds that group's blocks s·k … s·k + k − 1. Blocks come from a partly
used slab of the own group, fewest free blocks first; else from a free slab; else what is older goes: the own least
recently used idle block, or the wholly idle slab of another group that was used longest ago.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from kvframe.blocks.arrays import items
from kvframe.blocks.errors import not_held
from kvframe.blocks.pool import check_block_ids
from kvframe.blocks.prefix import PrefixCache
from kvframe.blocks.queues import EvictionPolicy
from kvframe.checks import cdiv

NOBODY = -1


class SlabPool:
    """Slabs, each free or a group's; a group's blocks are plain (free), idle (free but cached), or held.

    Slab 0 holds the null block of every group in its first bytes, as many as the widest block has; the rest of it
    serves the group that gets most blocks out of it.

    Args:
        num_slabs: slab 0 included.
        blocks_per_slab: k, by group.
        policy: the eviction policy, for each group's idle blocks.
        cache: the prefix cache, with one id space a group; None without prefix caching.
    """

    def __init__(
        self,
        num_slabs: int,
        blocks_per_slab: Sequence[int],
        policy: EvictionPolicy,
        cache: PrefixCache | None,
    ) -> None:
        groups = range(len(blocks_per_slab))
        self.blocks_per_slab = tuple(blocks_per_slab)
        self.num_slabs = num_slabs
        self.refs = tuple(np.zeros(num_slabs * k, np.int32) for k in blocks_per_slab)
        self._refs_at = tuple(items(refs) for refs in self.refs)
        self._stamp_at = tuple(items(np.zeros(num_slabs * k, np.int64)) for k in blocks_per_slab)
        self._idle = tuple(policy.make(num_slabs * k, None) for k in blocks_per_slab)
        self._cache = cache
        self._owner = [NOBODY] * num_slabs
        self._held = [0] * num_slabs  # blocks with references, by slab
        self._num_idle = [0] * num_slabs
        self._plain: list[list[int]] = [[] for _ in range(num_slabs)]
        self._last_use = [0] * num_slabs
        self._clock = 0
        self._free_slabs = list(range(num_slabs - 1, 0, -1))
        self._fullest: list[list[tuple[int, int]]] = [
            [] for _ in groups
        ]  # heaps of (plain blocks, slab), some stale
        self._oldest: list[tuple[int, int]] = []  # heap of (last use, wholly idle slab), some stale
        self._wholly_idle = 0
        # Blocks, plain and idle, in slabs that somebody holds a block of: no other group can have those slabs.
        self._pinned_room = [0 for _ in groups]
        self._reserved = [0 for _ in groups]
        self._open_slab_zero()

    def _open_slab_zero(self) -> None:
        widest = min(self.blocks_per_slab)
        starts = [cdiv(k, widest) for k in self.blocks_per_slab]
        rest = [k - start for k, start in zip(self.blocks_per_slab, starts, strict=True)]
        group = rest.index(max(rest))
        self._held[0] = 1  # the null block
        self._owner[0] = group
        self._plain[0] = list(range(self.blocks_per_slab[group] - 1, starts[group] - 1, -1))
        self._pinned_room[group] = len(self._plain[0])
        self._note_plain(0)

    # --- questions ---

    @property
    def num_free(self) -> int:
        """Slabs that nobody holds a block of."""
        return len(self._free_slabs) + self._wholly_idle

    @property
    def num_held(self) -> int:
        """Blocks that requests hold, of all groups."""
        return sum(self._held) - 1

    def free_for(self, group: int) -> int:
        """Blocks that the group could get if no other group wanted any."""
        slabs = len(self._free_slabs) + self._wholly_idle
        return self._pinned_room[group] + slabs * self.blocks_per_slab[group]

    def missing(self, needs: Sequence[int], hits: Sequence[Sequence[int]] = (), spare: int = 0) -> int:
        """Slabs that lack for all groups to get `needs` and keep `hits`, with `spare` slabs left over; 0: it fits."""
        room = list(self._pinned_room)
        slabs = len(self._free_slabs) + self._wholly_idle - spare
        pinned: set[int] = set()
        for group, blocks in enumerate(hits):
            for block in blocks:
                if self._refs_at[group][block]:
                    continue
                slab = block // self.blocks_per_slab[group]
                if not self._held[slab] and slab not in pinned:
                    pinned.add(slab)
                    slabs -= 1
                    room[group] += self._num_idle[slab] + len(self._plain[slab])
                room[group] -= 1
        wanted = sum(
            cdiv(max(0, need - have), k)
            for need, have, k in zip(needs, room, self.blocks_per_slab, strict=True)
        )
        return max(0, wanted - slabs)

    # --- changes ---

    def reserve(self, needs: Sequence[int]) -> None:
        """Say what the following `take`s will add up to, so that one group's choice leaves enough for the others."""
        self._reserved = list(needs)

    def take(self, group: int, count: int) -> list[int]:
        """Hand out blocks, whose keys are gone; the caller has asked `missing` and said `reserve`."""
        blocks = [self._take_one(group) for _ in range(count)]
        if self._cache is not None:
            self._cache.drop_all(group, blocks)
        return blocks

    def _take_one(self, group: int) -> int:
        slab = self._fullest_slab(group)
        if slab is None:
            slab = self._next_slab(group)
        if slab is None:
            # The own idle block that is next to go; a slab that nobody holds yet may have plain ones beside it.
            slab = self._idle[group].next() // self.blocks_per_slab[group]
        if self._plain[slab]:
            block = self._plain[slab].pop()
            self._hold(group, block)
            self._note_plain(slab)
        else:
            (block,) = self._idle[group].take(1)
            self._leave_idle(group, block)
        self._reserved[group] = max(0, self._reserved[group] - 1)
        return block

    def _fullest_slab(self, group: int) -> int | None:
        heap = self._fullest[group]
        while heap:
            plain, slab = heap[0]
            if self._owner[slab] == group and self._held[slab] and len(self._plain[slab]) == plain:
                return slab
            heapq.heappop(heap)
        return None

    def _next_slab(self, group: int) -> int | None:
        """A slab that becomes the group's, or None: its own idle block goes."""
        idle = self._idle[group]
        others = sum(
            cdiv(max(0, need - room), k)
            for g, (need, room, k) in enumerate(
                zip(self._reserved, self._pinned_room, self.blocks_per_slab, strict=True)
            )
            if g != group
        )
        if self._pinned_room[group] and others >= len(self._free_slabs) + self._wholly_idle:
            self._bring_pinned_forward(group)
            return None
        if self._free_slabs:
            return self._claim(group, self._free_slabs.pop())
        slab = self._oldest_idle_slab(group)
        if slab is None:
            return None
        own = idle.next() if len(idle) else None
        if own is not None and self._stamp_at[group][own] <= self._last_use[slab]:
            return None
        self._vacate(slab)
        return self._claim(group, self._free_slabs.pop())

    def _bring_pinned_forward(self, group: int) -> None:
        # All slabs are spoken for: only idle blocks in slabs that are pinned anyway may go.
        idle, k = self._idle[group], self.blocks_per_slab[group]
        chosen = next(block for block in idle.in_order() if self._held[block // k])
        idle.drop([chosen])
        idle.push_empty([chosen])

    def _oldest_idle_slab(self, group: int) -> int | None:
        keep: list[tuple[int, int]] = []
        found = None
        while self._oldest:
            last_use, slab = self._oldest[0]
            valid = self._owner[slab] != NOBODY and not self._held[slab] and self._last_use[slab] == last_use
            if valid and self._owner[slab] != group:
                found = slab
                break
            entry = heapq.heappop(self._oldest)
            if valid:
                keep.append(entry)
        for entry in keep:
            heapq.heappush(self._oldest, entry)
        return found

    def _claim(self, group: int, slab: int) -> int:
        k = self.blocks_per_slab[group]
        self._owner[slab] = group
        self._plain[slab] = list(range(slab * k + k - 1, slab * k - 1, -1))
        self._wholly_idle += 1
        return slab

    def _vacate(self, slab: int) -> None:
        """A wholly idle slab loses its keys and becomes free."""
        group = self._owner[slab]
        k = self.blocks_per_slab[group]
        plain = set(self._plain[slab])
        idle = [block for block in range(slab * k, slab * k + k) if block not in plain]
        self._idle[group].drop(idle)
        if self._cache is not None:
            self._cache.drop_all(group, idle)
        self._free(slab)

    def _free(self, slab: int) -> None:
        self._wholly_idle -= 1
        self._owner[slab] = NOBODY
        self._plain[slab] = []
        self._num_idle[slab] = 0
        self._free_slabs.append(slab)

    def _note_plain(self, slab: int) -> None:
        if self._plain[slab]:
            heapq.heappush(self._fullest[self._owner[slab]], (len(self._plain[slab]), slab))

    def _hold(self, group: int, block: int) -> None:
        """A plain or idle block gets its first reference; it is out of its list."""
        slab = block // self.blocks_per_slab[group]
        self._refs_at[group][block] = 1
        self._held[slab] += 1
        if self._held[slab] == 1:
            self._pinned_room[group] += self._num_idle[slab] + len(self._plain[slab]) + 1
            self._wholly_idle -= 1
            self._note_plain(slab)
        self._pinned_room[group] -= 1

    def _leave_idle(self, group: int, block: int) -> None:
        self._num_idle[block // self.blocks_per_slab[group]] -= 1
        self._hold(group, block)

    def touch(self, group: int, blocks: list[int]) -> None:
        """Hold blocks that a request found."""
        refs = self._refs_at[group]
        for block in blocks:
            if refs[block]:
                refs[block] += 1
            else:
                self._idle[group].reuse([block])
                self._leave_idle(group, block)

    def give_back(self, group: int, blocks: list[int]) -> None:
        """Release blocks in this order; a slab whose last block is plain again goes back to the pool.

        Raises:
            BlockError: nobody holds one of them.
        """
        refs, k = self._refs_at[group], self.blocks_per_slab[group]
        self._clock += 1
        for block in blocks:
            left = refs[block] - 1
            if left < 0:
                raise not_held(block)
            refs[block] = left
            if left == 0:
                self._rest(group, block, block // k)

    def _rest(self, group: int, block: int, slab: int) -> None:
        cached = self._cache is not None and block in self._cache.index_of[group]
        self._stamp_at[group][block] = self._last_use[slab] = self._clock
        self._held[slab] -= 1
        if cached:
            self._num_idle[slab] += 1
            self._idle[group].push_cached([block])
        else:
            self._plain[slab].append(block)
            self._note_plain(slab)
        if self._held[slab]:
            self._pinned_room[group] += 1
            return
        self._pinned_room[group] -= self._num_idle[slab] + len(self._plain[slab]) - 1
        self._wholly_idle += 1
        if self._num_idle[slab]:
            heapq.heappush(self._oldest, (self._last_use[slab], slab))
        else:
            self._free(slab)

    def check_ids(self, group: int, blocks: Sequence[int]) -> None:
        """Refuse ids that are not blocks of the group."""
        check_block_ids(blocks, self.num_slabs * self.blocks_per_slab[group])
