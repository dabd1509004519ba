"""BlockTables: one int32 array a group, a row a request; entry 0 is the null block, where nothing is alive."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvframe.blocks.arrays import ONE, items

Table = npt.NDArray[np.int32]
Places = npt.NDArray[np.intp]
Touched = tuple[int, list[int], list[int]]  # group, slots, the entry of each
MANY = 1024  # so many calls' changes are kept for whoever may read them


class DirtyRows(NamedTuple):
    """Rows of one group's table that changed, each in one range of entries; a row may come more than once.

    Args:
        group: index of the group.
        slots: the rows.
        starts, stops: their ranges of entries.
    """

    group: int
    slots: Places
    starts: Places
    stops: Places


class BlockTables:
    """The tables of all groups in one flat buffer, so that an engine can copy them to the device as they are.

    Args:
        rows: requests that can run at once.
        widths: entries of a row, by group.

    Attributes:
        touch_some: notes that one entry of each of some rows changed; what it is given is kept, and must not change.
    """

    def __init__(self, rows: int, widths: Sequence[int]) -> None:
        self.rows = rows
        self.buffer = np.zeros(rows * sum(widths), np.int32)
        ends = np.cumsum([rows * width for width in widths])
        self.tables: tuple[Table, ...] = tuple(
            self.buffer[end - rows * width : end].reshape(rows, width)
            for end, width in zip(ends.tolist(), widths, strict=True)
        )
        self.widths = tuple(widths)
        self.length = np.zeros((len(widths), rows), np.intp)
        # Where each row begins in its group's table, taken as one long row of places.
        self.starts: tuple[Places, ...] = tuple(np.arange(rows) * width for width in widths)
        self._ranges: list[list[int]] = [[] for _ in widths]  # slot, first entry, end, slot, first entry, …
        self._lists: deque[Touched] = deque(maxlen=MANY)  # once it is full, every row may have changed
        self.touch_some: Callable[[Touched], None] = self._lists.append  # no frame of its own on the hot path
        self._batches: list[DirtyRows] = []
        self._all_dirty = False
        self._cleared = np.zeros(max(widths), np.intp)  # kept: see `arrays.Gather`
        self._overflow = 16 * rows + 1024
        # The same memory by place, as arrays and for loops.
        self.flat: tuple[Table, ...] = tuple(table.reshape(-1) for table in self.tables)
        self.flat_at = tuple(items(table) for table in self.tables)
        self.length_at = tuple(items(row) for row in self.length)

    def row(self, group: int, slot: int) -> Table:
        """A request's entries, null blocks included: a view, valid until the next call."""
        return self.tables[group][slot, : self.length_at[group][slot]]

    def entries(self, group: int, slot: int) -> int:
        """How many entries a request has."""
        return self.length_at[group][slot]

    def get(self, group: int, slot: int, entry: int) -> int:
        """One entry."""
        return self.flat_at[group][slot * self.widths[group] + entry]

    def put(self, group: int, slot: int, entry: int, block: int) -> None:
        """Change one entry that the row has."""
        self.flat_at[group][slot * self.widths[group] + entry] = block
        self._touch_range(group, slot, entry, entry + 1)

    def append(self, group: int, slot: int, blocks: Sequence[int] | Table) -> None:
        """Add entries at the end of a row."""
        if not len(blocks):
            return
        start = self.length_at[group][slot]
        stop = start + len(blocks)
        self.length_at[group][slot] = stop
        if len(blocks) == 1:
            self.put(group, slot, start, int(blocks[0]))
        else:
            self.tables[group][slot, start:stop] = blocks
            self._touch_range(group, slot, start, stop)

    def cut(self, group: int, slot: int, start: int, stop: int) -> list[int]:
        """Null the entries [start, stop); returns the blocks that were there, the last first."""
        if stop - start == 1:
            block = self.get(group, slot, start)
            if block:
                self.put(group, slot, start, 0)
            return [block] if block else []
        view = self.tables[group][slot, start:stop]
        blocks: list[int] = view[view > 0][::-1].tolist()
        if blocks:
            view[:] = 0
            self._touch_range(group, slot, start, stop)
        return blocks

    def cut_end(self, group: int, slot: int, stop: int) -> list[int]:
        """Shorten a row to `stop` entries; returns the blocks that were beyond, the last first."""
        blocks = self.cut(group, slot, stop, self.length_at[group][slot])
        self.length_at[group][slot] = stop
        return blocks

    def clear_row(self, group: int, slot: int) -> Places:
        """Empty a row; returns its entries, the last first, null blocks too; they hold until the next call."""
        length = self.length_at[group][slot]
        row = self.tables[group][slot, :length]
        blocks: Places = self._cleared[:length]
        blocks[:] = row[::-1]
        row.fill(0)
        self.length_at[group][slot] = 0
        self._touch_range(group, slot, 0, length)
        return blocks

    def clear(self, group: int, slots: Places) -> tuple[Places, Places]:
        """Empty rows.

        Returns:
            Their blocks, row by row and the last of each first, and whose each is as a place in `slots`.
        """
        lengths, table = self.length[group].take(slots), self.flat[group]
        owners, ends = np.arange(len(slots)).repeat(lengths), lengths.cumsum()
        places = (self.starts[group].take(slots) + ends - ONE).take(owners) - np.arange(len(owners))
        blocks = table.take(places)
        table[places] = 0
        self.length[group][slots] = 0
        self.touch_many(group, slots, np.zeros_like(slots), lengths)
        used = blocks.nonzero()[0]
        return blocks.take(used).astype(np.intp), owners.take(used)

    def _touch_range(self, group: int, slot: int, start: int, stop: int) -> None:
        if self._all_dirty:
            return
        ranges = self._ranges[group]
        ranges += (slot, start, stop)
        if len(ranges) > self._overflow:
            self._mark_all()

    def touch_many(self, group: int, slots: Places, starts: Places, stops: Places) -> None:
        """Note that these rows changed in [starts, stops); the arrays are kept, and must not change after."""
        self._batches.append(DirtyRows(group, slots, starts, stops))
        if len(self._batches) > MANY:
            self._mark_all()

    def _mark_all(self) -> None:
        # Nobody takes note of the changes: remember only that every row may have changed.
        self._forget()
        self._all_dirty = True

    def _forget(self) -> None:
        self._ranges, self._batches = [[] for _ in self.widths], []
        self._lists.clear()
        self._all_dirty = False

    def take_dirty(self) -> list[DirtyRows]:
        """What changed since the last call; then all is clean."""
        if self._all_dirty or len(self._lists) == MANY:
            self._forget()
            slots = np.arange(self.rows)
            return [
                DirtyRows(g, slots, np.zeros_like(slots), np.full_like(slots, width))
                for g, width in enumerate(self.widths)
            ]
        changed, self._batches = self._batches, []
        if self._lists:
            changed += self._from_lists()
            self._lists.clear()
        if any(self._ranges):
            changed += self._from_ranges()
        return changed

    def _from_ranges(self) -> list[DirtyRows]:
        columns = [np.array(ranges, np.intp).reshape(-1, 3).T for ranges in self._ranges]
        self._ranges = [[] for _ in self.widths]
        return [DirtyRows(group, *parts) for group, parts in enumerate(columns) if parts.size]

    def _from_lists(self) -> list[DirtyRows]:
        # One array for all, since making one costs more than what is in it.
        numbers: list[int] = []
        for _, slots, entries in self._lists:
            numbers += slots
            numbers += entries
            numbers += [entry + 1 for entry in entries]
        every, at, changed = np.array(numbers, np.intp), 0, []
        for group, slots, _ in self._lists:
            count = len(slots)
            starts, stops, end = at + count, at + 2 * count, at + 3 * count
            changed.append(DirtyRows(group, every[at:starts], every[starts:stops], every[stops:end]))
            at = end
        return changed
