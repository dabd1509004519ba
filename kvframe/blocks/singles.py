"""Singles: the common events of a few rows, as loops over the arrays' memory.

What `Batches` does in numpy; for a few rows a loop costs less, even for many if the caches are cold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvframe.blocks.keying import Keying
from kvframe.blocks.pool import BlockPool
from kvframe.blocks.prefix import PrefixCache
from kvframe.blocks.publish import Publishing
from kvframe.blocks.rowops import RowOps
from kvframe.blocks.rules import GroupRule
from kvframe.blocks.tails import Tails
from kvframe.blocks.wheel import Cohort


class Singles:
    """Rows that gain or lose exactly one entry, where all groups share block ids.

    Args:
        ops, keying: the exact operations, and the state.
        pool: the pool.
        tails: the last hash of every row.
    """

    def __init__(self, ops: RowOps, keying: Keying, pool: BlockPool, tails: Tails) -> None:
        self._ops, self._keying, self._pool, self._cache = ops, keying, pool, ops.cache
        self._longest, self._touch = ops.config.max_model_len, ops.tables.touch_some
        self._ledger, self._hashed, self._last = ops.ledger, tails.hashed_at, tails.last
        # By group: its table and the length of a row there, then what each kind of event is about.
        ledger, tables = ops.ledger, ops.tables
        self._tables = tuple(zip(tables.flat_at, tables.widths, strict=True))
        self._lengths = {g: (tables.length_at[g], at) for g, at in ledger.grow_at.items()}
        self._dead = {g: (ledger.freed_at[g], at) for g, at in ledger.die_at.items()}
        self._keyed = {g: (ledger.registered_at[g], at) for g, at in ledger.key_at.items()}

    def bury(self, rule: GroupRule, cohort: Cohort, behind: Any) -> bool:
        """One entry of each row dies, if that is so for all of them.

        Args:
            rule, cohort: the group, and the rows.
            behind: computed tokens that have not settled: of all rows, or an array by row.
        """
        g, rows, wakes = rule.index, cohort.rows, rule.wakes_at
        if wakes is None:
            return False
        (flat, width), (freed, die_at) = self._tables[g], self._dead[g]
        surely = cohort.sure and rule.steady
        if not surely and not self._one_dies(rule, rows, wakes, behind):
            return False
        blocks, entries = [], []
        for row in rows:
            dead = freed[row]
            block = flat[row * width + dead]
            if not block:
                return False
            blocks.append(block)
            entries.append(dead)
        for row, dead in zip(rows, entries, strict=True):
            flat[row * width + dead] = 0
            freed[row] = dead + 1
            die_at[row] = wakes[dead + 2]
        self._touch(g, rows, entries)
        self._pool.give_back(g, blocks)
        cohort.again, cohort.facts = rule.block if surely else 0, None
        return True

    def _one_dies(self, rule: GroupRule, rows: list[int], wakes: memoryview, behind: Any) -> bool:
        """Whether each row is awake for its entry, and not yet for the next."""
        computed, (freed, _) = self._ledger.computed_at, self._dead[rule.index]
        waits: Sequence[int] = [behind] * len(rows) if isinstance(behind, int) else behind[rows].tolist()
        for row, wait in zip(rows, waits, strict=True):
            dead, now = freed[row], computed[row] - wait + 1
            if wakes[dead + 1] > now or wakes[dead + 2] <= now:
                return False
        return True

    def grows_singly(self, rule: GroupRule, cohort: Cohort, lookahead: int) -> bool:
        """Whether each row lacks exactly one entry; never so beyond the longest request."""
        computed, longest, (_, grow_at) = self._ledger.computed_at, self._longest, self._lengths[rule.index]
        for row in cohort.rows:  # noqa: SIM110 - a generator costs twice as much
            if not computed[row] + lookahead == grow_at[row] <= longest:
                return False
        return True

    def grow(self, rule: GroupRule, cohort: Cohort) -> None:
        """One block for each row, which `grows_singly`. The pool has them."""
        g, rows, tokens, beyond = rule.index, cohort.rows, rule.block, self._longest + 1
        (flat, width), (length, grow_at), entries = self._tables[g], self._lengths[g], []
        blocks = self._pool.take(g, len(rows))
        cohort.again, cohort.facts = tokens, None
        for row, block in zip(rows, blocks, strict=True):
            entry, limit = length[row], grow_at[row] + tokens
            flat[row * width + entry] = block
            length[row] = entry + 1
            entries.append(entry)
            if limit >= beyond:
                limit, cohort.again = beyond, 0
            grow_at[row] = limit
        self._touch(g, rows, entries)
        if rule.group.zeroed:
            self._ops.fresh[g] += blocks

    def register(self, rule: GroupRule, cohort: Cohort) -> bool:
        """Key the entry that became full in each row, exactly where it is not the row's last hash that belongs to it.

        Rows whose hash has yet to come, since their tokens are known only after the step, stay awake.
        """
        cache, publishing = self._cache, rule.publishing
        if cache is None or publishing is None or not publishing.regular or self._ops.notes.exported:
            return False
        if not cohort.went_on:
            if not self._wait(rule, cohort):
                self._register_each(cache, rule, publishing, cohort)
            return True
        g, rows, tokens, hashed = rule.index, cohort.rows, rule.block, self._hashed
        (flat, width), (registered, key_at) = self._tables[g], self._keyed[g]
        blocks: list[int] = []
        for row in rows:
            end, entry = key_at[row], registered[row]
            block = flat[row * width + entry]
            if hashed[row] != end or not block:  # an entry may die before its hash comes
                if blocks or not self._wait(rule, cohort):
                    self._key(cache, rule, blocks, rows[: len(blocks)])
                    self._register_each(cache, rule, publishing, cohort)
                return True
            blocks.append(block)
            registered[row] = entry + 1
            key_at[row] = end + tokens
        self._key(cache, rule, blocks, rows)
        cohort.keyed(tokens)
        return True

    def _wait(self, rule: GroupRule, cohort: Cohort) -> bool:
        """Have the rows wait if the hashes of all of them have yet to come; says whether they do."""
        if not cohort.sure:
            return False
        hashed, key_at = self._hashed, self._keyed[rule.index][1]
        for row in cohort.rows:
            if hashed[row] >= key_at[row]:
                return False
        cohort.wait()
        return True

    def _key(self, cache: PrefixCache, rule: GroupRule, blocks: list[int], rows: list[int]) -> None:
        """Key the entries, which end where the rows' last hashes do."""
        ends = [] if cache.watcher is None else [self._hashed[row] for row in rows]
        cache.add_few(rule.index, blocks, self._last(rows), rows, ends)
        if rule.state:
            self._ops.notes.keyed(rule.index, blocks)

    def _register_each(
        self, cache: PrefixCache, rule: GroupRule, publishing: Publishing, cohort: Cohort
    ) -> None:
        """`register` where each entry may be out of the ordinary. Rows that are done are passed over."""
        g, tokens, clear, hashed = rule.index, rule.block, publishing.clear, self._hashed
        (flat, width), (registered, key_at) = self._tables[g], self._keyed[g]
        groups, prompt = cache.index_of[g].group_at, None if publishing.plain else self._ledger.prompt_at
        cohort.facts = None
        full: list[int] = []
        blocks: list[int] = []
        for row in cohort.rows:
            end, entry = key_at[row], registered[row]
            block = flat[row * width + entry]
            regular = prompt is None or end - clear >= prompt[row]
            if regular and hashed[row] == end and block and groups[block] < 0:
                full.append(row)
                blocks.append(block)
                registered[row] = entry + 1
                key_at[row] = end + tokens
            elif hashed[row] >= end:
                self._key(cache, rule, blocks, full)
                full, blocks = [], []
                final = min(self._ledger.computed_at[row], self._ledger.known_at[row])
                self._keying.register_group(rule, publishing, row, final)
        self._key(cache, rule, blocks, full)
        if len(full) == len(cohort.rows):
            cohort.keyed(tokens)
        else:
            cohort.again, cohort.went_on, cohort.waited = 0, False, 0
