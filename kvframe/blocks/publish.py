"""Which entries are worth keying, and up to where: retention, draft groups, prompt tails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from kvframe.blocks.config import BlockConfig
from kvframe.checks import cdiv, round_up
from kvframe.lifetime import Lifetime

_FAR = 1 << 12  # entries: further than any window that hits could depend on goes without one


def prompt_checkpoint(prompt: int, unit: int, draft: bool, lookahead: int = 1) -> int:
    """The position whose state a later identical prompt can resume from, 0 if there is none (contract 3.8).

    Args:
        prompt: tokens of the prompt.
        unit: tokens that hits are multiples of.
        draft: a draft model needs the last unit computed again.
        lookahead: tokens at the end that are always computed.
    """
    limit = prompt if draft else prompt - lookahead
    return max(0, limit // unit * unit - (unit if draft else 0))


def replay_boundaries(prompt: int, unit: int, draft: bool) -> tuple[int, ...]:
    """Where a later request with this prompt can resume (contract 6.9), in tokens."""
    if not draft:
        return (prompt - 1,)
    ends = {max(limit // unit * unit - unit, 0) for limit in (prompt - 1, prompt)}
    return tuple(sorted(ends))


@attrs.frozen(kw_only=True)
class Publishing:
    """What one keyed group publishes.

    Args:
        lifetime: the group's rule.
        block: tokens of an entry.
        drop: tokens beyond a resume point that the group must have as well.
        is_draft: hits leave out its last unit.
        stop_unit: a resume point every so many tokens; 0: only where the prompt can be resumed; None: everything.
        align: tokens that resume points are multiples of.
        round_to: counts are rounded down to this many tokens before blocks are keyed.
        held_back: tokens at the end that a draft module may write again.
        tail_unit: the hash unit, where a prompt's tail inside a block gets a key; 0: it gets none.
        sparse: only resume points are published, where the prompt can be resumed among them.
        entries: how many a request can have.
        periodic: by entry, whether a periodic resume point needs it.
        at_once: entries that are keyed at once, where counts are rounded to more than one.
        clear: entries of which the last ends so many tokens beyond the prompt have nothing to do with its own keys.
        regular: every such entry is published as soon as it is full and counts, and nothing else is then.
        plain: so it is for each entry, from the first token on.
    """

    lifetime: Lifetime
    block: int
    drop: int
    is_draft: bool
    stop_unit: int | None
    align: int
    round_to: int
    held_back: int
    tail_unit: int
    sparse: bool
    entries: int
    periodic: bytes = attrs.field(init=False, repr=False)
    at_once: int = attrs.field(init=False)
    clear: int = attrs.field(init=False)
    regular: bool = attrs.field(init=False)
    plain: bool = attrs.field(init=False)

    @periodic.default
    def _find_periodic(self) -> bytes:
        if not self.stop_unit:
            return bytes(self.entries)
        # The dead range only grows, so the first resume point that the entry could serve decides.
        entries, unit = np.arange(self.entries), self.stop_unit
        first = np.maximum(unit, -(-((entries + 1) * self.block - self.drop) // unit) * unit)
        low, high = self._alive(first)
        return bytes((low <= entries) & (entries < high))

    @at_once.default
    def _count_at_once(self) -> int:
        return max(1, self.round_to // self.block)

    @clear.default
    def _find_clear(self) -> int:
        if not self.tail_unit and not self.lifetime.state:
            return -self.block * self.entries  # the prompt has no keys of its own
        # Where counts are rounded to blocks, the prompt's tail is keyed together with the block that it is in.
        tail = self.block if self.tail_unit and self.round_to > 1 else 1
        return tail + (self.at_once - 1) * self.block

    @regular.default
    def _is_regular(self) -> bool:
        whole = self.round_to == 1 or self.round_to % self.block == 0
        return self.stop_unit is None and not self.is_draft and whole

    @plain.default
    def _is_plain(self) -> bool:
        return self.regular and self.at_once == 1 and not self.lifetime.state and not self.tail_unit

    def cacheable(self, tokens: int) -> int:
        """How many of `tokens` final tokens count (contract 6.8)."""
        if not self.is_draft:
            return tokens // self.round_to * self.round_to
        if tokens < self.round_to:
            return 0
        final = max(0, tokens - self.held_back)
        return min(final, final // self.round_to * self.round_to + self.block)

    def fewest(self, target: int) -> int:
        """The fewest final tokens of which `target` count."""
        if not self.is_draft:
            return round_up(target, self.round_to)
        final = max(target, round_up(target - self.block, self.round_to))
        return max(final + self.held_back, self.round_to)

    def next_block(self, registered: int) -> int:
        """The fewest final tokens at which entry `registered` is full and counts."""
        return self.fewest((registered + 1) * self.block)

    def tail(self, prompt: int) -> int:
        """The last hash boundary of the prompt that lies inside a block, 0 if there is none."""
        if not self.tail_unit:
            return 0
        boundary = (prompt if self.is_draft else prompt - 1) // self.tail_unit * self.tail_unit
        return boundary if boundary % self.block else 0

    def wanted(self, start: int, stop: int, boundaries: Sequence[int]) -> list[int]:
        """Those of the entries [start, stop) that are published: where all are not, those alive at a resume point."""
        if self.stop_unit is None:
            return list(range(start, stop))
        ranges, periodic = self._needed(boundaries), self.periodic
        return [
            entry
            for entry in range(start, stop)
            if periodic[entry] or any(low <= entry < high for low, high in ranges)
        ]

    def next_wanted(self, entry: int, boundaries: Sequence[int]) -> int | None:
        """The first entry from this one on that `wanted` would choose; None: there is none any more."""
        if self.stop_unit is None:
            return entry
        periodic = self.periodic.find(1, entry)
        found = [] if periodic < 0 else [periodic]
        found += [max(entry, int(low)) for low, high in self._needed(boundaries) if entry < high]
        return min(found, default=None)

    def _needed(self, boundaries: Sequence[int]) -> list[tuple[Any, Any]]:
        """The entries [low, high) that are alive at each boundary."""
        # A state is kept at the end of an entry: the last one that a resume point inside an entry can start from.
        unit = self.block if self.lifetime.state else self.align
        return [self._alive(at // unit * unit) for at in boundaries]

    def _alive(self, at: Any) -> tuple[Any, Any]:
        _, hi = self.lifetime.dead(at + self.lifetime.slack, at)
        return hi, (at + self.drop) // self.block


def publishing(config: BlockConfig, g: int) -> Publishing:
    """The rule of keyed group `g`."""
    group, align = config.groups[g], config.alignment
    block, interval = group.lifetime.block, config.retention_interval
    stop_unit: int | None = align if interval is None else interval
    if group.dense or (interval is None and group.lifetime.state):
        stop_unit = None
    elif group.lifetime.state:
        stop_unit = None if interval and interval <= block else interval
    elif align % block or (interval is None and align == block and _serves_hits(group.lifetime)):
        stop_unit = None
    rule = Publishing(
        lifetime=group.lifetime,
        block=block,
        drop=config.drop_unit(g) and block,
        is_draft=g in config.draft_groups,
        stop_unit=stop_unit,
        align=align,
        round_to=1 if config.fine_grained else config.step_unit,
        held_back=max(0, config.prefill_lookahead - 1),
        tail_unit=config.hash_unit if group.dense and block != config.hash_unit else 0,
        sparse=interval is not None and stop_unit is not None,
        entries=cdiv(config.max_model_len, block) + 1,
    )
    # Resume points so close that they need every entry choose nothing.
    return attrs.evolve(rule, stop_unit=None, sparse=False) if stop_unit and all(rule.periodic) else rule


def _serves_hits(lifetime: Lifetime) -> bool:
    """Whether a hit ever needs a full entry: not so for a window of one token."""
    at = lifetime.block * np.arange(1, _FAR)
    return bool((lifetime.dead(at + lifetime.slack, at)[1] < at // lifetime.block).any())
