"""PrefixCache: which block holds which prefix. Keys of whole blocks live in numpy, the few others in dicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.blocks.arrays import FEW
from kvframe.blocks.keys import Blocks, Digests, KeyIndex

Key = tuple[int, bytes]  # group, hash
UNKNOWN = -1  # no row: the caller does not say whose tokens a key covers


class KeyWatcher(Protocol):
    """Is told as keys come and go, of each copy: several blocks may hold one key."""

    def came(self, group: int, digest: bytes, row: int, end: int) -> None:
        """A block got a key: the hash of the first `end` tokens of the request in `row`, which may be UNKNOWN."""

    def came_many(self, group: int, digests: Digests, rows: Any, ends: Any) -> None:
        """`came` for many blocks: `rows` is an array or one row, `ends` an array. They must not change after."""

    def went(self, group: int, digests: list[bytes] | Digests) -> None:
        """Blocks lost these keys."""

    def cleared(self) -> None:
        """All keys went."""


@attrs.frozen(kw_only=True, eq=False)
class CacheImage:
    """What a `PrefixCache` holds.

    Args:
        whole: (group, blocks, hashes) of the blocks' first keys; of equal keys the older block comes first.
        covers: (id space, block, tokens) of blocks whose first key covers only their start.
        further: (group, hash, blocks) of further keys.
    """

    whole: tuple[tuple[int, Blocks, Digests], ...]
    covers: tuple[tuple[int, int, int], ...]
    further: tuple[tuple[int, bytes, tuple[int, ...]], ...]


class PrefixCache:
    """Keys of cached blocks. A block's first key is its content at its longest; a block may have further, shorter ones.

    A key that covers only the start of a block (a prompt's tail, a state inside a block) counts as shorter, and gives
    way when the block becomes full.

    Args:
        sizes: number of block ids of each id space.
        space_of: the id space of each group.
        watcher: is told of keys that come and go; None costs nothing.
    """

    def __init__(
        self, sizes: Sequence[int], space_of: Sequence[int], watcher: KeyWatcher | None = None
    ) -> None:
        self.indices = tuple(KeyIndex(size) for size in sizes)
        self.index_of = tuple(self.indices[space] for space in space_of)
        self.watcher = watcher
        self._space_of = tuple(space_of)
        self._covers: dict[tuple[int, int], int] = {}  # (space, block): tokens, for blocks not keyed as whole
        self._further: dict[tuple[int, int], list[Key]] = {}
        self._holders: dict[Key, list[int]] = {}  # of further keys
        self.evicted = [0] * len(self._space_of)  # keyed blocks that were overwritten, by group

    def add(
        self,
        group: int,
        block: int,
        digest: bytes,
        covers: int,
        whole: int,
        row: int = UNKNOWN,
        end: int = 0,
    ) -> bool:
        """Key a block with the hash at the end of the first `covers` of its `whole` tokens.

        Args:
            group, block: whose id it is, and the id.
            digest: the hash.
            covers, whole: tokens of the block that it covers, and that the block has.
            row, end: the request whose first `end` tokens it is the hash of, for the watcher.

        Returns:
            Whether the key is new for this block.
        """
        index, where = self.index_of[group], (self._space_of[group], block)
        if block in index:
            if index.digest(block) == digest or block in self._holders.get((group, digest), ()):
                return False
            if self._covers.get(where, whole) >= covers:
                self._note_came(group, digest, row, end)
                self._further.setdefault(where, []).append((group, digest))
                self._holders.setdefault((group, digest), []).append(block)
                return True
            self.drop(group, block)
        self._note_came(group, digest, row, end)
        index.add(block, group, digest)
        if covers < whole:
            self._covers[where] = covers
        return True

    def add_first(
        self,
        group: int,
        block: int,
        digest: bytes,
        whole: int,
        row: int = UNKNOWN,
        end: int = 0,
    ) -> None:
        """`add` for a block that is keyed as a whole and most likely has no key yet."""
        index = self.index_of[group]
        if self.watcher is None and block not in index:
            index.add(block, group, digest)
        else:
            self.add(group, block, digest, whole, whole, row, end)

    def add_few(
        self,
        group: int,
        blocks: list[int] | Blocks,
        digests: list[bytes],
        rows: list[int] | Blocks,
        ends: list[int] | Blocks,
    ) -> None:
        """Key some whole blocks that have no key; what is given must not change after.

        Args:
            group, blocks, digests: whose blocks they are, the blocks, and their hashes.
            rows, ends: by block as in `KeyWatcher.came_many`; without a watcher nobody asks.
        """
        if not digests:
            return
        self.index_of[group].add_few(blocks, group, digests)
        if self.watcher is not None:
            words = np.frombuffer(b"".join(digests), np.uint64).reshape(len(digests), -1)
            self.watcher.came_many(group, words, np.array(rows, np.intp), np.array(ends, np.intp))

    def drop(self, group: int, block: int) -> None:
        """Take all keys of a block; none is fine. `group` only says whose id it is."""
        index, where = self.index_of[group], (self._space_of[group], block)
        if block not in index:
            return
        owner, digest = index.group(block), index.digest(block)
        index.remove(block)
        self._note_went(owner, digest)
        self._covers.pop(where, None)
        for key in self._further.pop(where, ()):
            self._holders[key].remove(block)
            if not self._holders[key]:
                del self._holders[key]
            self._note_went(*key)

    def drop_all(self, group: int, blocks: list[int]) -> None:
        """`drop` for blocks that are about to be overwritten."""
        if len(blocks) > FEW and not (self._covers or self._further):
            self.drop_many(group, np.array(blocks, np.intp))
            return
        index, evicted = self.index_of[group], self.evicted
        only_first = not (self._covers or self._further) and self.watcher is None
        for block in blocks:
            if block in index:
                evicted[index.group(block)] += 1
                if only_first:
                    index.remove(block)
                else:
                    self.drop(group, block)

    def drop_many(self, group: int, blocks: Blocks) -> None:
        """`drop_all` for many blocks."""
        if self._covers or self._further:
            self.drop_all(group, blocks.tolist())
            return
        index = self.index_of[group]
        if self.watcher is not None:
            for owner, _, digests in index.keys_by_group(blocks):
                self.watcher.went(owner, digests)
        for owner, count in index.remove_many(blocks):
            self.evicted[owner] += count

    def move(self, group: int, source: int, target: int) -> None:
        """Give the keys of `source` to `target`, which has none and gets a copy of the content."""
        index, space = self.index_of[group], self._space_of[group]
        if source not in index:
            return
        index_group, digest = index.group(source), index.digest(source)
        index.remove(source)
        index.add(target, index_group, digest)
        if (space, source) in self._covers:
            self._covers[space, target] = self._covers.pop((space, source))
        for key in self._further.pop((space, source), []):
            self._further.setdefault((space, target), []).append(key)
            holders = self._holders[key]
            holders[holders.index(source)] = target

    def find(self, group: int, digest: bytes) -> int:
        """A block with this key, the oldest whole one if there are several; 0 if there is none."""
        found = self.index_of[group].find(group, digest)
        if not found and self._holders:
            holders = self._holders.get((group, digest))
            return holders[0] if holders else 0
        return found

    def find_many(self, group: int, digests: Digests) -> npt.NDArray[np.int32]:
        """`find` for many hashes."""
        found = self.index_of[group].find_many(group, digests)
        if self._holders:
            for at in (found == 0).nonzero()[0].tolist():
                holders = self._holders.get((group, digests[at].tobytes()))
                found[at] = holders[0] if holders else 0
        return found

    def add_whole(
        self, group: int, blocks: Blocks, digests: Digests, rows: Any = UNKNOWN, ends: Any = None
    ) -> None:
        """Key many whole blocks that have no key; `rows` and `ends` as in `KeyWatcher.came_many`.

        The arrays must not change after.
        """
        self.index_of[group].add_many(blocks, group, digests)
        if self.watcher is not None:
            self.watcher.came_many(group, digests, rows, ends)

    # --- for snapshots and resizing ---

    def image(self) -> CacheImage:
        """All keys, as plain values."""
        whole = []
        for index in self.indices:
            blocks = index.oldest_first()
            whole += [(group, held, digests) for group, held, digests in index.keys_by_group(blocks)]
        covers = [(space, block, tokens) for (space, block), tokens in self._covers.items()]
        further = [(group, digest, tuple(held)) for (group, digest), held in self._holders.items()]
        return CacheImage(whole=tuple(whole), covers=tuple(covers), further=tuple(further))

    def restore(self, image: CacheImage) -> None:
        """Take over all keys of an image, in a cache that has none; the watcher is not told."""
        for group, blocks, digests in image.whole:
            self.index_of[group].add_many(blocks, group, digests)
        self._covers.update({(space, block): tokens for space, block, tokens in image.covers})
        for group, digest, held in image.further:
            self._holders[group, digest] = list(held)
            for block in held:
                self._further.setdefault((self._space_of[group], block), []).append((group, digest))

    def clear(self) -> None:
        """Take every key."""
        for index in self.indices:
            index.clear()
        self._covers.clear()
        self._further.clear()
        self._holders.clear()
        if self.watcher is not None:
            self.watcher.cleared()

    @property
    def num_keys(self) -> int:
        """Different keys; slow, for reports."""
        further = sum(not self.index_of[group].find(group, digest) for group, digest in self._holders)
        return sum(index.distinct() for index in self.indices) + further

    def _note_came(self, group: int, digest: bytes, row: int, end: int) -> None:
        if self.watcher is not None:
            self.watcher.came(group, digest, row, end)

    def _note_went(self, group: int, digest: bytes) -> None:
        if self.watcher is not None:
            self.watcher.went(group, [digest])
