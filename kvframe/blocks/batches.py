"""Batches: the common events of many rows in numpy, where one row at a time would cost more.

Each method does rows that gain or lose exactly one entry and says whether it did; if not, `RowOps` and `Keying` do them
one by one. It changes what those would change, in the same order.

The number and the kind of numpy calls count here, not their size: between two steps of an engine their code goes cold.
`take` and assignment by an index array cost a third of an arithmetic call and a tenth of a reduction, and a cast or an
array beyond the kilobyte that numpy keeps for itself costs more than all else. So arrays are compared as bytes, and
extremes are found in lists. What was looked up for a cohort is kept with it and changed in place.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvframe.blocks.arrays import ONE
from kvframe.blocks.pool import BlockPool
from kvframe.blocks.rowops import RowOps
from kvframe.blocks.singles import Singles
from kvframe.blocks.tails import Tails
from kvframe.blocks.wheel import Cohort, Serve

Rows = npt.NDArray[np.intp]


class _Facts:
    """Of a cohort of n rows.

    Args:
        rows: the rows.
        entries: the entry of each that the event is about; a new array each time, since the tables' readers keep it.
        rest: [2n]: the entries' places in the table, then the counts that wake the rows; changed in place.
        on: [2n]: what `rest` goes on by from one entry to the next.
        room: how often all rows can go on to their next entries before one comes to the longest request.
    """

    __slots__ = ("_on", "_rest", "entries", "limits", "places", "room", "rows")

    def __init__(self, rows: Rows, entries: Rows, rest: Rows, on: Rows, room: int) -> None:
        self.rows, self.entries, self.room = rows, entries, room
        self._rest, self._on = rest, on
        self.places, self.limits = rest[: len(rows)], rest[len(rows) :]

    def go_on(self, entries: Rows) -> None:
        """The next event is about these entries, which follow."""
        np.add(self._rest, self._on, self._rest)
        self.entries, self.room = entries, self.room - 1


class Batches:
    """Vectorised forms of `RowOps.bury`, `grow` and `register_group`.

    Args:
        ops: the exact operations, and the state.
        pool: the pool, where groups share block ids.
        tails: the last hash of every row.
        singles: the same for a few rows.
    """

    def __init__(self, ops: RowOps, pool: BlockPool, tails: Tails, singles: Singles) -> None:
        self._ops, self._pool, self._tails, self._singles = ops, pool, tails, singles
        self._ledger, self._tables = ops.ledger, ops.tables
        self._longest = ops.config.max_model_len
        serve = {"die": self.bury, "grow": self.grow, "state": self.grow, "key": self.register}
        self.serve: tuple[Serve, ...] = tuple(serve[kind] for kind, _ in ops.ledger.kinds)
        starts = ops.tables.starts
        self._at = tuple((rule, entries, starts[rule.index], limits) for rule, entries, limits in ops.by_kind)

    def look_up(self, cohort: Cohort) -> _Facts:
        """What is known of the cohort's rows while nobody else changes them."""
        if cohort.facts is None:
            rule, entry_of, starts, limits_of = self._at[cohort.kind]
            rows = np.array(cohort.rows, np.intp)
            entries, limits = entry_of.take(rows), limits_of.take(rows)
            room = (self._longest - int(limits.max(initial=0))) // rule.block
            rest = np.concatenate((starts.take(rows) + entries, limits))
            on = np.array((1, rule.block)).repeat(len(rows))  # a place, a block of tokens
            cohort.facts = _Facts(rows, entries, rest, on, room)
        facts: _Facts = cohort.facts
        return facts

    def _note(self, cohort: Cohort, facts: _Facts) -> None:
        """Write down which entry is next, and when."""
        _, entry_of, _, limits_of = self._at[cohort.kind]
        entry_of[facts.rows] = facts.entries
        limits_of[facts.rows] = facts.limits

    def bury(self, cohort: Cohort, behind: Any) -> bool:
        """One entry of each row dies, if that is so for all of them; see `Singles.bury`."""
        rule = self._at[cohort.kind][0]
        g, wakes = rule.index, rule.wakes
        if wakes is None:
            return False
        facts = self.look_up(cohort)
        following, limits = facts.entries + ONE, None
        if not (cohort.sure and rule.steady):
            limits = wakes.take(following + ONE)
            if not self._one_dies(facts, limits, behind):
                return False
        blocks = self._tables.flat[g].take(facts.places).astype(np.intp)
        if 0 in blocks.tolist():
            return False
        self._tables.flat[g][facts.places] = 0
        self._tables.touch_many(g, facts.rows, facts.entries, following)
        if not self._pool.give_back_many(g, blocks):
            self._pool.give_back(g, blocks.tolist())  # shared blocks, which may come twice
        facts.go_on(following)
        if limits is not None:
            facts.limits[:] = limits
        self._note(cohort, facts)
        cohort.again = rule.block if limits is None else 0
        return True

    def _one_dies(self, facts: _Facts, following: Rows, behind: Any) -> bool:
        """Whether each row is awake for its entry, and not yet for the next."""
        gone = behind if isinstance(behind, int) else behind.take(facts.rows)
        now = self._ledger.computed.take(facts.rows) - gone + 1
        return bool((facts.limits <= now).all() and (following > now).all())

    def grows_singly(self, cohort: Cohort, lookahead: int) -> bool:
        """Whether each row lacks exactly one entry; never so beyond the longest request."""
        facts = self.look_up(cohort)
        if cohort.sure and not lookahead:
            return True
        tokens = self._ledger.computed.take(facts.rows) + lookahead
        return bool((facts.limits == tokens).all() and (tokens <= self._longest).all())

    def grow(self, cohort: Cohort, behind: Any) -> bool:
        """One block for each row, which `grows_singly`. The pool has them."""
        rule, facts = self._at[cohort.kind][0], self.look_up(cohort)
        following = facts.entries + ONE
        for g in self._ledger.groups[cohort.kind]:
            blocks = self._pool.take_many(g, len(cohort.rows))
            self._tables.flat[g][facts.places] = blocks
            self._tables.touch_many(g, facts.rows, facts.entries, following)
            if g != rule.index:
                self._tables.length[g][facts.rows] = following
            if self._ops.rules[g].group.zeroed:
                self._ops.fresh[g] += blocks.tolist()
        facts.go_on(following)
        beyond = facts.room < 0
        if beyond:
            np.minimum(facts.limits, self._longest + 1, out=facts.limits)
        self._note(cohort, facts)
        cohort.again = 0 if beyond else rule.block
        return True

    def register(self, cohort: Cohort, behind: Any) -> bool:
        """Key the entry that became full in each row; see `Singles.register`."""
        if self._register_all(cohort):
            return True
        # What is not regular for all of the rows may be so for each.
        cohort.facts = None
        return self._singles.register(cohort, behind)

    def _register_all(self, cohort: Cohort) -> bool:
        """`register`, if nothing else is to be done for any of the rows."""
        rule, cache = self._at[cohort.kind][0], self._ops.cache
        g, publishing = rule.index, rule.publishing
        if cache is None or publishing is None or not publishing.regular or publishing.at_once > 1:
            return False
        facts = self.look_up(cohort)
        rows, ends = facts.rows, facts.limits
        prompts = None if publishing.plain or cohort.went_on else self._ledger.prompt.take(rows)
        if prompts is not None and (ends - publishing.clear < prompts).nonzero()[0].size:
            return False
        hashed = self._tails.hashed.take(rows)
        if hashed.tobytes() != ends.tobytes():
            waits = cohort.sure and not (hashed >= ends).nonzero()[0].size
            if waits:
                cohort.wait()
            return waits
        blocks = self._tables.flat[g].take(facts.places).astype(np.intp)
        if (rule.frees or not cohort.went_on) and 0 in blocks.tolist():
            return False  # an entry may die before its hash comes
        if not cohort.went_on and not cache.index_of[g].none_keyed(blocks):
            return False
        cache.add_few(g, blocks, self._tails.last(cohort.rows), rows, ends)
        if rule.state:
            self._ops.notes.keyed(g, blocks.tolist())
        facts.go_on(facts.entries + ONE)
        self._note(cohort, facts)
        cohort.keyed(rule.block)
        return True
