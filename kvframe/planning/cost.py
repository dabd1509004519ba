"""What a plan costs: bytes held against bytes needed, at the lengths that requests have. The planner minimises this.

    C = mean over lengths [1 - natural / held]
        + (S + PARTLY_USED * sum_g S * (1 - 1 / k_g) + tables) / pool + TABLE_COST * G

with S the slab, k_g the blocks that group g cuts from one, `held` blocks at their stride, `natural` the blocks of the
model's own specs at their page (so the last block's empty tail is in both). The lone S is the null slab; a group leaves
on average one slab partly used.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.checks import at_least
from kvframe.errors import SpecError

Floats = npt.NDArray[np.float64]

LENGTHS = (256, 2048, 8192, 32768, 131072)
"""Request lengths, in tokens, over which plans are compared."""

PARTLY_USED = 1.0
TABLE_COST = 5e-5
ENTRY_BYTES = 4  # a block-table entry is an int32
BYTE = 1e-3  # sums of bytes are compared in floating point: so much more is still equal


def _share(limits: Any, attribute: attrs.Attribute[Any], value: float) -> None:
    if not 0 <= value <= 1:
        raise SpecError(spec="Limits", field=attribute.name, value=value, rule="must be a share, 0 to 1")


@attrs.frozen(kw_only=True)
class Limits:
    """What a plan may not exceed.

    Args:
        structural_share: the largest share of a request's bytes that may hold nothing, at any length.
        slab_bytes: the largest slab.
        groups: the most groups, each of which has a block table.

    Raises:
        SpecError: a limit is out of its range; names it, the value and the rule.
    """

    structural_share: float = attrs.field(default=0.02, validator=_share)
    slab_bytes: int = attrs.field(default=256 << 20, validator=at_least(1))
    groups: int = attrs.field(default=16, validator=at_least(1))


@attrs.frozen(kw_only=True, eq=False)
class Demand:
    """What the groups of one candidate ask for, on one rank.

    Rows are requests. The first `compared` of them are those of `LENGTHS`, whose shares the cost averages. The others
    are the same requests at their peak: limits hold for them too.

    Args:
        pages: bytes of one block of each group, shape [G].
        blocks: blocks that one request holds, by row and group, shape [rows, G].
        compared: rows that count in the cost.
        longest: blocks that one request of max_model_len holds at most, shape [G].
        table_entries: block-table entries of each group over all running requests, shape [G].
        natural: bytes that one request needs, whatever the plan, shape [rows].
        pool_bytes: the pool's budget.
    """

    pages: Floats
    blocks: Floats
    compared: int
    longest: Floats
    table_entries: Floats
    natural: Floats
    pool_bytes: int

    def held(self, strides: Floats) -> Floats:
        """Bytes that each row's request holds, with blocks at `strides`.

        Args:
            strides: bytes, shape [..., G].

        Returns:
            shape [..., rows].
        """
        held: Floats = strides @ self.blocks.T
        return held

    def structural_shares(self, strides: Floats) -> Floats:
        """Share of each row's bytes that holds nothing, shape [..., rows]."""
        held = self.held(strides)
        return 1.0 - np.divide(self.natural, held, out=np.ones_like(held), where=held > 0)

    def fits(self, slabs: Floats, per_slab: Floats) -> npt.NDArray[np.bool_]:
        """Whether one request of max_model_len fits in whole slabs beside the null slab, shape [...]."""
        needed = np.ceil(self.longest / per_slab).sum(axis=-1) + 1
        enough: npt.NDArray[np.bool_] = needed <= np.floor(self.pool_bytes / slabs)
        return enough

    def cost(self, shares: Floats, slabs: Floats, per_slab: Floats) -> Floats:
        """C for each candidate.

        Args:
            shares: structural shares, shape [..., rows].
            slabs: slab bytes, shape [...].
            per_slab: blocks that each group cuts from a slab, shape [..., G].
        """
        costs: Floats = shares[..., : self.compared].mean(axis=-1)
        return costs + self.overhead(slabs, per_slab)

    def overhead(self, slabs: Floats, per_slab: Floats) -> Floats:
        """C without the structural share: null slab, partly used slabs, tables, groups."""
        partly = PARTLY_USED * slabs * (1.0 - 1.0 / per_slab).sum(axis=-1)
        total: Floats = (slabs + partly) / self.pool_bytes + self.fixed_cost
        return total

    @property
    def fixed_cost(self) -> float:
        """The part of C that the slab does not change: tables and groups."""
        tables = ENTRY_BYTES * float(self.table_entries.sum())
        return tables / self.pool_bytes + TABLE_COST * self.pages.size
