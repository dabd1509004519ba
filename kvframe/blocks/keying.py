"""Keying: which blocks of a row get keys, exactly, one row a call."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import numpy as np

from kvframe.blocks.arrays import FEW
from kvframe.blocks.config import BlockConfig
from kvframe.blocks.hashing import DIGEST_BYTES
from kvframe.blocks.ledger import Ledger
from kvframe.blocks.prefix import PrefixCache
from kvframe.blocks.publish import Publishing, prompt_checkpoint, replay_boundaries
from kvframe.blocks.rules import NEVER, GroupRule
from kvframe.blocks.tables import BlockTables
from kvframe.checks import cdiv


@attrs.define(kw_only=True)
class StateNotes:
    """What is remembered about states from one call to the next.

    Args:
        keyed_now: (group, block) of states that were keyed in this step: they are written only when it has run.
        shared_tail: (group, row) to the entry whose running state has a key inside its block.
        exported: (group, row) to the position, and the entry, of a state that the kernel saves in this step's chunk.
    """

    keyed_now: set[tuple[int, int]] = attrs.field(factory=set)
    shared_tail: dict[tuple[int, int], int] = attrs.field(factory=dict)
    exported: dict[tuple[int, int], tuple[int, int]] = attrs.field(factory=dict)

    def keyed(self, group: int, blocks: Iterable[int]) -> None:
        """These states got their keys now."""
        self.keyed_now.update([(group, block) for block in blocks])

    def forget(self, group: int, row: int) -> None:
        """The row's request is gone."""
        self.shared_tail.pop((group, row), None)
        self.exported.pop((group, row), None)


