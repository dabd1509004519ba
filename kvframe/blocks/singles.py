"""Singles: the common events of a few rows, as plain loops over the arrays' memory.

The same methods as `Batches`, which does them in numpy; up to some tens of rows a loop costs less.
"""

from __future__ import annotations

import numpy as np

from kvframe.blocks.arrays import items
from kvframe.blocks.pool import BlockPool
from kvframe.blocks.rowops import RowOps
from kvframe.blocks.rules import NEVER, GroupRule
from kvframe.blocks.tails import Tails


class Singles:
    """Rows that gain or lose exactly one entry, where all groups share block ids.

    Args:
        ops: the exact operations, and the state.
        pool: the pool.
        tails: the last hash of every row.
    """

    def __init__(self, ops: RowOps, pool: BlockPool, tails: Tails) -> None:
        self._ops, self._pool, self._tails = ops, pool, tails
        self._ledger, self._tables = ops.ledger, ops.tables
        self._limit = ops.config.max_model_len
        self._flat = tuple(items(table) for table in ops.tables.tables)
        self._length = tuple(items(row) for row in ops.tables.length)
        self._wakes = {
            rule.index: [death + 1 for death in rule.deaths_at] + [NEVER, NEVER]
            for rule in ops.rules
            if rule.deaths_at is not None
        }

    def bury(self, rule: GroupRule, rows: list[int], settled: list[int]) -> bool:
        """One entry of each row dies, if that is so for all of them."""
        g, ledger = rule.index, self._ledger
        wakes, freed, die_at = self._wakes.get(g), ledger.freed_at[g], ledger.die_at[g]
        if wakes is None:
            return False
        flat, width, blocks = self._flat[g], self._tables.widths[g], []
        for row, tokens in zip(rows, settled, strict=True):
            dead = freed[row]
            block = flat[row * width + dead]
            if not block or wakes[dead + 1] > tokens + 1 or wakes[dead + 2] <= tokens + 1:
                return False
            blocks.append(block)
        places = [row * width + freed[row] for row in rows]
        for row, place in zip(rows, places, strict=True):
            dead = freed[row]
            flat[place] = 0
            freed[row] = dead + 1
            die_at[row] = wakes[dead + 2]
        self._tables.touch(g, places)
        self._pool.give_back(g, blocks)
        return True

    def grows_singly(self, rule: GroupRule, rows: list[int], lookahead: int) -> bool:
        """Whether each row lacks exactly one entry; never so beyond the longest request."""
        computed, limits, longest = self._ledger.computed_at, self._ledger.grow_at[rule.index], self._limit
        for row in rows:
            if not computed[row] + lookahead == limits[row] <= longest:
                return False
        return True

    def grow(self, rule: GroupRule, rows: list[int]) -> None:
        """One block for each row. The pool has them."""
        g, longest, block_tokens = rule.index, self._limit + 1, rule.block
        flat, width, length, limits = (
            self._flat[g],
            self._tables.widths[g],
            self._length[g],
            self._ledger.grow_at[g],
        )
        blocks, places = self._pool.take(g, len(rows)), []
        for row, block in zip(rows, blocks, strict=True):
            entry = length[row]
            place = row * width + entry
            flat[place] = block
            length[row] = entry + 1
            places.append(place)
            limit = limits[row] + block_tokens
            limits[row] = limit if limit < longest else longest
        self._tables.touch(g, places)
        if rule.group.zeroed:
            self._ops.fresh[g] += blocks

    def register(self, rule: GroupRule, rows: list[int]) -> bool:
        """Key the entry that became full in each row, if its hash is the row's last and the group publishes all.

        Rows whose hash has yet to come, since their tokens are known only after the step, stay awake.
        """
        g, ledger, cache, publishing = rule.index, self._ledger, self._ops.cache, rule.publishing
        if cache is None or publishing is None or not publishing.plain:
            return False
        limits, registered, index = ledger.key_at[g], ledger.registered_at[g], cache.index_of[g]
        flat, width, hashed = self._flat[g], self._tables.widths[g], self._tails.hashed_at
        full, blocks = [], []
        for row in rows:
            end = limits[row]
            if hashed[row] < end:
                continue
            block = flat[row * width + registered[row]]
            if hashed[row] > end or not block or block in index:
                return False
            full.append(row)
            blocks.append(block)
        if cache.watcher is None:
            index.add_few(blocks, g, [self._tails.hash_of(row) for row in full])
        elif full:
            ids, slots = np.array(blocks, np.intp), np.array(full, np.intp)
            cache.add_whole(g, ids, self._tails.last(slots), slots, np.array([limits[row] for row in full]))
        for row in full:
            registered[row] += 1
            limits[row] += rule.block
        return True
