"""The inverse questions: the longest request for a budget, and the budget for a number of requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvframe.config import DEVICE
from kvframe.errors import InsufficientMemoryError, UsageError
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


def memory_for_requests(
    make: Callable[[int], Plan], wanted: int, measure: Callable[[Plan], Mapping[str, int]]
) -> int:
    """The least memory of the device, in bytes and whole MiB on one rank, with which `wanted` requests fit at once.

    Args:
        make: bytes to the plan; raises InsufficientMemoryError where one request does not fit.
        measure: a plan to the requests that fit at once, by pool.

    Raises:
        UsageError: another pool does not hold so many, whatever the device has.
        InsufficientMemoryError: another pool does not hold one.
    """

    def too_small(mib: int) -> bool:
        try:
            held = measure(make(mib * MIB))
        except InsufficientMemoryError as error:
            if error.pool != DEVICE:
                raise
            return True
        for pool, count in held.items():
            if pool != DEVICE and count < wanted:
                rule = (
                    f"pool {pool!r} holds {count:,} at once, whatever the device has: give it a larger budget"
                )
                raise UsageError(option="--requests", value=wanted, rule=rule)
        return held.get(DEVICE, wanted) < wanted

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
