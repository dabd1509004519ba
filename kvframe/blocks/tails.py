"""Tails: the tokens of every running request that no hash covers yet, and the hashing of units that became full."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvframe.blocks.arrays import ONE, items
from kvframe.blocks.config import BlockConfig
from kvframe.blocks.hashing import TokenChain
from kvframe.blocks.ledger import Ledger


class Tails:
    """For each request the tokens after its last hash, which its next hash covers.

    The rows 0 … `count` − 1 are in step as long as `append_one` asks for just these: each is a ring whose next token
    goes into the same column, so that one token for each is one assignment, and which rows are full then is known
    beforehand. The tokens of any other row begin in its first column.

    Args:
        ledger: the rows' counts.
        config: the hash unit, the tokens that must follow it, and whether anything is hashed at all.
    """

    def __init__(self, ledger: Ledger, config: BlockConfig) -> None:
        self._ledger, self._unit = ledger, config.hash_unit
        self._hashing = config.prefix_caching
        rows, width = ledger.rows, config.hash_unit + config.hash_lookahead
        self._width = width
        self._table = np.zeros((rows, width), np.int32)
        self._flat = self._table.reshape(-1)
        self._bytes = items(self._table.view(np.uint8))
        self._columns = np.arange(width)
        self._count, self._tick = 0, 0  # rows in step, and tokens that rows in step have got in all
        # Rows in step, by the tick at which they are full.
        self._due: list[list[int]] = [[] for _ in range(self._unit)]
        self._asked, self._steady = 0, 0  # rows that got one token, and how often these have been the same
        # Of a row in step the tick at which its tail was empty, of another the place of its next token.
        self._start = np.arange(rows) * width
        self._cursor = self._start.copy()
        self._cursor_at, self._start_at = items(self._cursor), items(self._start)
        self._digests: list[bytearray] = [bytearray() for _ in range(rows)]
        self._last = [b""] * rows  # the last hash of each row
        self._latest: tuple[list[int], list[bytes]] = ([], [])  # rows that were hashed last, and their hashes
        self._raw = [False] * rows  # rows whose next unit is hashed as raw bytes, without extra keys
        self.hashed = np.zeros(rows, np.intp)  # tokens that the chain's hashes cover
        self.hashed_at = items(self.hashed)

    def last(self, rows: list[int]) -> list[bytes]:
        """The last hash of each row."""
        latest, digests = self._latest  # mostly those: what was hashed after a step is keyed in the next
        return digests if latest == rows else [self._last[row] for row in rows]

    # --- single rows ---

    def load(self, row: int) -> None:
        """Take over a request's tail when it is admitted."""
        if not self._hashing:
            return
        chain = self._ledger.request(row).chain
        tail, length, start = chain.tail.view(np.int32), len(chain.tail), self._start_at[row]
        if row < self._count:
            since = self._tick - length
            self._flat[start + np.arange(since, self._tick) % self._width] = tail
            self._cursor_at[row] = since
            self._await_full(row, since)
        else:
            self._flat[start : start + length] = tail
            self._cursor_at[row] = start + length
        self._raw[row], self._digests[row] = chain.raw, chain.digests
        self._note(row, chain)

    def _note(self, row: int, chain: TokenChain) -> None:
        self._last[row] = chain.parent
        self._latest = ([], [])
        self.hashed_at[row] = chain.num_units * self._unit

    def store(self, row: int) -> None:
        """Hand count and tail back to the request, when it leaves its row."""
        chain = self._ledger.request(row).chain
        chain.num_tokens = self._ledger.known_at[row]
        if not self._hashing:
            return
        start, cursor = self._start_at[row], self._cursor_at[row]
        if row < self._count:
            places = start + np.arange(cursor, self._tick) % self._width
            chain.tail = self._flat.take(places).view(np.uint32)
        else:
            chain.tail = self._flat[start:cursor].view(np.uint32).copy()

    def leave(self, row: int) -> None:
        """The row's request is gone: what the row gets from now on is nobody's."""
        self._drop(row)
        self._raw[row], self._digests[row] = False, bytearray()

    def append(self, row: int, tokens: Sequence[int]) -> None:
        """Some tokens for one row."""
        chain = self._ledger.request(row).chain
        empty = self._tick if row < self._count else self._start_at[row]
        if not len(tokens) and self._cursor_at[row] == empty:
            # Nothing waits to be hashed: a chain that its engine hashes takes over what is new there.
            chain.num_tokens = self._ledger.known_at[row]
            chain.extend(tokens)
            self._ledger.known_at[row] = chain.num_tokens
            if self._hashing:
                self._note(row, chain)
            return
        self.store(row)
        self._drop(row)
        chain.extend(tokens)
        self._ledger.known_at[row] = chain.num_tokens
        self.load(row)

    # --- one token for each row ---

    def append_one(self, slots: int | npt.NDArray[np.intp], tokens: npt.NDArray[np.int32]) -> None:
        """One token for each row; rows without a request take none."""
        if not isinstance(slots, int):
            self._steady = 0
            self._ledger.known[slots] += ONE
            if self._hashing:
                self._line_up(0)
                self._append_alone(slots, tokens)
            return
        self._ledger.known_counts.one_more(slots)
        if not self._hashing:
            return
        if slots != self._count and not self._find_step(slots):
            self._append_alone(np.arange(slots), tokens)
            return
        tick = self._tick
        self._table[:slots, tick % self._width] = tokens
        self._tick = tick = tick + 1
        due = self._due[tick % self._unit]
        if due:
            self._hash_full(due.copy(), tick % self._width)

    def _append_alone(self, slots: npt.NDArray[np.intp], tokens: npt.NDArray[np.int32]) -> None:
        """One token for each of these rows, none of which is in step."""
        cursor = self._cursor.take(slots)
        self._flat[cursor] = tokens
        cursor += ONE
        self._cursor[slots] = cursor
        full = slots[cursor == self._start.take(slots) + self._width]
        if full.size:
            self._hash_full(full.tolist(), 0)

    def _hash_full(self, rows: list[int], first: int) -> None:
        """Hash the unit of each of these rows, whose tokens begin in the column `first`."""
        raw, digests, last, found = self._raw, self._digests, self._last, []
        data, width, cursor, hashed = self._bytes, 4 * self._width, self._cursor_at, self.hashed_at
        sha256, unit, start, join = hashlib.sha256, self._unit, self._start_at, b"".join
        in_step, tick, first = bool(self._count), self._tick, 4 * first
        for row in rows:
            if not raw[row]:
                self._hash(row)
                found.append(last[row])
                continue
            at = row * width
            digest = sha256(join((last[row], data[at + first : at + width], data[at : at + first]))).digest()
            last[row] = digest
            found.append(digest)
            digests[row] += digest
            hashed[row] += unit
            cursor[row] = tick if in_step else start[row]
        self._latest = (rows, found)

    def _hash(self, row: int) -> None:
        if self._ledger.requests[row] is not None:
            self.append(row, ())
        elif not self._count:
            self._cursor_at[row] = self._start_at[row]

    # --- rows in step ---

    def _find_step(self, count: int) -> bool:
        """Whether the rows 0 … count − 1 are in step now; from none on only those that stay together for a while."""
        self._steady = self._steady + 1 if count == self._asked else 0
        self._asked = count
        if not self._count and self._steady < 2:
            return False
        self._line_up(count)
        return True

    def _line_up(self, count: int) -> None:
        """Have the rows 0 … count − 1 in step, and no others."""
        before, self._count = self._count, count
        if count > before:
            self._join(before, count)
        elif count < before:
            self._part(count, before)

    def _join(self, first: int, end: int) -> None:
        """Rows [first, end) become rings that go on in the column of the tick."""
        since = self._tick - (self._cursor[first:end] - self._start[first:end])
        self._turn(first, end, self._columns - since[:, None])
        self._cursor[first:end] = since
        requests = self._ledger.requests
        for row, tick in enumerate(since.tolist(), first):
            if requests[row] is not None:
                self._await_full(row, tick)

    def _part(self, first: int, end: int) -> None:
        """Rows [first, end) are rings no more: their tokens begin in the first column."""
        since = self._cursor[first:end].copy()
        self._turn(first, end, self._columns + since[:, None])
        # Free rows stay in step too, and are never full: only of theirs is the number beyond the width.
        self._cursor[first:end] = self._start[first:end] + (self._tick - since) % self._width
        self._due = [[row for row in rows if not first <= row < end] for rows in self._due]

    def _turn(self, first: int, end: int, columns: npt.NDArray[np.intp]) -> None:
        rows = self._table[first:end]
        rows[:] = np.take_along_axis(rows, columns % self._width, axis=1)

    def _await_full(self, row: int, since: int) -> None:
        """A row in step whose tail was empty at the tick `since` is full at a tick that follows from it."""
        bisect.insort(self._due[(since + self._width) % self._unit], row)

    def _drop(self, row: int) -> None:
        """A row in step is not full any more at the tick at which it would have been."""
        if self._hashing and row < self._count:
            self._due[(self._cursor_at[row] + self._width) % self._unit].remove(row)
