"""RowOps: what happens to one request's rows: entries die, tables grow. All exact, a row a call.

The batch step (`stepping`) calls these for the rows that its thresholds woke, and does the common cases of many rows in
numpy instead.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvframe.blocks.arrays import FEW
from kvframe.blocks.config import BlockConfig
from kvframe.blocks.keying import StateNotes
from kvframe.blocks.ledger import Ledger
from kvframe.blocks.pool import BlockPool, Pool
from kvframe.blocks.prefix import PrefixCache
from kvframe.blocks.queues import Blocks
from kvframe.blocks.results import Copy
from kvframe.blocks.rules import NEVER, GroupRule
from kvframe.blocks.state import StateGrowth, exported_position, state_growth
from kvframe.blocks.tables import BlockTables
from kvframe.checks import cdiv


class RowOps:
    """Changes to single rows. Callers have asked the pool that what is taken is there.

    Args:
        config: groups and limits.
        rules: what follows from the groups.
        ledger, tables, pool, cache, notes: the state that the operations change.
    """

    def __init__(
        self,
        config: BlockConfig,
        rules: tuple[GroupRule, ...],
        ledger: Ledger,
        tables: BlockTables,
        pool: Pool,
        cache: PrefixCache | None,
        notes: StateNotes,
    ) -> None:
        self.config, self.rules = config, rules
        self.ledger, self.tables, self.pool, self.cache = ledger, tables, pool, cache
        self.fresh: list[list[int]] = [[] for _ in rules]
        self.copies: list[Copy] = []
        self._held_for_copy: list[tuple[int, int]] = []
        self.notes = notes
        self._limit = config.max_model_len
        # By kind of event: the group, each row's entry that is next, and the count of tokens that wakes the row.
        entries = {
            "die": ledger.freed,
            "grow": tables.length,
            "state": tables.length,
            "key": ledger.registered,
        }
        self.by_kind = tuple(
            (rules[g], entries[kind][g], limits)
            for (kind, g), limits in zip(ledger.kinds, ledger.thresholds, strict=True)
        )

    # --- death ---

    def bury(self, rule: GroupRule, row: int, settled: int) -> None:
        """Give back the entries that no step from `settled` tokens on reads, the highest first."""
        g, ledger = rule.index, self.ledger
        freed, length, wakes = ledger.freed_at[g], self.tables.entries(g, row), rule.wakes_at
        if wakes is not None:
            # The dead range starts at 0 and its end is tabulated.
            start = stop = freed[row]
            while wakes[stop + 1] <= settled + 1:
                stop += 1
            ledger.die_at[g][row] = wakes[stop + 1]
        else:
            lo, stop = rule.dead(settled, ledger.prompt_at[row])
            start = max(lo, freed[row])
            self.arm_death(rule, row, settled)
        stop = min(stop, length)
        if start < stop:
            self.pool.give_back(g, self.tables.cut(g, row, start, stop))
            freed[row] = stop

    def arm_death(self, rule: GroupRule, row: int, settled: int) -> None:
        """Set the count at which the next entry dies; one more, since thresholds are compared with a step's end."""
        death = rule.next_death(settled, self.ledger.prompt_at[row], self._limit)
        self.ledger.die_at[rule.index][row] = min(death + 1, NEVER)

    # --- growth ---

    def growth(self, rule: GroupRule, row: int, start: int, tokens: int, lookahead: int) -> int:
        """Blocks that the row takes to go from `start` to `tokens` tokens, with room for `lookahead` more."""
        if rule.state:
            grown = self._state_growth(rule, row, start, tokens)
            return grown.fresh + ((rule.index, row) in self.notes.shared_tail)
        wanted = -(-min(tokens + lookahead, self._limit) // rule.block) + rule.spare
        return max(0, wanted - self.tables.entries(rule.index, row))

    def grow(self, rule: GroupRule, row: int, start: int, tokens: int, count: int) -> None:
        """Take the `count` blocks that `growth` said."""
        if rule.state:
            self._grow_state(rule, row, start, tokens)
        else:
            self.take(rule, row, count)
        self.arm_growth(rule, row)

    def take(self, rule: GroupRule, row: int, count: int) -> None:
        """Append `count` fresh blocks."""
        if count:
            blocks = (
                self.pool.take_many(rule.index, count)
                if count > FEW and isinstance(self.pool, BlockPool)
                else self.pool.take(rule.index, count)
            )
            self.tables.append(rule.index, row, blocks)
            if rule.group.zeroed:
                self.fresh[rule.index] += [int(block) for block in blocks]

    def arm_growth(self, rule: GroupRule, row: int) -> None:
        """Set the count that no longer fits the table; beyond the longest request it is an error that wakes the row."""
        room = (self.tables.entries(rule.index, row) - rule.spare) * rule.block
        if rule.state and (rule.index, row) in self.notes.shared_tail:
            room = 0
        self.ledger.grow_at[rule.index][row] = min(room, self._limit) + 1

    def _state_growth(self, rule: GroupRule, row: int, start: int, tokens: int) -> StateGrowth:
        exported = self._export(rule, row, start, tokens)
        return state_growth(
            length=self.tables.entries(rule.index, row),
            running=True,
            tokens=tokens,
            block=rule.block,
            spare=rule.spare,
            exported=exported > 0,
        )

    def _export(self, rule: GroupRule, row: int, start: int, tokens: int) -> int:
        ledger, g = self.ledger, rule.index
        prefill_end = max(ledger.prompt_at[row], ledger.known_at[row] - 1)
        position = exported_position(self.config, g, start, tokens, prefill_end)
        entry, length = cdiv(tokens, rule.block) - 2, self.tables.entries(g, row)
        if position and entry < length - rule.spare and self.tables.get(g, row, entry):
            return 0  # the column before the running state is in use
        return position

    def _grow_state(self, rule: GroupRule, row: int, start: int, tokens: int) -> None:
        g = rule.index
        position = self._export(rule, row, start, tokens)
        self.apply_state(rule, row, self._state_growth(rule, row, start, tokens), move_key=True)
        self.note_export(rule, row, position, tokens)
        self.notes.shared_tail.pop((g, row), None)

    def note_export(self, rule: GroupRule, row: int, position: int, tokens: int) -> None:
        """Remember the state that the kernel saves inside this step's chunk, until it is keyed."""
        self.notes.exported.pop((rule.index, row), None)
        if position:
            self.notes.exported[rule.index, row] = (position, cdiv(tokens, rule.block) - 2)

    def apply_state(self, rule: GroupRule, row: int, grown: StateGrowth, *, move_key: bool = False) -> None:
        """Grow a state table. With `move_key`, a key inside the running entry moves to a copy first."""
        g, tables = rule.index, self.tables
        if grown.nulls:
            tables.append(g, row, [0] * grown.nulls)
        for entry in grown.moves:
            tables.append(g, row, [tables.get(g, row, entry)])
            tables.put(g, row, entry, 0)
        if move_key and (g, row) in self.notes.shared_tail:
            self._move_key(rule, row)
        self.take(rule, row, grown.fresh)

    def _move_key(self, rule: GroupRule, row: int) -> None:
        # The request goes on writing its own block, so the cached content moves to a copy that nobody holds.
        g = rule.index
        source = self.tables.get(g, row, self.notes.shared_tail[g, row])
        (target,) = self.pool.take(g, 1)
        if self.cache is not None:
            self.cache.move(g, source, target)
        self.notes.keyed(g, [target])
        self.copy(g, source, target, held=target)

    # --- copies ---

    def copy(self, g: int, source: int, target: int, held: int) -> None:
        """Queue a copy; the reference to `held`, one of the two, lasts until the copy has been taken note of."""
        self.copies.append(Copy(group=g, source=source, target=target))
        self._held_for_copy.append((g, held))

    def take_copies(self) -> list[Copy]:
        """The queued copies; the caller runs them before anything else is asked of the manager."""
        copies, held = self.copies, self._held_for_copy
        self.copies, self._held_for_copy = [], []
        for g, block in held:
            # A copy of a state inside an entry: it saves less than an entry's tokens, and costs as much as a whole one.
            if self.rules[g].state:
                self.pool.retire(g, [block])
            else:
                self.pool.give_back(g, [block])
        return copies

    # --- the end ---

    def release(self, rows: Sequence[int]) -> None:
        """Give all blocks of rows back, group by group, row by row, the last entry first."""
        for rule in self.rules:
            if len(rows) == 1:
                self._release_row(rule, rows[0])
            else:
                self._release_rows(rule.index, np.array(rows, np.intp))
            for row in rows:
                self.notes.forget(rule.index, row)

    def _release_row(self, rule: GroupRule, row: int) -> None:
        g, pool = rule.index, self.pool
        blocks = self.tables.clear_row(g, row)
        if not rule.keeps_all:
            blocks = blocks[blocks.nonzero()[0]]
        if len(blocks) <= FEW or not isinstance(pool, BlockPool) or not pool.give_back_many(g, blocks):
            pool.give_back(g, blocks.tolist())

    def _release_rows(self, g: int, slots: Blocks) -> None:
        blocks, owners = self.tables.clear(g, slots)
        if not self._release_many(g, blocks, owners):
            for mine in np.split(blocks, np.searchsorted(owners, np.arange(1, len(slots)))):
                self.pool.give_back(g, mine.tolist())

    def _release_many(self, g: int, blocks: Blocks, owners: Blocks) -> bool:
        if len(blocks) <= FEW or not isinstance(self.pool, BlockPool):
            return False
        # Blocks without a key are handed out next, those of the last row first, as if rows came one by one.
        if self.cache is None:
            blocks = blocks[np.argsort(-owners, kind="stable")]
        elif not self.cache.index_of[g].all_keyed(blocks):
            keyed = self.cache.index_of[g].keyed(blocks)
            last_first = np.argsort(-owners[~keyed], kind="stable")
            blocks = np.concatenate((blocks[keyed], blocks[~keyed][last_first]))
        return self.pool.give_back_many(g, blocks)
