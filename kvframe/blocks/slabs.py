"""SlabPool: slabs that groups cut into blocks of their own size (k > 1). The same questions and changes as BlockPool.

A slab belongs to one group at a time; slab s holds that group's blocks s·k … s·k + k − 1. Blocks come from a partly
used slab of the own group, fewest free blocks first; else from a free slab; else what is older goes: the own least
recently used idle block, or the wholly idle slab of another group that was used longest ago. When few slabs are left
that nobody holds a block of, the idle blocks of the own slabs that are held anyway go first: what is scattered over
many slabs can be given to no other group.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from kvframe.blocks.pool import let_go
from kvframe.blocks.slab_state import NOBODY, SlabState
from kvframe.checks import cdiv

UNKNOWN = -1  # slabs that other groups need: asked only when a new slab is
LEFT_BEHIND = 0  # the age of what was retired: older than all else
SOME = 16  # from so many blocks on numpy lets go faster than a loop
SCATTER = 64  # a group may leave one in so many of its blocks idle in slabs that are held


class SlabPool(SlabState):
    """Slabs that groups cut into blocks: takes, holds and gives back. See `SlabState` for the arguments."""

    # --- taking ---

    def reserve(self, needs: Sequence[int]) -> None:
        """Say what the following `take`s will add up to, so that one group's choice leaves enough for the others."""
        self._reserved = list(needs)

    def take(self, group: int, count: int) -> list[int]:
        """Hand out blocks, whose keys are gone; the caller has asked `missing` and said `reserve`."""
        blocks: list[int] = []
        self._others = UNKNOWN
        while len(blocks) < count:
            if self._fullest[group]:
                self._fill_up(group, count, blocks)
            lack = count - len(blocks)
            if not lack:
                break
            slab = self._next_slab(group)
            blocks += self._overwrite(group, lack) if slab is None else self._open(group, slab, lack)
        self._reserved[group] = max(0, self._reserved[group] - count)
        return blocks

    def _fill_up(self, group: int, count: int, blocks: list[int]) -> None:
        """Add plain blocks of partly used slabs, the fullest first, until there are `count`, or no more."""
        heap, owner, held, plain_of = self._fullest[group], self._owner, self._held, self._plain
        refs, mixed, idle = self._refs_at[group], self._mixed[group], self._num_idle
        lack, taken = count - len(blocks), 0
        while heap and lack:
            number, slab = heapq.heappop(heap)
            plain = plain_of[slab]
            if owner[slab] != group or not held[slab] or len(plain) != number:
                continue
            if number <= lack:
                some, plain_of[slab] = plain, []
            else:
                some, number = plain[-lack:], lack
                del plain[-lack:]
                heapq.heappush(heap, (len(plain), slab))
            for block in some:
                refs[block] = 1
            held[slab] += number
            if idle[slab]:
                mixed[slab] = None
            blocks += some
            taken += number
            lack -= number
        self._pinned_room[group] -= taken

    def _open(self, group: int, slab: int, most: int) -> list[int]:
        """Take plain blocks of a slab that the group has just got."""
        plain, refs = self._plain[slab], self._refs_at[group]
        blocks = plain[-most:]
        del plain[-most:]
        for block in blocks:
            refs[block] = 1
        self._held[slab] = len(blocks)
        self._settle(group, slab, 0, 0)
        return blocks

    def _next_slab(self, group: int) -> int | None:
        """A slab that becomes the group's, or None: an idle block of its own goes."""
        if self._others == UNKNOWN:
            self._others = self._needed_by_others(group)
        spare = self.num_free - self._others
        if spare <= 0 and self._pinned_room[group]:
            return None
        if self._free_slabs:
            return self._claim(group, self._free_slabs.pop())
        if spare <= self._close and self._mixed[group]:
            return None
        slab = self._oldest_idle_slab(group)
        idle = self._idle[group]
        own = idle.next() if len(idle) else None
        if own is not None and (slab is None or self._stamp_at[group][own] <= self._last_use[slab]):
            slab = self._own_idle_slab(group, own)
        if slab is None:
            return None
        self._vacate(slab)
        return self._claim(group, self._free_slabs.pop())

    def _own_idle_slab(self, group: int, oldest: int) -> int | None:
        """The group's own wholly idle slab to be filled anew, or None: its oldest idle block alone goes.

        One block alone pins a slab with all the others in it. A little of that does no harm; else slabs of many blocks
        would all be held by a few.
        """
        k = self.blocks_per_slab[group]
        if self._held[oldest // k] or self._pinned_room[group] * SCATTER <= self.num_slabs * k:
            return None
        heap = self._oldest[group]
        while heap and not self._is_wholly_idle(group, *heap[0]):
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def _needed_by_others(self, group: int) -> int:
        """Slabs that other groups lack for what is reserved."""
        others = 0
        for g, (need, room) in enumerate(zip(self._reserved, self._pinned_room, strict=True)):
            if need > room and g != group:
                others += cdiv(need - room, self.blocks_per_slab[g])
        return others

    def _overwrite(self, group: int, most: int) -> list[int]:
        """Take idle blocks of one own slab: the one held anyway if slabs are few, else that of the oldest block."""
        k, idle, flags = self.blocks_per_slab[group], self._idle[group], self._is_idle[group]
        mixed = self._mixed[group]
        if mixed and self.num_free - self._others <= self._close:
            slab = next(iter(mixed))
            blocks = [block for block in range(slab * k, slab * k + k) if flags[block]][-most:]
        else:
            oldest = idle.next()
            slab, stamps = oldest // k, self._stamp_at[group]
            # What was given up together with it is as old.
            blocks = [
                block
                for block in range(slab * k, slab * k + k)
                if flags[block] and stamps[block] == stamps[oldest]
            ][-most:]
        idle.drop(blocks)
        self._leave_idle(group, slab, blocks)
        if self._cache is not None:
            self._cache.drop_all(group, blocks)
        return blocks

    def _oldest_idle_slab(self, group: int) -> int | None:
        """The wholly idle slab of another group that was used longest ago."""
        found: tuple[int, int] | None = None
        for g, heap in enumerate(self._oldest):
            if g == group:
                continue
            while heap and not self._is_wholly_idle(g, *heap[0]):
                heapq.heappop(heap)
            if heap and (found is None or heap[0] < found):
                found = heap[0]
        return None if found is None else found[1]

    def _is_wholly_idle(self, group: int, last_use: int, slab: int) -> bool:
        return self._owner[slab] == group and not self._held[slab] and self._last_use[slab] == last_use

    def _vacate(self, slab: int) -> None:
        """A wholly idle slab loses its keys and becomes free."""
        group = self._owner[slab]
        k, flags = self.blocks_per_slab[group], self._is_idle[group]
        idle = [block for block in range(slab * k, slab * k + k) if flags[block]]
        for block in idle:
            flags[block] = 0
        self._idle[group].drop(idle)
        if self._cache is not None:
            self._cache.drop_all(group, idle)
        self._free(slab)

    # --- holding and giving back ---

    def touch(self, group: int, blocks: list[int]) -> None:
        """Hold blocks that a request found."""
        refs, k = self._refs_at[group], self.blocks_per_slab[group]
        idle: dict[int, list[int]] = {}
        for block in blocks:
            if refs[block]:
                refs[block] += 1
            else:
                idle.setdefault(block // k, []).append(block)
        for slab, found in idle.items():
            self._idle[group].reuse(found)
            self._leave_idle(group, slab, found)

    def give_back(self, group: int, blocks: list[int]) -> None:
        """Release blocks in this order; a slab whose last block is plain again goes back to the pool.

        Raises:
            BlockError: nobody holds one of them.
        """
        self._clock += 1
        if self._cache is None:
            self._release_plain(group, blocks)
        else:
            self._release(group, blocks, self._clock)

    def retire(self, group: int, blocks: list[int]) -> None:
        """Release blocks that are worth little to a later request: of what is cached they go first."""
        self._release(group, blocks, LEFT_BEHIND)

    def _release_plain(self, group: int, blocks: list[int]) -> None:
        """Release blocks where none has a key."""
        k = self.blocks_per_slab[group]
        slabs: dict[int, list[int]] = {}
        last, mine = NOBODY, []
        for block in self._let_go(group, blocks):
            slab = block // k
            if slab != last:  # what was taken together mostly lies together
                last, mine = slab, slabs.setdefault(slab, [])
            mine.append(block)
        # What `_rest` does, where nothing is ever idle.
        held, plain, fullest, gained = self._held, self._plain, self._fullest[group], 0
        for slab, free in slabs.items():
            mine = plain[slab]
            held[slab] -= len(free)
            if held[slab]:
                gained += len(free)
                mine += free
                heapq.heappush(fullest, (len(mine), slab))
            else:
                gained -= len(mine)
                self._wholly_idle += 1
                self._free(slab)
        self._pinned_room[group] += gained

    def _let_go(self, group: int, blocks: list[int]) -> list[int]:
        """Take a reference from each block; returns those that nobody holds any more."""
        if len(blocks) > SOME and len(set(blocks)) == len(blocks):
            held = np.array(blocks, np.intp)
            refs = self.refs[group].take(held)
            if refs.min() == refs.max() == 1:
                self.refs[group][held] = 0
                return blocks
        return let_go(self._refs_at[group], blocks)

    def _release(self, group: int, blocks: list[int], stamp: int) -> None:
        k, idle = self.blocks_per_slab[group], self._idle[group]
        index = None if self._cache is None else self._cache.index_of[group]
        stamps, flags = self._stamp_at[group], self._is_idle[group]
        cached: list[int] = []
        slabs: dict[int, tuple[int, int]] = {}
        for block in let_go(self._refs_at[group], blocks):
            slab = block // k
            if slab not in slabs:
                slabs[slab] = (self._room(slab), self._held[slab])
            self._held[slab] -= 1
            if index is not None and block in index:
                stamps[block], flags[block] = stamp, 1
                self._num_idle[slab] += 1
                cached.append(block)
            else:
                self._plain[slab].append(block)
        if stamp == LEFT_BEHIND:
            idle.push_empty(cached)
        else:
            idle.push_cached(cached)
        for slab, (room, held) in slabs.items():
            self._last_use[slab] = max(self._last_use[slab], stamp)
            self._rest(group, slab, room, held)

    def _rest(self, group: int, slab: int, room: int, held: int) -> None:
        self._settle(group, slab, room, held)
        if self._held[slab]:
            return
        if self._num_idle[slab]:
            heapq.heappush(self._oldest[group], (self._last_use[slab], slab))
        else:
            self._free(slab)

    def forget(self, group: int, blocks: list[int]) -> None:
        """Blocks that nobody holds have lost their keys: of their group's idle blocks they go first."""
        self._idle[group].drop(blocks)
        self._idle[group].push_empty(blocks)
