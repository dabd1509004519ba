"""Singles: the common events of a few rows, as loops over the arrays' memory.

What `Batches` does in numpy; for a few rows a loop costs less, even for many if the caches are cold.
"""

from __future__ import annotations

from typing import Any

from kvframe.blocks.arrays import items
from kvframe.blocks.growth import at_rows
from kvframe.blocks.keying import Keying
from kvframe.blocks.pool import BlockPool
from kvframe.blocks.prefix import PrefixCache
from kvframe.blocks.publish import Publishing
from kvframe.blocks.rowops import RowOps
from kvframe.blocks.rules import GroupRule
from kvframe.blocks.tails import Tails
from kvframe.blocks.wheel import Cohort, Serve


class Singles:
    """Rows that gain or lose exactly one entry, where all groups share block ids.

    Args:
        ops, keying: the exact operations, and the state.
        pool: the pool.
        tails: the last hash of every row.
    """

    def __init__(self, ops: RowOps, keying: Keying, pool: BlockPool, tails: Tails) -> None:
        self._ops, self._keying, self._cache = ops, keying, ops.cache
        self._longest, self._touch = ops.config.max_model_len, ops.tables.touch_some
        self._take, self._give_back = pool.take, pool.give_back
        self._ledger, self._hashed, self._last = ops.ledger, tails.hashed_at, tails.last
        serve = {"die": self.bury, "grow": self.grow, "state": self.grow, "key": self.register}
        self.serve: tuple[Serve, ...] = tuple(serve[kind] for kind, _ in ops.ledger.kinds)
        # By kind: the group's table and the length of a row there, then each row's entry that is next, and when.
        tables = ops.tables
        self._at = tuple(
            (rule, tables.flat_at[rule.index], tables.widths[rule.index], items(entries), items(limits))
            for rule, entries, limits in ops.by_kind
        )
        # By kind: groups that grow with this one.
        self._alike = tuple(
            tuple((ops.rules[g], tables.flat_at[g], tables.length_at[g]) for g in groups[1:])
            for groups in ops.ledger.groups
        )

    def bury(self, cohort: Cohort, behind: Any) -> bool:
        """One entry of each row dies, if that is so for all of them."""
        rule, flat, width, freed, die_at = self._at[cohort.kind]
        rows, wakes = cohort.rows, rule.wakes_at
        surely = cohort.sure and rule.steady
        if wakes is None or not (surely or self._one_dies(cohort, wakes, behind)):
            return False
        blocks, entries = [], []
        for row in rows:
            dead = freed[row]
            place = row * width + dead
            block = flat[place]
            if not block:
                break
            flat[place] = 0
            freed[row] = dead + 1
            die_at[row] = wakes[dead + 2]
            blocks.append(block)
            entries.append(dead)
        g, done = rule.index, len(blocks)
        self._touch((g, rows[:done], entries))
        if done < len(rows):  # the others will be done one by one, and in whose order blocks come counts
            for block in blocks:
                self._give_back(g, [block])
            return False
        self._give_back(g, blocks)
        cohort.again = rule.block if surely else 0
        return True

    def _one_dies(self, cohort: Cohort, wakes: memoryview, behind: Any) -> bool:
        """Whether each row is awake for its entry, and not yet for the next."""
        computed, freed = self._ledger.computed_at, self._at[cohort.kind][3]
        for row, wait in zip(cohort.rows, at_rows(behind, cohort), strict=True):
            dead, now = freed[row], computed[row] - wait + 1
            if wakes[dead + 1] > now or wakes[dead + 2] <= now:
                return False
        return True

    def grows_singly(self, cohort: Cohort, lookahead: int) -> bool:
        """Whether each row lacks exactly one entry; never so beyond the longest request."""
        computed, longest, grow_at = self._ledger.computed_at, self._longest, self._at[cohort.kind][4]
        for row in cohort.rows:  # noqa: SIM110 - a generator costs twice as much
            if not computed[row] + lookahead == grow_at[row] <= longest:
                return False
        return True

    def grow(self, cohort: Cohort, behind: Any) -> bool:
        """One block for each row, which `grows_singly`. The pool has them."""
        rule, flat, width, length, grow_at = self._at[cohort.kind]
        g, rows, tokens, beyond, entries = rule.index, cohort.rows, rule.block, self._longest + 1, []
        blocks = self._take(g, len(rows))
        cohort.again = tokens
        for row, block in zip(rows, blocks, strict=True):
            entry, limit = length[row], grow_at[row] + tokens
            flat[row * width + entry] = block
            length[row] = entry + 1
            entries.append(entry)
            if limit >= beyond:
                limit, cohort.again = beyond, 0
            grow_at[row] = limit
        changed = rows.copy()
        self._touch((g, changed, entries))
        if rule.group.zeroed:
            self._ops.fresh[g] += blocks
        for other, flat, length in self._alike[cohort.kind]:
            g = other.index
            blocks = self._take(g, len(rows))
            for row, entry, block in zip(rows, entries, blocks, strict=True):
                flat[row * width + entry] = block
                length[row] = entry + 1
            self._touch((g, changed, entries))
            if other.group.zeroed:
                self._ops.fresh[g] += blocks
        return True

    def register(self, cohort: Cohort, behind: Any) -> bool:
        """Key the entry that became full in each row, exactly where it is not the row's last hash that belongs to it.

        Rows whose hash has yet to come, since their tokens are known only after the step, stay awake.
        """
        rule, flat, width, registered, key_at = self._at[cohort.kind]
        cache, publishing, hashed = self._cache, rule.publishing, self._hashed
        if cache is None or publishing is None or not publishing.regular:
            return False
        if not cohort.went_on or publishing.at_once > 1:
            if not self._wait(cohort):
                register = self._register_each if publishing.at_once == 1 else self._register_runs
                register(cache, publishing, cohort)
            return True
        rows, tokens = cohort.rows, rule.block
        blocks: list[int] = []
        for row in rows:
            end, entry = key_at[row], registered[row]
            block = flat[row * width + entry]
            if hashed[row] != end or not block:  # an entry may die before its hash comes
                if blocks or not self._wait(cohort):
                    self._key(cache, rule, blocks, rows[: len(blocks)])
                    self._register_each(cache, publishing, cohort)
                return True
            blocks.append(block)
            registered[row] = entry + 1
            key_at[row] = end + tokens
        self._key(cache, rule, blocks, rows)
        cohort.keyed(tokens)
        return True

    def _wait(self, cohort: Cohort) -> bool:
        """Have the rows wait if the hashes of all of them have yet to come; says whether they do."""
        if not cohort.sure:
            return False
        hashed, key_at = self._hashed, self._at[cohort.kind][4]
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

    def _register_each(self, cache: PrefixCache, publishing: Publishing, cohort: Cohort) -> None:
        """`register` where each entry may be out of the ordinary. Rows that are done are passed over."""
        rule, flat, width, registered, key_at = self._at[cohort.kind]
        tokens, clear, hashed = rule.block, publishing.clear, self._hashed
        groups, prompt = cache.index_of[rule.index].group_at, self._ledger.prompt_at
        full: list[int] = []
        blocks: list[int] = []
        for row in cohort.rows:
            end, entry = key_at[row], registered[row]
            block = flat[row * width + entry]
            regular = end - clear >= prompt[row]
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

    def _register_runs(self, cache: PrefixCache, publishing: Publishing, cohort: Cohort) -> None:
        """`register` where several entries of each row come to count at once."""
        rule, _, _, registered, key_at = self._at[cohort.kind]
        count, tokens, hashed = publishing.at_once, publishing.round_to, self._hashed
        clear, prompt, done = publishing.clear, self._ledger.prompt_at, 0
        for row in cohort.rows:
            end, entry = key_at[row], registered[row]
            usual = end - clear >= prompt[row] and end == (entry + count) * rule.block
            if usual and end <= hashed[row] < end + tokens and self._keying.key_run(rule, row, entry, count):
                registered[row] = entry + count
                key_at[row] = end + tokens
                done += 1
            elif hashed[row] >= end:
                final = min(self._ledger.computed_at[row], self._ledger.known_at[row])
                self._keying.register_group(rule, publishing, row, final)
        if done == len(cohort.rows):
            cohort.keyed(tokens)
        else:
            cohort.again, cohort.went_on, cohort.waited = 0, False, 0
