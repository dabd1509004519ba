"""Counts: a number for each row, to which a decode step adds one for most of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvframe.blocks.arrays import ONE, items


class Counts:
    """A count for each row, of which the first rows may go on by one very often and without anybody asking.

    Args:
        rows: how many there are.
    """

    __slots__ = ("_array", "_items", "_owed", "_owed_rows")

    def __init__(self, rows: int) -> None:
        self._array: npt.NDArray[np.intp] = np.zeros(rows, np.intp)
        self._items = items(self._array)
        self._owed_rows, self._owed = 0, 0

    def one_more(self, rows: int) -> None:
        """Add one to each of the first `rows`, in time for whoever asks next."""
        if rows != self._owed_rows:
            self._settle()
            self._owed_rows = rows
        self._owed += 1

    def _settle(self) -> None:
        counts = self._array[: self._owed_rows]
        np.add(counts, ONE if self._owed == 1 else self._owed, counts)
        self._owed = 0

    @property
    def array(self) -> npt.NDArray[np.intp]:
        """The counts; they hold until the next `one_more`."""
        if self._owed:
            self._settle()
        return self._array

    @property
    def at(self) -> memoryview:
        """The same for loops over single rows."""
        if self._owed:
            self._settle()
        return self._items
