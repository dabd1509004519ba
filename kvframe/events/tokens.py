"""TokenLog: the token ids of every running request, which events name and the manager itself does not keep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvframe.blocks import BlockRequest, KVCacheManager
from kvframe.blocks.hashing import Tokens, as_tokens


class TokenLog:
    """A row of ids for each request: 4 bytes a token that was ever in the row; memory is taken as it is first used.

    Args:
        manager: whose requests they are.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self._ledger = manager.ledger
        self._last = manager.config.max_model_len  # a generated token may lie one behind the longest request
        self._ids = np.zeros((self._ledger.rows, self._last + 1), np.uint32)
        self._flat = self._ids.reshape(-1)
        self._starts = np.arange(self._ledger.rows) * (self._last + 1)
        self._loaded: list[BlockRequest | None] = [None] * self._ledger.rows

    def row(self, row: int) -> Tokens:
        """The ids of a row's request."""
        request = self._ledger.request(row)
        if self._loaded[row] is not request:
            self._loaded[row] = request
            if request.tokens is not None:
                self._ids[row, : len(request.tokens)] = request.tokens
                request.tokens = None
        ids: Tokens = self._ids[row]
        return ids

    def blocks(self, rows: npt.NDArray[np.intp], ends: npt.NDArray[np.intp], block: int) -> Tokens:
        """For each row the `block` ids before its end, [rows, block]; the rows are loaded."""
        ids: Tokens = self._flat[(self._starts[rows] + ends - block)[:, None] + np.arange(block)]
        return ids

    def fork(self, parent: int, row: int) -> None:
        """A row begins with what another has."""
        known = self._ledger.known_at[parent]
        self._loaded[row] = self._ledger.request(row)
        self._ids[row, :known] = self.row(parent)[:known]

    def append_one(self, slots: int | npt.NDArray[np.intp], tokens: npt.NDArray[np.int32]) -> None:
        """One id for each row, before the manager counts it; what a free row gets is nobody's."""
        rows: Any = slice(slots) if isinstance(slots, int) else slots
        places = np.minimum(self._ledger.known[rows], self._last)
        self._flat[self._starts[rows] + places] = tokens

    def append(self, row: int, tokens: Sequence[Any]) -> None:
        """Ids for one row, before the manager counts them."""
        known = self._ledger.known_at[row]
        self.row(row)[known : known + len(tokens)] = as_tokens(tokens)

    def close(self, row: int) -> None:
        """The row's request leaves, and takes its ids along."""
        request = self._ledger.request(row)
        request.tokens = self.row(row)[: self._ledger.known_at[row]].copy()
        self._loaded[row] = None
