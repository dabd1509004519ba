"""Blocks for a forward pass: asked of the manager in steps, with what layers read and write meanwhile worked out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvframe.blocks import Admission, Refused, Served
from kvframe_transformers.engine import Engine
from kvframe_transformers.forward import Forward, Numbers, Places, entries_of, state_blocks, still_own
from kvframe_transformers.rows import Row


def places_of(engine: Engine, rows: Sequence[Row]) -> Places:
    """Where a batch's tokens lie now."""
    return Places(
        manager=engine.manager,
        storage=engine.storage,
        slots=np.array([row.slot for row in rows], np.int64),
        pads=np.array([row.pad for row in rows], np.int64),
    )


def states_of(engine: Engine, rows: Sequence[Row], group: int, counts: Numbers) -> Numbers:
    """[B], the blocks that hold each row's state after so many tokens; 0 where there is none."""
    lifetime = engine.planned.blocks.groups[group].lifetime
    places = places_of(engine, rows)
    counts = np.where(places.slots < 0, 0, counts)
    return state_blocks(places.table(group), lifetime.block, counts, lifetime.fixed is not None)


class Taker:
    """Takes the blocks of one pass.

    Args:
        engine: whose blocks.
        rows: the batch.
        encoder_len: positions of the encoder, for rows that begin.
        unsettled: tokens of passes before that may still be taken back.
        make_room: asked for room when blocks are short; raises if there is none.
    """

    def __init__(
        self,
        engine: Engine,
        rows: Sequence[Row],
        *,
        encoder_len: int,
        unsettled: int,
        make_room: Callable[[Refused | None], None],
    ) -> None:
        self._engine, self._rows = engine, rows
        self._encoder_len, self._unsettled, self._make_room = encoder_len, unsettled, make_room

    def take(self, forward: Forward, *, whole: bool) -> None:
        """Blocks for all columns of a pass, a few at a time where earlier ones die meanwhile.

        Args:
            forward: the pass, completed in place; what was taken before an error is noted in it.
            whole: all at once.
        """
        engine, rows, new = self._engine, self._rows, forward.stop - forward.start
        before = np.array([row.count(forward.start) for row in rows], np.int64)
        after = np.array([row.count(forward.stop) for row in rows], np.int64)
        size = new if whole or engine.whole_steps else min(new, engine.step_tokens)
        if size < new:
            forward.recycled = {g: [] for g in engine.recycling}
            forward.early = self._early_reads(forward.start) if forward.start else {}
        forward.state_from = {g: states_of(engine, rows, g, before) for g in engine.state_groups}
        engine.manager.start_step()
        done = before
        while (done < after).any():
            goal = np.minimum(after, done + size)
            self._grow(goal - done)
            places = places_of(engine, rows)
            for group, entries in forward.recycled.items():
                entries += entries_of(places.table(group), engine.blocks[group], done, goal)
            done = goal
        forward.places = places_of(engine, rows)
        forward.recycled = {
            group: still_own(entries, self._keeper(group, forward.places))
            for group, entries in forward.recycled.items()
        }
        forward.stored_whole = 0 < forward.start >= max(row.pad for row in rows) and not forward.recycled
        forward.state_to = {g: states_of(engine, rows, g, after) for g in engine.state_groups}

    def _early_reads(self, start: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """What layers that give blocks back read, taken before later blocks of this pass take their place."""
        found, places = {}, places_of(self._engine, self._rows)
        for name, first in self._engine.first_columns(start).items():
            store = self._engine.storage.tokens[name]
            found[name] = store.read(places.slots_of(store.group, store.tokens, first, start))
        return found

    def _keeper(self, group: int, places: Places) -> Callable[[int, int, int], bool]:
        """Whether a block that this pass filled still holds what it was filled with: it is held, or it has its key."""
        table, engine = places.table(group), self._engine

        def keep(row: int, entry: int, block: int) -> bool:
            held = bool(table[row, entry] == block)
            return held or engine.has_key(group, block, int(places.slots[row]), entry)

        return keep

    def _grow(self, new: Numbers) -> None:
        """Blocks for new tokens of each row, all or an error."""
        engine = self._engine
        growing = [(row, int(count)) for row, count in zip(self._rows, new, strict=True) if count]
        counts = {row.slot: count for row, count in growing if row.slot >= 0}
        slots = list(counts)
        while slots:
            result = engine.manager.step(
                slots,
                np.array([counts[slot] for slot in slots], np.int32),
                in_flight=[self._unsettled] * len(slots),
                starts=False,
            )
            slots = [answer.slot for answer in result.refused if answer.slot is not None]
            if slots:
                self._make_room(result.refused[0])
        engine.run_copies()
        for row, count in growing:
            if row.slot < 0:
                row.slot = self._admitted(row, count)
        engine.run_copies()

    def _admitted(self, row: Row, count: int) -> int:
        engine = self._engine
        admission = Admission(
            request=row.request, num_new_tokens=count, encoder_tokens=self._encoder_len, hit=engine.no_hit
        )
        while True:
            (result,) = engine.manager.admit([admission], busy=False)
            if isinstance(result, Served):
                return result.slot
            self._make_room(result if isinstance(result, Refused) else None)
