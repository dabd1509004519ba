"""Growth: rows that grow by any number of entries, all of them at once or in the order of the call."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvframe.blocks.errors import BlockError
from kvframe.blocks.results import Refused
from kvframe.blocks.rowops import RowOps
from kvframe.blocks.rules import GroupRule, by_name
from kvframe.blocks.wheel import Cohort

Rows = npt.NDArray[np.intp]
Growing = tuple[GroupRule, int, int, int]  # rule, row, tokens before, tokens after


class Call(NamedTuple):
    """One call's arguments; numbers, or arrays by row."""

    rows: Rows | None  # in the order of the call; None: 0 … count − 1
    places: int  # how many
    new: Any
    lookahead: int
    in_flight: Any


def at_rows(value: Any, cohort: Cohort) -> list[int]:
    """A number, or an array by row, as one number for each of the rows."""
    values: list[int] = [value] * len(cohort.rows) if isinstance(value, int) else value[cohort.rows].tolist()
    return values


class Growth:
    """What growing rows need, and giving it to them.

    Args:
        ops: the exact operations, and the state.
    """

    def __init__(self, ops: RowOps) -> None:
        self._ops, self._ledger = ops, ops.ledger
        self._rules = tuple(tuple(ops.rules[g] for g in groups) for groups in ops.ledger.groups)
        self._limit = ops.config.max_model_len

    def of(self, growing: list[Cohort], call: Call) -> list[Growing]:
        """The rows that compute something, with their counts.

        Raises:
            BlockError: one would grow beyond the longest request; the call's rows have their counts back.
        """
        computed = self._ledger.computed_at
        growth = [
            (rule, row, computed[row] - step, computed[row])
            for cohort in growing
            for rule in self._rules[cohort.kind]
            for row, step in zip(cohort.rows, at_rows(call.new, cohort), strict=True)
            if step
        ]
        self._check_length(growth, call)
        return growth

    def _check_length(self, growth: list[Growing], call: Call) -> None:
        longest = max((after for _, _, _, after in growth), default=0)
        if longest > self._limit:
            rows: Any = slice(call.places) if call.rows is None else call.rows
            self._ledger.computed[rows] -= call.new if isinstance(call.new, int) else call.new[rows]
            rule = f"a request would grow beyond the longest of {self._limit} tokens"
            raise BlockError(what="num_new_tokens", value=longest, rule=rule)

    def serve(self, growing: list[Growing], call: Call) -> tuple[Refused, ...]:
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

    def _grow_in_order(self, growing: list[Growing], call: Call) -> tuple[Refused, ...]:
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
