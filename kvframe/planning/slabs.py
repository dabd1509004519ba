"""The slab search: how many blocks of each group one slab holds, at the least cost (slabs in kvframe.planning.cost).

A slab of S bytes fits a group with page P and stride alignment A when S = k * stride for a whole k, with the stride a
multiple of A and at least P. The limits, and the cost to beat, say how far above its page a stride may lie. That leaves
so few sizes that all of them can be looked at: for one set of groups the search is exact, unless its effort runs out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.checks import cdiv, round_up
from kvframe.planning.cost import BYTE, PARTLY_USED, Demand, Floats

Ints = npt.NDArray[np.int64]

_FIRST_LOOK, _NEXT_LOOK = 1.5, 4
"""Sizes are looked at up to so many widest pages first, then up to so many times as much, and so on."""

_AT_ONCE = 4096  # sizes, before what they cost bounds the next


@attrs.frozen(kw_only=True)
class SlabChoice:
    """A slab size in bytes, blocks per slab by group, and its cost."""

    slab_bytes: int
    blocks_per_slab: tuple[int, ...]
    cost: float


@attrs.define
class Effort:
    """Work that a search may still do. It is counted, not timed, so that a plan is the same on every machine.

    Args:
        left: tries, each of one size with one number of blocks of one group. As given, a fraction of a second, and many
            times what real models take.
        steps: the most tries of one size for one group.
    """

    left: float = 10_000_000
    steps: int = 512

    def spend(self, tries: int) -> bool:
        """Take so many tries; whether they were left."""
        self.left -= tries
        return self.left >= 0

    @classmethod
    def unlimited(cls) -> Effort:
        """What an exact search may do."""
        return cls(left=math.inf, steps=1 << 62)


def smallest_slab(pages: Sequence[int], per_slab: Sequence[int], alignments: Sequence[int]) -> int:
    """The smallest slab that holds `per_slab` blocks of each group at aligned strides; bytes."""
    step = math.lcm(*(k * align for k, align in zip(per_slab, alignments, strict=True)))
    return round_up(max(k * page for k, page in zip(per_slab, pages, strict=True)), step)


def search_slab(
    demand: Demand,
    alignments: Sequence[int],
    *,
    largest: int,
    ceiling: Floats,
    best: float = math.inf,
    effort: Effort | None = None,
) -> SlabChoice | None:
    """The cheapest slab for one set of groups, None if nothing within the limits beats `best`.

    Args:
        demand: what the groups ask for.
        alignments: bytes that each group's stride is a multiple of.
        largest: bytes of the largest slab.
        ceiling: bytes that each row's request may hold, shape [rows].
        best: the cost to beat.
        effort: what the search may do; the search spends it. None: as much as a quick one may.
    """
    effort = Effort() if effort is None else effort
    largest = min(largest, demand.pool_bytes // (2 * demand.pages.size), _largest_fitting(demand))
    found: SlabChoice | None = None
    above, up_to = 0, int(demand.pages.max() * _FIRST_LOOK)
    while True:  # small sizes first: what they cost bounds the larger ones
        widest = _widest_strides(demand, _allowed_bytes(demand, ceiling, best), largest)
        largest = min(largest, _largest_below(demand, widest, best))
        if max(above, demand.pages.max()) > largest or (widest < demand.pages).any() or effort.left <= 0:
            return found
        sizes = _sizes(demand, alignments, widest, (above, min(up_to, largest)))
        for begin in range(0, sizes.size, _AT_ONCE):
            some = sizes[begin : begin + _AT_ONCE]
            least = np.maximum(1.0, np.ceil(some[:, None] / widest))
            some = some[demand.overhead(some.astype(np.float64), least) < best]
            choice = _cheapest(demand, *_cuts(demand, alignments, some, widest, effort), ceiling)
            if choice is not None and choice.cost < best:
                best, found = choice.cost, choice
        above, up_to = up_to, up_to * _NEXT_LOOK


def _largest_fitting(demand: Demand) -> int:
    """A bound on slabs beside whose null slab one request of max_model_len fits; bytes.

    In each group it takes at least its blocks' pages, and at least a slab. Shrunk until both hold: Newton's method,
    which never falls below the bound, since what is taken is convex in the slab.
    """
    needs = (demand.longest * demand.pages)[demand.longest > 0]
    slab = float(demand.pool_bytes)
    for _ in range(needs.size + 1):
        whole = needs <= slab
        slab = min(slab, (demand.pool_bytes - needs[~whole].sum()) / (1.0 + whole.sum()))
    return int(max(slab, 0.0))


def _largest_below(demand: Demand, widest: Ints, best: float) -> int:
    """A bound on slabs that cost less than `best`; bytes.

    A slab S costs S / pool for the null slab, and for partly used ones, as S / k is at most the widest stride, at least
    PARTLY_USED * (G * S - sum of the widest strides) / pool.
    """
    if best == math.inf:
        return int(widest.max()) * demand.pool_bytes
    budget = max(0.0, best - demand.fixed_cost) * demand.pool_bytes
    partly = (budget + PARTLY_USED * float(widest.sum())) / (1.0 + PARTLY_USED * widest.size)
    return int(min(budget, partly))


def _allowed_bytes(demand: Demand, ceiling: Floats, best: float) -> Floats:
    """The most bytes that each row may hold in a plan below the ceiling that costs less than `best`; shape [rows]."""
    allowed: Floats = ceiling.copy()
    # No share is negative: one compared row alone may lose at most as much as the mean over all of them.
    share = (best - demand.fixed_cost) * demand.compared
    if share < 1:
        rows = slice(demand.compared)
        allowed[rows] = np.minimum(allowed[rows], demand.natural[rows] / (1.0 - max(0.0, share)))
    return allowed


def _widest_strides(demand: Demand, allowed: Floats, largest: int) -> Ints:
    """The widest stride that each group may have, were all others at their pages; bytes, shape [G]."""
    room = allowed - demand.held(demand.pages) + BYTE
    with np.errstate(divide="ignore", invalid="ignore"):
        excess = np.where(demand.blocks > 0, room[:, None] / demand.blocks, np.inf).min(axis=0)
    widest: Ints = np.floor(np.minimum(demand.pages + excess, max(largest, 0))).astype(np.int64)
    return widest


def _sizes(demand: Demand, alignments: Sequence[int], widest: Ints, between: tuple[int, int]) -> Ints:
    """Sizes, ascending, above and up to the given ones that fit the group with the fewest, and every alignment."""
    above, largest = between
    pages = demand.pages.astype(np.int64).tolist()
    groups = zip(pages, alignments, widest.tolist(), strict=True)
    page, align, most = min(groups, key=lambda group: ((group[2] - group[0]) // group[1] + 1) / group[0])
    ks = np.arange(above // most + 1, largest // page + 1)
    first = np.maximum(cdiv(page, align), above // (ks * align) + 1)  # strides in units of the alignment
    counts = np.maximum(0, np.minimum(most, largest // ks) // align - first + 1)
    begins = np.repeat(first - np.cumsum(counts) + counts, counts)
    sizes: Ints = np.repeat(ks, counts) * (begins + np.arange(counts.sum())) * align
    suits = (sizes % math.lcm(*alignments) == 0) & (sizes >= max(pages))
    ordered = np.sort(sizes[suits])  # not np.unique, which brings masked arrays along at start-up
    return ordered[np.flatnonzero(np.diff(ordered, prepend=-1))]


def _cuts(
    demand: Demand, alignments: Sequence[int], sizes: Ints, widest: Ints, effort: Effort
) -> tuple[Ints, Ints]:
    """Sizes that fit every group, shape [n], and blocks per slab, shape [n, G].

    The most blocks that fit are best. Fewer would save less of a partly used slab than they add to the blocks of one
    request, and a pool holds more than one.
    """
    idle = ~demand.blocks.any(axis=0) & (
        demand.longest == 0
    )  # nothing is ever held there: a whole slab costs nothing
    alike: dict[tuple[int, int, int], list[int]] = {}
    for group in np.flatnonzero(~idle).tolist():
        key = (int(demand.pages[group]), alignments[group], int(widest[group]))
        alike.setdefault(key, []).append(group)
    per_slab = np.ones((sizes.size, demand.pages.size), dtype=np.int64)
    for key in sorted(alike, key=lambda key: key[2] / key[0]):  # what fits the fewest sizes first
        ks = _most_blocks(sizes, *key, effort)
        per_slab[:, alike[key]] = ks[:, None]
        sizes, per_slab = sizes[ks > 0], per_slab[ks > 0]
    return sizes, per_slab


def _most_blocks(sizes: Ints, page: int, align: int, widest: int, effort: Effort) -> Ints:
    """The most blocks of one group that each size is cut into evenly; 0 where there is none. Shape of `sizes`.

    Tried are strides from the page on, or numbers of blocks from the most on: of two numbers with a known product, the
    smaller one is the sooner found.
    """
    found, rows = np.zeros_like(sizes), np.arange(sizes.size)
    if cdiv(page, align) <= int(sizes.max(initial=0)) // page:
        strides = range(round_up(page, align), widest + 1, align)
        for stride in strides[: effort.steps]:
            if not rows.size or not effort.spend(rows.size):
                break
            fits = sizes[rows] % stride == 0
            found[rows[fits]] = sizes[rows[fits]] // stride
            rows = rows[~fits]
        return found
    ks, least = sizes // page, np.maximum(1, -(-sizes // widest))
    for _ in range(effort.steps):
        if not rows.size or not effort.spend(rows.size):
            break
        fits = (ks >= least) & (sizes[rows] % (ks * align) == 0)
        found[rows[fits]] = ks[fits]
        more = (ks > least) & ~fits
        rows, ks, least = rows[more], ks[more] - 1, least[more]
    return found


def _cheapest(demand: Demand, sizes: Ints, per_slab: Ints, ceiling: Floats) -> SlabChoice | None:
    if not sizes.size:
        return None
    slabs, ks = sizes.astype(np.float64), per_slab.astype(np.float64)
    strides = slabs[:, None] / ks
    legal = demand.fits(slabs, ks) & (demand.held(strides) <= ceiling + BYTE).all(axis=1)
    costs = np.where(legal, demand.cost(demand.structural_shares(strides), slabs, ks), np.inf)
    index = int(costs.argmin())
    if costs[index] == np.inf:
        return None
    return SlabChoice(
        slab_bytes=int(sizes[index]),
        blocks_per_slab=tuple(int(k) for k in per_slab[index]),
        cost=float(costs[index]),
    )
