"""SlabState: which slab is whose, and what its blocks are: the part of `SlabPool` that counts, and decides nothing."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Sequence

import numpy as np

from kvframe.blocks.arrays import items
from kvframe.blocks.pool import check_block_ids
from kvframe.blocks.prefix import PrefixCache
from kvframe.blocks.queues import EvictionPolicy
from kvframe.checks import cdiv

NOBODY = -1
CLOSE = 4  # slabs are few when no more than one in so many is left


class SlabState:
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

    # --- one slab ---

    def _claim(self, group: int, slab: int) -> int:
        k = self.blocks_per_slab[group]
        self._owner[slab] = group
        self._plain[slab] = list(range(slab * k + k - 1, slab * k - 1, -1))
        self._wholly_idle += 1
        return slab

    def _free(self, slab: int) -> None:
        self._wholly_idle -= 1
        self._owner[slab] = NOBODY
        self._last_use[slab] = 0
        self._plain[slab] = []
        self._num_idle[slab] = 0
        self._free_slabs.append(slab)

    def _room(self, slab: int) -> int:
        """What the slab adds to its group's pinned room."""
        return self._num_idle[slab] + len(self._plain[slab]) if self._held[slab] else 0

    def _settle(self, group: int, slab: int, room: int, held: int) -> None:
        """After a change of a slab's blocks: bring in line what is counted over all slabs.

        Args:
            room: its `_room` before.
            held: its held blocks before.
        """
        mixed = self._mixed[group]
        if not self._held[slab]:
            self._pinned_room[group] -= room
            if held:
                self._wholly_idle += 1
            if slab in mixed:
                del mixed[slab]
            return
        plain, idle = len(self._plain[slab]), self._num_idle[slab]
        self._pinned_room[group] += idle + plain - room
        if not held:
            self._wholly_idle -= 1
        if plain:
            heapq.heappush(self._fullest[group], (plain, slab))
        if idle:
            mixed[slab] = None
        elif slab in mixed:
            del mixed[slab]

    def _leave_idle(self, group: int, slab: int, blocks: list[int]) -> None:
        """Idle blocks of a slab, which are out of their queue, get their first reference."""
        refs, flags = self._refs_at[group], self._is_idle[group]
        room, held = self._room(slab), self._held[slab]
        for block in blocks:
            refs[block], flags[block] = 1, 0
        self._num_idle[slab] -= len(blocks)
        self._held[slab] = held + len(blocks)
        self._settle(group, slab, room, held)

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
