"""The optimal strategy: groups, layout and slabs chosen by cost, with the engines' plan always among the candidates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import attrs
import numpy as np

from kvframe.checks import cdiv, round_up
from kvframe.config import KVCacheGroupSpec
from kvframe.errors import KVFrameError, PlanError
from kvframe.layout import KVCacheLayout
from kvframe.merge import Refusal
from kvframe.planning.cost import BYTE, ENTRY_BYTES, TABLE_COST, Demand, Floats
from kvframe.planning.grouping import engine_groups, make_group, merged
from kvframe.planning.paging import unify_pages
from kvframe.planning.placement import check_layout
from kvframe.planning.problem import Kind, Problem
from kvframe.planning.sizing import bytes_per_block, stride_alignment_of
from kvframe.planning.slabs import Effort, search_slab
from kvframe.plugins import PluginHost

SEARCH_BUDGET = 24
"""Splits that are searched for a slab unless the search is exact: it bounds the time of mixes of many kinds."""


@attrs.frozen(kw_only=True, eq=False)
class Candidate:
    """One way to plan.

    Args:
        name: what the report calls it.
        layout: its memory layout.
        slab_bytes: its slab, or with one block a slab the block of all layers.
        cost: see kvframe.planning.cost.
        held: bytes that one request holds, shape [rows].
        shares: share of those bytes that holds nothing, shape [rows].
        fits: one request of max_model_len fits.
        build: makes its groups.
    """

    name: str
    layout: KVCacheLayout
    slab_bytes: int
    cost: float
    held: Floats
    shares: Floats
    fits: bool
    build: Callable[[], tuple[KVCacheGroupSpec, ...]]


def splits(count: int) -> list[int]:
    """Into how many groups `count` layers may be split: divisors, and up to 3, each group of more than 3 layers."""
    wanted = {1, 2, 3, *(d for d in range(1, count + 1) if count % d == 0)}
    return sorted(q for q in wanted if q == 1 or q < count / 3)


def grouped(
    kinds: Sequence[Kind],
    rows: Sequence[Sequence[Sequence[str]]],
    host: PluginHost,
    per_slab: Sequence[int] = (),
) -> tuple[KVCacheGroupSpec, ...]:
    """Groups of the rows' layers, merged where their specs merge."""
    groups = []
    for kind, dealt in zip(kinds, rows, strict=True):
        for row in dealt:
            members = {layer: kind.layers[layer] for layer in row}
            groups.append(make_group(members, host, uniform=isinstance(merged(members, host), Refusal)))
    ks = per_slab or [1] * len(groups)
    return tuple(attrs.evolve(group, blocks_per_slab=k) for group, k in zip(groups, ks, strict=True))


def _candidate(
    name: str,
    layout: KVCacheLayout,
    demand: Demand,
    slab: int,
    per_slab: Sequence[int],
    build: Callable[[], tuple[KVCacheGroupSpec, ...]],
) -> Candidate:
    ks, size = np.array(per_slab, dtype=np.float64), np.float64(slab)
    shares = demand.structural_shares(size / ks)
    return Candidate(
        name=name,
        layout=layout,
        slab_bytes=slab,
        cost=float(demand.cost(shares, size, ks)),
        held=demand.held(size / ks),
        shares=shares,
        fits=bool(demand.fits(size, ks)),
        build=build,
    )


def whole_candidate(
    problem: Problem, name: str, groups: Sequence[KVCacheGroupSpec], layout: KVCacheLayout
) -> Candidate:
    """Given groups as a candidate, with the blocks per slab that they have."""
    kinds = [problem.kind(group.layer_specs) for group in groups]
    demand = problem.demand(kinds, [[group.layer_names] for group in groups])
    slab = bytes_per_block(problem.on_stage(groups, problem.stage), layout)
    per_slab = [group.blocks_per_slab for group in groups]
    return _candidate(name, layout, demand, slab, per_slab, lambda: tuple(groups))


