"""Stepper: one call serves a whole batch. Only rows that cross a threshold are looked at."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvframe.blocks.batches import Batches
from kvframe.blocks.errors import BlockError
from kvframe.blocks.keying import Keying
from kvframe.blocks.pool import BlockPool
from kvframe.blocks.results import Refused, StepResult
from kvframe.blocks.rowops import RowOps
from kvframe.blocks.rules import GroupRule, by_name
from kvframe.blocks.singles import Singles, by_kind
from kvframe.blocks.tails import Tails
from kvframe.blocks.wheel import TimingWheel

Rows = npt.NDArray[np.intp]
Growing = tuple[GroupRule, int, int, int]  # rule, row, tokens before, tokens after
ALL_SERVED = StepResult()
ONE = np.array(1, np.int32)
FEW = 48  # more rows than these are looked at anew, all of them, where they did not go on as before


class _Call(NamedTuple):
    """One call's arguments; numbers, or arrays by place in the call."""

    rows: Rows | None  # None: place i is row i
    places: int  # how many
    new: Any
    lookahead: int
    in_flight: Any


class _Part(NamedTuple):
    """The rows that one kind of event woke."""

    kind: int
    rule: GroupRule
    places: Rows
    rows: Rows


class Stepper:
    """Runs steps: entries die, tables grow, blocks get keys, each kind for all rows before the next."""

    def __init__(self, ops: RowOps, keying: Keying, tails: Tails) -> None:
        self._ops, self._keying, self._ledger = ops, keying, ops.ledger
        # Where every group shares one set of block ids, the common events are done for all their rows at once.
        self._singles = self._batches = None
        if isinstance(ops.pool, BlockPool):
            self._singles = Singles(ops, keying, ops.pool, tails)
            self._batches = Batches(ops, ops.pool, tails)
        self._rules = tuple(ops.rules[g] for _, g in ops.ledger.kinds)
        self._woken = np.zeros(len(self._rules) * ops.ledger.rows, bool)
        self._limit = ops.config.max_model_len
        self._first_growth, self._first_state, self._first_key = ops.ledger.cuts
        self._views: tuple[Any, ...] = (-1,)
        self._wheel: TimingWheel | None = None
        self._steady = 0  # steps of one token for each of the same rows, one after another
        # Keys of states are what changes the thresholds of another kind of event.
        self._crossing = frozenset(
            kind for kind, rule in enumerate(self._rules) if kind >= self._first_key and rule.state
        )

    def step(self, slots: Any, new: Any, lookahead: int, in_flight: Any) -> StepResult:
        """Give every row of `slots` room for its new tokens; see `KVCacheManager.step`."""
        if slots.__class__ is int and new.__class__ is int and new == 1 and not lookahead:
            wheel = self._wheel
            if wheel is None or wheel.count != slots or len(self._ledger.moved) > FEW:
                wheel = self._look_ahead(slots)
            if wheel is not None:
                return self._turn(wheel, in_flight)
        else:
            self._look_aside(slots)
        return self._compare(slots, new if isinstance(new, int) else np.asarray(new), lookahead, in_flight)

    # --- one token for each of the rows 0 … R − 1, as in the step before ---

    def _look_ahead(self, count: int) -> TimingWheel | None:
        """A wheel, from the third such step in a row on: what came once may not come again."""
        self._ledger.moved.clear()
        self._steady = self._steady + 1 if count == self._views[0] else 0
        self._wheel = TimingWheel(self._ledger, count) if self._steady > 1 else None
        return self._wheel

    def _look_aside(self, slots: Any) -> None:
        """Another kind of step is to come: the wheel bears it where it concerns few rows."""
        moved = self._ledger.moved
        if self._wheel is None:
            moved.clear()
        elif not isinstance(slots, int):
            moved += slots
        if isinstance(slots, int) or len(slots) > FEW:
            self._wheel, self._steady = None, 0

    def _turn(self, wheel: TimingWheel, in_flight: Any) -> StepResult:
        woken = wheel.turn()
        np.add(wheel.computed, ONE, wheel.computed)
        if not woken:
            return ALL_SERVED
        if self._singles is None or not self._singles.run(woken, None, 1, 0, _listed(in_flight)):
            self._wheel = None  # until all is done as it should be
            call = _Call(None, wheel.count, 1, 0, in_flight)
            result = self._wake(call, [self._part(call, *some) for some in woken])
            if result.refused:
                return result
            self._wheel = wheel
        for kind, rows in woken:
            if kind in self._crossing:
                self._ledger.moved += rows
            else:
                wheel.put(kind, rows)
        return ALL_SERVED

    # --- any step ---

    def _compare(self, slots: Any, new: Any, lookahead: int, in_flight: Any) -> StepResult:
        ledger = self._ledger
        rows: Rows | None = None
        if isinstance(slots, int):
            if self._views[0] != slots:
                self._views = self._dense_views(slots)
            count, computed, limits, flat, woken = self._views
            # A number that becomes an array costs more than the sum.
            np.add(computed, ONE if isinstance(new, int) and new == 1 else new, computed)
        else:
            rows = np.asarray(slots, np.intp)
            count, limits = len(rows), ledger.thresholds[:, rows]
            flat = self._woken[: limits.size]
            woken = flat.reshape(len(self._rules), count)
            computed = ledger.computed[rows] + (new if isinstance(new, int) else new.astype(np.int32))
            ledger.computed[rows] = computed
        np.greater_equal(computed, limits, woken)
        if lookahead:
            growth = slice(self._first_growth, self._first_state)
            np.greater_equal(computed + lookahead, limits[growth], out=woken[growth])
        events = flat.nonzero()[0]
        if not events.size:
            return ALL_SERVED
        places = by_kind(events.tolist(), count)
        if self._singles is not None:
            picked = None if rows is None else rows.tolist()
            if self._singles.run(places, picked, _listed(new), lookahead, _listed(in_flight)):
                return ALL_SERVED
        call = _Call(rows, count, new, lookahead, in_flight)
        return self._wake(call, [self._part(call, *some) for some in places])

    def _dense_views(self, count: int) -> tuple[Any, ...]:
        ledger = self._ledger
        flat = self._woken[: len(self._rules) * count]
        woken = flat.reshape(len(self._rules), count)
        return count, ledger.computed[:count], ledger.thresholds[:, :count], flat, woken

    def _part(self, call: _Call, kind: int, places: list[int]) -> _Part:
        """The rows that one kind of event woke, as arrays."""
        at = np.array(places, np.intp)
        return _Part(kind, self._rules[kind], at, at if call.rows is None else call.rows[at])

    def _wake(self, call: _Call, parts: list[_Part]) -> StepResult:
        """Do what the woken rows need, kind by kind: deaths, growth, keys."""
        batches = self._batches
        growing = [part for part in parts if self._first_growth <= part.kind < self._first_key]
        growth: list[Growing] = []
        if growing and (batches is None or not self._grows_singly(batches, growing, call)):
            growth = self._growing(growing, call)
            self._check_length(growth, call)
            growing = []
        for part in parts:
            if part.kind < self._first_growth:
                settled = self._settled(part, call)
                if batches is None or not batches.bury(part.rule, part.rows, settled):
                    self._bury(part, settled)
        if batches is not None:
            for part in growing:
                batches.grow(part.rule, part.rows)
        refused = self._grow(growth, call) if growth else ()
        for part in parts:
            if part.kind >= self._first_key and (
                refused or batches is None or not batches.register(part.rule, part.rows)
            ):
                self._register(part, call, refused)
        return StepResult(refused=refused) if refused else ALL_SERVED

    def _grows_singly(self, batches: Batches, growing: list[_Part], call: _Call) -> bool:
        """Whether all growth is one block for each woken row, and the pool has them: deaths can only add to it."""
        blocks = 0
        for kind, rule, places, rows in growing:
            moves = isinstance(call.new, int) or (call.new[places] > 0).all()
            if kind >= self._first_state or not moves or not batches.grows_singly(rule, rows, call.lookahead):
                return False
            blocks += len(rows)
        return blocks <= self._ops.pool.num_free

    def _growing(self, growing: list[_Part], call: _Call) -> list[Growing]:
        computed = self._ledger.computed_at
        return [
            (part.rule, row, computed[row] - step, computed[row])
            for part in growing
            for row, step in zip(part.rows.tolist(), _at(call.new, part), strict=True)
            if step
        ]

    def _check_length(self, growth: list[Growing], call: _Call) -> None:
        longest = max((after for _, _, _, after in growth), default=0)
        if longest > self._limit:
            self._ledger.computed[slice(call.places) if call.rows is None else call.rows] -= call.new
            rule = f"a request would grow beyond the longest of {self._limit} tokens"
            raise BlockError(what="num_new_tokens", value=longest, rule=rule)

    def _settled(self, part: _Part, call: _Call) -> Rows:
        """The tokens of the part's rows that had settled when the step started: what is dead is dead at that count."""
        gone = [v if isinstance(v, int) else np.asarray(v)[part.places] for v in (call.new, call.in_flight)]
        settled: Rows = self._ledger.computed.take(part.rows) - (gone[0] + gone[1])
        return settled

    # --- a row at a time ---

    def _bury(self, part: _Part, settled: Rows) -> None:
        for row, tokens in zip(part.rows.tolist(), settled.tolist(), strict=True):
            self._ops.bury(part.rule, row, max(tokens, 0))

    def _register(self, part: _Part, call: _Call, refused: tuple[Refused, ...]) -> None:
        stuck = {answer.slot for answer in refused}
        computed, known = self._ledger.computed_at, self._ledger.known_at
        for row, step in zip(part.rows.tolist(), _at(call.new, part), strict=True):
            if part.rule.publishing is not None and row not in stuck and step:
                self._keying.register_group(
                    part.rule, part.rule.publishing, row, min(computed[row], known[row])
                )

    def _grow(self, growing: list[Growing], call: _Call) -> tuple[Refused, ...]:
        """Grow what must grow; rows that do not fit stay as they were and are refused."""
        ops = self._ops
        needs = [0] * len(ops.rules)
        counts = [ops.growth(rule, row, start, after, call.lookahead) for rule, row, start, after in growing]
        for (rule, *_), count in zip(growing, counts, strict=True):
            needs[rule.index] += count
        if ops.pool.missing(needs):
            return self._grow_in_order(growing, call)
        ops.pool.reserve(needs)
        for (rule, row, start, after), count in zip(growing, counts, strict=True):
            ops.grow(rule, row, start, after, count)
        return ()

    def _grow_in_order(self, growing: list[Growing], call: _Call) -> tuple[Refused, ...]:
        """Not all fit: serve the rows in the order of the call, each as a whole or not at all."""
        ops, refused = self._ops, []
        counts = {row: (start, after) for _, row, start, after in growing}
        places = sorted(counts) if call.rows is None else [row for row in call.rows.tolist() if row in counts]
        rules = [rule for rule in ops.rules if rule.grows]
        for row in places:
            start, after = counts[row]
            needs = [0] * len(ops.rules)
            for rule in rules:
                needs[rule.index] = ops.growth(rule, row, start, after, call.lookahead)
            missing = ops.pool.missing(needs)
            if missing:
                refused.append(Refused(missing=missing, needed=by_name(ops.rules, needs), slot=row))
                self._ledger.computed_at[row] = start
                continue
            ops.pool.reserve(needs)
            for rule in rules:
                ops.grow(rule, row, start, after, needs[rule.index])
        return tuple(refused)


def _listed(value: Any) -> int | list[int]:
    """A number, or an array by place as a list."""
    listed: int | list[int] = value if isinstance(value, int) else np.asarray(value).tolist()
    return listed


def _at(value: Any, part: _Part) -> list[int]:
    """A number, or an array by place, as one number for each of the part's rows."""
    values: list[int] = [value] * len(part.rows) if isinstance(value, int) else value[part.places].tolist()
    return values
