"""Transplant: a manager's state into another pool, for resizing and for restoring a snapshot."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import attrs
import numpy as np

from kvframe.blocks.errors import BlockError
from kvframe.blocks.pins import Pin
from kvframe.blocks.pool import Pool
from kvframe.blocks.prefix import CacheImage
from kvframe.blocks.wiring import Wiring

Held = tuple[int, int]  # group, block
Rename = Callable[[int, int], int]  # (group, block) to the block's new id


def holders(manager: Wiring) -> Counter[Held]:
    """How often each block is held, by requests and by pins."""
    held = pinned(manager.pins.all())
    for row, request in enumerate(manager.ledger.requests):
        if request is not None:
            for g in range(len(manager.config.groups)):
                held.update((g, block) for block in manager.tables.row(g, row).tolist() if block)
    return held


def pinned(pins: Mapping[str, Pin]) -> Counter[Held]:
    """How often each block is held by pins."""
    held: Counter[Held] = Counter()
    for pin in pins.values():
        for g, blocks in enumerate(pin.blocks):
            held.update((g, block) for block in blocks)
    return held


def must_be_settled(manager: Wiring) -> None:
    """Refuse while copies wait: they hold blocks that no table names.

    Raises:
        BlockError: there are such copies.
    """
    if manager.has_copies:
        raise BlockError(what="copies", value="waiting", rule="must be taken by take_copies and run first")


def fill(pool: Pool, held: Mapping[Held, int], idle: Iterable[Held]) -> None:
    """Bring a new pool to where these blocks are held so often, and those idle, the first of them to go first.

    The cache already has the keys.
    """
    order = list(idle)
    for group, blocks in _by_group(sorted([*held, *order])):
        pool.seize(group, blocks)
    further = {block: count - 1 for block, count in held.items() if count > 1}
    while further:
        for group, blocks in _by_group(sorted(further)):
            pool.touch(group, blocks)  # each block once a call
        further = {block: count - 1 for block, count in further.items() if count > 1}
    for group, blocks in _by_group(order):
        pool.give_back(group, blocks)


def _by_group(blocks: Iterable[Held]) -> Iterable[tuple[int, list[int]]]:
    for group, run in itertools.groupby(blocks, key=operator.itemgetter(0)):
        yield group, [block for _, block in run]


def renamed(image: CacheImage, rename: Rename, groups_of_space: Mapping[int, int]) -> CacheImage:
    """The keys of blocks that have other ids.

    Args:
        image: the keys.
        rename: by group and block.
        groups_of_space: a group for each id space, since `covers` names the space only.
    """
    return attrs.evolve(
        image,
        whole=tuple(
            (g, np.array([rename(g, block) for block in blocks.tolist()], np.intp), digests)
            for g, blocks, digests in image.whole
        ),
        covers=tuple(
            (space, rename(groups_of_space[space], block), tokens) for space, block, tokens in image.covers
        ),
        further=tuple(
            (g, digest, tuple(rename(g, b) for b in blocks)) for g, digest, blocks in image.further
        ),
    )