def engine_candidate(
    problem: Problem, layouts: Sequence[KVCacheLayout]
) -> tuple[Candidate | None, KVFrameError | None]:
    """The engines' plan in the first layout where their rule has one, and why it has none in the first of them."""
    refusal: KVFrameError | None = None
    for layout in layouts:
        try:
            specs = problem.in_stage_order(problem.aligned)
            groups = engine_groups(specs, host=problem.host, layout=layout)
            check_layout(groups, layout)
        except KVFrameError as error:
            refusal = refusal or error
            continue
        return whole_candidate(problem, f"engine rule, {layout.name}", groups, layout), refusal
    return None, refusal


def equal_page_candidates(problem: Problem, layout: KVCacheLayout) -> Iterator[Candidate]:
    """Plans with one page size, for every group size: what layer-outermost layouts can hold."""
    specs = unify_pages(problem.aligned, problem.host)
    if isinstance(specs, Refusal):
        return
    kinds = problem.kinds(specs)
    page = max(spec.page_size_bytes for spec in specs.values())
    multiple = math.lcm(*{spec.block_stride_bytes_multiple for spec in specs.values()})
    step = page if layout.block_outermost else round_up(page, multiple)
    seen = set()
    for size in range(1, max(len(kind.layers) for kind in kinds) + 1):
        counts = tuple(cdiv(len(kind.layers), size) for kind in kinds)
        if sum(counts) > problem.limits.groups or counts in seen:
            continue
        seen.add(counts)
        rows = [kind.dealt(count) for kind, count in zip(kinds, counts, strict=True)]
        widest = max(sum(problem.holds(layer) for layer in row) for dealt in rows for row in dealt)
        yield _candidate(
            f"groups of {widest}, {layout.name}",
            layout,
            problem.demand(kinds, rows),
            round_up(widest * step, multiple),
            [1] * sum(counts),
            lambda rows=rows: grouped(kinds, rows, problem.host),  # type: ignore[misc]
        )


def slab_candidate(problem: Problem, layout: KVCacheLayout, ceiling: Floats, best: float) -> Candidate | None:
    """The cheapest slab plan that beats `best` and holds no more than the ceiling, None if there is none."""
    kinds = problem.natural_kinds
    alignments = [stride_alignment_of(kind.layers.values()) for kind in kinds]
    effort = Effort.unlimited() if problem.exact else Effort()
    found: Candidate | None = None
    for bound, rows in _split_options(problem, kinds):
        if bound >= best or effort.left <= 0:
            break
        demand = problem.demand(kinds, rows)
        aligned = [align for align, dealt in zip(alignments, rows, strict=True) for _ in dealt]
        largest = problem.limits.slab_bytes
        choice = search_slab(demand, aligned, largest=largest, ceiling=ceiling, best=best, effort=effort)
        if choice is not None:
            best = choice.cost
            found = _candidate(
                f"slabs, {layout.name}",
                layout,
                demand,
                choice.slab_bytes,
                choice.blocks_per_slab,
                lambda rows=rows, ks=choice.blocks_per_slab: grouped(kinds, rows, problem.host, ks),  # type: ignore[misc]
            )
    return found


def _split_options(problem: Problem, kinds: Sequence[Kind]) -> Iterator[tuple[float, list[list[list[str]]]]]:
    """Splits of the kinds into groups, with a lower bound of their cost, cheapest bound first."""
    by_count = [{count: kind.dealt(count) for count in splits(len(kind.layers))} for kind in kinds]
    widths = [
        {count: max(sum(kind.pages[n] for n in row) for row in rows) for count, rows in dealt.items()}
        for kind, dealt in zip(kinds, by_count, strict=True)
    ]
    options = []
    for counts in itertools.product(*by_count):
        if sum(counts) > problem.limits.groups:
            continue
        widest = max(width[count] for width, count in zip(widths, counts, strict=True))
        tables = ENTRY_BYTES * sum(kind.entries * count for kind, count in zip(kinds, counts, strict=True))
        options.append((sum(counts) * TABLE_COST + (widest + tables) / max(problem.memory, 1), counts))
    options.sort()
    for bound, counts in options if problem.exact else options[:SEARCH_BUDGET]:
        yield bound, [dealt[count] for dealt, count in zip(by_count, counts, strict=True)]


