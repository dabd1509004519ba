"""Statistics: what a manager's pool holds and what it has counted, as plain numbers.

Shares are of the pool: a slab is 1, a block of a group 1 / k. Together the shares of `fragmentation` are 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.blocks.config import BlockConfig
from kvframe.blocks.pool import BlockPool, Pool
from kvframe.blocks.slabs import SlabPool
from kvframe.checks import cdiv

if TYPE_CHECKING:
    from kvframe.blocks.questions import Questions


@attrs.frozen(kw_only=True)
class GroupStatistics:
    """One group.

    Args:
        name: of the group.
        block_tokens: tokens of a block.
        blocks_per_slab: blocks that it cuts a slab into.
        held_blocks: that requests hold, shared ones once.
        cached_blocks: that nobody holds and later requests may find.
        empty_tokens: places in held blocks that no token has taken yet.
        hit_tokens: that the group alone would have found, over all admissions; None without keys.
        hit_rate: the same, of the tokens that were asked for.
        limited_hits: hits that this group ended before others would have.
        evicted_blocks: cached blocks that were overwritten.
    """

    name: str
    block_tokens: int
    blocks_per_slab: int
    held_blocks: int
    cached_blocks: int
    empty_tokens: int
    hit_tokens: int | None
    hit_rate: float | None
    limited_hits: int
    evicted_blocks: int


@attrs.frozen(kw_only=True)
class Statistics:
    """A manager at one moment; counts are since it was made.

    Args:
        pool_units: slabs of the pool; blocks, where no group splits slabs. The null block's included.
        free_units: that nobody holds a block of, cached ones included.
        usage: share of the pool that requests hold or that nobody else could get.
        running: requests with a slot.
        running_tokens: tokens stored or scheduled for them.
        admitted, preempted, forked, finished: requests; one that resumes is admitted again.
        deferred: admissions that had to wait, by reason.
        refused: admissions that did not fit; stuck: running requests that did not, one a step and request.
        asked_tokens: tokens of admitted requests when they asked; hit_tokens: of these, found in the cache.
        hit_rate: hit_tokens / asked_tokens, 0 before the first.
        fragmentation: shares of the pool by what is there: "tokens", "empty_tails" of held blocks, "partly_used_slabs"
            (blocks that only the slab's own group can get), "null_block", "free" (cached ones included).
        groups: each group.
    """

    pool_units: int
    free_units: int
    usage: float
    running: int
    running_tokens: int
    admitted: int
    preempted: int
    forked: int
    finished: int
    deferred: Mapping[str, int]
    refused: int
    stuck: int
    asked_tokens: int
    hit_tokens: int
    hit_rate: float
    fragmentation: Mapping[str, float]
    groups: tuple[GroupStatistics, ...]

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        return attrs.asdict(self)


def collect(manager: Questions) -> Statistics:
    """The statistics of a manager."""
    counters, ledger, pool = manager.counters, manager.ledger, manager.pool
    rows = [row for row, request in enumerate(ledger.requests) if request is not None]
    groups = _groups(manager)
    shares = _fragmentation(
        manager.config, groups, pool.num_free, [pool.free_for(g) for g in range(len(groups))]
    )
    return Statistics(
        pool_units=manager.config.num_blocks,
        free_units=pool.num_free,
        usage=1 - pool.num_free / manager.config.num_blocks,
        running=len(rows),
        running_tokens=int(ledger.computed[rows].sum()),
        admitted=counters.admitted,
        preempted=counters.preempted,
        forked=counters.forked,
        finished=counters.admitted + counters.forked - counters.preempted - len(rows),
        deferred=dict(counters.deferred),
        refused=counters.refused,
        stuck=counters.stuck,
        asked_tokens=counters.asked_tokens,
        hit_tokens=counters.hit_tokens,
        hit_rate=_rate(counters.hit_tokens, counters.asked_tokens),
        fragmentation=shares,
        groups=groups,
    )


def _rate(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def references(pool: Pool) -> tuple[npt.NDArray[np.int32], ...]:
    """How many requests hold each block, by id space; a pool that keeps no such arrays has none."""
    if isinstance(pool, SlabPool):
        return pool.refs
    return (pool.refs,) if isinstance(pool, BlockPool) else ()


def held_blocks(manager: Questions, group: int) -> int:
    """Blocks of a group that requests hold, shared ones once."""
    lengths, table = manager.tables.length[group], manager.tables.tables[group]
    rows = lengths.nonzero()[0]
    entries = table[rows, : int(lengths.max(initial=0))]
    return len(np.unique(entries[entries > 0]))


def empty_tokens(manager: Questions, group: int) -> int:
    """Places at the ends of a group's tables that no token has taken yet; 0 where entries do not hold tokens."""
    lifetime = manager.config.groups[group].lifetime
    if not lifetime.per_token or lifetime.source != "decoder":
        return 0
    lengths = manager.tables.length[group].astype(np.int64)
    rows = lengths.nonzero()[0]
    return int((lengths[rows] * lifetime.block - manager.ledger.computed[rows]).sum())


def _groups(manager: Questions) -> tuple[GroupStatistics, ...]:
    config, counters = manager.config, manager.counters
    cached = _cached(manager)
    return tuple(
        GroupStatistics(
            name=group.name,
            block_tokens=group.lifetime.block,
            blocks_per_slab=group.blocks_per_slab,
            held_blocks=held_blocks(manager, g),
            cached_blocks=cached[g],
            empty_tokens=empty_tokens(manager, g),
            hit_tokens=counters.group_tokens[g] if group.keyed and config.prefix_caching else None,
            hit_rate=_rate(counters.group_tokens[g], counters.asked_tokens)
            if group.keyed and config.prefix_caching
            else None,
            limited_hits=counters.limited[g],
            evicted_blocks=counters.evicted[g],
        )
        for g, group in enumerate(config.groups)
    )


def _cached(manager: Questions) -> list[int]:
    """Blocks with a key that nobody holds, by group; not counted in a pool without `references`."""
    counts = [0] * len(manager.config.groups)
    if manager.cache is None:
        return counts
    for index, held in zip(manager.cache.indices, references(manager.pool), strict=False):
        for g, blocks, _ in index.keys_by_group((held == 0).nonzero()[0]):
            counts[g] += len(blocks)
    return counts


def _fragmentation(
    config: BlockConfig, groups: tuple[GroupStatistics, ...], free: int, free_for: list[int]
) -> dict[str, float]:
    """Where the pool's slabs are, as shares."""
    null = 1.0 if config.uniform else _null_share(config)
    held = sum(group.held_blocks / group.blocks_per_slab for group in groups)
    tails = sum(group.empty_tokens / group.block_tokens / group.blocks_per_slab for group in groups)
    partly = sum(
        (most - free * group.blocks_per_slab) / group.blocks_per_slab
        for most, group in zip(free_for, groups, strict=True)
    )
    slabs = {
        "tokens": held - tails,
        "empty_tails": tails,
        "partly_used_slabs": partly,
        "null_block": null,
        "free": float(free),
    }
    return {cause: slabs_of / config.num_blocks for cause, slabs_of in slabs.items()}


def _null_share(config: BlockConfig) -> float:
    """The part of slab 0 that is nobody's: the null block of every group, as many bytes as the widest block has."""
    cuts = [group.blocks_per_slab for group in config.groups]
    rest = [(k - cdiv(k, min(cuts))) / k for k in cuts]
    return 1 - max(rest)
