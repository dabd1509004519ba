"""Stepper: one call serves a whole batch. Only rows that cross a threshold are looked at."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvframe.blocks.arrays import ONE
from kvframe.blocks.batches import Batches
from kvframe.blocks.growth import Call, Growth, at_rows
from kvframe.blocks.keying import Keying
from kvframe.blocks.pool import BlockPool
from kvframe.blocks.results import Refused, StepResult
from kvframe.blocks.rowops import RowOps
from kvframe.blocks.singles import Singles
from kvframe.blocks.tails import Tails
from kvframe.blocks.wheel import Cohort, TimingWheel, Woken

Rows = npt.NDArray[np.intp]
ALL_SERVED = StepResult()
FEW = 40  # up to so many rows a loop costs less than numpy, whose calls find cold caches
MOVED = 48  # more rows than these are looked at anew, all of them, where they did not go on as before


class Stepper:
    """Runs steps: entries die, tables grow, blocks get keys, each kind for all rows before the next."""

    def __init__(self, ops: RowOps, keying: Keying, tails: Tails) -> None:
        self._ops, self._keying, self._ledger = ops, keying, ops.ledger
        # Where every group shares one set of block ids, the common events are done for all their rows at once.
        self._common: tuple[Singles, Batches] | None = None
        if isinstance(ops.pool, BlockPool):
            singles = Singles(ops, keying, ops.pool, tails)
            batches = Batches(ops, ops.pool, tails, singles)
            self._common, self._serve = (singles, batches), (singles.serve, batches.serve)
            self._count_free = ops.pool.count_free
        self._rules = tuple(ops.rules[g] for _, g in ops.ledger.kinds)
        self._woken = np.zeros(len(self._rules) * ops.ledger.rows, bool)
        self._by_row = np.zeros((2, ops.ledger.rows), np.intp)
        self._growth, self._limit = Growth(ops), ops.config.max_model_len
        self._first_growth, self._first_state, self._first_key = ops.ledger.cuts
        self._most = sum(rule.grows for rule in ops.rules)  # blocks that one more token can take
        self._views: tuple[Any, ...] = (-1,)
        self._wheel: TimingWheel | None = None
        self._steady = 0  # steps of one token for each of the same rows, one after another

    def step(self, slots: Any, new: Any, lookahead: int, in_flight: Any) -> StepResult:
        """Give every row of `slots` room for its new tokens; see `KVCacheManager.step`."""
        if slots.__class__ is int and new.__class__ is int and new == 1 and not lookahead:
            wheel = self._wheel
            if wheel is None or wheel.count != slots or wheel.in_flight is not in_flight:
                wheel = self._look_ahead(slots, in_flight)
            if wheel is not None:
                return self._turn(wheel)
        else:
            self._look_aside(slots)
        return self._compare(slots, new, lookahead, in_flight)

    # --- one token for each of the rows 0 … R − 1, as in the step before ---

    def _look_ahead(self, count: int, in_flight: Any) -> TimingWheel | None:
        """A wheel, from the third such step in a row on: what came once may not come again."""
        self._ledger.moved.clear()
        self._steady = self._steady + 1 if count == self._views[0] else 0
        self._wheel = None
        if self._steady > 1 and isinstance(in_flight, int):
            self._wheel = TimingWheel(self._ledger, count, in_flight, self._limit)
            self._look_up(self._wheel)
        return self._wheel

    def _look_up(self, wheel: TimingWheel) -> None:
        """Have what numpy will ask in the coming steps asked at once, while its code is warm."""
        if self._common is not None:
            for cohort in wheel.cohorts():
                if len(cohort.rows) > FEW:
                    self._common[1].look_up(cohort)

    def _look_aside(self, slots: Any) -> None:
        """Another kind of step is to come: the wheel bears it where it concerns few rows."""
        moved = self._ledger.moved
        if self._wheel is None:
            moved.clear()
        elif not isinstance(slots, int):
            moved += slots
        if isinstance(slots, int) or len(slots) > MOVED:
            self._wheel, self._steady = None, 0

    def _turn(self, wheel: TimingWheel) -> StepResult:
        woken = wheel.turn()
        self._ledger.computed_counts.one_more(wheel.count)
        if not woken:
            return ALL_SERVED
        if not self._run_surely(wheel, woken):
            steady, self._wheel, self._steady = self._steady, None, 0  # until all is done as it should be
            result = self._wake(woken, Call(None, wheel.count, 1, 0, wheel.in_flight))
            if result.refused:
                return result
            self._wheel, self._steady = wheel, steady
        wheel.put(woken)
        return ALL_SERVED

    def _run_surely(self, wheel: TimingWheel, woken: Woken) -> bool:
        """Do what needs no questions, in as few words as can be: each row that grows is sure to lack one block."""
        # A state that the kernel exports takes a place of its own in the table, and a key of its own.
        if not woken.sure or self._common is None or self._ops.notes.exported:
            return False
        free = self._count_free()
        if free < wheel.count * self._most and free < sum(self._count_blocks(cohort) for cohort in woken):
            return False
        behind, (few, many) = 1 + wheel.in_flight, self._serve
        for cohort in woken:
            if not (few if len(cohort.rows) <= FEW else many)[cohort.kind](cohort, behind):
                self._serve_each(cohort, behind, ())
        return True

    def _count_blocks(self, cohort: Cohort) -> int:
        """Blocks that the rows take, if each lacks one."""
        return len(cohort.rows) * len(self._ledger.groups[cohort.kind]) if self._grows(cohort) else 0

    def _grows(self, cohort: Cohort) -> bool:
        return self._first_growth <= cohort.kind < self._first_key

    def _serve_each(self, cohort: Cohort, behind: Any, refused: tuple[Refused, ...]) -> None:
        """Deaths and keys of rows for which they cannot be done at once."""
        if cohort.kind < self._first_growth:
            self._bury_each(cohort, behind)
        else:
            self._register_each(cohort, refused)

    # --- any step ---

    def _compare(self, slots: Any, new: Any, lookahead: int, in_flight: Any) -> StepResult:
        ledger = self._ledger
        rows: Rows | None = None
        if isinstance(slots, int):
            if self._views[0] != slots:
                self._views = self._dense_views(slots)
            count, limits, flat, woken = self._views
            computed = ledger.computed[:count]
            # A number that becomes an array costs more than the sum.
            np.add(computed, ONE if isinstance(new, int) and new == 1 else new, computed)
        else:
            rows = np.asarray(slots, np.intp)
            count, limits = len(rows), ledger.thresholds[:, rows]
            flat = self._woken[: limits.size]
            woken = flat.reshape(len(self._rules), count)
            computed = ledger.computed[rows] + (new if isinstance(new, int) else np.asarray(new, np.intp))
            ledger.computed[rows] = computed
        np.greater_equal(computed, limits, woken)
        if lookahead:
            growth = slice(self._first_growth, self._first_state)
            np.greater_equal(computed + lookahead, limits[growth], out=woken[growth])
        events = flat.nonzero()[0]
        if not events.size:
            return ALL_SERVED
        call = Call(rows, count, self._for_rows(0, rows, new), lookahead, self._for_rows(1, rows, in_flight))
        return self._wake(_by_kind(events.tolist(), count, None if rows is None else rows.tolist()), call)

    def _dense_views(self, count: int) -> tuple[Any, ...]:
        flat = self._woken[: len(self._rules) * count]
        woken = flat.reshape(len(self._rules), count)
        return count, self._ledger.thresholds[:, :count], flat, woken

    def _for_rows(self, which: int, rows: Rows | None, value: Any) -> Any:
        """A number, or numbers by place in the call, as numbers by row."""
        if isinstance(value, int):
            return value
        if rows is None:
            return np.asarray(value)
        self._by_row[which][rows] = value
        return self._by_row[which]

    def _wake(self, woken: Woken, call: Call) -> StepResult:
        """Do what the woken rows need, kind by kind: deaths, growth, keys."""
        growing = [cohort for cohort in woken if self._grows(cohort)]
        singly = not growing or self._grows_singly(growing, call)
        growth = [] if singly else self._growth.of(growing, call)
        behind = call.new + call.in_flight
        refused: tuple[Refused, ...] = ()
        for cohort in woken:
            if not singly and self._grows(cohort):
                if growth:
                    refused, growth = self._growth.serve(growth, call), []
                cohort.again = 0
                cohort.changed()
                continue
            serve = None if self._common is None else self._serve[len(cohort.rows) > FEW][cohort.kind]
            if cohort.kind >= self._first_key and (refused or self._ops.notes.exported):
                serve = None
            if serve is None or not serve(cohort, behind):
                self._serve_each(cohort, behind, refused)
        return StepResult(refused=refused) if refused else ALL_SERVED

    def _grows_singly(self, growing: list[Cohort], call: Call) -> bool:
        """Whether all growth is one block for each woken row, and the pool has them: deaths can only add to it."""
        blocks = 0
        for cohort in growing:
            kind, rows = cohort.kind, cohort.rows
            if self._common is None or kind >= self._first_state:
                return False
            if not isinstance(call.new, int) and not call.new.take(rows).all():
                return False
            if not self._common[len(rows) > FEW].grows_singly(cohort, call.lookahead):
                return False
            blocks += self._count_blocks(cohort)
        return blocks <= self._ops.pool.num_free

    def _bury_each(self, cohort: Cohort, behind: Any) -> None:
        """What the rows read no more is dead at the count that had settled when the step started."""
        computed, rule = self._ledger.computed_at, self._rules[cohort.kind]
        for row, gone in zip(cohort.rows, at_rows(behind, cohort), strict=True):
            self._ops.bury(rule, row, max(computed[row] - gone, 0))
        cohort.again = 0
        cohort.changed()

    def _register_each(self, cohort: Cohort, refused: tuple[Refused, ...]) -> None:
        """Key what became full in rows for which that cannot be done at once."""
        rule, stuck = self._rules[cohort.kind], {answer.slot for answer in refused}
        computed, known = self._ledger.computed_at, self._ledger.known_at
        for row in cohort.rows:
            if rule.publishing is not None and row not in stuck:
                self._keying.register_group(rule, rule.publishing, row, min(computed[row], known[row]))
        cohort.again = 0
        cohort.changed()
        cohort.waited = 0
        if cohort.sure:
            key_at = self._ledger.key_at[rule.index]
            gaps = {key_at[row] - computed[row] for row in cohort.rows}
            cohort.again = gaps.pop() if len(gaps) == 1 else 0


def _by_kind(events: list[int], count: int, rows: list[int] | None) -> Woken:
    """Events as kind x count + place in the call, in order; the rows by place, None where these are the same."""
    woken, end = Woken(), 0
    woken.sure = False
    for event in events:
        if event >= end:
            kind = event // count
            start, end = kind * count, kind * count + count
            cohort = Cohort(kind, [], sure=False)
            woken.append(cohort)
        cohort.rows.append(event - start if rows is None else rows[event - start])
    return woken
