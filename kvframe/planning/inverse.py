"""The inverse questions: the longest request for a budget, and the budget for a number of requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvframe.checks import cdiv
from kvframe.config import DEVICE
from kvframe.errors import InsufficientMemoryError, SequenceLimitError, UsageError
from kvframe.planning.plan import Plan

MIB = 1 << 20


def largest_len(make: Callable[[int], Plan], longest: int) -> int:
    """The largest max_model_len, in tokens and up to `longest`, for which a plan exists; 0 if not even for one token.

    Args:
        make: a length to its plan; raises InsufficientMemoryError where one request does not fit.
    """
    try:
        make(longest)
    except InsufficientMemoryError as error:
        return error.largest_fitting_len
    return longest


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

    def held(mib: int) -> tuple[int, int]:
        """Requests that fit, and what the next try should have at least."""
        try:
            found = measure(make(mib * MIB))
        except InsufficientMemoryError as error:
            if error.pool != DEVICE:
                raise
            return 0, cdiv(error.needed_bytes, MIB)
        except SequenceLimitError as error:
            if error.pool != DEVICE:
                raise
            return 0, 0
        _check_others(found, wanted)
        return found.get(DEVICE, wanted), 0

    low, high = 0, 1
    count, hint = held(high)
    while count < wanted:
        low, high = high, max(2 * high, hint)
        count, hint = held(high)
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if held(middle)[0] >= wanted else (middle, high)
    return high * MIB


def _check_others(held: Mapping[str, int], wanted: int) -> None:
    """Pools beside the device's hold so many requests."""
    for pool, count in held.items():
        if pool != DEVICE and count < wanted:
            rule = f"pool {pool!r} holds {count:,} at once, whatever the device has: give it a larger budget"
            raise UsageError(option="--requests", value=wanted, rule=rule)
