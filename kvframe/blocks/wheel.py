"""TimingWheel: which rows wake in each of the coming steps, while all of them move by one token a step.

A decoding batch crosses block boundaries at steps that are known long before: nothing need be compared with anything in
between. Timing wheels are Varghese and Lauck's (1987).
"""

from __future__ import annotations

import numpy as np

from kvframe.blocks.arrays import items
from kvframe.blocks.ledger import Ledger
from kvframe.blocks.rules import NEVER

SPAN = 64  # steps that the wheel looks ahead, a power of two; what comes later is looked at again when these are over
_MASK = SPAN - 1

Woken = list[tuple[int, list[int]]]  # kinds of events, in order, each with its rows


class TimingWheel:
    """The wake-ups of the rows 0 … count − 1.

    Whoever changes a row's counts or thresholds otherwise than by such a step says so in `ledger.moved`.

    Args:
        ledger: counts and thresholds.
        count: rows.
    """

    def __init__(self, ledger: Ledger, count: int) -> None:
        self.count = count
        self.computed = ledger.computed[:count]
        self._ledger, self._computed_at = ledger, ledger.computed_at
        self._limits = tuple(items(limits) for limits in ledger.thresholds)
        self._clock = 0
        # By slot: the rows that wake then, by kind; and (kind, row) of those that come later than the wheel sees.
        self._slots: list[list[list[int]]] = [[[] for _ in self._limits] for _ in range(SPAN)]
        self._later: list[list[tuple[int, int]]] = [[] for _ in range(SPAN)]
        # By kind and row, the clock at which the row is in the wheel; what is not above the clock is over.
        self._due = [self._fill(kind) for kind in range(len(self._limits))]

    def _fill(self, kind: int) -> list[int]:
        """Place all rows for one kind of event, and say where."""
        limits = self._ledger.thresholds[kind, : self.count]
        distances = limits.astype(np.int64) - self.computed
        slots = np.where(limits == NEVER, 0, distances.clip(1, SPAN))
        rows, ends = (
            slots.argsort(kind="stable").tolist(),
            np.bincount(slots, minlength=SPAN).cumsum().tolist(),
        )
        for slot in range(1, SPAN):
            self._slots[slot][kind] = rows[ends[slot - 1] : ends[slot]]
        self._later[SPAN - 1] += [(kind, row) for row in rows[ends[SPAN - 1] :]]
        due: list[int] = slots.clip(max=SPAN - 1).tolist()
        return due

    def turn(self) -> Woken:
        """Go on by one step: the rows that wake, in order. They are out of the wheel until they are `put` back."""
        if self._ledger.moved:
            self._replace()
        clock = self._clock + 1
        later = self._later[clock & _MASK]
        if later:
            self._later[clock & _MASK] = []
            for kind, row in later:
                self.put(kind, (row,))
        self._clock = clock
        slot = self._slots[clock & _MASK]
        woken = [(kind, rows) for kind, rows in enumerate(slot) if rows]
        for kind, rows in woken:
            slot[kind] = []
            rows.sort()  # whoever comes first in a call is served first
        return woken

    def put(self, kind: int, rows: list[int] | tuple[int, ...]) -> None:
        """Put rows where their thresholds say; a row beyond its threshold wakes in the next step."""
        limits, computed, due, slots, clock = (
            self._limits[kind],
            self._computed_at,
            self._due[kind],
            self._slots,
            self._clock,
        )
        for row in rows:
            limit = limits[row]
            distance = limit - computed[row]
            if distance < SPAN:
                due[row] = at = clock + (distance if distance > 0 else 1)
                slots[at & _MASK][kind].append(row)
            elif limit != NEVER:
                due[row] = at = clock + SPAN - 1
                self._later[at & _MASK].append((kind, row))

    def _replace(self) -> None:
        """Rows that moved otherwise get their places anew."""
        moved, self._ledger.moved = self._ledger.moved, []
        for row in dict.fromkeys(moved):
            if row < self.count:
                for kind, due in enumerate(self._due):
                    if due[row] > self._clock:
                        self._take_out(kind, row, due[row] & _MASK)
                        due[row] = 0
                    self.put(kind, (row,))

    def _take_out(self, kind: int, row: int, slot: int) -> None:
        rows = self._slots[slot][kind]
        if row in rows:
            rows.remove(row)
        else:
            self._later[slot].remove((kind, row))
