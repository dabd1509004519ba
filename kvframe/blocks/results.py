"""What the block manager answers: a request is served, deferred or refused; no number means "no"."""

from __future__ import annotations

from collections.abc import Mapping

import attrs


@attrs.frozen(kw_only=True)
class Served:
    """The request has a slot and the blocks that its first chunk needs.

    Args:
        slot: the row of the block tables that is now the request's.
        hit_tokens: tokens whose blocks were found in the prefix cache.
    """

    slot: int
    hit_tokens: int = 0


@attrs.frozen(kw_only=True)
class Deferred:
    """The request can be served in a later step, whatever the others do.

    Args:
        reason: "same_step_state", a state that it hits is written only in this step; "no_slot", all rows are taken;
            "not_cached", what was to be pinned is not in the cache.
    """

    reason: str


@attrs.frozen(kw_only=True)
class Refused:
    """The request does not fit now. It got nothing, and lost nothing that it could still use.

    Args:
        missing: blocks that are lacking.
        needed: blocks that it needs, by group name; hits that are idle count, since they leave the free queue.
        slot: its row, for a request that is running.
        reason: what is too small: "pool"; "pin_limit", what may be pinned; "tenant", what its tenant may hold.
    """

    missing: int
    needed: Mapping[str, int]
    slot: int | None = None
    reason: str = "pool"


@attrs.frozen(kw_only=True)
class Copy:
    """A block to copy on the device before the step's kernels run (and after zeroing).

    Args:
        group: index of the group.
        source: block id to read.
        target: block id to write.
    """

    group: int
    source: int
    target: int


@attrs.frozen(kw_only=True)
class StepResult:
    """The answer to one step: every request that is not listed has its blocks.

    Args:
        refused: the requests that could not be served, in the order in which the step named them.
    """

    refused: tuple[Refused, ...] = ()

    @property
    def served(self) -> bool:
        """Whether every request of the step has its blocks."""
        return not self.refused


@attrs.frozen(kw_only=True)
class HitLimit:
    """Why a prefix hit is no longer than it is.

    Args:
        hit_tokens: the hit.
        limited_by: name of the group that ended it; None if nothing but `rule` did.
        entry: the first table entry of that group that is missing for the next longer hit, or None.
        rule: the reason in words.
        by_group: the longest hit that each keyed group would allow alone, in tokens.
    """

    hit_tokens: int
    limited_by: str | None
    entry: int | None
    rule: str
    by_group: Mapping[str, int]
