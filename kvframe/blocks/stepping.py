"""Stepper: one call serves a whole batch. Only rows that cross a threshold are looked at."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvframe.blocks.batches import Batches
from kvframe.blocks.errors import BlockError
from kvframe.blocks.keying import Keying
from kvframe.blocks.pool import BlockPool
from kvframe.blocks.results import Refused, StepResult
from kvframe.blocks.rowops import RowOps
from kvframe.blocks.rules import GroupRule
from kvframe.blocks.singles import Singles
from kvframe.blocks.tails import Tails

Rows = npt.NDArray[np.intp]
Growing = tuple[GroupRule, int, int, int]  # rule, row, tokens before, tokens after
ALL_SERVED = StepResult()
FEW = 32  # up to so many events a row at a time costs less than numpy, whose calls find cold caches


class _Call(NamedTuple):
    """One call's arguments; numbers, or arrays by place in the call."""

    rows: Rows | None  # None: place i is row i
    places: int  # how many
    new: Any
    lookahead: int
    in_flight: Any


class _Part(NamedTuple):
    """The rows that one kind of event woke: lists, if they are few."""

    kind: int
    rule: GroupRule
    places: Any
    rows: Any


class Stepper:
    """Runs steps: entries die, tables grow, blocks get keys, each kind for all rows before the next."""

    def __init__(self, ops: RowOps, keying: Keying, tails: Tails) -> None:
        self._ops, self._keying, self._ledger = ops, keying, ops.ledger
        # Where every group shares one set of block ids, the common events are done for all their rows at once.
        self._fast = isinstance(ops.pool, BlockPool)
        if isinstance(ops.pool, BlockPool):
            self._singles, self._batches = Singles(ops, ops.pool), Batches(ops, ops.pool, tails)
        self._rules = tuple(ops.rules[g] for _, g in ops.ledger.kinds)
        self._woken = np.zeros(len(self._rules) * ops.ledger.rows, bool)
        self._limit = ops.config.max_model_len
        self._first_growth, self._first_state, self._first_key = ops.ledger.cuts
        self._starts = np.arange(1, len(self._rules))
        self._views: tuple[Any, ...] = (-1,)

    def step(self, slots: Any, new: Any, lookahead: int, in_flight: Any) -> StepResult:
        """Give every row of `slots` room for its new tokens; see `KVCacheManager.step`."""
        ledger = self._ledger
        rows: Rows | None = None
        if isinstance(slots, int):
            if self._views[0] != slots:
                self._views = self._dense_views(slots)
            count, computed, limits, flat, woken = self._views
            computed += new
        else:
            rows = np.asarray(slots, np.intp)
            count, limits = len(rows), ledger.thresholds[:, rows]
            flat = self._woken[: limits.size]
            woken = flat.reshape(len(self._rules), count)
            computed = ledger.computed[rows] + np.asarray(new, np.int32)
            ledger.computed[rows] = computed
        np.greater_equal(computed, limits, out=woken)
        if lookahead:
            growth = slice(self._first_growth, self._first_state)
            np.greater_equal(computed + lookahead, limits[growth], out=woken[growth])
        events = flat.nonzero()[0]
        if not events.size:
            return ALL_SERVED
        return self._wake(events, _Call(rows, count, new, lookahead, in_flight))

    def _dense_views(self, count: int) -> tuple[Any, ...]:
        ledger = self._ledger
        flat = self._woken[: len(self._rules) * count]
        woken = flat.reshape(len(self._rules), count)
        return count, ledger.computed[:count], ledger.thresholds[:, :count], flat, woken

    def _wake(self, events: Rows, call: _Call) -> StepResult:
        """Do what the woken rows need, kind by kind: deaths, growth, keys."""
        parts = self._by_kind(events, call)
        growing = [part for part in parts if self._first_growth <= part.kind < self._first_key]
        singly = self._fast and self._grows_singly(growing, call)
        if not singly:
            growth = self._growing(growing, call)
            self._check_length(growth, call)
        for part in parts:
            if part.kind < self._first_growth:
                self._bury(part, call)
        refused: tuple[Refused, ...] = ()
        if singly:
            for part in growing:
                self._engine(part).grow(part.rule, part.rows)
        elif growth:
            refused = self._grow(growth, call)
        for part in parts:
            if part.kind >= self._first_key:
                self._register(part, call, refused)
        return StepResult(refused=refused) if refused else ALL_SERVED

    def _by_kind(self, events: Rows, call: _Call) -> list[_Part]:
        count, parts = call.places, []
        if events.size <= FEW:
            kind = -1
            for event in events.tolist():
                if event // count != kind:
                    kind = event // count
                    places: list[int] = []
                    parts.append(_Part(kind, self._rules[kind], places, places))
                places.append(event - kind * count)
            if call.rows is not None:
                picked = call.rows.tolist()
                parts = [_Part(k, rule, at, [picked[place] for place in at]) for k, rule, at, _ in parts]
            return parts
        cuts = [0, *np.searchsorted(events, self._starts * count).tolist(), len(events)]
        for kind, (start, stop) in enumerate(itertools.pairwise(cuts)):
            if start < stop:
                at = events[start:stop] - kind * count
                rows = at if call.rows is None else call.rows[at]
                few = stop - start <= FEW
                parts.append(
                    _Part(kind, self._rules[kind], at.tolist() if few else at, rows.tolist() if few else rows)
                )
        return parts

    def _engine(self, part: _Part) -> Any:
        return self._singles if isinstance(part.rows, list) else self._batches

    def _grows_singly(self, growing: list[_Part], call: _Call) -> bool:
        """Whether all growth is one block for each woken row, and the pool has them: deaths can only add to it."""
        for part in growing:
            if part.kind >= self._first_state or not self._all_move(part, call):
                return False
            if not self._engine(part).grows_singly(part.rule, part.rows, call.lookahead):
                return False
        return not self._ops.pool.missing([sum([len(part.rows) for part in growing])])

    def _all_move(self, part: _Part, call: _Call) -> bool:
        return isinstance(call.new, int) or bool((np.asarray(call.new)[part.places] > 0).all())

    def _growing(self, growing: list[_Part], call: _Call) -> list[Growing]:
        computed = self._ledger.computed_at
        return [
            (part.rule, row, computed[row] - step, computed[row])
            for part in growing
            for row, step in zip(*self._loops(part, call.new), strict=True)
            if step
        ]

    def _loops(self, part: _Part, value: Any) -> tuple[list[int], list[int]]:
        """The part's rows, and each one's value of a number or an array by place."""
        rows = part.rows if isinstance(part.rows, list) else part.rows.tolist()
        return rows, [value] * len(rows) if isinstance(value, int) else np.asarray(value)[
            part.places
        ].tolist()

    def _check_length(self, growth: list[Growing], call: _Call) -> None:
        longest = max((after for _, _, _, after in growth), default=0)
        if longest > self._limit:
            self._ledger.computed[slice(call.places) if call.rows is None else call.rows] -= call.new
            rule = f"a request would grow beyond the longest of {self._limit} tokens"
            raise BlockError(what="num_new_tokens", value=longest, rule=rule)

    def _bury(self, part: _Part, call: _Call) -> None:
        """Give back what died before the step: at the count that has settled when it starts."""
        settled: Any
        if isinstance(part.rows, list):
            rows, moved = self._loops(part, call.new)
            _, flying = self._loops(part, call.in_flight)
            computed = self._ledger.computed_at
            settled = [computed[row] - n - f for row, n, f in zip(rows, moved, flying, strict=True)]
        else:
            gone = [
                value if isinstance(value, int) else np.asarray(value)[part.places]
                for value in (call.new, call.in_flight)
            ]
            settled = self._ledger.computed.take(part.rows) - (gone[0] + gone[1])
        if self._fast and self._engine(part).bury(part.rule, part.rows, settled):
            return
        rows, counts = self._loops(part, 0)[0], settled if isinstance(settled, list) else settled.tolist()
        for row, tokens in zip(rows, counts, strict=True):
            self._ops.bury(part.rule, row, max(tokens, 0))

    def _register(self, part: _Part, call: _Call, refused: tuple[Refused, ...]) -> None:
        if self._fast and not refused and self._engine(part).register(part.rule, part.rows):
            return
        stuck = {answer.slot for answer in refused}
        computed, known = self._ledger.computed_at, self._ledger.known_at
        for row, step in zip(*self._loops(part, call.new), strict=True):
            if part.rule.publishing is not None and row not in stuck and step:
                self._keying.register_group(
                    part.rule, part.rule.publishing, row, min(computed[row], known[row])
                )

    # --- a row at a time ---

    def _grow(self, growing: list[Growing], call: _Call) -> tuple[Refused, ...]:
        """Grow what must grow; rows that do not fit stay as they were and are refused."""
        ops = self._ops
        needs = [0] * len(ops.rules)
        for rule, row, start, after in growing:
            needs[rule.index] += ops.growth(rule, row, start, after, call.lookahead)
        if ops.pool.missing(needs):
            return self._grow_in_order(growing, call)
        ops.pool.reserve(needs)
        for rule, row, start, after in growing:
            ops.grow(rule, row, start, after, call.lookahead)
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
                names = (rule.group.name for rule in ops.rules)
                needed = dict(zip(names, needs, strict=True))
                refused.append(Refused(missing=missing, needed=needed, slot=row))
                self._ledger.computed_at[row] = start
                continue
            ops.pool.reserve(needs)
            for rule in rules:
                ops.grow(rule, row, start, after, call.lookahead)
        return tuple(refused)
