"""A plain simulation of one request against a lifetime: what it holds, token by token. Planning shares none of it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from kvframe.checks import cdiv
from kvframe.lifetime import Lifetime


def dead_entries(lifetime: Lifetime, settled: int, prompt: int, table: int) -> set[int]:
    """The entries of a table of `table` entries that are dead once `settled` tokens are settled."""
    low, high = lifetime.dead(settled, prompt)
    return set(range(max(0, int(low)), min(table, int(high))))


def simulated_peak(lifetime: Lifetime, in_flight: int, max_len: int, max_encoder_tokens: int = 0) -> int:
    """The most entries that one request holds at once, looking at every token of requests up to `max_len` tokens.

    Args:
        lifetime: the rule, its block already as wide as context parallelism makes it.
        in_flight: tokens scheduled and not settled.
        max_len: tokens of the longest request.
        max_encoder_tokens: encoder positions, for rules whose source is the encoder.
    """
    if lifetime.fixed is not None:
        return lifetime.fixed
    if lifetime.source == "encoder":
        return cdiv(max_encoder_tokens, lifetime.block) + lifetime.spare
    settled = np.arange(max_len, dtype=np.int64)
    stored = np.minimum(settled + in_flight, max_len)
    if lifetime.state:
        # the state that a step starts from, the one that it ends with, drafts, and one saved in between
        crosses = (settled > 0) & ((settled - 1) // lifetime.block < (stored - 1) // lifetime.block)
        return int((1 + crosses).max()) + lifetime.spare + (lifetime.export is not None)
    return max(int(_held(lifetime, settled, stored, prompt).max()) for prompt in prompts(lifetime, max_len))


def prompts(lifetime: Lifetime, max_len: int) -> Iterable[int]:
    """Prompt lengths worth trying: the shortest, around a block, half, and all of the request."""
    return sorted({1, min(lifetime.block + 1, max_len), max(1, max_len // 2), max_len})


def _held(
    lifetime: Lifetime, settled: npt.NDArray[np.int64], stored: npt.NDArray[np.int64], prompt: int
) -> npt.NDArray[np.int64]:
    table = -(-stored // lifetime.block) + lifetime.spare
    low, high = lifetime.dead(settled, np.full_like(settled, prompt))
    low, high = np.maximum(low, 0), np.minimum(high, table)
    held: npt.NDArray[np.int64] = table - np.maximum(0, high - low)
    return held


def alive_entries(lifetime: Lifetime, settled: int, prompt: int, count: int) -> npt.NDArray[np.int64]:
    """The first `count` entries of a table that are not dead."""
    low, high = (int(edge) for edge in lifetime.dead(settled, prompt))
    entries = np.arange(count, dtype=np.int64)
    return entries[(entries < low) | (entries >= high)]


def entries_that_a_hit_needs(lifetime: Lifetime, length: int) -> list[int]:
    """The entries that a request resumed at `length` tokens reads, the last first."""
    count = cdiv(length, lifetime.block)
    if lifetime.state:
        return [count - 1]
    needed: list[int] = alive_entries(lifetime, length + lifetime.slack, length, count)[::-1].tolist()
    return needed
