"""TimingWheel: which rows wake in each of the coming steps, while all of them move by one token a step.

A decoding batch crosses block boundaries at steps that are known long before: nothing need be compared with anything in
between. Timing wheels are Varghese and Lauck's (1987).
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Iterator
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
        sure: each row is at its threshold, not beyond, and no threshold is beyond the longest request.

    Attributes:
        again: after how many steps all of them wake again; 0: not all after the same. Whoever serves them sets it.
        facts: what `Batches` knows of the rows while nobody else changes them, None if it has to look.
        went_on: the entries that were keyed last followed those before, so that they were blank when their blocks came.
    """

    __slots__ = ("again", "facts", "kind", "rows", "sure", "went_on")

    def __init__(self, kind: int, rows: list[int], sure: bool) -> None:
        self.kind, self.rows, self.sure = kind, rows, sure
        self.again = 0
        self.facts: Any = None
        self.went_on = False

    def changed(self) -> None:
        """Rows came or went, or were not served like all others."""
        self.facts, self.went_on = None, False


Woken = list[Cohort]  # one for each kind of event, in the order of the kinds
_kind_of = operator.attrgetter("kind")


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
        self._delays = tuple(in_flight if kind == "die" else 0 for kind, _ in ledger.kinds)
        self._clock, self._span = 0, span
        self._slots: dict[int, Woken] = {}  # by step
        self._later: dict[int, Woken] = {}  # beyond the span: to be looked at again at that step
        self._cohort_of = [self._fill(kind) for kind in range(len(self._limits))]

    def _fill(self, kind: int) -> list[Cohort | None]:
        """Place all rows for one kind of event."""
        span, limits = self._span, self._ledger.thresholds[kind, : self.count]
        distances = limits - self._ledger.computed[: self.count] + self._delays[kind]
        slots = np.where(limits == NEVER, 0, distances.clip(1, span))
        unsure = ((distances < 1) | (limits > self._longest)).nonzero()[0].tolist()
        counts = np.bincount(slots, minlength=span + 1)
        rows, ends = slots.argsort(kind="stable").tolist(), counts.cumsum().tolist()
        cohorts: list[Cohort | None] = [None] * (span + 1)
        for slot in counts.nonzero()[0].tolist():
            if slot:
                place = self._slots if slot < span else self._later
                cohort = cohorts[slot] = Cohort(kind, rows[ends[slot - 1] : ends[slot]], sure=True)
                place.setdefault(min(slot, span - 1), []).append(cohort)
        cohort_of = [cohorts[slot] for slot in slots.tolist()]
        for row in unsure:
            cohort = cohort_of[row]
            if cohort is not None:
                cohort.sure = False
        return cohort_of

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
        steps = woken[0].again
        for cohort in woken:
            if cohort.again != steps or not cohort.sure:
                break
        else:  # most often they wake together again, and with nobody else
            if 0 < steps < self._span and self._clock + steps not in self._slots:
                self._slots[self._clock + steps] = woken
                return
        for cohort in woken:
            if cohort.sure and 0 < cohort.again < self._span:
                self._put_among(self._slots.setdefault(self._clock + cohort.again, []), cohort)
            else:
                self._scatter(cohort)

    def _put_among(self, slot: Woken, cohort: Cohort) -> None:
        kind = cohort.kind
        at = bisect.bisect_left(slot, kind, key=_kind_of)
        if at == len(slot) or slot[at].kind != kind:
            slot.insert(at, cohort)
            return
        other = slot[at]
        other.rows = sorted(other.rows + cohort.rows)
        other.changed()
        for row in cohort.rows:
            self._cohort_of[kind][row] = other

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
            slot = self._slots.setdefault(self._clock + max(distance, 1), [])
        else:
            slot = self._later.setdefault(self._clock + self._span - 1, [])
        at = bisect.bisect_left(slot, kind, key=_kind_of)
        if at == len(slot) or slot[at].kind != kind:
            slot.insert(at, Cohort(kind, [], sure=True))
        cohort = slot[at]
        bisect.insort(cohort.rows, row)
        cohort.changed()
        if distance < 1 or limit > self._longest:
            cohort.sure = False
        self._cohort_of[kind][row] = cohort
