"""Resizing of the pool while requests run: an engine gives memory back, or has got more.

The pool grows at its end. To shrink, what is held beyond the new end moves: `shrink` says which blocks, the engine
copies them, `Shrink.commit` makes it so. What is cached beyond the end, or where blocks move to, is evicted.
"""

from __future__ import annotations

from typing import Any

import attrs

from kvframe.blocks.errors import BlockError
from kvframe.blocks.results import Copy, Refused
from kvframe.blocks.transplant import Held, fill, holders, must_be_settled, renamed
from kvframe.blocks.wiring import Wiring


@attrs.frozen(kw_only=True)
class Shrink:
    """A pool that is about to shrink. Nothing has changed yet.

    Args:
        manager: whose pool.
        num_blocks: its slabs after, or blocks, where no group splits slabs.
        moves: what the engine copies, all at once, before it commits; the targets hold nothing that is needed.
    """

    manager: Wiring
    num_blocks: int
    moves: tuple[Copy, ...]
    _units: dict[int, int] = attrs.field(alias="units")
    _state: Any = attrs.field(alias="state")

    def commit(self) -> None:
        """The engine has copied: tables, pins and keys name the new blocks, and the pool ends earlier.

        Raises:
            BlockError: the manager was used since `shrink`; what was copied is stale, so ask again.
        """
        must_be_settled(self.manager)
        if _state(self.manager) != self._state:
            raise BlockError(
                what="num_blocks",
                value=self.num_blocks,
                rule="the manager was used since the moves were listed; call shrink again",
            )
        _rebuild(self.manager, self.num_blocks, self._units)


def grow(manager: Wiring, num_blocks: int) -> None:
    """Give the pool more slabs (blocks, where no group splits slabs), all of them free.

    Args:
        manager: whose pool; the engine has already made room behind its blocks.
        num_blocks: slabs after, the one with the null block included.

    Raises:
        BlockError: these are no more than there are, or copies wait.
    """
    if num_blocks <= manager.config.num_blocks:
        rule = f"must be more than the {manager.config.num_blocks} that there are"
        raise BlockError(what="num_blocks", value=num_blocks, rule=rule)
    must_be_settled(manager)
    _rebuild(manager, num_blocks, {})


def shrink(manager: Wiring, num_blocks: int) -> Shrink | Refused:
    """What must move for the pool to end after so many slabs (blocks, where no group splits slabs).

    A slab moves as a whole, with what is cached in it; into one that is free, or else the one that goes first. What is
    cached where something moves to is evicted at once; nothing else changes before `Shrink.commit`.

    Args:
        manager: whose pool.
        num_blocks: slabs after, the one with the null block included.

    Returns:
        The moves; or Refused, with the slabs that lack for what is held: preempt some requests, or unpin a prefix.

    Raises:
        BlockError: these are none, or not fewer than there are; or copies wait.
    """
    if not 1 <= num_blocks < manager.config.num_blocks:
        rule = f"must be 1 to {manager.config.num_blocks - 1} to shrink the pool"
        raise BlockError(what="num_blocks", value=num_blocks, rule=rule)
    must_be_settled(manager)
    groups = manager.config.groups
    held, idle = holders(manager), manager.pool.idle()
    cuts = [group.blocks_per_slab for group in groups]
    busy = {block // cuts[g] for g, block in held}
    high = sorted(unit for unit in busy if unit >= num_blocks)
    # Free ones first, then those whose last cached block goes first.
    last_use = {block // cuts[g]: place for place, (g, block) in enumerate(idle)}
    low = [unit for unit in range(1, num_blocks) if unit not in busy]
    low.sort(key=lambda unit: (last_use.get(unit, -1), unit))
    if len(high) > len(low):
        moving = [g for g, block in held if block // cuts[g] >= num_blocks]
        needed = {group.name: moving.count(g) for g, group in enumerate(groups)}
        return Refused(missing=len(high) - len(low), needed=needed)
    units = dict(zip(high, low, strict=False))
    moves = tuple(
        Copy(group=g, source=block, target=units[block // cuts[g]] * cuts[g] + block % cuts[g])
        for g, block in sorted({*held, *idle})
        if block // cuts[g] in units
    )
    targets = set(units.values())
    for g, block in idle:
        if block // cuts[g] in targets:
            manager.drop_keys(g, [block])
    return Shrink(manager=manager, num_blocks=num_blocks, moves=moves, units=units, state=_state(manager))


def _state(manager: Wiring) -> Any:
    """What tells whether a manager was used."""
    return holders(manager), manager.pool.idle(), manager.ledger.computed.tobytes()


def _rebuild(manager: Wiring, num_blocks: int, units: dict[int, int]) -> None:
    """Join the rows to a pool of another size.

    Args:
        manager: whose pool.
        num_blocks: its slabs.
        units: where slabs beyond the end go.
    """
    cuts = [group.blocks_per_slab for group in manager.config.groups]

    def rename(g: int, block: int) -> int:
        unit = block // cuts[g]
        return units[unit] * cuts[g] + block % cuts[g] if unit in units else block

    def lost(g: int, block: int) -> bool:
        unit = block // cuts[g]
        return unit in targets or (unit >= num_blocks and unit not in units)

    targets = set(units.values())
    held = {(g, rename(g, block)): count for (g, block), count in holders(manager).items()}
    idle: list[Held] = []
    for g, block in manager.pool.idle():
        if not lost(g, block):
            idle.append((g, rename(g, block)))
        else:
            manager.drop_keys(g, [block])
    owners = {
        (space, rename(space, block)): owner
        for (space, block), owner in manager.owners().items()
        if not lost(space, block)
    }
    config = attrs.evolve(manager.config, num_blocks=num_blocks)
    pool, cache = manager.make(config)
    if cache is not None and manager.cache is not None:
        spaces = {0: 0} if config.uniform else {g: g for g in range(len(cuts))}
        cache.restore(renamed(manager.cache.image(), rename, spaces))
    fill(pool, held, idle)
    manager.rejoin(config, pool, cache, rename)
    manager.pins.replace(
        {
            name: attrs.evolve(
                pin, blocks=tuple(tuple(rename(g, b) for b in row) for g, row in enumerate(pin.blocks))
            )
            for name, pin in manager.pins.all().items()
        }
    )
    manager.adopt(owners)
