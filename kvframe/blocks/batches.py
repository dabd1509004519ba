"""Batches: the common events of many rows in numpy, where one row at a time would cost more.

Each method does rows that gain or lose exactly one entry and says whether it did; if not, `RowOps` and `Keying` do them
one by one. It changes what those would change, in the same order.

The number and the kind of numpy calls count here, not their size: between two steps of an engine their code goes cold.
`take` and assignment by an index array cost a third of an arithmetic call and a tenth of a reduction, so arrays are
compared as bytes, extremes are found by `argmax`, and constants are 0-d arrays.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvframe.blocks.pool import BlockPool
from kvframe.blocks.rowops import RowOps
from kvframe.blocks.rules import GroupRule
from kvframe.blocks.tails import Tails

Rows = npt.NDArray[np.intp]
ONE = np.array(1, np.intp)


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
        self._blocks = tuple(np.array(rule.block, np.int32) for rule in ops.rules)

    def bury(self, rule: GroupRule, rows: Rows, settled: Any) -> bool:
        """One entry of each row dies, if that is so for all of them."""
        g, ledger = rule.index, self._ledger
        wakes = rule.wakes
        if wakes is None:
            return False
        freed = ledger.freed[g].take(rows)
        now, after = settled + ONE, freed + ONE
        waking, following = wakes.take(after), wakes.take(after + ONE)
        # Awake for this entry and not yet for the next, and the row has it.
        if (waking > now).nonzero()[0].size or (following <= now).nonzero()[0].size:
            return False
        places = self._tables.starts[g].take(rows) + freed
        blocks = self._tables.flat[g].take(places).astype(np.intp)
        if not blocks[blocks.argmin()]:
            return False
        self._tables.flat[g][places] = 0
        self._tables.touch_many(g, rows, freed)
        if not self._pool.give_back_many(g, blocks):
            self._pool.give_back(g, blocks.tolist())  # shared blocks, which may come twice
        ledger.freed[g][rows] = after
        self._thresholds["die", g][rows] = following
        return True

    def grows_singly(self, rule: GroupRule, rows: Rows, lookahead: int) -> bool:
        """Whether each row lacks exactly one entry; never so beyond the longest request."""
        limits = self._thresholds["grow", rule.index].take(rows)
        tokens = self._ledger.computed.take(rows)
        if lookahead:
            tokens += lookahead
        return limits.tobytes() == tokens.tobytes() and bool(limits[limits.argmax()] <= self._limit)

    def grow(self, rule: GroupRule, rows: Rows) -> None:
        """One block for each row, which `grows_singly`. The pool has them."""
        g, tables, thresholds = rule.index, self._tables, self._thresholds["grow", rule.index]
        entries = tables.length[g].take(rows)
        places = tables.starts[g].take(rows) + entries
        blocks = self._pool.take_many(g, len(rows))
        self._tables.flat[g][places] = blocks
        tables.touch_many(g, rows, entries)
        tables.length[g][rows] = entries + ONE
        limits = thresholds.take(rows) + self._blocks[g]
        if limits[limits.argmax()] > self._limit:
            limits = np.minimum(limits, self._limit + 1)
        thresholds[rows] = limits
        if rule.group.zeroed:
            self._ops.fresh[g] += blocks.tolist()

    def register(self, rule: GroupRule, rows: Rows) -> bool:
        """Key the entry that became full in each row, if its hash is the row's last and the group publishes all.

        Rows whose hash has yet to come, since their tokens are known only after the step, stay awake.
        """
        g, registered, cache, publishing = (
            rule.index,
            self._ledger.registered[rule.index],
            self._ops.cache,
            rule.publishing,
        )
        if cache is None or publishing is None or not publishing.plain:
            return False
        limits = self._thresholds["key", g]
        ends, hashed = limits.take(rows), self._tails.hashed.take(rows)
        if hashed.tobytes() != ends.tobytes():
            if (hashed > ends).nonzero()[0].size:
                return False
            ready = (hashed == ends).nonzero()[0]
            if not ready.size:
                return True
            rows, ends = rows[ready], ends[ready]
        entries = registered.take(rows)
        places = self._tables.starts[g].take(rows) + entries
        blocks = self._tables.flat[g].take(places).astype(np.intp)
        if not blocks[blocks.argmin()] or cache.index_of[g].any_keyed(blocks):
            return False
        cache.add_whole(g, blocks, self._tails.last(rows), rows, ends)
        registered[rows] = entries + ONE
        limits[rows] = ends + self._blocks[g]
        return True
