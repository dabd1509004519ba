"""What numpy is given and gives on the hot path: views for loops, numbers as arrays, memory that is kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

FEW = 48  # up to so many items a loop costs less than numpy's index arrays
ONE = np.array(1, np.intp)  # a number that becomes an array costs more than the sum


def items(array: npt.NDArray[Any]) -> memoryview:
    """The array's memory for loops over single items, whose reading and writing costs a third of the array's own.

    Args:
        array: contiguous; what either side writes the other sees.
    """
    flat: Any = array.reshape(-1)
    return memoryview(flat)


class Gather:
    """Items of an array by index, into memory that is kept.

    An array of a kilobyte and more is memory of the C library's, which first tidies up what the engine has freed since:
    that costs ten times what is done with it.

    Args:
        array: contiguous, whose items are taken.
    """

    __slots__ = ("_array", "_out", "_out_at")

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array, self._out = array, np.empty(0, array.dtype)
        self._out_at = items(self._out)

    def __call__(self, places: npt.NDArray[np.intp]) -> npt.NDArray[Any]:
        """The items at these places, all of them within the array; they hold until the next call."""
        count = len(places)
        if count > len(self._out):
            self._out = np.empty(2 * count, self._out.dtype)
            self._out_at = items(self._out)
        # Another mode than this one has numpy make a copy of its own.
        return self._array.take(places, mode="clip", out=self._out[:count])

    def one(self, places: npt.NDArray[np.intp]) -> int | None:
        """The number that all items at these places are; None if there is more than one, or none.

        Found without numpy's arithmetic, which costs several times as much while its code is cold.
        """
        count, found = len(self(places)), self._out_at
        return found[0] if count and found[1:count] == found[: count - 1] else None
