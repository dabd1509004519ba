"""What running requests have in common, for kernels that read a shared prefix once for all of them."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from kvframe.blocks.hashing import DIGEST_BYTES
from kvframe.blocks.wiring import Wiring


@attrs.frozen(kw_only=True)
class CommonPrefix:
    """A prefix that several running requests share.

    Args:
        tokens: tokens that are the same in all of them, as far as they are hashed; 0 without prefix caching.
        entries: by group, leading table entries that are the same block in all of them; a null block ends them.
    """

    tokens: int
    entries: tuple[int, ...]


def common_prefix(manager: Wiring, slots: Sequence[int]) -> CommonPrefix:
    """What these running requests share, of their tokens and of their blocks. Costs nothing to those who do not ask.

    Requests may share tokens and yet hold copies of their own: those that were admitted in one step, for instance.

    Args:
        manager: whose requests they are.
        slots: their rows, at least one.

    Raises:
        BlockError: a row holds no request.
    """
    chains = [manager.ledger.request(slot).chain for slot in slots]
    shortest = min(len(chain.digests) for chain in chains)
    words = np.array([np.frombuffer(bytes(chain.digests[:shortest]), np.uint64) for chain in chains])
    units = _equal(words) * 8 // DIGEST_BYTES
    entries = []
    for g, table in enumerate(manager.tables.tables):
        length = min(manager.tables.entries(g, slot) for slot in slots)
        rows = table[np.asarray(slots, np.intp), :length]
        alive = np.flatnonzero(rows[0] == 0)
        entries.append(min(_equal(rows), int(alive[0]) if alive.size else length))
    return CommonPrefix(tokens=units * chains[0].unit, entries=tuple(entries))


def _equal(rows: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> int:
    """Leading columns in which all rows are the same."""
    different = np.flatnonzero((rows != rows[0]).any(axis=0))
    return int(different[0]) if different.size else rows.shape[1]
