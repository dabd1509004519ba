"""What a plan costs: bytes held against bytes needed, at the lengths that requests have. The planner minimises this.

    C = mean over lengths [1 - natural / held]
        + (S + PARTLY_USED * sum_g S * (1 - 1 / k_g) + tables) / pool + TABLE_COST * G

with S the slab, k_g the blocks that group g cuts from one, `held` blocks at their stride, `natural` the blocks of the
model's own specs at their page (so the last block's empty tail is in both). The lone S is the null slab; a group leaves
on average one slab partly used.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LENGTHS = (256, 2048, 8192, 32768, 131072)
"""Request lengths, in tokens, over which plans are compared."""

PARTLY_USED = 1.0
TABLE_COST = 5e-5
ENTRY_BYTES = 4  # a block-table entry is an int32


@attrs.frozen(kw_only=True)
class Limits:
    """What a plan may not exceed.

    Args:
        structural_share: the largest share of a request's bytes that may hold nothing, at any length.
        slab_bytes: the largest slab.
        groups: the most groups, each of which has a block table.
    """

    structural_share: float = 0.02
    slab_bytes: int = 256 << 20
    groups: int = 16


@attrs.frozen(kw_only=True, eq=False)
class Demand:
    """What the groups of one candidate ask for, on one rank.

    Args:
        pages: bytes of one block of each group, shape [G].
        blocks: blocks that one request holds, by length and group, shape [lengths, G].
        longest: blocks that one request of max_model_len holds, shape [G].
        table_entries: block-table entries of each group over all running requests, shape [G].
        natural: bytes that one request needs at each length, whatever the plan, shape [lengths].
        pool_bytes: the pool's budget.
    """

    pages: Floats
    blocks: Floats
    longest: Floats
    table_entries: Floats
    natural: Floats
    pool_bytes: int

    def held(self, strides: Floats) -> Floats:
        """Bytes that one request holds at each length, with blocks at `strides`.

        Args:
            strides: bytes, shape [..., G].

        Returns:
            shape [..., lengths].
        """
        held: Floats = strides @ self.blocks.T
        return held

    def structural_shares(self, strides: Floats) -> Floats:
        """Share of a request's bytes that holds nothing, at each length, shape [..., lengths]."""
        held = self.held(strides)
        return 1.0 - np.divide(self.natural, held, out=np.ones_like(held), where=held > 0)

    def fits(self, slabs: Floats, per_slab: Floats) -> npt.NDArray[np.bool_]:
        """Whether one request of max_model_len fits in whole slabs beside the null slab, shape [...]."""
        needed = np.ceil(self.longest / per_slab).sum(axis=-1) + 1
        enough: npt.NDArray[np.bool_] = needed <= np.floor(self.pool_bytes / slabs)
        return enough

    def cost(self, slabs: Floats, per_slab: Floats) -> Floats:
        """C for each candidate.

        Args:
            slabs: slab bytes, shape [...].
            per_slab: blocks that each group cuts from a slab, shape [..., G].
        """
        costs: Floats = self.structural_shares(slabs[..., None] / per_slab).mean(axis=-1)
        return costs + self.overhead(slabs, per_slab)

    def overhead(self, slabs: Floats, per_slab: Floats) -> Floats:
        """C without the structural share: null slab, partly used slabs, tables, groups."""
        partly = PARTLY_USED * (slabs[..., None] * (1.0 - 1.0 / per_slab)).sum(axis=-1)
        tables = ENTRY_BYTES * self.table_entries.sum()
        total: Floats = (slabs + partly + tables) / self.pool_bytes + TABLE_COST * self.pages.size
        return total


def worst_share(shares: Sequence[float] | Floats) -> float:
    """The largest structural share over the lengths."""
    return float(np.max(shares, initial=0.0))
