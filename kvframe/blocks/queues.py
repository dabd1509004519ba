"""Free queues: blocks that nobody holds, in the order in which they are handed out. The eviction policy is the queue.

A policy is a name and a maker of such queues (`EvictionPolicy`); two ship, plugins bring more through
`kvframe_eviction_policies`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.blocks.arrays import FEW, items

Blocks = npt.NDArray[np.intp]  # block ids as numpy takes them for an index
Ids = npt.NDArray[np.int32]  # block ids as tables hold them


class FreeQueue(Protocol):
    """The blocks that nobody holds. Ids are above 0; a block is in the queue once or not at all."""

    def __len__(self) -> int:
        """Blocks in the queue."""

    def push_empty(self, blocks: list[int] | Blocks) -> None:
        """Add blocks without a key, to be handed out next, the first of them first."""

    def push_cached(self, blocks: list[int] | Blocks) -> None:
        """Add blocks whose content a later request may find, in the order in which they were given up."""

    @property
    def num_empty(self) -> int:
        """At least so many of the next blocks have no key, so that nothing is lost with them."""

    def take(self, count: int) -> list[int]:
        """Take the next `count` blocks out, to be overwritten; there are that many."""

    def take_many(self, count: int) -> Ids:
        """`take` as an array."""

    def reuse(self, blocks: list[int] | Blocks) -> None:
        """Take these blocks out, since a request has found them."""

    def drop(self, blocks: list[int] | Blocks) -> None:
        """Take these blocks out, since their content is gone."""

    def next(self) -> int:
        """The block that would be handed out next; there is one."""

    def in_order(self) -> list[int]:
        """All blocks, the next to be handed out first."""


class LruQueue:
    """Least recently used first: a ring buffer in which a block found again leaves a hole.

    Args:
        num_blocks: ids run below this.
        blocks: the blocks that are free at the start, in order.
    """

    def __init__(self, num_blocks: int, blocks: Blocks | None = None) -> None:
        size = 2 * num_blocks + 2
        self._ring, self._places = np.zeros(size, np.int32), np.arange(size, dtype=np.int32)
        self._where = np.zeros(num_blocks, np.int32)
        self._size, self._holes, self._spare = size, 0, max(num_blocks // 4, 8)
        self._ring_at, self._where_at = items(self._ring), items(self._where)
        self._place(np.zeros(0, np.int32) if blocks is None else blocks.astype(np.int32))
        self._empty_end = self._end  # the blocks before it were never cached, or their keys are gone

    def __len__(self) -> int:
        return self._end - self._start - self._holes

    @property
    def num_empty(self) -> int:
        """Blocks at the front that were pushed as empty; it may be below 0."""
        return self._empty_end - self._start

    def _place(self, blocks: npt.NDArray[np.int32]) -> None:
        # In the middle: on either side there is room for all blocks that are not here.
        self._start = (self._size - len(blocks)) // 2
        self._end = self._start + len(blocks)
        self._ring[self._start : self._end] = blocks
        self._where[blocks] = self._places[self._start : self._end]
        self._holes = 0

    def _centre(self) -> None:
        live = self._ring[self._start : self._end]
        empty = max(self.num_empty, 0)
        self._place(live[live > 0].copy())
        self._empty_end = self._start + empty

    def push_empty(self, blocks: list[int] | Blocks) -> None:
        """Add blocks at the front, the first of them first."""
        if self._start < len(blocks):
            self._centre()
        # Behind them there may be cached blocks in front of empty ones: those then count as cached.
        self._empty_end = max(self._empty_end, self._start)
        self._start -= len(blocks)
        self._write(self._start, blocks)

    def push_cached(self, blocks: list[int] | Blocks) -> None:
        """Add blocks at the back."""
        if self._end + len(blocks) > self._size:
            self._centre()
        self._write(self._end, blocks)
        self._end += len(blocks)

    def _write(self, start: int, blocks: list[int] | Blocks) -> None:
        if len(blocks) > FEW or isinstance(blocks, np.ndarray):
            self._ring[start : start + len(blocks)] = blocks
            # Of the array's own type: numpy scatters what it must cast ten times slower. Adding would cost more, too.
            self._where[blocks] = self._places[start : start + len(blocks)]
            return
        ring, where = self._ring_at, self._where_at
        for at, block in enumerate(blocks, start):
            ring[at] = block
            where[block] = at

    def take(self, count: int) -> list[int]:
        """Take the first `count` blocks."""
        taken: list[int] = self._ring_at[self._start : self._start + count].tolist()
        self._start += count
        while self._holes and 0 in taken:
            solid = [block for block in taken if block]
            self._holes -= len(taken) - len(solid)
            more = count - len(solid)
            taken = solid + self._ring_at[self._start : self._start + more].tolist()
            self._start += more
        return taken

    def take_many(self, count: int) -> Ids:
        """`take` as an array."""
        if self._holes:
            return np.array(self.take(count), np.int32)
        self._start += count
        taken: Ids = self._ring[self._start - count : self._start].copy()
        return taken

    def reuse(self, blocks: list[int] | Blocks) -> None:
        """Leave a hole where each block was."""
        if isinstance(blocks, np.ndarray):
            places = self._where.take(blocks)
            self._ring[places] = 0
            self._empty_end = min(self._empty_end, int(places.min(initial=self._size)))
        else:
            self._reuse_few(blocks)
        self._holes += len(blocks)
        if self._holes > self._spare:
            self._centre()

    drop = reuse

    def _reuse_few(self, blocks: list[int]) -> None:
        for block in blocks:
            at = self._where_at[block]
            self._ring_at[at] = 0
            self._empty_end = min(self._empty_end, at)  # no hole among the empty ones

    def next(self) -> int:
        """The least recently used block."""
        while not self._ring_at[self._start]:
            self._start += 1
            self._holes -= 1
        return self._ring_at[self._start]

    def in_order(self) -> list[int]:
        """All blocks, the least recently used first."""
        live = self._ring[self._start : self._end]
        ordered: list[int] = live[live > 0].tolist()
        return ordered


class FrequencyQueue:
    """Blocks that were found again outlive those that never were: a segmented queue that ages.

    Blocks given up for the first time wait in a trial queue and go first; blocks that were found since wait in a kept
    queue. When more than three quarters of the cached blocks are kept, the oldest of them go back on trial.
    """

    def __init__(self, num_blocks: int, blocks: Blocks | None = None) -> None:
        self._trial = LruQueue(num_blocks, blocks)
        self._kept = LruQueue(num_blocks)
        self._found = np.zeros(num_blocks, bool)
        self._is_kept = np.zeros(num_blocks, bool)

    def __len__(self) -> int:
        return len(self._trial) + len(self._kept)

    @property
    def num_empty(self) -> int:
        """Blocks at the front of those on trial that were pushed as empty."""
        return self._trial.num_empty

    def push_empty(self, blocks: list[int] | Blocks) -> None:
        """Add blocks at the front of those on trial."""
        self._found[blocks] = False
        self._trial.push_empty(blocks)

    def push_cached(self, blocks: list[int] | Blocks) -> None:
        """Add blocks to those kept if they were found again, else to those on trial."""
        kept = [block for block in blocks if self._found[block]]
        self._is_kept[kept] = True
        self._kept.push_cached(kept)
        self._trial.push_cached([block for block in blocks if not self._found[block]])
        excess = len(self._kept) - 3 * len(self) // 4
        if excess > 0:
            self._demote(excess)

    def _demote(self, count: int) -> None:
        aged = self._kept.take(count)
        self._is_kept[aged] = self._found[aged] = False
        self._trial.push_cached(aged)

    def take(self, count: int) -> list[int]:
        """Take blocks on trial first."""
        trial = min(count, len(self._trial))
        taken = self._trial.take(trial) + self._kept.take(count - trial)
        self._is_kept[taken] = self._found[taken] = False
        return taken

    def take_many(self, count: int) -> Ids:
        """`take` as an array."""
        return np.array(self.take(count), np.int32)

    def reuse(self, blocks: list[int] | Blocks) -> None:
        """Remember that these blocks were found."""
        self.drop(blocks)
        self._found[blocks] = True

    def drop(self, blocks: list[int] | Blocks) -> None:
        """Forget these blocks."""
        blocks = list(blocks)
        kept = [block for block in blocks if self._is_kept[block]]
        self._kept.drop(kept)
        self._trial.drop([block for block in blocks if not self._is_kept[block]])
        self._is_kept[kept] = False
        self._found[blocks] = False

    def next(self) -> int:
        """The oldest block on trial, else the oldest kept one."""
        return self._trial.next() if len(self._trial) else self._kept.next()

    def in_order(self) -> list[int]:
        """Those on trial, then those kept."""
        return self._trial.in_order() + self._kept.in_order()


@attrs.frozen(kw_only=True)
class EvictionPolicy:
    """A way to choose which cached block goes first.

    Args:
        name: how a configuration asks for it; one owner a name.
        make: (number of ids, blocks that are free at the start) to a queue.
    """

    name: str
    make: Callable[[int, Blocks | None], FreeQueue]


def builtin_policies() -> tuple[EvictionPolicy, ...]:
    """The policies that kvframe brings itself."""
    return (
        EvictionPolicy(name="lru", make=LruQueue),
        EvictionPolicy(name="frequency", make=FrequencyQueue),
    )
