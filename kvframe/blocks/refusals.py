"""Why a request does not fit: what it needs by group, who holds the pool, and whom to preempt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvframe.blocks.results import Refused
from kvframe.blocks.statistics import references

if TYPE_CHECKING:
    from kvframe.blocks.admission import Admitter
    from kvframe.blocks.questions import Questions
    from kvframe.blocks.requests import Admission
    from kvframe.blocks.rowops import RowOps


@attrs.frozen(kw_only=True)
class GroupShortage:
    """What one group needs and could get.

    Args:
        needed: blocks that the request takes.
        available: blocks that the group could get if no other wanted any; cached ones included, they would be evicted.
    """

    needed: int
    available: int


@attrs.frozen(kw_only=True)
class Holder:
    """A running request. Units are slabs; blocks, where no group splits slabs.

    Args:
        slot: its row.
        blocks: that it holds, by group name; shared ones included.
        frees: units that would be free if it alone were preempted.
    """

    slot: int
    blocks: Mapping[str, int]
    frees: int


@attrs.frozen(kw_only=True)
class RefusalReason:
    """Why a request was refused, or would be. Units as in Holder.

    Args:
        missing: units that lack; 0: it fits.
        reason: what is short: "pool", or "tenant" where a quota is, which preempting others does not help.
        free_units: units that nobody holds, cached ones included: what evicting everything gives.
        watermark_units: units of these that admission leaves free.
        groups: by group name.
        holders: the running requests, those that would free most first.
        preempt: slots that together free enough, as few as taking those that free most first finds; None: preempting
            all others is not enough. Empty if it fits.
        text: all of this in a sentence or two.
    """

    missing: int
    reason: str
    free_units: int
    watermark_units: int
    groups: Mapping[str, GroupShortage]
    holders: tuple[Holder, ...]
    preempt: tuple[int, ...] | None
    text: str


def explain_admission(
    manager: Questions, admitter: Admitter, admission: Admission, busy: bool
) -> RefusalReason:
    """The reason for a waiting request."""
    refused, found = admitter.shortage(admission, busy)
    watermark = manager.config.watermark_blocks if busy else 0
    return _reason(manager, refused, found, watermark)


def explain_growth(
    manager: Questions, ops: RowOps, slot: int, num_new_tokens: int, lookahead: int
) -> RefusalReason:
    """The reason for a running request that is to compute `num_new_tokens` more."""
    manager.ledger.request(slot)
    start = manager.ledger.computed_at[slot]
    needs = {
        rule.group.name: ops.growth(rule, slot, start, start + num_new_tokens, lookahead) if rule.grows else 0
        for rule in ops.rules
    }
    missing = manager.pool.missing(list(needs.values()))
    return _reason(manager, Refused(missing=missing, needed=needs, slot=slot), (), 0)


def _reason(
    manager: Questions, refused: Refused, found: Sequence[Sequence[int]], watermark: int
) -> RefusalReason:
    pool, names = manager.pool, list(refused.needed)
    groups = {
        name: GroupShortage(needed=needed, available=pool.free_for(g))
        for g, (name, needed) in enumerate(refused.needed.items())
    }
    tables = _tables(manager, refused.slot)
    holders = sorted(
        (
            Holder(
                slot=slot,
                blocks=dict(zip(names, map(len, blocks), strict=True)),
                frees=_freed(manager, [blocks]),
            )
            for slot, blocks in tables.items()
        ),
        key=lambda holder: (-holder.frees, -holder.slot),
    )
    order = [holder.slot for holder in holders] if refused.reason == "pool" else []
    preempt = _victims(manager, refused.missing, order, tables, found)
    return RefusalReason(
        missing=refused.missing,
        reason=refused.reason,
        free_units=pool.num_free,
        watermark_units=watermark,
        groups=groups,
        holders=tuple(holders),
        preempt=preempt,
        text=_text(manager, refused, groups, preempt, watermark),
    )


def _tables(manager: Questions, but: int | None) -> dict[int, list[list[int]]]:
    """The blocks of every running request but one, by slot and group, null blocks left out."""
    groups = range(len(manager.config.groups))
    return {
        row: [[block for block in manager.tables.row(g, row).tolist() if block] for g in groups]
        for row, request in enumerate(manager.ledger.requests)
        if request is not None and row != but
    }


def _freed(
    manager: Questions, holders: Sequence[Sequence[Sequence[int]]], kept: Sequence[Sequence[int]] = ()
) -> int:
    """Units that are free if these requests leave: those of which nobody else holds a block, nor `kept` needs one."""
    uniform = manager.config.uniform
    cuts = [group.blocks_per_slab for group in manager.config.groups]
    refs = references(manager.pool)
    leaving = Counter(
        (0 if uniform else g, block) for blocks in holders for g, held in enumerate(blocks) for block in held
    )
    gone = Counter(
        (space, block // cuts[space])
        for (space, block), count in leaving.items()
        if refs[space][block] == count
    )
    needed = {(0 if uniform else g, block // cuts[g]) for g, found in enumerate(kept) for block in found}
    return sum(
        (space, unit) not in needed
        and count == np.count_nonzero(refs[space][unit * cuts[space] : (unit + 1) * cuts[space]])
        for (space, unit), count in gone.items()
        if unit  # the null block never leaves
    )


def _victims(
    manager: Questions,
    missing: int,
    order: Sequence[int],
    tables: Mapping[int, list[list[int]]],
    found: Sequence[Sequence[int]],
) -> tuple[int, ...] | None:
    if not missing:
        return ()
    chosen: list[int] = []
    for slot in order:
        chosen.append(slot)
        if _freed(manager, [tables[slot] for slot in chosen], found) >= missing:
            return tuple(chosen)
    return None


def _text(
    manager: Questions,
    refused: Refused,
    groups: Mapping[str, GroupShortage],
    preempt: tuple[int, ...] | None,
    watermark: int,
) -> str:
    unit = "block" if manager.config.uniform else "slab"
    if not refused.missing:
        return "It fits."
    needs = ", ".join(f"{group.needed} of {name}" for name, group in groups.items() if group.needed)
    free = f"{manager.pool.num_free} {unit}s are free, cached ones that would be evicted included"
    if watermark:
        free += f", {watermark} of which the watermark keeps"
    if refused.reason == "tenant":
        return f"It needs blocks: {needs}. Its tenant would be {refused.missing} {unit}s over its quota."
    advice = f"Preempting slots {', '.join(map(str, preempt))} would free enough" if preempt else None
    if preempt is None:
        advice = "Preempting all other requests would not free enough: it must wait for a larger pool, or be shorter"
    return f"It needs blocks: {needs}. {free}; {refused.missing} {unit}s lack. {advice}."
