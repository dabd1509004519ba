"""The inverse questions: the longest request for a budget, and the budget for a number of requests."""

from __future__ import annotations

from collections.abc import Callable

from kvframe.errors import InsufficientMemoryError
from kvframe.planning.plan import Plan

MIB = 1 << 20


def largest_len(make: Callable[[int], Plan], longest: int) -> int:
    """The largest max_model_len, in tokens and up to `longest`, for which a plan exists; 0 if not even for one token.

    Args:
        make: a length to its plan; raises InsufficientMemoryError where one request does not fit.
    """

    def fits(length: int) -> bool:
        try:
            make(length)
        except InsufficientMemoryError:
            return False
        return True

    return _last(fits, longest)


def memory_for_requests(make: Callable[[int], Plan], wanted: int, measure: Callable[[Plan], int]) -> int:
    """The least memory, in bytes and whole MiB on one rank, with which `wanted` requests fit at once.

    Args:
        make: bytes to the plan; raises InsufficientMemoryError where one request does not fit.
        measure: a plan to the requests that fit at once.
    """

    def too_small(mib: int) -> bool:
        try:
            return measure(make(mib * MIB)) < wanted
        except InsufficientMemoryError:
            return True

    enough = 1
    while too_small(enough):
        enough *= 2
    return (_last(too_small, enough) + 1) * MIB


def _last(holds: Callable[[int], bool], high: int) -> int:
    """The largest number in [1, high] for which `holds`, 0 if none; it holds for all smaller ones too."""
    low = 0
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low
