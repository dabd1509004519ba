"""The errors of the bridge, beside those of kvframe that it passes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import attrs

from kvframe import KVFrameError


@attrs.define(auto_exc=True, eq=False, kw_only=True, str=False)
class PoolFullError(KVFrameError, MemoryError):
    """A batch needs blocks that the pool does not have. The batch is given up; the pool and all others go on.

    Args:
        batch: sequences of the batch.
        length: tokens that the longest of them was to have.
        needed: blocks that one sequence asked for, by group; empty where rows are lacking, not blocks.
        missing: blocks that lack, slabs where groups cut slabs.
        largest_fitting_len: tokens that each sequence of such a batch could have, in the pool as it is now.
    """

    kind: ClassVar[str] = "pool_full"
    batch: int
    length: int
    needed: Mapping[str, int]
    missing: int
    largest_fitting_len: int

    def __str__(self) -> str:
        asked = ", ".join(f"{count} of group {name}" for name, count in self.needed.items() if count)
        what = f"{self.missing} blocks are missing (asked: {asked})" if asked else "all rows are taken"
        return (
            f"the pool has no room for {self.batch} sequences of {self.length:,} tokens: {what}. "
            f"As it is now it holds {self.batch} sequences of up to {self.largest_fitting_len:,} tokens. "
            "Close caches that are done, ask for fewer or shorter sequences, or give memory= more."
        )


@attrs.define(auto_exc=True, eq=False, kw_only=True, str=False)
class CacheStateError(KVFrameError, RuntimeError):
    """A cache was asked for something that it cannot do any more, or not yet."""

    kind: ClassVar[str] = "cache_state"
    what: str
    advice: str

    def __str__(self) -> str:
        return f"{self.what}. {self.advice}."
