"""KeyIndex: hash of a full block to the block that holds it, in three numpy arrays instead of a dict of objects.

A chained hash table. `first[bucket]` is the newest block of a bucket, `after[block]` the one before it. A key may be
held by several blocks; the oldest that is still there is the one found, as in a dict of insertion-ordered lists.

Keys are written and linked into their buckets when somebody next asks for a hash: a decoding batch keys a few blocks a
step, and linking what many steps brought costs little more than linking one step's.
"""

from __future__ import annotations

import itertools
import operator
import sys

import numpy as np
import numpy.typing as npt

from kvframe.blocks.arrays import Gather, items

Digests = npt.NDArray[np.uint64]  # [n, 4] words
HASH = np.dtype("V32")  # a hash as one item, the form in which numpy copies it fastest
Blocks = npt.NDArray[np.intp]

_UNKEYED = np.array(-1, np.int16)  # the group of a block without a key; an array, since numpy would make one
_GROUP_MIX = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
GROUPS = 64  # more groups than any plan has
_UNLINKED = 64  # arrays of keyed blocks that may wait to be linked
_UNWRITTEN = 4096  # single blocks that may wait for their hashes to be written, some 200 bytes each


class KeyIndex:
    """Keys of blocks with ids below `num_blocks`: (group, hash) to block. Id 0 is the null block and has no key.

    Memory: 32 bytes of hash, 16 to 32 of buckets, 8 of links and 2 of group a block.
    """

    def __init__(self, num_blocks: int) -> None:
        # Four times as many buckets as blocks and more: nearly all keys are alone in theirs.
        self._mask = (1 << max(4 * num_blocks - 1, 1).bit_length()) - 1
        self._first = np.zeros(self._mask + 1, np.int32)
        self._after = np.zeros(num_blocks, np.int32)
        self._bucket = np.zeros(num_blocks, np.int32)  # of each linked block: cheaper to read than its hash
        self._group = np.full(num_blocks, -1, np.int16)
        self._words = np.zeros((num_blocks, 4), np.uint64)
        # The same memory for the loop over single blocks: a memoryview's items cost a third of an array's.
        self._first_at, self._after_at = items(self._first), items(self._after)
        self._bucket_at, self._bucket_of = items(self._bucket), Gather(self._bucket)
        self.group_at = items(self._group)
        self._bytes = items(self._words.view(np.uint8))
        self._hashes = self._words.view(HASH).reshape(-1)
        self._first_words = self._words[:, 0]
        self._group_of, self._newest_of = Gather(self._group), Gather(self._first)
        self._unlinked: list[tuple[int, Blocks]] = []  # group, blocks; older than what is unwritten
        self._unwritten: list[tuple[list[int] | Blocks, list[bytes]]] = []  # blocks and their hashes
        self._waiting = 0  # how many are unwritten
        self._word_at = items(self._words)
        self._mixes = [group * _GROUP_MIX & _WORD for group in range(GROUPS)]

    def __contains__(self, block: int) -> bool:
        return self.group_at[block] >= 0

    def keyed(self, blocks: Blocks) -> npt.NDArray[np.bool_]:
        """Which of the blocks have a key."""
        flags: npt.NDArray[np.bool_] = self._group_of(blocks) != _UNKEYED
        return flags

    def all_keyed(self, blocks: Blocks) -> bool:
        """Whether each of the blocks has a key."""
        one = self._group_of.one(blocks)
        return bool(self.keyed(blocks).all()) if one is None else one >= 0

    def none_keyed(self, blocks: Blocks) -> bool:
        """Whether none of the blocks has a key."""
        return not len(blocks) or self._group_of.one(blocks) == -1

    def digest(self, block: int) -> bytes:
        """The hash of a block that has a key."""
        if self.group_at[block] >= GROUPS:
            blocks, digests = self._unwritten[-1]
            if isinstance(blocks, list) and block in blocks:  # the hash is most often asked for at once
                return digests[blocks.index(block)]
            self._write()
        return bytes(self._bytes[block * 32 : block * 32 + 32])

    def group(self, block: int) -> int:
        """The group of a block's key, -1 if it has none."""
        group = self.group_at[block]
        return group - GROUPS if group >= GROUPS else group

    def keys_by_group(self, blocks: Blocks) -> list[tuple[int, Blocks, Digests]]:
        """Those of the blocks that have a key of a group, and their hashes, by group."""
        self._write()
        return [(group, held, self._words[held]) for group, held in self._split(blocks)]

    def _split(self, blocks: Blocks) -> list[tuple[int, Blocks]]:
        """Those of the blocks that have a key of a group, by group."""
        one = self._group_of.one(blocks)
        if one is not None:
            return [(one, blocks)] if one >= 0 else []
        groups = self._group_of(blocks)
        return [(group, blocks[groups == group]) for group in sorted(set(groups.tolist()) - {-1})]

    # --- one block ---

    def add(self, block: int, group: int, digest: bytes) -> None:
        """Give a block without a key the key (group, digest)."""
        self.add_few([block], group, [digest])

    def add_few(self, blocks: list[int] | Blocks, group: int, digests: list[bytes]) -> None:
        """`add` for some blocks of one group. What is given must not change after."""
        if isinstance(blocks, np.ndarray):
            self._group[blocks] = group + GROUPS
        else:
            groups, mark = self.group_at, group + GROUPS
            for block in blocks:
                groups[block] = mark
        self._unwritten.append((blocks, digests))
        self._waiting += len(digests)
        if self._waiting > _UNWRITTEN:
            self._link()

    def remove(self, block: int) -> None:
        """Take the key of a block that has one."""
        if self._unlinked or self.group_at[block] >= GROUPS:
            self._link()
        self.group_at[block] = -1
        self._unlink([block])

    def _unlink(self, blocks: list[int]) -> None:
        """Take each block out of its bucket."""
        first, after, buckets = self._first_at, self._after_at, self._bucket_at
        for block in blocks:
            bucket = buckets[block]
            at = first[bucket]
            if at == block:
                first[bucket] = after[block]
                continue
            while after[at] != block:
                at = after[at]
            after[at] = after[block]

    def find(self, group: int, digest: bytes) -> int:
        """The oldest block with this key, 0 if there is none."""
        self._link()
        word = int.from_bytes(digest[:8], sys.byteorder)
        at, found = self._first_at[(word ^ self._mixes[group]) & self._mask], 0
        while at:
            if self._word_at[4 * at] == word and self.group_at[at] == group and self.digest(at) == digest:
                found = at
            at = self._after_at[at]
        return found

    # --- many blocks ---

    def add_many(self, blocks: Blocks, group: int, digests: Digests) -> None:
        """`add` for many blocks; of equal keys the earlier is the older. The array of blocks must not change after."""
        self._write()
        self._hashes[blocks] = digests.view(HASH).reshape(-1)
        self._group[blocks] = group
        self._unlinked.append((group, blocks))
        if len(self._unlinked) > _UNLINKED:
            self._link()

    def _write(self) -> None:
        """Write the hashes that wait, whose blocks then wait to be linked."""
        if not self._unwritten:
            return
        unwritten, self._unwritten, self._waiting = self._unwritten, [], 0
        blocks = np.concatenate([np.asarray(some, np.intp) for some, _ in unwritten])
        self._hashes[blocks] = np.frombuffer(
            b"".join(itertools.chain.from_iterable(d for _, d in unwritten)), HASH
        )
        self._group[blocks] = self._group_of(blocks) - GROUPS
        self._unlinked += self._split(blocks)

    def _link(self) -> None:
        """Put the blocks that wait into their buckets, those of one group together."""
        self._write()
        if not self._unlinked:
            return
        waiting, self._unlinked = self._unlinked, []
        for group, runs in itertools.groupby(waiting, key=operator.itemgetter(0)):
            arrays = [blocks for _, blocks in runs]
            self._link_many(arrays[0] if len(arrays) == 1 else np.concatenate(arrays), group)

    def _link_many(self, blocks: Blocks, group: int) -> None:
        buckets, ids = self._buckets(self._first_words[blocks], group), blocks.astype(np.int32)
        self._after[blocks] = self._newest_of(buckets)
        self._first[buckets], self._bucket[blocks] = ids, buckets.astype(np.int32)
        # Of several blocks for one bucket numpy has kept the last, the newest; the few others go behind it in order.
        left = (self._newest_of(buckets) != ids).nonzero()[0]
        if left.size:
            first, after = self._first_at, self._after_at
            for block, bucket in zip(ids[left].tolist(), buckets[left].tolist(), strict=True):
                newest = first[bucket]
                after[block], after[newest] = after[newest], block

    def remove_many(self, blocks: Blocks) -> list[tuple[int, int]]:
        """`remove` for those of the blocks that have a key; returns (group, how many) of these."""
        self._link()
        split = self._split(blocks)
        for _, held in split:
            self._group[held] = _UNKEYED
            buckets = self._bucket_of(held).astype(np.intp)
            first = self._newest_of(buckets) == held.astype(np.int32)
            at = first.nonzero()[0]
            self._first[buckets[at]] = self._after.take(held[at])
            if len(at) < len(held):
                self._unlink(held[(~first).nonzero()[0]].tolist())
        return [(group, len(held)) for group, held in split]

    def find_many(self, group: int, digests: Digests) -> npt.NDArray[np.int32]:
        """The oldest block of each key, 0 where there is none."""
        self._link()
        found = np.zeros(len(digests), np.int32)
        rows = np.arange(len(digests))
        at = self._first.take(self._buckets(digests[:, 0].copy(), group))
        while True:
            live = at.nonzero()[0]
            if not live.size:
                return found
            rows, at = rows[live], at[live].astype(np.intp)
            same = (self._words[at, 0] == digests[rows, 0]) & (self._group[at] == group)
            same[same] = (self._words[at[same]] == digests[rows[same]]).all(axis=1)
            found[rows[same]] = at[same]
            at = self._after[at]

    def _buckets(self, first_words: Digests, group: int) -> Blocks:
        """The buckets of hashes of which these are the first words, which it overwrites."""
        if group:  # the first one's mix is 0
            np.bitwise_xor(first_words, np.array(self._mixes[group], np.uint64), first_words)
        np.bitwise_and(first_words, np.array(self._mask, np.uint64), first_words)
        buckets: Blocks = first_words.view(np.intp)  # far below the sign bit
        return buckets

    def oldest_first(self) -> Blocks:
        """The blocks with a key; of equal keys the older comes first."""
        self._link()
        levels: list[Blocks] = []
        at: Blocks = self._first[self._first > 0].astype(np.intp)
        while at.size:
            levels.append(at)
            following = self._after[at]
            at = following[following > 0].astype(np.intp)
        return np.concatenate([np.zeros(0, np.intp), *levels[::-1]])

    def clear(self) -> None:
        """Take every key."""
        self._unlinked, self._unwritten, self._waiting = [], [], 0
        self._first[:] = 0
        self._group[:] = -1

    def distinct(self) -> int:
        """Different keys: blocks that hold the same key count once."""
        self._write()
        blocks = (self._group >= 0).nonzero()[0]
        keys = np.column_stack((self._words[blocks], self._group[blocks].astype(np.uint64)))
        return len(np.unique(keys, axis=0)) if blocks.size else 0
