"""Snapshots: what is cached, to a file and back, so that a scheduler restarts without losing it.

For pools whose memory outlives the scheduler: shared memory, pinned host memory of another process, a file. Kept are
the cached blocks with their keys and tenants, the order in which they go, and the pins. Running requests are not kept:
what they had keyed is cached then, and what they had not is free. Ask them in anew; they find their prefixes.

A snapshot is written aside, synced, and put in place of the one before in one step: a crash leaves the old one or the
new one. It is read only if nothing is missing and nothing was changed.
"""

from __future__ import annotations

from pathlib import Path

import attrs

from kvframe.blocks.config import BlockConfig
from kvframe.blocks.errors import BlockError
from kvframe.blocks.prefix import UNKNOWN, CacheImage
from kvframe.blocks.snapfile import Contents, Unreadable, fingerprint, read, write
from kvframe.blocks.transplant import Held, fill, must_be_settled, pinned
from kvframe.blocks.wiring import Wiring


@attrs.frozen(kw_only=True)
class Restored:
    """A snapshot was taken over.

    Args:
        num_keys: keys that later requests find.
        pins: names of the pinned prefixes.
    """

    num_keys: int
    pins: tuple[str, ...]


@attrs.frozen(kw_only=True)
class NotRestored:
    """A snapshot was not taken over; the manager is empty, and works.

    Args:
        reason: "missing", there is no file; "truncated" or "altered", it is damaged; "version", another kvframe wrote
            it in a form of its own; "config", its blocks are those of other groups, another pool or other content.
        detail: the same in words.
    """

    reason: str
    detail: str


def save(manager: Wiring, path: str | Path, *, content: str) -> None:
    """Write what is cached to a file, in place of what it held.

    Call it between steps, when the device has done what was scheduled: what has a key is taken to be stored.

    Args:
        manager: whose cache.
        path: the file; its folder must exist, and be one that renames files in one step, as local file systems do.
        content: what the blocks hold beside their tokens: name it after the model, its weights, the layout, and the
            memory that the pool lies in. A restart under another name does not take the snapshot over.

    Raises:
        BlockError: copies wait: take and run them first.
        OSError: the file cannot be written; the one before is still there.
    """
    must_be_settled(manager)
    image = CacheImage(whole=(), covers=(), further=())
    if manager.cache is not None:
        image = manager.cache.image()
    contents = Contents(
        fingerprint=_fingerprint(manager.config, content),
        image=image,
        idle=tuple(_unpinned(manager)),
        pins=manager.pins.all(),
        owners=manager.owners(),
    )
    write(Path(path), contents)


def load(manager: Wiring, path: str | Path, *, content: str) -> Restored | NotRestored:
    """Take a snapshot over into a manager that runs nothing. What it had cached itself is forgotten, in any case.

    Args:
        manager: configured as the one that wrote the snapshot was.
        path: the file.
        content: as it was given to `save`.

    Returns:
        What was restored, or why nothing was; then the manager is empty.

    Raises:
        BlockError: requests run, or prefixes are pinned.
    """
    if manager.pool.num_held or len(manager.pins):
        raise BlockError(
            what="manager", value="in use", rule="must run nothing and pin nothing to be restored"
        )
    if manager.cache is not None:
        manager.cache.clear()
    contents = read(Path(path))
    if isinstance(contents, Contents) and contents.fingerprint != _fingerprint(manager.config, content):
        detail = "its groups, pool, hashes or content are not those of this manager"
        contents = Unreadable(reason="config", detail=detail)
    pool, cache = manager.make(manager.config)
    if isinstance(contents, Unreadable):
        manager.join(manager.config, pool, cache)
        return NotRestored(reason=contents.reason, detail=contents.detail)
    if cache is not None:
        cache.restore(contents.image)
    fill(pool, pinned(contents.pins), contents.idle)
    manager.join(manager.config, pool, cache)
    manager.pins.replace(dict(contents.pins))
    _announce(manager, contents.image)
    manager.adopt(contents.owners)
    return Restored(num_keys=0 if cache is None else cache.num_keys, pins=tuple(contents.pins))


def _fingerprint(config: BlockConfig, content: str) -> str:
    names = ("groups", "num_blocks", "prefix_caching", "hash_unit", "hash_name", "hash_lookahead")
    return fingerprint(repr([(name, getattr(config, name)) for name in names]), content)


def _unpinned(manager: Wiring) -> list[Held]:
    """Everything cached, those that go first in front: idle blocks, then those that requests hold, as if released."""
    order = dict.fromkeys(manager.pool.idle())
    if manager.cache is None:
        return []
    for row, request in enumerate(manager.ledger.requests):
        for g in range(len(manager.config.groups)) if request is not None else ():
            keyed = manager.cache.index_of[g]
            order.update(
                {
                    (g, block): None
                    for block in manager.tables.row(g, row)[::-1].tolist()
                    if block and block in keyed
                }
            )
    for held in pinned(manager.pins.all()):
        order.pop(held, None)
    return list(order)


def _announce(manager: Wiring, image: CacheImage) -> None:
    """Tell the watcher of the keys; whose tokens they cover is not known any more."""
    watcher = manager.watcher
    if watcher is not None:
        for group, _, digests in image.whole:
            watcher.came_many(group, digests, UNKNOWN, None)
        for group, digest, blocks in image.further:
            for _ in blocks:
                watcher.came(group, digest, UNKNOWN, 0)
