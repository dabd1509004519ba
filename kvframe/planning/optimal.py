"""The optimal strategy: groups, layout and slabs chosen by cost, with the engines' plan always among the candidates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from kvframe.checks import cdiv
from kvframe.config import KVCacheGroupSpec
from kvframe.errors import KVFrameError, PlanError
from kvframe.layout import KVCacheLayout
from kvframe.merge import Refusal
from kvframe.planning.cost import ENTRY_BYTES, TABLE_COST, Demand, Floats
from kvframe.planning.grouping import deal, engine_groups, make_group, merged
from kvframe.planning.paging import unify_pages
from kvframe.planning.placement import check_layout
from kvframe.planning.problem import Kind, Problem
from kvframe.planning.sizing import bytes_per_block, stride_alignment_of
from kvframe.planning.slabs import search_slab
from kvframe.plugins import PluginHost

SEARCH_BUDGET = (
    24  # splits searched for a slab unless the search is exact: bounds the time of mixes of many kinds
)


@attrs.frozen(kw_only=True, eq=False)
class Candidate:
    """One way to plan.

    Args:
        name: what the report calls it.
        layout: its memory layout.
        slab_bytes: its slab, or with one block a slab the block of all layers.
        cost: see kvframe.planning.cost.
        held: bytes that one request holds at each length.
        shares: share of those bytes that holds nothing.
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


def split_layers(kind: Kind, count: int) -> list[list[str]]:
    """A kind's layers dealt to `count` groups of near-equal pages: layers of each page size round-robin."""
    by_page: dict[int, dict[str, Any]] = {}
    for layer, page in kind.pages.items():
        by_page.setdefault(page, {})[layer] = page
    dealt = [deal(layers, count) for layers in by_page.values()]
    return [[layer for part in row for layer in part] for row in zip(*dealt, strict=True)]


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
    ks = np.array(per_slab, dtype=np.float64)
    return Candidate(
        name=name,
        layout=layout,
        slab_bytes=slab,
        cost=float(demand.cost(np.float64(slab), ks)),
        held=demand.held(slab / ks),
        shares=demand.structural_shares(slab / ks),
        fits=bool(demand.fits(np.float64(slab), ks)),
        build=build,
    )


def whole_candidate(
    problem: Problem, name: str, groups: Sequence[KVCacheGroupSpec], layout: KVCacheLayout
) -> Candidate:
    """Given groups as a candidate, one block a slab."""
    kinds = [problem.kinds(group.layer_specs)[0] for group in groups]
    demand = problem.demand(kinds, [[group.layer_names] for group in groups])
    slab = bytes_per_block(problem.on_stage(groups), layout)
    return _candidate(name, layout, demand, slab, [1] * len(groups), lambda: tuple(groups))


def engine_candidate(problem: Problem, layout: KVCacheLayout) -> Candidate | None:
    """The engines' plan in a layout, None where their rule has none."""
    try:
        groups = engine_groups(problem.aligned, host=problem.host, layout=layout)
        check_layout(groups, layout)
    except KVFrameError:
        return None
    return whole_candidate(problem, f"engine rule, {layout.name}", groups, layout)


def equal_page_candidates(problem: Problem, layout: KVCacheLayout) -> Iterator[Candidate]:
    """Plans with one page size, for every group size: what layer-outermost layouts can hold."""
    specs = unify_pages(problem.aligned, problem.host)
    if isinstance(specs, Refusal):
        return
    kinds = problem.kinds(specs)
    page = max(spec.page_size_bytes for spec in specs.values())
    multiple = math.lcm(*{spec.block_stride_bytes_multiple for spec in specs.values()})
    seen = set()
    for size in range(1, max(len(kind.layers) for kind in kinds) + 1):
        counts = tuple(cdiv(len(kind.layers), size) for kind in kinds)
        if sum(counts) > problem.limits.groups or counts in seen:
            continue
        seen.add(counts)
        rows = [[list(r) for r in deal(kind.layers, n)] for kind, n in zip(kinds, counts, strict=True)]
        widest = max(
            sum(1 for layer in row if problem.page_of(layer, specs[layer])) for dealt in rows for row in dealt
        )
        slab = (
            cdiv(widest * page, multiple) * multiple
            if layout.block_outermost
            else widest * cdiv(page, multiple) * multiple
        )
        yield _candidate(
            f"groups of {widest}, {layout.name}",
            layout,
            problem.demand(kinds, rows),
            slab,
            [1] * sum(counts),
            lambda rows=rows: grouped(kinds, rows, problem.host),  # type: ignore[misc]
        )


