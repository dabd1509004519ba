"""TimingWheel: which rows wake in each of the coming steps, while all of them move by one token a step.

A decoding batch crosses block boundaries at steps that are known long before: nothing need be compared with anything in
between. Timing wheels are Varghese and Lauck's (1987).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvframe.blocks.arrays import items
from kvframe.blocks.ledger import Ledger
from kvframe.blocks.rules import NEVER

SPAN = 512  # steps that a wheel looks ahead; what comes later is looked at again when these are over


class Cohort:
    """Rows that wake in the same step for one kind of event.

    Args:
        kind: the kind of event.
        rows: the rows, in order.
        sure: each row is at its threshold, or `waited` steps beyond if it is for a hash, and no threshold is beyond the
            longest request.
        waited: steps since its rows were at their thresholds.

    Attributes:
        again: after how many steps all of them wake again; 0: not all after the same. Whoever serves them sets it.
        facts: what `Batches` knows of the rows while nobody else changes them, None if it has to look.
        went_on: the entries that were keyed last followed those before, so that they were blank when their blocks came.
    """

    __slots__ = ("again", "facts", "kind", "rows", "sure", "waited", "went_on")

    def __init__(self, kind: int, rows: list[int], sure: bool, waited: int = 0) -> None:
        self.kind, self.rows, self.sure, self.waited = kind, rows, sure, waited
        self.again = 0
        self.facts: Any = None
        self.went_on = False

    def wait(self) -> None:
        """All its rows wait for their hashes: they wake in the next step, and stay together."""
        self.again, self.waited = 1, self.waited + 1

    def keyed(self, tokens: int) -> None:
        """All its rows were keyed, and are to be again when `tokens` more are full."""
        self.again = tokens - self.waited if self.sure else 0
        self.went_on, self.waited = True, 0

    def changed(self) -> None:
        """Rows came or went, or were not served like all others."""
        self.facts, self.went_on = None, False


# Serves a cohort, given how many of each row's computed tokens have not settled: one number, or an array by row. Says
# whether all rows were served.
Serve = Callable[[Cohort, Any], bool]


class Woken(list[Cohort]):
    """What wakes in one step: a cohort for each kind of event and steps waited, in this order.

    Attributes:
        sure: whether all of them are.
    """

    sure = True

    def find(self, kind: int, waited: int) -> tuple[int, bool]:
        """The place of the cohort of this kind that has waited so long, and whether it is there."""
        for at, cohort in enumerate(self):
            if cohort.kind > kind or (cohort.kind == kind and cohort.waited >= waited):
                return at, cohort.kind == kind and cohort.waited == waited
        return len(self), False


class TimingWheel:
    """The wake-ups of the rows 0 … count − 1.

    Whoever changes a row's counts or thresholds otherwise than by such a step says so in `ledger.moved`.

    Args:
        ledger: counts and thresholds.
        count: rows.
        in_flight: tokens that have not settled, of every row.
        longest: tokens that no request goes beyond.
        span: steps that it looks ahead.
    """

    def __init__(self, ledger: Ledger, count: int, in_flight: int, longest: int, span: int = SPAN) -> None:
        self.count, self.in_flight = count, in_flight
        self._ledger, self._longest = ledger, longest
        self._limits = tuple(items(limits) for limits in ledger.thresholds)
        self._keys = tuple(kind == "key" for kind, _ in ledger.kinds)
        self._delays = tuple(in_flight if kind == "die" else 0 for kind, _ in ledger.kinds)
        self._clock, self._span = 0, span
        self._slots: dict[int, Woken] = {}  # by step
        self._later: dict[int, Woken] = {}  # beyond the span: to be looked at again at that step
        self._cohort_of: list[list[Cohort | None]] = []
        for kind in range(len(self._limits)):
            self._fill(kind)

    def _fill(self, kind: int) -> None:
        """Place all rows for one kind of event."""
        span, limits = self._span, self._ledger.thresholds[kind, : self.count]
        distances = limits - self._ledger.computed[: self.count] + self._delays[kind]
        late = distances < 1
        slots = np.where((limits == NEVER) | late, 0, np.minimum(distances, span))
        counts = np.bincount(slots, minlength=span + 1)
        rows, ends = slots.argsort(kind="stable").tolist(), counts.cumsum().tolist()
        cohorts: list[Cohort | None] = [None] * (span + 1)
        for slot in counts.nonzero()[0].tolist():
            if slot:
                place = self._slots if slot < span else self._later
                cohort = cohorts[slot] = Cohort(kind, rows[ends[slot - 1] : ends[slot]], sure=True)
                place.setdefault(min(slot, span - 1), Woken()).append(cohort)
        cohort_of = [cohorts[slot] for slot in slots.tolist()]
        for row in (limits > self._longest).nonzero()[0].tolist():
            beyond = cohort_of[row]
            if beyond is not None:
                beyond.sure = False
                if slots[row] < span:
                    self._slots[int(slots[row])].sure = False
        self._cohort_of.append(cohort_of)
        computed = self._ledger.computed_at
        for row in late.nonzero()[0].tolist():
            self._join(kind, row, computed)

    def cohorts(self) -> Iterator[Cohort]:
        """All that will wake within the span."""
        for woken in self._slots.values():
            yield from woken

    def turn(self) -> Woken | None:
        """Go on by one step, before the rows do. What wakes is out of the wheel until it is `put` back."""
        if self._ledger.moved:
            moved, self._ledger.moved = self._ledger.moved, []
            for row in moved:
                if row < self.count:
                    self._move(row)
        at = self._clock + 1
        if at in self._later:
            for cohort in self._later.pop(at):
                self._scatter(cohort)
        self._clock = at
        return self._slots.pop(at, None)

    def put(self, woken: Woken) -> None:
        """Put rows where their thresholds now say; those beyond a threshold wake in the next step."""
        slots, clock, span, steps = self._slots, self._clock, self._span, woken[0].again
        if woken.sure and 0 < steps < span and clock + steps not in slots:
            for cohort in woken:
                if cohort.again != steps or not cohort.rows:
                    break
            else:  # most often they wake together again, and with nobody else
                slots[clock + steps] = woken
                return
        for cohort in woken:
            steps = cohort.again
            if not cohort.sure or not 0 < steps < span:
                self._scatter(cohort)
            elif cohort.rows:
                at = clock + steps
                if at in slots:
                    self._put_among(slots[at], cohort)
                else:
                    slots[at] = Woken((cohort,))

    def _put_among(self, slot: Woken, cohort: Cohort) -> None:
        at, there = slot.find(cohort.kind, cohort.waited)
        if not there:
            slot.insert(at, cohort)
            return
        other = slot[at]
        other.rows = sorted(other.rows + cohort.rows)
        other.changed()
        for row in cohort.rows:
            self._cohort_of[cohort.kind][row] = other

    def _scatter(self, cohort: Cohort) -> None:
        computed = self._ledger.computed_at
        for row in cohort.rows:
            self._join(cohort.kind, row, computed)

    def _move(self, row: int) -> None:
        computed = self._ledger.computed_at
        for kind, cohort_of in enumerate(self._cohort_of):
            cohort = cohort_of[row]
            if cohort is not None:
                cohort.rows.remove(row)
                cohort.changed()
            self._join(kind, row, computed)

    def _join(self, kind: int, row: int, computed: memoryview) -> None:
        """Place a row that is in no cohort."""
        limit = self._limits[kind][row]
        self._cohort_of[kind][row] = None
        if limit == NEVER:
            return
        distance = limit - computed[row] + self._delays[kind]
        if distance < self._span:
            slot = self._slots.setdefault(self._clock + max(distance, 1), Woken())
        else:
            slot = self._later.setdefault(self._clock + self._span - 1, Woken())
        # Rows that wait for their hashes stay together; all others of a kind are served in the order of the rows.
        waited = max(1 - distance, 0) if self._keys[kind] else 0
        at, there = slot.find(kind, waited)
        if not there:
            slot.insert(at, Cohort(kind, [], sure=True, waited=waited))
        cohort = slot[at]
        bisect.insort(cohort.rows, row)
        cohort.changed()
        if limit > self._longest or (distance < 1 and not self._keys[kind]):
            cohort.sure = slot.sure = False
        self._cohort_of[kind][row] = cohort
