"""Tails: the tokens of every running request that no hash covers yet, and the hashing of units that became full."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvframe.blocks.arrays import items
from kvframe.blocks.config import BlockConfig
from kvframe.blocks.hashing import DIGEST_BYTES, TokenChain
from kvframe.blocks.ledger import Ledger

ONE = np.array(1, np.int32)
TOKEN = np.dtype(np.int32)
PARENT = DIGEST_BYTES // 4  # words of 4 bytes in front of a row's tokens: the hash of its last unit


class Tails:
    """A row of uint32 for each request: its last hash, then the tokens after it; both are what the next hash covers.

    Args:
        ledger: the rows' counts.
        config: the hash unit, the tokens that must follow it, and whether anything is hashed at all.
    """

    def __init__(self, ledger: Ledger, config: BlockConfig) -> None:
        self._ledger, self._unit = ledger, config.hash_unit
        self._hashing = config.prefix_caching
        rows = ledger.rows
        width = PARENT + config.hash_unit + config.hash_lookahead
        self._hash_bytes = DIGEST_BYTES + 4 * config.hash_unit
        self._words = np.zeros((rows, width), np.uint32)
        self._flat = self._words.reshape(-1)
        self._bytes = items(self._words.view(np.uint8))
        self._row_bytes = width * 4
        self._start = np.arange(rows) * width + PARENT
        self._end = self._start + config.hash_unit + config.hash_lookahead
        self._cursor = self._start.copy()
        self._begin = self._start + config.hash_lookahead  # where a row goes on when it was hashed
        self._cursor_at, self._begin_at, self._start_at = map(items, (self._cursor, self._begin, self._start))
        self._digests: list[bytearray] = [bytearray() for _ in range(rows)]
        self._last = [b""] * rows  # the last hash of each row
        self._latest: tuple[list[int], list[bytes]] = ([], [])  # rows that were hashed last, and their hashes
        self._raw = [False] * rows  # rows whose next unit is hashed as raw bytes, without extra keys
        self.hashed = np.zeros(rows, np.intp)  # tokens that the chain's hashes cover
        self.hashed_at = items(self.hashed)
        self._views: tuple[Any, ...] = (-1,)

    def last(self, rows: list[int]) -> list[bytes]:
        """The last hash of each row."""
        latest, digests = self._latest  # mostly those: what was hashed after a step is keyed in the next
        return digests if latest == rows else [self._last[row] for row in rows]

    def load(self, row: int) -> None:
        """Take over a request's tail when it is admitted."""
        if self._hashing:
            chain = self._ledger.request(row).chain
            start = self._start_at[row]
            if len(chain.tail):
                self._flat[start : start + len(chain.tail)] = chain.tail
            self._cursor_at[row] = start + len(chain.tail)
            self._raw[row], self._digests[row] = chain.raw, chain.digests
            self._note(row, chain)

    def _note(self, row: int, chain: TokenChain) -> None:
        at, parent = row * self._row_bytes, chain.parent
        self._bytes[at : at + DIGEST_BYTES] = parent
        self._last[row] = parent
        self._latest = ([], [])
        self.hashed_at[row] = chain.num_units * self._unit

    def store(self, row: int) -> None:
        """Hand count and tail back to the request, when it leaves its row."""
        chain = self._ledger.request(row).chain
        chain.num_tokens = self._ledger.known_at[row]
        if self._hashing:
            chain.tail = self._flat[self._start_at[row] : self._cursor_at[row]].copy()

    def leave(self, row: int) -> None:
        """The row's request is gone: what the row gets from now on is nobody's."""
        self._raw[row], self._digests[row] = False, bytearray()

    def append_one(self, slots: int | npt.NDArray[np.intp], tokens: npt.NDArray[np.int32]) -> None:
        """One token for each row; rows without a request take none."""
        if not isinstance(slots, int):
            self._append_picked(slots, tokens)
            return
        if self._views[0] != slots:
            self._views = (slots, self._ledger.known[:slots], self._cursor[:slots], self._end[:slots])
        _, known, cursor, end = self._views
        np.add(known, ONE, known)
        if self._hashing:
            # A cast costs four times the assignment.
            self._flat[cursor] = tokens.view(np.uint32) if tokens.dtype is TOKEN else tokens
            np.add(cursor, ONE, cursor)
            full = np.equal(cursor, end).nonzero()[0]
            if full.size:
                self._hash_full(full)

    def _append_picked(self, slots: npt.NDArray[np.intp], tokens: npt.NDArray[np.int32]) -> None:
        self._ledger.known[slots] += ONE
        if self._hashing:
            cursor = self._cursor.take(slots)
            self._flat[cursor] = tokens
            cursor += ONE
            self._cursor[slots] = cursor
            full = slots[cursor == self._end.take(slots)]
            if full.size:
                self._hash_full(full)

    def append(self, row: int, tokens: Sequence[int]) -> None:
        """Some tokens for one row."""
        chain = self._ledger.request(row).chain
        if not len(tokens) and self._cursor_at[row] == self._start_at[row]:
            # Nothing waits to be hashed: a chain that its engine hashes takes over what is new there.
            chain.num_tokens = self._ledger.known_at[row]
            chain.extend(tokens)
            self._ledger.known_at[row] = chain.num_tokens
            if self._hashing:
                self._note(row, chain)
            return
        self.store(row)
        chain.extend(tokens)
        self._ledger.known_at[row] = chain.num_tokens
        self.load(row)

    def _hash_full(self, full: npt.NDArray[np.intp]) -> None:
        raw, digests, last, found = self._raw, self._digests, self._last, []
        data, width, cursor, begin = self._bytes, self._row_bytes, self._cursor_at, self._begin_at
        hashed, sha256, unit, length = self.hashed_at, hashlib.sha256, self._unit, self._hash_bytes
        rows: list[int] = full.tolist()
        for row in rows:
            if not raw[row]:
                self._hash(row)
                cursor[row] = begin[row]
                found.append(last[row])
                continue
            at = row * width
            digest = sha256(data[at : at + length]).digest()
            data[at : at + DIGEST_BYTES] = digest
            last[row] = digest
            found.append(digest)
            digests[row] += digest
            hashed[row] += unit
            cursor[row] = begin[row]
        self._latest = (rows, found)

    def _hash(self, row: int) -> None:
        if self._ledger.requests[row] is not None:
            self.append(row, ())