def slab_candidate(
    problem: Problem, kinds: Sequence[Kind], layout: KVCacheLayout, ceiling: Floats | None, best: float
) -> Candidate | None:
    """The cheapest slab plan that beats `best`, None if there is none."""
    found: Candidate | None = None
    alignments = [stride_alignment_of(kind.layers.values()) for kind in kinds]
    for bound, rows in _split_options(problem, kinds):
        if bound >= best:
            break
        demand = problem.demand(kinds, rows)
        aligned = [align for align, dealt in zip(alignments, rows, strict=True) for _ in dealt]
        choice = search_slab(
            demand, aligned, limits=problem.limits, ceiling=ceiling, best=best, exact=problem.exact
        )
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


def _split_options(problem: Problem, kinds: Sequence[Kind]) -> list[tuple[float, list[list[list[str]]]]]:
    """Splits of the kinds into groups, with a lower bound of their cost, cheapest bound first."""
    by_count = [{count: split_layers(kind, count) for count in splits(len(kind.layers))} for kind in kinds]
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
    if not problem.exact:
        options = options[:SEARCH_BUDGET]
    return [
        (bound, [dealt[n] for dealt, n in zip(by_count, counts, strict=True)]) for bound, counts in options
    ]


def candidates(problem: Problem, layouts: Sequence[KVCacheLayout]) -> list[Candidate]:
    """Every plan worth comparing in the given layouts, none that holds more than the engines' plan at any length.

    Args:
        layouts: layouts that the kernels take, the preferred one first. The engines' plan in that one sets the ceiling.
    """
    engines = (engine_candidate(problem, layout) for layout in layouts)
    engine = next((made for made in engines if made is not None), None)
    ceiling = engine.held if engine else None
    found: list[Candidate] = [engine] if engine else []
    kinds = problem.kinds(problem.natural_specs)
    for layout in layouts:
        if len(kinds) == 1:
            found += _one_kind(problem, kinds, layout)
            continue
        found += equal_page_candidates(problem, layout)
        if layout.block_outermost and layout.block_compact:
            best = min((c.cost for c in found), default=math.inf)
            slabs = slab_candidate(problem, kinds, layout, ceiling, best)
            found += [slabs] if slabs is not None else []
    if ceiling is None:
        return found
    return [c for c in found if c is engine or bool((c.held <= ceiling + 0.5).all())]


def choose(problem: Problem, layouts: Sequence[KVCacheLayout]) -> tuple[Candidate, list[Candidate]]:
    """The cheapest plan of which one request fits (else the cheapest), and all that it was compared with.

    Raises:
        PlanError: no layout can hold the layers.
    """
    found = candidates(problem, layouts)
    if not found:
        raise PlanError(
            reason=f"no plan in layout {', '.join(layout.name for layout in layouts)} can hold these layers",
            layers=list(problem.specs),
            values={"pages": sorted({spec.page_size_bytes for spec in problem.specs.values()})},
            advice="Use a block-outermost layout such as --layout BLHNC, which packs mixed pages",
        )
    return min(found, key=lambda c: (not c.fits, c.cost)), found


def _one_kind(problem: Problem, kinds: Sequence[Kind], layout: KVCacheLayout) -> list[Candidate]:
    groups = grouped(kinds, [[list(kinds[0].layers)]], problem.host)
    try:
        check_layout(groups, layout)
    except KVFrameError:
        return []
    return [whole_candidate(problem, f"one group, {layout.name}", groups, layout)]
