"""One forward pass of a batch: which slots it reads and writes, worked out once for all layers of a group."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import torch

from kvframe.blocks import KVCacheManager
from kvframe.ops import TokenMap, slot_mapping
from kvframe_transformers.planes import Plane
from kvframe_transformers.storage import Storage

Numbers = npt.NDArray[np.int64]
Entries = list[tuple[int, int, int]]  # row of the batch, entry, block


@attrs.define(kw_only=True, eq=False)
class Places:
    """Where a batch's tokens lie: its rows in the block tables, as they are now.

    Args:
        manager: whose tables.
        storage: on whose device slots are.
        slots: [B], rows of the tables, -1 for a sequence that has no token yet.
        pads: [B], columns before each sequence's first token.
    """

    manager: KVCacheManager
    storage: Storage
    slots: Numbers
    pads: Numbers

    def table(self, group: int) -> Numbers:
        """[B, entries], block ids."""
        return self.manager.tables.tables[group][self.slots].astype(np.int64)

    def slots_of(
        self, group: int, tokens: TokenMap, start: int, stop: int, *, encoder: bool = False
    ) -> torch.Tensor:
        """[B, stop - start], the slots of columns; those of the null block, which reads as zeros, where nothing is."""
        columns = torch.arange(start, stop, device=self.storage.device)
        pads = self.storage.index(np.zeros_like(self.pads) if encoder else self.pads)
        rows = torch.arange(len(self.slots), device=self.storage.device)
        table = self.storage.index(self.table(group))
        return slot_mapping(tokens, table, rows[:, None], columns[None] - pads[:, None])


@attrs.define(kw_only=True, eq=False)
class Forward:
    """What one forward pass reads and writes.

    Args:
        start, stop: its columns.
        unwritten: names of layers that have not stored theirs.
        places: where the batch's tokens lie once it has its blocks.
        stored_whole: all that layers see of it can be read back: no block has died in it, and nothing is padding.
        recycled: by group that gave blocks back within the pass, what is still to be written of it.
        early: by layer, what it reads, taken before its blocks were given back.
        state_from, state_to: by group of states, [B], the block to read and the block to write; 0: none.
    """

    start: int
    stop: int
    unwritten: set[str]
    places: Places = attrs.field(init=False)
    stored_whole: bool = False
    recycled: dict[int, Entries] = attrs.field(factory=dict)
    early: dict[str, tuple[torch.Tensor, torch.Tensor]] = attrs.field(factory=dict)
    state_from: dict[int, Numbers] = attrs.field(factory=dict)
    state_to: dict[int, Numbers] = attrs.field(factory=dict)
    _read: dict[tuple[int, int], torch.Tensor] = attrs.field(factory=dict)
    _whole: dict[tuple[int, int], torch.Tensor] = attrs.field(factory=dict)
    _seen: dict[Hashable, torch.Tensor] = attrs.field(factory=dict)
    _write: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = attrs.field(factory=dict)
    _stored: dict[Hashable, torch.Tensor] = attrs.field(factory=dict)

    def read_slots(self, group: int, tokens: TokenMap, first: int) -> torch.Tensor:
        """[B, start - first], where a layer finds the tokens that it stored before, from column `first` on."""
        if (group, first) not in self._read:
            self._read[group, first] = self.places.slots_of(group, tokens, first, self.start)
        return self._read[group, first]

    def seen_index(self, group: int, tokens: TokenMap, first: int, plane: Plane) -> torch.Tensor:
        """The rows of a plane that hold columns [first, stop), once they are stored."""
        key = (group, first, plane.key)
        if key not in self._seen:
            if (group, first) not in self._whole:
                self._whole[group, first] = self.places.slots_of(group, tokens, first, self.stop)
            self._seen[key] = plane.index(self._whole[group, first])
        return self._seen[key]

    def write_slots(self, group: int, tokens: TokenMap) -> tuple[torch.Tensor | None, torch.Tensor]:
        """What a group stores of this pass: positions in the flat [B * new] batch, None for all; and their slots."""
        if group not in self._write:
            found: tuple[torch.Tensor | None, torch.Tensor]
            if group in self.recycled:
                found = self._recycled_slots(group, tokens)
            else:
                slots = self.places.slots_of(group, tokens, self.start, self.stop).reshape(-1)
                chosen = (slots >= tokens.states).nonzero().squeeze(1)  # those of the null block come first
                found = (None, slots) if len(chosen) == len(slots) else (chosen, slots[chosen])
            self._write[group] = found
        return self._write[group]

    def write_index(self, group: int, tokens: TokenMap, plane: Plane) -> torch.Tensor:
        """The rows of a plane that `write_slots` stands for."""
        key = (group, plane.key)
        if key not in self._stored:
            self._stored[key] = plane.rows.of_tokens(self.write_slots(group, tokens)[1])
        return self._stored[key]

    def _recycled_slots(self, group: int, tokens: TokenMap) -> tuple[torch.Tensor, torch.Tensor]:
        """As `write_slots`, for blocks of which some are no longer in the tables."""
        new, block = self.stop - self.start, tokens.block
        entries = np.array(self.recycled[group], np.int64).reshape(-1, 3)
        positions = entries[:, 1, None] * block + np.arange(block)
        columns = positions + self.places.pads[entries[:, 0], None] - self.start
        inside = (columns >= 0) & (columns < new)
        flat = (entries[:, 0, None] * new + columns)[inside]
        slots = (entries[:, 2, None] * tokens.states + np.arange(block))[inside]
        index = self.places.storage.index
        return index(flat), index(slots)


def entries_of(table: Numbers, block: int, before: Numbers, after: Numbers) -> Entries:
    """The table entries that hold tokens [before, after) of each row."""
    found: Entries = []
    for row, (low, high) in enumerate(zip(before.tolist(), after.tolist(), strict=True)):
        for entry in range(low // block, -(-high // block)):
            if table[row, entry]:
                found.append((row, entry, int(table[row, entry])))
    return found


def still_own(entries: Sequence[tuple[int, int, int]], keep: Callable[[int, int, int], bool]) -> Entries:
    """The entries whose blocks nobody else has taken since; a block that came twice counts where it came last."""
    last: dict[int, tuple[int, int]] = {block: (row, entry) for row, entry, block in entries}
    return [
        (row, entry, block)
        for row, entry, block in dict.fromkeys(entries)
        if last[block] == (row, entry) and keep(row, entry, block)
    ]


def state_blocks(table: Numbers, block: int, counts: Numbers, fixed: bool) -> Numbers:
    """[B], the block that holds each row's state after so many tokens; 0 where there is none yet."""
    entry = np.zeros_like(counts) if fixed else np.maximum(counts - 1, 0) // block
    found: Any = np.take_along_axis(table, entry[:, None], 1)[:, 0]
    return np.where(counts > 0, found, 0)
