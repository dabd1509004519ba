"""The slab search: how many blocks of each group one slab holds, at the least cost (slabs in kvframe.planning.cost).

A slab size S fits a group with page P and stride alignment A when S = k * stride for a whole k, with the stride a
multiple of A and at most `slack` above P. Sizes that fit every group are found with a sieve over short windows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.checks import cdiv, round_up
from kvframe.planning.cost import Demand, Floats, Limits

SLACK = 0.01
"""How far a stride may lie above its page in the quick search, as a share."""


@attrs.frozen(kw_only=True)
class SlabChoice:
    """A slab size in bytes, blocks per slab by group, and its cost."""

    slab_bytes: int
    blocks_per_slab: tuple[int, ...]
    cost: float


def smallest_slab(pages: Sequence[int], per_slab: Sequence[int], alignments: Sequence[int]) -> int:
    """The smallest slab that holds `per_slab` blocks of each group at aligned strides; bytes."""
    step = math.lcm(*(k * align for k, align in zip(per_slab, alignments, strict=True)))
    return round_up(max(k * page for k, page in zip(per_slab, pages, strict=True)), step)


def search_slab(
    demand: Demand,
    alignments: Sequence[int],
    *,
    limits: Limits,
    ceiling: Floats | None,
    best: float = math.inf,
    exact: bool = False,
) -> SlabChoice | None:
    """The cheapest slab for one set of groups, None if nothing within the limits beats `best`.

    Args:
        demand: what the groups ask for.
        alignments: bytes that each group's stride is a multiple of.
        limits: what may not be exceeded.
        ceiling: bytes that one request may hold at each length, None for no ceiling.
        best: the cost to beat.
        exact: let each stride lie as far above its page as the cost to beat allows, instead of the quick search's 1 %.
    """
    pages = [int(page) for page in demand.pages]
    largest = min(limits.slab_bytes, demand.pool_bytes // (2 * len(pages)))
    found: SlabChoice | None = None
    slack = SLACK
    for _ in range(2 if exact else 1):
        for lo, hi in _windows(pages, largest, slack):
            if _least_cost(demand, lo, slack) >= best:
                break
            sizes, per_slab = _fitting_sizes(pages, alignments, lo, hi, slack)
            choice = _cheapest(demand, sizes, per_slab, limits, ceiling)
            if choice is not None and choice.cost < best:
                best, found = choice.cost, choice
        slack = min(0.5, _slack_from(best, demand))
    return found


def _least_cost(demand: Demand, slab: int, slack: float) -> float:
    """A bound that no slab of at least so many bytes beats: the cost of its null slab, partly used slabs and tables."""
    fewest = np.maximum(1.0, np.ceil(slab * (1 - slack) / demand.pages))
    return float(demand.overhead(np.float64(slab), fewest))


def _slack_from(best: float, demand: Demand) -> float:
    """The largest stride excess that a plan cheaper than `best` could have in any one group."""
    weights = (demand.pages * demand.blocks / np.maximum(demand.natural[:, None], 1)).mean(axis=0)
    excess = best / np.maximum(weights, 1e-9)
    return float(np.max(excess)) if math.isfinite(best) else 0.5


def _windows(pages: Sequence[int], largest: int, slack: float) -> Iterator[tuple[int, int]]:
    """The sizes at which the widest group's stride is within `slack` of its page, smallest first."""
    widest = max(pages)
    last = 0
    for k in range(1, largest // widest + 1):
        lo, hi = max(k * widest, last + 1), min(int(k * widest / (1 - slack)), largest)
        if lo <= hi:
            yield lo, hi
        last = hi


def _fitting_sizes(
    pages: Sequence[int], alignments: Sequence[int], lo: int, hi: int, slack: float
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Sizes in [lo, hi] that fit every group, shape [n], and blocks per slab, shape [n, G]."""
    unit = math.gcd(*alignments)
    first = cdiv(lo, unit)
    kinds = sorted(set(zip(pages, alignments, strict=True)))  # equal groups share a row of the sieve
    rows = np.zeros((len(kinds), hi // unit - first + 1), dtype=np.int64)
    for row, (page, align) in zip(rows, kinds, strict=True):
        for k in range(max(1, int(lo * (1 - slack) // page)), hi // page + 1):
            step = k * align
            start = round_up(max(lo, k * page), step)
            stop = min(hi, int(k * page / (1 - slack)))
            if start <= stop:
                row[start // unit - first : stop // unit - first + 1 : step // unit] = k
    chosen = np.flatnonzero(rows.all(axis=0))
    order = [kinds.index(kind) for kind in zip(pages, alignments, strict=True)]
    return (chosen + first) * unit, rows[order][:, chosen].T


def _cheapest(
    demand: Demand,
    sizes: npt.NDArray[np.int64],
    per_slab: npt.NDArray[np.int64],
    limits: Limits,
    ceiling: Floats | None,
) -> SlabChoice | None:
    if not sizes.size:
        return None
    slabs, ks = sizes.astype(np.float64), per_slab.astype(np.float64)
    strides = slabs[:, None] / ks
    legal = demand.structural_shares(strides).max(axis=1) <= limits.structural_share
    legal &= demand.fits(slabs, ks)
    if ceiling is not None:
        legal &= (demand.held(strides) <= ceiling + 0.5).all(axis=1)
    if not legal.any():
        return None
    costs = np.where(legal, demand.cost(slabs, ks), np.inf)
    index = int(costs.argmin())
    return SlabChoice(
        slab_bytes=int(sizes[index]),
        blocks_per_slab=tuple(int(k) for k in per_slab[index]),
        cost=float(costs[index]),
    )
