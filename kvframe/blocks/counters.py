"""Counters: what has happened in a block manager. Counted where requests come and go, so a decode step pays nothing."""

from __future__ import annotations

import attrs

from kvframe.blocks.config import BlockConfig
from kvframe.blocks.hashing import TokenChain
from kvframe.blocks.hits import Hit, HitSearch


@attrs.define(kw_only=True)
class Counters:
    """Totals since the manager was made. A request that resumes after a preemption is admitted again.

    Args:
        config: the groups.
        admitted: requests that got a slot.
        deferred: by reason.
        refused: admissions that did not fit.
        stuck: running requests that did not fit, one a step and request.
        preempted, forked: requests.
        asked_tokens: tokens of admitted requests when they asked.
        hit_tokens: of these, found in the cache.
        group_tokens: tokens that each group would have found alone, by group; counted for keyed groups.
        limited: hits that a group ended, by group.
        evicted: cached blocks that were overwritten, by group.
    """

    config: BlockConfig
    admitted: int = 0
    deferred: dict[str, int] = attrs.field(factory=dict)
    refused: int = 0
    stuck: int = 0
    preempted: int = 0
    forked: int = 0
    asked_tokens: int = 0
    hit_tokens: int = 0
    group_tokens: list[int] = attrs.field(init=False)
    limited: list[int] = attrs.field(init=False)
    evicted: list[int] = attrs.field(init=False)
    _names: dict[str, int] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        groups = self.config.groups
        self.group_tokens, self.limited, self.evicted = ([0] * len(groups) for _ in range(3))
        self._names = {group.name: g for g, group in enumerate(groups)}

    def defer(self, reason: str) -> None:
        """A request must wait."""
        self.deferred[reason] = self.deferred.get(reason, 0) + 1

    def admit(self, chain: TokenChain, hit: Hit, search: HitSearch) -> None:
        """A request is about to get its slot. Called before its own blocks get keys.

        Who ended the hit is looked for only where a group had more: without a junction a dense group ended it, and no
        group that is not dense was asked for more.
        """
        self.admitted += 1
        self.asked_tokens += chain.num_tokens
        self.hit_tokens += hit.tokens
        if hit.junction or (hit.tokens and not search.has_dense):
            limit = search.explain(chain)
            for name, tokens in limit.by_group.items():
                self.group_tokens[self._names[name]] += tokens
            if limit.limited_by is not None:
                self.limited[self._names[limit.limited_by]] += 1
        elif hit.tokens:
            for g in self.config.keyed:
                self.group_tokens[g] += hit.tokens
