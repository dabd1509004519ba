"""Batches: the common events of many rows in numpy, where one row at a time would cost more.

Each method does rows that gain or lose exactly one entry and says whether it did; if not, `RowOps` and `Keying` do them
one by one. It changes what those would change, in the same order. The number of numpy calls counts here, not their
size: between two steps of an engine the code of each goes cold.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvframe.blocks.pool import BlockPool
from kvframe.blocks.rowops import RowOps
from kvframe.blocks.rules import NEVER, GroupRule
from kvframe.blocks.tails import Tails

Rows = npt.NDArray[np.intp]


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
        self._limit = ops.config.max_model_len
        self._thresholds = {kind: ops.ledger.thresholds[e] for e, kind in enumerate(ops.ledger.kinds)}
        self._flat = tuple(table.reshape(-1) for table in ops.tables.tables)
        # By entries that are dead already: the count that wakes the row for the next death.
        self._wakes = {
            rule.index: np.append(rule.deaths + 1, NEVER).clip(max=NEVER)
            for rule in ops.rules
            if rule.deaths is not None
        }

    def bury(self, rule: GroupRule, rows: Rows, settled: Any) -> bool:
        """One entry of each row dies, if that is so for all of them."""
        g, ledger = rule.index, self._ledger
        if rule.deaths is None:
            return False
        freed = ledger.freed[g].take(rows).astype(np.intp)
        wakes = self._wakes[g]
        following = wakes.take(freed + 2, mode="clip")
        # Awake for this entry and not yet for the next, and the row has it.
        if ((wakes.take(freed + 1, mode="clip") > settled + 1) | (following <= settled + 1)).any():
            return False
        places = rows * self._tables.widths[g] + freed
        blocks = self._flat[g].take(places).astype(np.intp)
        if not blocks.all():
            return False
        self._flat[g][places] = 0
        self._tables.touch_many(g, rows, freed)
        if not self._pool.give_back_many(g, blocks):
            self._pool.give_back(g, blocks.tolist())  # shared blocks, which may come twice
        ledger.freed[g][rows] = freed + 1
        self._thresholds["die", g][rows] = following
        return True

    def grows_singly(self, rule: GroupRule, rows: Rows, lookahead: int) -> bool:
        """Whether each row lacks exactly one entry; never so beyond the longest request."""
        limits = self._thresholds["grow", rule.index].take(rows)
        tokens = self._ledger.computed.take(rows)
        if lookahead:
            tokens += lookahead
        return bool((limits == tokens).all()) and int(limits.max()) <= self._limit

    def grow(self, rule: GroupRule, rows: Rows) -> None:
        """One block for each row. The pool has them."""
        g, tables = rule.index, self._tables
        entries = tables.length[g].take(rows).astype(np.intp)
        blocks = self._pool.take_many(g, len(rows))
        self._flat[g][rows * tables.widths[g] + entries] = blocks
        tables.touch_many(g, rows, entries)
        entries = entries + 1
        tables.length[g][rows] = entries
        room = (entries - rule.spare) * rule.block
        self._thresholds["grow", g][rows] = np.minimum(room, self._limit) + 1
        if rule.group.zeroed:
            self._ops.fresh[g] += blocks.tolist()

    def register(self, rule: GroupRule, rows: Rows) -> bool:
        """Key the entry that became full in each row, if its hash is the row's last and the group publishes all."""
        g, ledger, cache, publishing = rule.index, self._ledger, self._ops.cache, rule.publishing
        if cache is None or cache.watcher is not None or publishing is None or not publishing.plain:
            return False
        limits = self._thresholds["key", g]
        ends = limits.take(rows)
        if (self._tails.hashed.take(rows) != ends).any():
            return False
        entries = ends // rule.block
        blocks = self._flat[g].take(rows * self._tables.widths[g] + entries - 1).astype(np.intp)
        if cache.index_of[g].any_keyed_or_null(blocks):
            return False
        cache.add_whole(g, blocks, self._tails.last(rows))
        ledger.registered[g][rows] = entries
        limits[rows] = ends + rule.block
        return True
