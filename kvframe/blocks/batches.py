"""Batches: the common events of many rows in numpy, where one row at a time would cost more.

Each method does rows that gain or lose exactly one entry and says whether it did; if not, `RowOps` and `Keying` do them
one by one. It changes what those would change, in the same order.

The number and the kind of numpy calls count here, not their size: between two steps of an engine their code goes cold.
`take` and assignment by an index array cost a third of an arithmetic call and a tenth of a reduction, so arrays are
compared as bytes, and extremes are found in lists. What was looked up for a cohort is kept with it for the next time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvframe.blocks.pool import BlockPool
from kvframe.blocks.rowops import RowOps
from kvframe.blocks.rules import GroupRule
from kvframe.blocks.tails import Tails
from kvframe.blocks.wheel import Cohort

Rows = npt.NDArray[np.intp]
ONE = np.array(1, np.intp)


class _Facts(NamedTuple):
    """Of a cohort.

    Args:
        rows: the rows.
        about: of each row the entry that the event is about, that entry's place, and the count that wakes the row.
        room: how often all rows can go on to their next entries before one comes to the longest request.
        went_on: the entries followed those of the event before, so that they were blank when their blocks came.
    """

    rows: Rows
    about: Rows
    room: int
    went_on: bool


class Batches:
    """Vectorised forms of `RowOps.bury`, `grow` and `register_group`.

    Args:
        ops: the exact operations, and the state.
        pool: the pool, where groups share block ids.
        tails: the last hash of every row.
    """

    def __init__(self, ops: RowOps, pool: BlockPool, tails: Tails) -> None:
        self._ops, self._pool, self._tails = ops, pool, tails
        self._ledger, self._tables = ops.ledger, ops.tables
        self._longest = ops.config.max_model_len
        entries = {"die": self._ledger.freed, "grow": self._tables.length, "key": self._ledger.registered}
        self._arrays = {
            kind: (entries[event][g], ops.tables.starts[g], ops.ledger.thresholds[kind])
            for kind, (event, g) in enumerate(ops.ledger.kinds)
            if event in entries
        }
        # An entry on, a place on, a block of tokens on.
        self._next = tuple(np.array([[1], [1], [rule.block]], np.intp) for rule in ops.rules)

    def _facts(self, rule: GroupRule, cohort: Cohort) -> _Facts:
        if cohort.facts is None:
            entry_of, starts, limits_of = self._arrays[cohort.kind]
            rows = np.array(cohort.rows, np.intp)
            entries, limits = entry_of.take(rows), limits_of.take(rows)
            room = (self._longest - int(limits.max(initial=0))) // rule.block
            about = np.array((entries, starts.take(rows) + entries, limits), np.intp)
            cohort.facts = _Facts(rows, about, room, went_on=False)
        facts: _Facts = cohort.facts
        return facts

    def _advance(self, cohort: Cohort, facts: _Facts, about: Rows, again: int) -> None:
        """The next event is about each row's next entry."""
        entry_of, _, limits_of = self._arrays[cohort.kind]
        entry_of[facts.rows] = about[0]
        limits_of[facts.rows] = about[2]
        cohort.facts, cohort.again = _Facts(facts.rows, about, facts.room - 1, went_on=True), again

    def bury(self, rule: GroupRule, cohort: Cohort, behind: Any) -> bool:
        """One entry of each row dies, if that is so for all of them; see `Singles.bury`."""
        g, wakes = rule.index, rule.wakes
        if wakes is None:
            return False
        facts = self._facts(rule, cohort)
        rows, about = facts.rows, facts.about + self._next[g]
        surely = cohort.sure and rule.steady
        if not surely:
            about[2] = wakes.take(about[0] + ONE)
            if not self._one_dies(facts, about[2], behind):
                return False
        blocks = self._tables.flat[g].take(facts.about[1]).astype(np.intp)
        if 0 in blocks.tolist():
            return False
        self._tables.flat[g][facts.about[1]] = 0
        self._tables.touch_many(g, rows, facts.about[0])
        if not self._pool.give_back_many(g, blocks):
            self._pool.give_back(g, blocks.tolist())  # shared blocks, which may come twice
        self._advance(cohort, facts, about, rule.block if surely else 0)
        return True

    def _one_dies(self, facts: _Facts, following: Rows, behind: Any) -> bool:
        """Whether each row is awake for its entry, and not yet for the next."""
        gone = behind if isinstance(behind, int) else behind.take(facts.rows)
        now = self._ledger.computed.take(facts.rows) - gone + 1
        return bool((facts.about[2] <= now).all() and (following > now).all())

    def grows_singly(self, rule: GroupRule, cohort: Cohort, lookahead: int) -> bool:
        """Whether each row lacks exactly one entry; never so beyond the longest request."""
        facts = self._facts(rule, cohort)
        if cohort.sure and not lookahead:
            return True
        tokens = self._ledger.computed.take(facts.rows) + lookahead
        return bool((facts.about[2] == tokens).all() and (tokens <= self._longest).all())

    def grow(self, rule: GroupRule, cohort: Cohort) -> None:
        """One block for each row, which `grows_singly`. The pool has them."""
        g, facts = rule.index, self._facts(rule, cohort)
        blocks = self._pool.take_many(g, len(cohort.rows))
        self._tables.flat[g][facts.about[1]] = blocks
        self._tables.touch_many(g, facts.rows, facts.about[0])
        about, again = facts.about + self._next[g], rule.block
        if facts.room <= 0:
            about[2], again = np.minimum(about[2], self._longest + 1), 0
        self._advance(cohort, facts, about, again)
        if rule.group.zeroed:
            self._ops.fresh[g] += blocks.tolist()

    def register(self, rule: GroupRule, cohort: Cohort) -> bool:
        """Key the entry that became full in each row, if nothing else is to be done; see `Singles.register`."""
        g, cache, publishing = rule.index, self._ops.cache, rule.publishing
        if cache is None or publishing is None or not publishing.plain:
            return False
        facts = self._facts(rule, cohort)
        rows, ends = facts.rows, facts.about[2]
        if self._tails.hashed.take(rows).tobytes() != ends.tobytes():
            return False
        blocks = self._tables.flat[g].take(facts.about[1]).astype(np.intp)
        if not facts.went_on and (0 in blocks.tolist() or cache.index_of[g].num_keyed(blocks)):
            return False
        cache.add_few(g, blocks, self._tails.last(cohort.rows), rows, ends)
        self._advance(cohort, facts, facts.about + self._next[g], rule.block if cohort.sure else 0)
        return True