def candidates(
    problem: Problem, layouts: Sequence[KVCacheLayout], engine: Candidate | None
) -> list[Candidate]:
    """Every plan worth comparing in the given layouts, none that holds more than the engines' plan at any length.

    Args:
        layouts: layouts that the kernels take, the preferred one first.
        engine: the engines' plan, if there is one.
    """
    ceiling = engine.held if engine else np.full_like(problem.natural, np.inf)
    if len(problem.natural_kinds) == 1:
        others = [made for layout in layouts for made in _one_kind(problem, layout)]
    else:
        # Equal pages cost the same in every layout: the preferred one is enough.
        others = list(equal_page_candidates(problem, layouts[0]))
    found = [engine] if engine else []
    found += [other for other in others if bool((other.held <= ceiling + BYTE).all())]
    if len(problem.natural_kinds) > 1:
        found += [made for layout in layouts for made in _slab_plans(problem, layout, ceiling, found)]
    return found


def _slab_plans(
    problem: Problem, layout: KVCacheLayout, ceiling: Floats, others: Sequence[Candidate]
) -> list[Candidate]:
    """The cheapest slab plan of a layout within the tightest limits that any holds, none if others are as good."""
    if not (layout.block_outermost and layout.block_compact):
        return []
    for number, allowed in enumerate(problem.ceilings):
        best = min((c.cost for c in others if c.fits and problem.tier(c.held) <= number), default=math.inf)
        found = slab_candidate(problem, layout, np.minimum(allowed, ceiling), best)
        if found is not None or best < math.inf:
            return [found] if found is not None else []
    return []


def choose(problem: Problem, layouts: Sequence[KVCacheLayout]) -> tuple[Candidate, list[Candidate]]:
    """The cheapest plan of which one request fits within the limits, and all that it was compared with.

    Where none is within the limits, the cheapest of which one request fits; where none fits, the cheapest. On no
    pipeline stage does it hold more than the engines' plan, in the first layout where they have one.

    Raises:
        LayoutError: no layout holds the layers' pages.
        PlanError: the layers cannot be planned together.
    """
    engine, refusal = engine_candidate(problem, layouts)
    found = candidates(problem, layouts, engine)
    ordered = sorted(found, key=lambda c: (not c.fits, problem.tier(c.held), c.cost))
    for chosen in ordered:
        if engine in (None, chosen) or _no_more_elsewhere(problem, chosen, engine):
            return chosen, found
    raise refusal or PlanError(reason="there is no layout to plan in")


def _no_more_elsewhere(problem: Problem, candidate: Candidate, engine: Candidate) -> bool:
    """Whether a plan holds no more than the engines' on the other pipeline stages either."""
    stages = [stage for stage in range(len(problem.stages)) if stage != problem.stage]
    if not stages:
        return True
    ours, theirs = candidate.build(), engine.build()
    return all(
        bool(
            (
                _held_on(problem, ours, candidate.layout, s)
                <= _held_on(problem, theirs, engine.layout, s) + BYTE
            ).all()
        )
        for s in stages
    )


def _held_on(
    problem: Problem, groups: Sequence[KVCacheGroupSpec], layout: KVCacheLayout, stage: int
) -> Floats:
    """Bytes that each row's request holds on a pipeline stage."""
    slab = bytes_per_block(problem.on_stage(groups, stage), layout)
    held = [problem.kind(group.layer_specs).blocks * (slab / group.blocks_per_slab) for group in groups]
    total: Floats = np.array(held).sum(axis=0)
    return total


def _one_kind(problem: Problem, layout: KVCacheLayout) -> list[Candidate]:
    kinds = problem.natural_kinds
    groups = grouped(kinds, [[list(kinds[0].layers)]], problem.host)
    try:
        check_layout(groups, layout)
    except KVFrameError:
        return []
    return [whole_candidate(problem, f"one group, {layout.name}", groups, layout)]
