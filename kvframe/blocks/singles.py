"""Singles: the common events of a few rows, as plain loops over the arrays' memory.

What `Batches` does in numpy; up to some tens of events a loop costs less.
"""

from __future__ import annotations

import numpy as np

from kvframe.blocks.hashing import DIGEST_BYTES
from kvframe.blocks.keying import Keying
from kvframe.blocks.pool import BlockPool
from kvframe.blocks.rowops import RowOps
from kvframe.blocks.rules import GroupRule
from kvframe.blocks.tails import Tails

Values = int | list[int]  # one number for all, or one for each place in the call
Woken = list[tuple[int, list[int]]]  # kinds of events, in order, each with the places of its rows in the call
FEW = 80  # up to so many events a row at a time costs less than numpy, whose calls find cold caches


def by_kind(events: list[int], count: int) -> Woken:
    """Events as kind x count + place, in order."""
    split: Woken = []
    end = 0
    for event in events:
        if event >= end:
            kind = event // count
            start, end = kind * count, kind * count + count
            places: list[int] = []
            split.append((kind, places))
        places.append(event - start)
    return split


class Singles:
    """Runs steps in which few rows wake, where all groups share block ids.

    Args:
        ops, keying: the exact operations, for rows that gain or lose more than one entry, and the state.
        pool: the pool.
        tails: the last hash of every row.
    """

    def __init__(self, ops: RowOps, keying: Keying, pool: BlockPool, tails: Tails) -> None:
        self._ops, self._keying, self._pool, self._tails = ops, keying, pool, tails
        self._ledger, self._tables = ops.ledger, ops.tables
        self._rules = tuple(ops.rules[g] for _, g in ops.ledger.kinds)
        self._first_growth, self._first_state, self._first_key = ops.ledger.cuts
        self._limit = ops.config.max_model_len

    def run(
        self, split: Woken, picked: list[int] | None, new: Values, lookahead: int, in_flight: Values
    ) -> bool:
        """Do what the woken rows need: deaths, growth, keys.

        Args:
            split: the places of the woken rows, by kind of event.
            picked: the row of each place; None: place i is row i.
            new, lookahead, in_flight: as in `KVCacheManager.step`.

        Returns:
            Whether it was done. If not, nothing was: there are too many, a row grows by more than one block, or the
            pool has too few.
        """
        if sum([len(places) for _, places in split]) > FEW:
            return False
        if not self._grow_singly(split, picked, new, lookahead):
            return False
        for kind, places in split:
            rows = places if picked is None else [picked[place] for place in places]
            if kind < self._first_growth:
                moved = self._at(new, places)
                flying = self._at(in_flight, places)
                self._bury(self._rules[kind], rows, moved, flying)
            elif kind < self._first_key:
                self._grow(self._rules[kind], rows)
            elif not self._register(self._rules[kind], rows):
                self._register_each(self._rules[kind], rows, self._at(new, places))
        return True

    @staticmethod
    def _at(values: Values, places: list[int]) -> Values:
        return values if isinstance(values, int) else [values[place] for place in places]

    def _grow_singly(
        self, split: list[tuple[int, list[int]]], picked: list[int] | None, new: Values, lookahead: int
    ) -> bool:
        """Whether all growth is one block for each woken row, and the pool has them: deaths can only add to it."""
        computed, longest, blocks = self._ledger.computed_at, self._limit, 0
        for kind, places in split:
            if not self._first_growth <= kind < self._first_key:
                continue
            if kind >= self._first_state:
                return False
            limits = self._ledger.grow_at[self._rules[kind].index]
            for place in places:
                row = place if picked is None else picked[place]
                moves = isinstance(new, int) or new[place]
                if not (moves and computed[row] + lookahead == limits[row] <= longest):
                    return False
            blocks += len(places)
        return blocks <= self._pool.num_free

    def _bury(self, rule: GroupRule, rows: list[int], moved: Values, flying: Values) -> None:
        """One entry of each row dies, or the exact way is taken for all of them."""
        computed = self._ledger.computed_at
        if isinstance(moved, int) and isinstance(flying, int):
            settled = [computed[row] - moved - flying for row in rows]
        else:
            steps = [moved] * len(rows) if isinstance(moved, int) else moved
            waits = [flying] * len(rows) if isinstance(flying, int) else flying
            settled = [computed[row] - n - f for row, n, f in zip(rows, steps, waits, strict=True)]
        if not self._bury_singly(rule, rows, settled):
            for row, tokens in zip(rows, settled, strict=True):
                self._ops.bury(rule, row, max(tokens, 0))

    def _bury_singly(self, rule: GroupRule, rows: list[int], settled: list[int]) -> bool:
        g, ledger = rule.index, self._ledger
        wakes, freed, die_at = rule.wakes_at, ledger.freed_at[g], ledger.die_at[g]
        if wakes is None:
            return False
        flat, width, blocks, places = self._tables.flat_at[g], self._tables.widths[g], [], []
        for row, tokens in zip(rows, settled, strict=True):
            dead = freed[row]
            place = row * width + dead
            block = flat[place]
            if not block or wakes[dead + 1] > tokens + 1 or wakes[dead + 2] <= tokens + 1:
                return False
            blocks.append(block)
            places.append(place)
        for row, place in zip(rows, places, strict=True):
            dead = freed[row]
            flat[place] = 0
            freed[row] = dead + 1
            die_at[row] = wakes[dead + 2]
        self._tables.touch(g, places)
        self._pool.give_back(g, blocks)
        return True

    def _grow(self, rule: GroupRule, rows: list[int]) -> None:
        """One block for each row. The pool has them."""
        g, longest, tokens = rule.index, self._limit + 1, rule.block
        flat, width, length = self._tables.flat_at[g], self._tables.widths[g], self._tables.length_at[g]
        limits, places = self._ledger.grow_at[g], []
        blocks = self._pool.take(g, len(rows))
        for row, block in zip(rows, blocks, strict=True):
            entry = length[row]
            place = row * width + entry
            flat[place] = block
            length[row] = entry + 1
            places.append(place)
            limit = limits[row] + tokens
            limits[row] = limit if limit < longest else longest
        self._tables.touch(g, places)
        if rule.group.zeroed:
            self._ops.fresh[g] += blocks

    def _register(self, rule: GroupRule, rows: list[int]) -> bool:
        """Key the entry that became full in each row, if its hash is the row's last and the group publishes all.

        Rows whose hash has yet to come, since their tokens are known only after the step, stay awake.
        """
        g, ledger, cache, publishing = rule.index, self._ledger, self._ops.cache, rule.publishing
        if cache is None or publishing is None or not publishing.plain:
            return False
        limits, registered, groups = ledger.key_at[g], ledger.registered_at[g], cache.index_of[g].group_at
        flat, width, hashed = self._tables.flat_at[g], self._tables.widths[g], self._tails.hashed_at
        data, stride = self._tails.bytes, self._tails.row_bytes
        full, blocks, digests = [], [], []
        for row in rows:
            end = limits[row]
            if hashed[row] < end:
                continue
            block = flat[row * width + registered[row]]
            if hashed[row] > end or not block or groups[block] >= 0:
                return False
            full.append(row)
            blocks.append(block)
            digests.append(data[row * stride : row * stride + DIGEST_BYTES])
        cache.index_of[g].add_few(blocks, g, digests)
        if cache.watcher is not None and full:
            slots = np.array(full, np.intp)
            cache.watcher.came_many(g, self._tails.last(slots), slots, np.array([limits[r] for r in full]))
        for row in full:
            registered[row] += 1
            limits[row] += rule.block
        return True

    def _register_each(self, rule: GroupRule, rows: list[int], moved: Values) -> None:
        computed, known = self._ledger.computed_at, self._ledger.known_at
        steps = [moved] * len(rows) if isinstance(moved, int) else moved
        for row, step in zip(rows, steps, strict=True):
            if rule.publishing is not None and step:
                self._keying.register_group(rule, rule.publishing, row, min(computed[row], known[row]))
