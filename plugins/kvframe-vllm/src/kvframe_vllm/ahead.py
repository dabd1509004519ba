"""Ahead: all running requests that need something in a step get it in one call, before the scheduler asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    """

    def __init__(self, core: KVCacheManager, ledger: Ledger, rows: dict[str, Row]) -> None:
        self._core, self._ledger, self._rows = core, ledger, rows
        self._ready: dict[int, tuple[Row, int]] = {}  # by slot: the row, and the tokens it had

    def step(self, running: Iterable[Any], steady: Callable[[Any], bool]) -> None:
        """Give the rows that need something for one more token what they need.

        Args:
            running: vLLM's running requests.
            steady: whether the scheduler is about to compute exactly one token of a request.
        """
        self.take_back()
        rows, requests = self._due(running, steady)
        if len(rows) < 2:
            return  # the scheduler's own question costs as much
        slots = np.array([row.slot for row in rows], np.intp)
        computed = np.array([request.num_computed_tokens for request in requests], np.int32)
        if self._ledger.growing(slots, computed + 1) > self._core.num_free:
            return  # somebody will be preempted: let the scheduler decide who, in its order
        counts = self._core.ledger
        counts.computed[slots] = computed
        counts.known[slots] = [request.num_tokens for request in requests]
        for row, request in zip(rows, requests, strict=True):
            self._ledger.extend(row, request)
        flying = np.array([request.num_in_flight_tokens for request in requests], np.int32)
        before = self._core.tables.length[:, slots]
        result = self._core.step(slots, 1, in_flight=flying if flying.any() else 0, starts=False)
        self._ledger.wake_all(rows, slots)
        self._keep(rows, slots, before, computed.tolist(), {one.slot for one in result.refused})

    def _due(self, running: Iterable[Any], steady: Callable[[Any], bool]) -> tuple[list[Row], list[Any]]:
        find, rows, requests = self._rows.get, [], []
        for request in running:
            row = find(request.request_id)
            if row is None:
                continue
            after = request.num_computed_tokens + 1
            if after < row.due or not steady(request):
                continue
            final = min(after, request.num_tokens)
            if after >= row.grow or final >= row.keys or after - request.num_in_flight_tokens >= row.die:
                rows.append(row)
                requests.append(request)
        return rows, requests

    def _keep(self, rows: list[Row], slots: Any, before: Any, computed: list[int], refused: set[int]) -> None:
        tables = self._core.tables
        grown = (tables.length[:, slots] - before).tolist()
        # A row grows by one block a group at most; where it did not, the id read here is not used.
        last = [
            table[slots, np.minimum(start, table.shape[1] - 1)].tolist()
            for table, start in zip(tables.tables, before, strict=True)
        ]
        for place, row in enumerate(rows):
            if row.slot in refused:
                continue
            new = tuple(
                [ids[place]] if counts[place] else [] for ids, counts in zip(last, grown, strict=True)
            )
            row.ready, row.ready_at, row.due = Blocks(new), computed[place] + 1, 0
            self._ready[row.slot] = (row, computed[place])

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
