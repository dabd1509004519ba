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
from kvframe.blocks.keys import Digests
from kvframe.blocks.ledger import Ledger

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
        width += width % 2  # so that the hashes in front can be read as words of 8 bytes
        self._hash_bytes = DIGEST_BYTES + 4 * config.hash_unit
        self._words = np.zeros((rows, width), np.uint32)
        self._flat = self._words.reshape(-1)
        self._bytes = items(self._words.view(np.uint8))
        self._row_bytes = width * 4
        self._start = np.arange(rows) * width + PARENT
        self._end = self._start + config.hash_unit + config.hash_lookahead
        self._cursor = self._start.copy()
        self._left = np.zeros(rows, np.intp)  # tokens that stay when a full row is hashed
        self._left += config.hash_lookahead
        self._digests: list[bytearray] = [bytearray() for _ in range(rows)]
        self._words64 = self._words.view(np.uint64)[:, : PARENT // 2]
        self._raw = [False] * rows  # rows whose next unit is hashed as raw bytes, without extra keys
        self.hashed = np.zeros(rows, np.int32)  # tokens that the chain's hashes cover
        self._hashed_at = items(self.hashed)

    def last(self, rows: npt.NDArray[np.intp]) -> Digests:
        """The last hash of each row."""
        return self._words64[rows]

    def load(self, row: int) -> None:
        """Take over a request's tail when it is admitted."""
        if self._hashing:
            chain = self._ledger.request(row).chain
            start = int(self._start[row])
            self._flat[start : start + len(chain.tail)] = chain.tail
            self._cursor[row] = start + len(chain.tail)
            self._raw[row], self._digests[row] = chain.raw, chain.digests
            self._note(row, chain)

    def _note(self, row: int, chain: TokenChain) -> None:
        at = row * self._row_bytes
        self._bytes[at : at + DIGEST_BYTES] = chain.parent
        self._hashed_at[row] = chain.num_units * self._unit

    def store(self, row: int) -> None:
        """Hand count and tail back to the request, when it leaves its row."""
        chain = self._ledger.request(row).chain
        chain.num_tokens = self._ledger.known_at[row]
        if self._hashing:
            chain.tail = self._flat[self._start[row] : self._cursor[row]].copy()

    def leave(self, row: int) -> None:
        """The row's request is gone: what the row gets from now on is nobody's."""
        self._raw[row], self._digests[row] = False, bytearray()

    def append_one(self, slots: int | npt.NDArray[np.intp], tokens: npt.NDArray[np.int32]) -> None:
        """One token for each row; rows without a request take none."""
        picked: Any = slice(slots) if isinstance(slots, int) else slots
        known = self._ledger.known[picked]
        known += 1
        cursor = self._cursor[picked]
        if self._hashing:
            self._flat[cursor] = tokens
            cursor += 1
        if not isinstance(slots, int):  # then these are copies
            self._ledger.known[picked] = known
            self._cursor[picked] = cursor
        if not self._hashing:
            return
        full = (cursor == self._end[picked]).nonzero()[0]
        if full.size:
            self._hash_full((full if isinstance(slots, int) else slots[full]).tolist())

    def append(self, row: int, tokens: Sequence[int]) -> None:
        """Some tokens for one row."""
        self.store(row)
        chain = self._ledger.request(row).chain
        chain.extend(tokens)
        self._ledger.known_at[row] = chain.num_tokens
        self.load(row)

    def _hash_full(self, rows: list[int]) -> None:
        raw, digests, data, width = self._raw, self._digests, self._bytes, self._row_bytes
        hashed, sha256, unit, length = self._hashed_at, hashlib.sha256, self._unit, self._hash_bytes
        for row in rows:
            if not raw[row]:
                self._hash(row)
                continue
            at = row * width
            digest = sha256(data[at : at + length]).digest()
            data[at : at + DIGEST_BYTES] = digest
            digests[row] += digest
            hashed[row] += unit
        self._cursor[rows] = self._start[rows] + self._left[rows]

    def _hash(self, row: int) -> None:
        if self._ledger.requests[row] is not None:
            self.append(row, ())
