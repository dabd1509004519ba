"""GroupRule: what the manager derives from one group's lifetime, once, at its start."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.blocks.arrays import items
from kvframe.blocks.config import BlockConfig, GroupBlocks
from kvframe.blocks.publish import Publishing, publishing
from kvframe.checks import cdiv

NEVER = np.iinfo(np.int32).max  # a threshold that no token count reaches


@attrs.frozen(kw_only=True, eq=False)
class GroupRule:
    """One group, with everything about it that no request changes.

    Args:
        index: the group's number.
        group: its configuration.
        block: tokens of an entry.
        grows: entries are added as the request grows; else all come at admission.
        state: an entry is the state after one position.
        frees: a running request gives entries back.
        keeps_all: no entry ever dies.
        spare: trailing entries without committed content.
        width: entries of a table row.
        peak: the most entries one request holds at once, for admission.
        deaths: fewest settled tokens at which the entries below k are dead, by k; None: it depends on the prompt.
        deaths_at: the same as a list.
        wakes: by dead entries, the step's end that wakes a row for the death of the last of them: one more than in
            `deaths`, since thresholds are compared with a step's end, and NEVER beyond; None where `deaths` is.
        wakes_at: the same for loops.
        steady: after the first entry, one dies with every block of tokens.
        publishing: what it publishes; None if it has no keys.
        drop_last: a state's checkpoint leaves out the last unit for a draft model.
    """

    index: int
    group: GroupBlocks
    block: int
    grows: bool
    state: bool
    frees: bool
    keeps_all: bool
    spare: int
    width: int
    peak: int
    deaths: npt.NDArray[np.int64] | None
    deaths_at: list[int] | None
    wakes: npt.NDArray[np.intp] | None
    wakes_at: memoryview | None
    steady: bool
    publishing: Publishing | None
    drop_last: bool

    def entries(self, tokens: int) -> int:
        """Table entries for so many tokens of the group's source."""
        return int(self.group.lifetime.entries(tokens))

    def dead(self, settled: int, prompt: int) -> tuple[int, int]:
        """The entries [lo, hi) that no step from `settled` on reads; empty ranges as (0, 0)."""
        if self.keeps_all:
            return 0, 0
        if self.deaths_at is not None:
            return 0, max(0, bisect.bisect_right(self.deaths_at, settled) - 1)
        lo, hi = self.group.lifetime.dead(settled, prompt)
        return (int(lo), int(hi)) if hi > lo else (0, 0)

    def next_death(self, settled: int, prompt: int, limit: int) -> int:
        """Fewest settled tokens above these at which more is dead, NEVER if that is beyond `limit`."""
        if self.deaths is None:
            found = self.group.lifetime.next_death(settled, prompt, limit)
            return NEVER if found is None else found
        dead = self.dead(settled, prompt)[1]
        return int(self.deaths[dead + 1]) if dead + 1 < len(self.deaths) else NEVER


def by_name(rules: Sequence[GroupRule], needs: Sequence[int]) -> dict[str, int]:
    """What is said by group, by the groups' names."""
    return {rule.group.name: need for rule, need in zip(rules, needs, strict=True)}


def group_rule(config: BlockConfig, g: int) -> GroupRule:
    """The rule of group `g`."""
    group = config.groups[g]
    lifetime = group.lifetime
    grows = lifetime.fixed is None and lifetime.source == "decoder"
    tokens = config.max_model_len if lifetime.source == "decoder" else config.max_encoder_tokens
    in_flight = min(config.max_in_flight_tokens or config.max_model_len, config.max_model_len)
    keyed = config.prefix_caching and group.keyed
    frees = grows and lifetime.recycles
    deaths = _deaths(config, g) if frees else None
    wakes = None if deaths is None else np.append(deaths + 1, [NEVER, NEVER]).clip(max=NEVER).astype(np.intp)
    return GroupRule(
        index=g,
        group=group,
        block=lifetime.block,
        grows=grows,
        state=lifetime.state and grows,
        frees=frees,
        keeps_all=not lifetime.recycles and not lifetime.thins,
        spare=lifetime.spare,
        width=max(1, int(lifetime.entries(tokens))),
        peak=lifetime.peak(in_flight, config.max_model_len, max_encoder_tokens=config.max_encoder_tokens),
        deaths=deaths,
        deaths_at=None if deaths is None else deaths.tolist(),
        wakes=wakes,
        wakes_at=None if wakes is None else items(wakes),
        steady=deaths is not None and bool((np.diff(deaths[1:]) == lifetime.block).all()),
        publishing=publishing(config, g) if keyed else None,
        drop_last=bool(config.draft_groups),
    )


def _deaths(config: BlockConfig, g: int) -> npt.NDArray[np.int64] | None:
    """When each entry dies, if that is the same for every prompt, and entries die from the first on."""
    lifetime, limit = config.groups[g].lifetime, config.max_model_len
    counts = np.arange(limit + 1)
    first, dead = (np.asarray(edge) for edge in lifetime.dead(counts, np.full_like(counts, 1)))
    if (dead != lifetime.dead(counts, np.full_like(counts, limit))[1]).any() or first.any():
        return None
    when = np.searchsorted(dead, np.arange(cdiv(limit, lifetime.block) + 2))
    return when[when <= limit]
