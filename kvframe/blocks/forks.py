"""Forks and roll-backs: two requests on one prefix, and one request that goes back."""

from __future__ import annotations

import copy

from kvframe.blocks.errors import BlockError
from kvframe.blocks.keying import Keying
from kvframe.blocks.limits import Limits
from kvframe.blocks.requests import BlockRequest
from kvframe.blocks.results import Deferred, Refused, Served
from kvframe.blocks.rowops import RowOps
from kvframe.blocks.rules import GroupRule, by_name


class Forker:
    """Forks rows: whole entries are shared, what either side will still write is copied."""

    def __init__(self, ops: RowOps, limits: Limits | None) -> None:
        self._ops, self._limits = ops, limits

    def fork(self, parent: int) -> Served | Deferred | Refused:
        """A second request with the parent's tokens, blocks and counts; only between steps, when all has settled."""
        ops, ledger = self._ops, self._ops.ledger
        request = ledger.request(parent)
        if not ledger.has_room:
            return Deferred(reason="no_slot")
        splits = [self._split(rule, parent) for rule in ops.rules]
        needs = [len(written) for _, written in splits]
        missing, reason = ops.pool.missing(needs), "pool"
        if not missing and self._limits is not None:
            missing, reason = self._limits.over(request.chain.extra.salt, needs, ()), "tenant"
        if missing:
            return Refused(missing=missing, needed=by_name(ops.rules, needs), reason=reason)
        ops.pool.reserve(needs)
        twin = BlockRequest(prompt=request.prompt, chain=copy.copy(request.chain), junction=request.junction)
        twin.chain.digests = bytearray(request.chain.digests)
        row = ledger.open(twin)
        for array in (ledger.computed, ledger.known, ledger.freed.T, ledger.registered.T):
            array[row] = array[parent]
        ledger.thresholds[:, row] = ledger.thresholds[:, parent]
        for rule, (kept, written) in zip(ops.rules, splits, strict=True):
            self._share(rule, parent, row, kept, written)
        return Served(slot=row)

    def _split(self, rule: GroupRule, parent: int) -> tuple[range, dict[int, bool]]:
        """The entries that both keep, and those that the fork gets blocks of its own for: whether they are copied."""
        g, tables = rule.index, self._ops.tables
        length, computed = tables.entries(g, parent), self._ops.ledger.computed_at[parent]
        if rule.group.lifetime.source == "encoder":
            return range(length), {}
        if rule.state:
            # Drafts leave the state in one of the spares: only the worker knows in which, so all are copied.
            _, dead = rule.dead(computed, self._ops.ledger.prompt_at[parent])
            return range(0), {entry: True for entry in range(dead, length) if tables.get(g, parent, entry)}
        if not rule.grows:
            return range(0), dict.fromkeys(range(length), True)
        whole = computed // rule.block
        return range(whole), {entry: entry * rule.block < computed for entry in range(whole, length)}

    def _share(self, rule: GroupRule, parent: int, row: int, kept: range, written: dict[int, bool]) -> None:
        g, ops = rule.index, self._ops
        entries: list[int] = ops.tables.row(g, parent).tolist()
        own = iter(ops.pool.take(g, len(written)))
        mine = [0] * len(entries)
        for entry in kept:
            mine[entry] = entries[entry]
        ops.pool.touch(g, [block for block in mine if block])
        for entry, copied in written.items():
            mine[entry] = next(own)
            if copied:
                ops.pool.touch(g, [entries[entry]])
                ops.copy(g, entries[entry], mine[entry], held=entries[entry])
            elif rule.group.zeroed:
                ops.fresh[g].append(mine[entry])
        ops.tables.append(g, row, mine)
        if rule.grows:
            ops.arm_growth(rule, row)


class RollBack:
    """Takes requests back to fewer computed tokens."""

    def __init__(self, ops: RowOps, keying: Keying) -> None:
        self._ops, self._keying = ops, keying

    def check(self, row: int, tokens: int) -> None:
        """Refuse a count that the request cannot go back to.

        Raises:
            BlockError: it has fewer tokens computed, gave back an entry that it would read, or its states moved on.
        """
        ledger = self._ops.ledger
        ledger.request(row)
        computed = ledger.computed_at[row]
        if not 0 <= tokens <= computed:
            raise BlockError(
                what="num_tokens", value=tokens, rule=f"slot {row} has {computed} tokens computed"
            )
        for rule in self._ops.rules:
            name = rule.group.name
            if rule.group.lifetime.state and computed - tokens > rule.spare:
                rule_text = (
                    f"group {name} keeps {rule.spare} spare states, not enough to go back {computed - tokens}"
                )
                raise BlockError(what="num_tokens", value=tokens, rule=rule_text)
            _, hi = rule.dead(tokens, ledger.prompt_at[row])
            if rule.frees and not rule.state and ledger.freed_at[rule.index][row] > hi:
                raise BlockError(
                    what="num_tokens", value=tokens, rule=f"group {name} has given back what they read"
                )

    def undo(self, row: int, tokens: int) -> None:
        """The tokens from `tokens` on were never computed: their blocks go back, without the keys they got."""
        ops, ledger = self._ops, self._ops.ledger
        ledger.computed_at[row] = tokens
        ledger.moved.append(row)
        for rule in ops.rules:
            if not rule.grows or rule.state:
                continue
            g, length = rule.index, ops.tables.entries(rule.index, row)
            first = tokens // rule.block
            if ops.cache is not None and rule.publishing is not None:
                for entry in range(first, length):
                    ops.cache.drop(g, ops.tables.get(g, row, entry))
                ledger.registered_at[g][row] = min(ledger.registered_at[g][row], first)
            ops.pool.give_back(g, ops.tables.cut_end(g, row, min(length, rule.entries(tokens))))
            ops.arm_growth(rule, row)
            if rule.publishing is not None:
                self._keying.arm_key(rule, rule.publishing, row, rule.publishing.cacheable(tokens))