class Keying:
    """Gives keys to the blocks of single rows.

    Args:
        config: groups and limits.
        rules: what follows from the groups.
        ledger, tables, cache, notes: the state that the operations change.
    """

    def __init__(
        self,
        config: BlockConfig,
        rules: tuple[GroupRule, ...],
        ledger: Ledger,
        tables: BlockTables,
        cache: PrefixCache | None,
        notes: StateNotes,
    ) -> None:
        self.config, self.rules = config, rules
        self.ledger, self.tables, self.cache, self.notes = ledger, tables, cache, notes

    def register(self, row: int, tokens: int) -> None:
        """Key what the first `tokens` final tokens made worth keying, in every keyed group."""
        for rule in self.rules:
            if rule.publishing is not None:
                self.register_group(rule, rule.publishing, row, tokens)

    def register_group(self, rule: GroupRule, publishing: Publishing, row: int, tokens: int) -> None:
        """`register` for one group."""
        if publishing.plain and self._register_one(rule, row, tokens):
            return
        chain = self.ledger.request(row).chain
        count = publishing.cacheable(tokens)
        hashed = chain.num_units * chain.unit
        self._register_whole(rule, publishing, row, min(count, hashed) // rule.block)
        tail = publishing.tail(self.ledger.prompt_at[row])
        if rule.state:
            self._register_state(rule, publishing, row, count)
        elif 0 < tail <= min(count, hashed) and tail // rule.block < self.tables.entries(rule.index, row):
            self._key(rule, row, tail // rule.block, tail)
        self.arm_key(rule, publishing, row, count)

    def _register_one(self, rule: GroupRule, row: int, tokens: int) -> bool:
        """The common case: one more entry is full, and nothing else is to be keyed."""
        g, registered = rule.index, self.ledger.registered_at[rule.index]
        entry, block = registered[row], rule.block
        end = (entry + 1) * block
        self.ledger.key_at[g][row] = end
        if tokens < end:
            return True
        chain = self.ledger.request(row).chain
        if tokens >= end + block or chain.num_units * chain.unit < end or self.cache is None:
            return False
        held = self.tables.get(g, row, entry)
        if held:
            self.cache.add_first(g, held, chain.hash_at(end), block, row, end)
        registered[row] = entry + 1
        self.ledger.key_at[g][row] = end + block
        return True

    def _register_whole(self, rule: GroupRule, publishing: Publishing, row: int, stop: int) -> None:
        g, ledger = rule.index, self.ledger
        start = ledger.registered_at[g][row]
        if stop <= start:
            return
        ledger.registered_at[g][row] = stop
        if publishing.stop_unit is None and stop - start > FEW and self._key_many(rule, row, start, stop):
            return
        wanted = publishing.wanted(start, stop, self._boundaries(publishing, row))
        together = bool(wanted) and wanted[-1] - wanted[0] < len(wanted)
        if not (together and self.key_run(rule, row, wanted[0], len(wanted))):
            for entry in wanted:
                self._key(rule, row, entry, (entry + 1) * rule.block)

    def _boundaries(self, publishing: Publishing, row: int) -> list[int]:
        if not publishing.sparse:
            return []
        draft = bool(self.config.draft_groups)
        ends = [*replay_boundaries(self.ledger.prompt_at[row], self.config.step_unit, draft)]
        junction = self.ledger.request(row).junction
        return [*ends, junction] if junction else ends

    def _key_many(self, rule: GroupRule, row: int, start: int, stop: int) -> bool:
        cache = self.cache
        if cache is None or rule.state:
            return False
        blocks = self.tables.row(rule.index, row)[start:stop].astype(np.intp)
        digests = self.ledger.request(row).chain.view(rule.block)[start:stop]
        used = blocks.nonzero()[0]
        if len(used) < len(blocks):
            blocks, digests = blocks[used], digests[used]
        if not cache.index_of[rule.index].none_keyed(blocks):
            return False
        ends = None if cache.watcher is None else (used + (start + 1)) * rule.block
        cache.add_whole(rule.index, blocks, digests, row, ends)
        return True

    def key_run(self, rule: GroupRule, row: int, first: int, count: int) -> bool:
        """Key whole entries, one after the other, if their blocks have no keys; says whether it did."""
        cache, g = self.cache, rule.index
        if cache is None:
            return False
        place = row * self.tables.widths[g] + first
        blocks: list[int] = self.tables.flat_at[g][place : place + count].tolist()
        keyed = cache.index_of[g].group_at
        if 0 in blocks or max([keyed[block] for block in blocks]) >= 0:
            return False
        chain = self.ledger.request(row).chain
        end, width = (first + 1) * rule.block, rule.block // chain.unit * DIGEST_BYTES
        stop = (first + count) * width
        hashes = bytes(chain.digests[(first + 1) * width - DIGEST_BYTES : stop])
        digests = [hashes[at : at + DIGEST_BYTES] for at in range(0, len(hashes), width)]
        ends = list(range(end, end + count * rule.block, rule.block))
        cache.add_few(g, blocks, digests, [row] * count, ends)
        if rule.state:
            self.notes.keyed(g, blocks)
        return True

    def _key(self, rule: GroupRule, row: int, entry: int, position: int) -> None:
        """Key an entry by the prefix that ends at `position`."""
        g, chain = rule.index, self.ledger.request(row).chain
        block = self.tables.get(g, row, entry)
        if not block or self.cache is None:
            return
        digest = chain.hash_at(position)
        covers = position - entry * rule.block
        if self.cache.add(g, block, digest, covers, rule.block, row, position) and rule.state:
            self.notes.keyed(g, [block])

    def _register_state(self, rule: GroupRule, publishing: Publishing, row: int, count: int) -> None:
        g, exported = rule.index, self.notes.exported.pop((rule.index, row), None)
        unit = self.config.hash_unit
        if exported is not None:
            self._key_exported(rule, publishing, row, *exported)
            return
        checkpoint = prompt_checkpoint(self.ledger.prompt_at[row], unit, rule.drop_last)
        if not 0 < count == checkpoint:
            return
        entry = cdiv(count, rule.block) - 1
        if entry >= self.tables.entries(g, row) or not self.tables.get(g, row, entry):
            return
        self._key(rule, row, entry, count)
        if count % rule.block:
            self.notes.shared_tail[g, row] = entry
            self.ledger.registered_at[g][row] = entry
            self.ledger.grow_at[g][row] = 0  # before the state moves on, its key moves to a copy
            self.ledger.moved.append(row)

    def _key_exported(
        self, rule: GroupRule, publishing: Publishing, row: int, position: int, entry: int
    ) -> None:
        g, cache, request = rule.index, self.cache, self.ledger.request(row)
        block = self.tables.get(g, row, entry)
        if cache is None or not block:
            return
        prompt = self.ledger.prompt_at[row]
        kept = position == prompt_checkpoint(prompt, self.config.alignment, rule.drop_last)
        if not kept and position % rule.block == 0:
            at = position // rule.block - 1
            kept = bool(publishing.wanted(at, at + 1, ()))
        held = cache.index_of[g]
        if block in held and held.digest(block) == request.chain.hash_at(position):
            return
        cache.drop(g, block)
        if kept or position == request.junction:
            self._key(rule, row, entry, position)

    def arm_key(self, rule: GroupRule, publishing: Publishing, row: int, count: int) -> None:
        """Set the count at which there is next something to key."""
        ledger, g = self.ledger, rule.index
        entry: int | None = ledger.registered_at[g][row]
        if entry is not None and not rule.state:  # a state may be exported into any entry
            entry = publishing.next_wanted(entry, self._boundaries(publishing, row))
        at = NEVER if entry is None else publishing.next_block(entry)
        tail = publishing.tail(ledger.prompt_at[row])
        if rule.state:
            tail = prompt_checkpoint(ledger.prompt_at[row], self.config.hash_unit, rule.drop_last)
        if tail > count:
            at = min(at, publishing.fewest(tail))
        ledger.key_at[g][row] = at
