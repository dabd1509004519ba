"""SlabPool: slabs that groups cut into blocks of their own size (k > 1). The same questions and changes as BlockPool.

A slab belongs to one group at a time; slab s holds that group's blocks s·k … s·k + k − 1. Blocks come from a partly
used slab of the own group, fewest free blocks first; else from a free slab; else what is older goes: the own least
recently used idle block, or the wholly idle slab of another group that was used longest ago. When few slabs are left
that nobody holds a block of, the idle blocks of the own slabs that are held anyway go first: what is scattered over
many slabs can be given to no other group.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Sequence

import numpy as np

from kvframe.blocks.arrays import items
from kvframe.blocks.errors import not_held
from kvframe.blocks.pool import check_block_ids
from kvframe.blocks.prefix import PrefixCache
from kvframe.blocks.queues import EvictionPolicy
from kvframe.checks import cdiv

NOBODY = -1
CLOSE = 16  # slabs are few when no more than one in so many is left


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
        self._is_idle = tuple(bytearray(num_slabs * k) for k in blocks_per_slab)
        self._idle = tuple(policy.make(num_slabs * k, None) for k in blocks_per_slab)
        self._cache = cache
        self._owner = [NOBODY] * num_slabs
        self._held = [0] * num_slabs  # blocks with references, by slab
        self._num_idle = [0] * num_slabs
        self._plain: list[list[int]] = [[] for _ in range(num_slabs)]
        self._last_use = [0] * num_slabs
        self._clock = 0
        self._free_slabs = list(range(num_slabs - 1, 0, -1))
        # Heaps, some of whose entries are stale: by group (plain blocks, slab), and (last use, wholly idle slab).
        self._fullest: list[list[tuple[int, int]]] = [[] for _ in groups]
        self._oldest: list[list[tuple[int, int]]] = [[] for _ in groups]
        self._mixed: list[dict[int, None]] = [{} for _ in groups]  # slabs with both held and idle blocks
        self._wholly_idle = 0
        # Blocks, plain and idle, in slabs that somebody holds a block of: no other group can have those slabs.
        self._pinned_room = [0 for _ in groups]
        self._reserved = [0 for _ in groups]
        self._others = 0  # slabs that other groups than the one that takes now will need
        self._close = num_slabs // CLOSE
        self._open_slab_zero()

    def _open_slab_zero(self) -> None:
        widest = min(self.blocks_per_slab)
        starts = [cdiv(k, widest) for k in self.blocks_per_slab]
        rest = [k - start for k, start in zip(self.blocks_per_slab, starts, strict=True)]
        group = rest.index(max(rest))
        self._held[0] = 1  # the null block
        self._owner[0] = group
        self._plain[0] = list(range(self.blocks_per_slab[group] - 1, starts[group] - 1, -1))
        self._settle(group, 0, 0, 1)

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
        return self._pinned_room[group] + self.num_free * self.blocks_per_slab[group]

    def missing(self, needs: Sequence[int], hits: Sequence[Sequence[int]] = (), spare: int = 0) -> int:
        """Slabs that lack for all groups to get `needs` and keep `hits`, with `spare` slabs left over; 0: it fits."""
        room = list(self._pinned_room)
        slabs = self.num_free - spare
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

    # --- taking ---

    def reserve(self, needs: Sequence[int]) -> None:
        """Say what the following `take`s will add up to, so that one group's choice leaves enough for the others."""
        self._reserved = list(needs)

    def take(self, group: int, count: int) -> list[int]:
        """Hand out blocks, whose keys are gone; the caller has asked `missing` and said `reserve`."""
        blocks: list[int] = []
        self._others = self._needed_by_others(group)
        while len(blocks) < count:
            lack = count - len(blocks)
            slab = self._fullest_slab(group)
            if slab is None:
                slab = self._next_slab(group)
            if slab is None:
                blocks += self._overwrite(group, lack)
            else:
                blocks += self._take_plain(group, slab, lack)
        self._reserved[group] = max(0, self._reserved[group] - count)
        return blocks

    def _fullest_slab(self, group: int) -> int | None:
        heap = self._fullest[group]
        while heap:
            plain, slab = heap[0]
            if self._owner[slab] == group and self._held[slab] and len(self._plain[slab]) == plain:
                return slab
            heapq.heappop(heap)
        return None

    def _take_plain(self, group: int, slab: int, most: int) -> list[int]:
        plain, refs, held = self._plain[slab], self._refs_at[group], self._held[slab]
        room = self._room(slab)
        blocks = plain[-most:]
        del plain[-most:]
        for block in blocks:
            refs[block] = 1
        self._held[slab] = held + len(blocks)
        self._settle(group, slab, room, held)
        return blocks

    def _next_slab(self, group: int) -> int | None:
        """A slab that becomes the group's, or None: an idle block of its own goes."""
        spare = self.num_free - self._others
        if spare <= 0 and self._pinned_room[group]:
            return None
        if self._free_slabs:
            return self._claim(group, self._free_slabs.pop())
        if spare <= self._close and self._mixed[group]:
            return None
        slab = self._oldest_idle_slab(group)
        if slab is None:
            return None
        idle = self._idle[group]
        own = idle.next() if len(idle) else None
        if own is not None and self._stamp_at[group][own] <= self._last_use[slab]:
            return None
        self._vacate(slab)
        return self._claim(group, self._free_slabs.pop())

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

    def _claim(self, group: int, slab: int) -> int:
        k = self.blocks_per_slab[group]
        self._owner[slab] = group
        self._plain[slab] = list(range(slab * k + k - 1, slab * k - 1, -1))
        self._wholly_idle += 1
        return slab

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

    def _free(self, slab: int) -> None:
        self._wholly_idle -= 1
        self._owner[slab] = NOBODY
        self._plain[slab] = []
        self._num_idle[slab] = 0
        self._free_slabs.append(slab)

    # --- one slab's counts ---

    def _room(self, slab: int) -> int:
        """What the slab adds to its group's pinned room."""
        return self._num_idle[slab] + len(self._plain[slab]) if self._held[slab] else 0

    def _settle(self, group: int, slab: int, room: int, held: int) -> None:
        """After a change of a slab's blocks: bring in line what is counted over all slabs.

        Args:
            room: its `_room` before.
            held: its held blocks before.
        """
        now = self._held[slab]
        self._pinned_room[group] += self._room(slab) - room
        self._wholly_idle += (now == 0) - (held == 0)
        if now and self._plain[slab]:
            heapq.heappush(self._fullest[group], (len(self._plain[slab]), slab))
        if now and self._num_idle[slab]:
            self._mixed[group][slab] = None
        else:
            self._mixed[group].pop(slab, None)

    def _leave_idle(self, group: int, slab: int, blocks: list[int]) -> None:
        """Idle blocks of a slab, which are out of their queue, get their first reference."""
        refs, flags = self._refs_at[group], self._is_idle[group]
        room, held = self._room(slab), self._held[slab]
        for block in blocks:
            refs[block], flags[block] = 1, 0
        self._num_idle[slab] -= len(blocks)
        self._held[slab] = held + len(blocks)
        self._settle(group, slab, room, held)

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
        refs, k = self._refs_at[group], self.blocks_per_slab[group]
        index = None if self._cache is None else self._cache.index_of[group]
        stamps, flags, self._clock = self._stamp_at[group], self._is_idle[group], self._clock + 1
        cached: list[int] = []
        slabs: dict[int, tuple[int, int]] = {}
        try:
            for block in blocks:
                left = refs[block] - 1
                if left < 0:
                    raise not_held(block)
                refs[block] = left
                if left:
                    continue
                slab = block // k
                if slab not in slabs:
                    slabs[slab] = (self._room(slab), self._held[slab])
                self._held[slab] -= 1
                if index is not None and block in index:
                    stamps[block], flags[block] = self._clock, 1
                    self._num_idle[slab] += 1
                    cached.append(block)
                else:
                    self._plain[slab].append(block)
        finally:
            self._idle[group].push_cached(cached)
            for slab, (room, held) in slabs.items():
                self._rest(group, slab, room, held)

    def _rest(self, group: int, slab: int, room: int, held: int) -> None:
        self._last_use[slab] = self._clock
        self._settle(group, slab, room, held)
        if self._held[slab]:
            return
        if self._num_idle[slab]:
            heapq.heappush(self._oldest[group], (self._clock, slab))
        else:
            self._free(slab)

    def forget(self, group: int, blocks: list[int]) -> None:
        """Blocks that nobody holds have lost their keys: of their group's idle blocks they go first."""
        self._idle[group].drop(blocks)
        self._idle[group].push_empty(blocks)

    # --- for snapshots and resizing ---

    def seize(self, group: int, blocks: Sequence[int]) -> None:
        """Hold these very blocks, each once, in a pool that has just been made."""
        k = self.blocks_per_slab[group]
        wanted = {block // k for block in blocks if self._owner[block // k] != group}
        self._free_slabs = [slab for slab in self._free_slabs if slab not in wanted]
        for slab in wanted:
            self._claim(group, slab)
        for block in blocks:
            slab = block // k
            room, held = self._room(slab), self._held[slab]
            self._plain[slab].remove(block)
            self._refs_at[group][block] = 1
            self._held[slab] = held + 1
            self._settle(group, slab, room, held)

    def idle(self) -> list[tuple[int, int]]:
        """(group, block) of all cached blocks that nobody holds, the least recently used first."""
        queues = (
            [(self._stamp_at[group][block], group, block) for block in queue.in_order()]
            for group, queue in enumerate(self._idle)
        )
        return [(group, block) for _, group, block in heapq.merge(*queues, key=operator.itemgetter(0))]

    def check_ids(self, group: int, blocks: Sequence[int]) -> None:
        """Refuse ids that are not blocks of the group."""
        check_block_ids(blocks, self.num_slabs * self.blocks_per_slab[group])
