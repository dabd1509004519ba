"""Admission: one request's prefix hit and its first blocks, all or nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvframe.blocks.counters import Counters
from kvframe.blocks.errors import BlockError
from kvframe.blocks.hits import Hit, HitSearch
from kvframe.blocks.keying import Keying
from kvframe.blocks.limits import Limits
from kvframe.blocks.requests import Admission
from kvframe.blocks.results import Deferred, Refused, Served
from kvframe.blocks.rowops import RowOps
from kvframe.blocks.rules import GroupRule, by_name
from kvframe.blocks.state import StateGrowth, exported_position, state_growth
from kvframe.checks import cdiv


class _Lengths(NamedTuple):
    """Token counts of one admission: the hit, hit + external, that + new, and that + lookahead."""

    hit: int
    total: int
    main: int
    need: int


class _GroupPlan(NamedTuple):
    """What one group does for a new request.

    Args:
        adopted: the row's first entries, found blocks and nulls.
        dead: entries below are dead already.
        copied: whether the last of them must be copied, since the request will write into it.
        imported: fresh blocks for what an external cache brings.
        import_at: null entries to add before the imported ones.
        fresh: fresh blocks for the chunk.
        state: how a state table grows, instead of `fresh`.
        exported: position whose state the kernel saves inside the chunk, 0: none.
    """

    adopted: Sequence[int] = ()
    dead: int = 0
    copied: bool = False
    imported: int = 0
    import_at: int = 0
    fresh: int = 0
    state: StateGrowth | None = None
    exported: int = 0

    @property
    def takes(self) -> int:
        """Blocks taken from the pool."""
        return self.copied + self.imported + self.fresh + (self.state.fresh if self.state else 0)

    @property
    def found(self) -> list[int]:
        """The blocks adopted."""
        return [block for block in self.adopted if block]


class Admitter:
    """Admits requests one after the other; each is served, deferred or refused as a whole."""

    def __init__(
        self, ops: RowOps, keying: Keying, search: HitSearch, limits: Limits | None, counters: Counters
    ) -> None:
        self._limits, self._counters = limits, counters
        self._ops, self._keying, self._search = ops, keying, search
        self._config, self._rules = ops.config, ops.rules

    def admit(self, admission: Admission, busy: bool) -> Served | Deferred | Refused:
        """Serve a request: adopt its hit, take its blocks, key what its first chunk fills.

        Args:
            admission: what it asks for.
            busy: something else runs in this step, so the watermark stays free.

        Raises:
            BlockError: it asks for nothing, or for more than the longest request.
        """
        ops, request = self._ops, admission.request
        hit = admission.hit if admission.hit is not None else self._search.find(request.chain)
        lengths = self._lengths(admission, hit)
        if not ops.ledger.has_room:
            return self._defer("no_slot")
        plans = [self._plan(rule, admission, hit, lengths) for rule in self._rules]
        if self._written_now(plans):
            return self._defer("same_step_state")
        watermark = self._config.watermark_blocks if busy else 0
        refused = self._refusal(plans, admission, hit, lengths, watermark)
        if refused is not None:
            self._counters.refused += 1
            return refused
        self._counters.admit(request.chain, hit, self._search)
        request.junction = hit.junction
        row = ops.ledger.open(request)
        ops.pool.reserve([plan.takes for plan in plans])
        self._adopt(row, plans)
        self._fill(row, plans, lengths)
        return self._finish(row, plans, admission, lengths)

    def _defer(self, reason: str) -> Deferred:
        self._counters.defer(reason)
        return Deferred(reason=reason)

    def _lengths(self, admission: Admission, hit: Hit) -> _Lengths:
        total = hit.tokens + admission.external_tokens
        main = total + admission.num_new_tokens
        limit = self._config.max_model_len
        if not main or main > limit:
            raise BlockError(
                what="num_new_tokens",
                value=admission.num_new_tokens,
                rule=f"with hit and external tokens there must be 1 to {limit} tokens, not {main}",
            )
        return _Lengths(hit=hit.tokens, total=total, main=main, need=min(main + admission.lookahead, limit))

    # --- planning: nothing changes ---

    def _plan(self, rule: GroupRule, admission: Admission, hit: Hit, lengths: _Lengths) -> _GroupPlan:
        if not rule.grows:
            encoder = rule.group.lifetime.source == "encoder"
            return _GroupPlan(fresh=rule.entries(admission.encoder_tokens if encoder else lengths.need))
        found = hit.blocks[rule.index] if hit.tokens else []
        if rule.state:
            return self._plan_state(rule, admission, found, lengths)
        lo, hi = rule.dead(lengths.total, lengths.total)
        adopted = [0 if lo <= entry < hi else block for entry, block in enumerate(found)]
        adopted += [0] * (hi - len(adopted))
        copied = bool(found) and lengths.hit % rule.block > 0 and adopted[-1] > 0
        have = len(adopted)
        imported = max(0, cdiv(lengths.total, rule.block) - have) if admission.external_tokens else 0
        fresh = max(0, rule.entries(lengths.need) - have - imported)
        return _GroupPlan(adopted=adopted, dead=hi, copied=copied, imported=imported, fresh=fresh)

    def _plan_state(
        self, rule: GroupRule, admission: Admission, found: list[int], lengths: _Lengths
    ) -> _GroupPlan:
        adopted, imported, nulls = found, 0, 0
        if admission.external_tokens:
            # Only the state at the very end is of use, and the external cache brings that one.
            adopted, imported = [], 1
            nulls = cdiv(lengths.total, rule.block) - 1
        copied = bool(adopted) and lengths.hit % rule.block > 0
        position = exported_position(
            self._config,
            rule.index,
            lengths.total,
            lengths.main,
            max(admission.request.prompt, admission.request.num_tokens - 1),
        )
        length = len(adopted) + nulls + imported
        if position and cdiv(lengths.main, rule.block) - 2 < length:
            column = cdiv(lengths.main, rule.block) - 2
            held = column >= len(adopted) + nulls or (column < len(adopted) and adopted[column] > 0)
            position = 0 if held else position
        state = state_growth(
            length=length,
            running=False,
            tokens=lengths.main,
            block=rule.block,
            spare=rule.spare,
            exported=position > 0,
        )
        return _GroupPlan(
            adopted=adopted, copied=copied, imported=imported, import_at=nulls, state=state, exported=position
        )

    def _written_now(self, plans: list[_GroupPlan]) -> bool:
        keyed_now = self._ops.notes.keyed_now
        return bool(keyed_now) and any(
            (rule.index, plan.adopted[-1]) in keyed_now
            for rule, plan in zip(self._rules, plans, strict=True)
            if rule.state and plan.adopted
        )

    def _refusal(
        self, plans: list[_GroupPlan], admission: Admission, hit: Hit, lengths: _Lengths, watermark: int
    ) -> Refused | None:
        found = [plan.found for plan in plans]
        asked = [[plan.takes for plan in plans]]
        if admission.whole_must_fit:
            asked.insert(0, self._whole(plans, admission, hit, lengths))
        for needs in asked:
            missing = self._ops.pool.missing(needs, found, watermark)
            reason = "pool"
            if not missing and self._limits is not None:
                missing = self._limits.over(admission.request.chain.extra.salt, needs, found)
                reason = "tenant"
            if missing:
                return Refused(missing=missing, needed=by_name(self._rules, needs), reason=reason)
        return None

    def shortage(self, admission: Admission, busy: bool) -> tuple[Refused, list[list[int]]]:
        """What a request would take and lack (0: it fits), and the cached blocks that it would hold. No change."""
        hit = admission.hit if admission.hit is not None else self._search.find(admission.request.chain)
        lengths = self._lengths(admission, hit)
        plans = [self._plan(rule, admission, hit, lengths) for rule in self._rules]
        watermark = self._config.watermark_blocks if busy else 0
        refused = self._refusal(plans, admission, hit, lengths, watermark)
        if refused is None:
            refused = Refused(missing=0, needed=by_name(self._rules, [plan.takes for plan in plans]))
        return refused, [plan.found for plan in plans]

    def _whole(self, plans: list[_GroupPlan], admission: Admission, hit: Hit, lengths: _Lengths) -> list[int]:
        """Blocks for the whole request, with what it gives back on the way taken into account."""
        tokens = min(admission.request.num_tokens, self._config.max_model_len)
        needs = []
        for rule, plan in zip(self._rules, plans, strict=True):
            if not rule.grows:
                needs.append(plan.takes)
            elif rule.state:
                whole = lengths._replace(main=max(tokens, lengths.total))
                found = hit.blocks[rule.index] if hit.tokens else []
                needs.append(self._plan_state(rule, admission, found, whole).takes)
            else:
                entries = min(rule.entries(tokens), rule.peak)
                needs.append(max(0, entries - len(plan.adopted)) + plan.copied)
        return needs

    # --- doing: cannot fail ---

    def _adopt(self, row: int, plans: list[_GroupPlan]) -> None:
        ops = self._ops
        # Every group holds its hits before any group takes a block, which could otherwise be one of them.
        for rule, plan in zip(self._rules, plans, strict=True):
            g = rule.index
            if plan.adopted:
                ops.pool.touch(g, plan.found)
                ops.tables.append(g, row, plan.adopted)
            ops.ledger.registered_at[g][row] = len(plan.adopted) - plan.copied
            if rule.frees:
                ops.ledger.freed_at[g][row] = plan.dead
        for rule, plan in zip(self._rules, plans, strict=True):
            if plan.imported:
                ops.tables.append(rule.index, row, [0] * plan.import_at)
                ops.take(rule, row, plan.imported)

    def _fill(self, row: int, plans: list[_GroupPlan], lengths: _Lengths) -> None:
        ops = self._ops
        for rule, plan in zip(self._rules, plans, strict=True):
            if plan.copied:
                entry = len(plan.adopted) - 1
                source = plan.adopted[-1]
                (target,) = ops.pool.take(rule.index, 1)
                ops.tables.put(rule.index, row, entry, target)
                ops.copy(rule.index, source, target, held=source)
            if plan.state is not None:
                ops.apply_state(rule, row, plan.state)
                ops.note_export(rule, row, plan.exported, lengths.main)
            else:
                ops.take(rule, row, plan.fresh)
            if rule.grows:
                ops.arm_growth(rule, row)
            if rule.frees:
                ops.arm_death(rule, row, lengths.total)
                if rule.dead(lengths.total, ops.ledger.prompt_at[row])[1] > plan.dead:
                    # A resumed request: its prompt is shorter than what it adopted, so some of that is dead already.
                    ops.ledger.die_at[rule.index][row] = 0

    def _finish(self, row: int, plans: list[_GroupPlan], admission: Admission, lengths: _Lengths) -> Served:
        ops = self._ops
        ops.ledger.computed_at[row] = lengths.main
        if ops.cache is not None and not admission.delay_caching:
            self._keying.register(row, min(lengths.main, ops.ledger.known_at[row]))
        return Served(slot=row, hit_tokens=lengths.hit)
