"""The loop's view of an array, and how long a loop may be."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

FEW = 48  # up to so many items a loop costs less than numpy's index arrays


def items(array: npt.NDArray[Any]) -> memoryview:
    """The array's memory for loops over single items, whose reading and writing costs a third of the array's own.

    Args:
        array: contiguous; what either side writes the other sees.
    """
    flat: Any = array.reshape(-1)
    return memoryview(flat)
