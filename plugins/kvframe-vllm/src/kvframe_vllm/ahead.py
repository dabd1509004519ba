"""Ahead: all running requests that need something in a step get it in one call, before the scheduler asks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvframe.blocks import KVCacheManager
from kvframe_vllm.rows import Ledger, Row
from kvframe_vllm.tables import Blocks


class Ahead:
    """Steps many rows at once, and keeps what each of them got until the scheduler asks for it.

    Args:
        core: the block manager.
        ledger: its counts.
        rows: running requests by id.
        nothing: the answer for a request that gets no block.
    """

    def __init__(self, core: KVCacheManager, ledger: Ledger, rows: dict[str, Row], nothing: Blocks) -> None:
        self._core, self._ledger, self._rows, self._nothing = core, ledger, rows, nothing
        self._ready: dict[int, tuple[Row, int]] = {}  # by slot: the row, and the tokens it had
        self._groups = len(core.config.groups)
        # Whoever is asked for tokens up to one below its next wake-up will need something in the next step.
        self.soon: dict[int, tuple[Row, Any]] = {}  # by slot, since a refused request is asked for again

    def step(self, steady: Callable[[Any], bool]) -> None:
        """Give the rows that need something for one more token what they need.

        Args:
            steady: whether the scheduler is about to compute exactly one token of a running request.
        """
        self.take_back()
        asked, self.soon = self.soon.values(), {}
        due = [(row, request) for row, request in asked if self._is_due(row, request) and steady(request)]
        if len(due) < 2:
            return  # the scheduler's own question costs as much
        rows, counts = [row for row, _ in due], [request.num_computed_tokens for _, request in due]
        growing = [place for place, row in enumerate(rows) if counts[place] >= row.grow - 1]
        slots, computed = np.array([row.slot for row in rows], np.intp), np.array(counts, np.int32)
        free = self._core.num_free
        if len(growing) * self._groups > free and self._ledger.growing(slots, computed + 1) > free:
            return  # somebody will be preempted: let the scheduler decide who, in its order
        self._ledger.settle_all(rows, slots, computed)
        flying = [request.num_in_flight_tokens for _, request in due]
        picked = slots[growing]
        before = self._core.tables.length[:, picked]
        result = self._core.step(
            slots, 1, in_flight=np.array(flying, np.int32) if any(flying) else 0, starts=False
        )
        self._ledger.wake_all(rows, slots)
        refused = {one.slot for one in result.refused}
        for row, count in zip(rows, counts, strict=True):
            if row.slot not in refused:
                row.ready, row.ready_at, row.due = self._nothing, count + 1, 0
                self._ready[row.slot] = (row, count)
        self._hand_out([rows[place] for place in growing], picked, before)

    def _is_due(self, row: Row, request: Any) -> bool:
        if self._rows.get(request.request_id) is not row:
            return False
        after: int = request.num_computed_tokens + 1
        if after < row.due:
            return False
        settled: int = after - request.num_in_flight_tokens
        return after >= row.grow or min(after, request.num_tokens) >= row.keys or settled >= row.die

    def _hand_out(self, rows: list[Row], slots: Any, before: Any) -> None:
        tables, parts = self._core.tables, []
        for table, start, stop in zip(tables.tables, before, tables.length[:, slots], strict=True):
            grown = (stop > start).tolist()  # by one block at most; where it did not grow, the id is not used
            ids = table[slots, np.minimum(start, table.shape[1] - 1)].tolist() if any(grown) else grown
            parts.append([[block] if new else [] for block, new in zip(ids, grown, strict=True)])
        for row, new in zip(rows, zip(*parts, strict=True), strict=True):
            if row.ready is not None and any(new):
                row.ready = Blocks(new)

    def consume(self, row: Row) -> Blocks | None:
        """What was allocated ahead for the row."""
        blocks, row.ready = row.ready, None
        self._ready.pop(row.slot, None)
        row.due = min(row.die, row.grow, row.keys)
        return blocks

    def forget(self, row: Row) -> None:
        """The row is released."""
        self._ready.pop(row.slot, None)

    def take_back(self) -> None:
        """Undo what nobody asked for: those requests were not scheduled after all."""
        while self._ready:
            _, (row, computed) = self._ready.popitem()
            row.ready = None
            self._core.roll_back([row.slot], [computed])
            self._ledger.wake(row)
