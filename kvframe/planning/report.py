"""The report of a plan: every number that `kvframe plan` shows, defined once (docs/reference/cli.md has the keys)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import attrs

from kvframe.config import DEVICE, KVCacheConfig, KVCacheGroupSpec
from kvframe.engine import EngineConfig
from kvframe.planning.optimal import Candidate
from kvframe.planning.problem import Problem
from kvframe.planning.sizing import Bound, exact_bound
from kvframe.plugins import PluginHost


@attrs.frozen(kw_only=True)
class GroupReport:
    """One group's numbers on the rank that decides. Bytes sum over the group's layers there.

    Args:
        kinds: layer kinds to number of layers.
        block_tokens: tokens of one block.
        natural_page_bytes: bytes of one block's content, nothing padded.
        page_bytes: the same with page padding.
        stride_bytes: bytes that one block takes in the pool.
        blocks_per_slab: blocks that the group cuts from one slab.
        empty_slots: layer slots of the widest group that this one leaves empty.
        blocks_per_request: the most blocks that one request of max_model_len holds.
        steady_blocks_per_request: of those, what it holds in steady decode; the rest is for tokens in flight.
    """

    kinds: Mapping[str, int]
    block_tokens: int
    natural_page_bytes: int
    page_bytes: int
    stride_bytes: int
    blocks_per_slab: int
    empty_slots: int
    blocks_per_request: int
    steady_blocks_per_request: int

    @property
    def wasted_bytes_per_request(self) -> int:
        """Bytes that one request of max_model_len holds in this group without content."""
        return self.blocks_per_request * (self.stride_bytes - self.natural_page_bytes)

    def as_dict(self) -> dict[str, Any]:
        """All numbers as plain values."""
        reserve = self.blocks_per_request - self.steady_blocks_per_request
        wasted = self.wasted_bytes_per_request
        return {
            **attrs.asdict(self),
            "reserve_blocks_per_request": reserve,
            "wasted_bytes_per_request": wasted,
        }


@attrs.frozen(kw_only=True)
class Waste:
    """Bytes of one request of max_model_len that hold nothing, by cause, and the floor below all plans.

    Args:
        structural_share: the largest share of a request's bytes that holds nothing, over the compared lengths.
        structural_share_by_length: the same by length in tokens.
        layer_padding_bytes: in layer slots that a smaller group leaves empty.
        page_padding_bytes: in pages made larger than their content.
        slab_remainder_bytes: between blocks, where a slab does not divide evenly.
        floor_bytes: what the model must keep for such a request; no plan can go below.
    """

    structural_share: float
    structural_share_by_length: Mapping[int, float]
    layer_padding_bytes: int
    page_padding_bytes: int
    slab_remainder_bytes: int
    floor_bytes: int


@attrs.frozen(kw_only=True)
class Alternative:
    """A plan that was compared: its cost (kvframe.planning.cost) and bytes held by one request at each length."""

    name: str
    layout: str
    cost: float
    fits: bool
    held_bytes: Mapping[int, int]
    structural_share: float


@attrs.frozen(kw_only=True)
class PlanReport:
    """What a plan gives and costs, for one rank: with pipeline stages, the one with the fewest slabs.

    A pool is counted in slabs. Where every group cuts one block from a slab, slabs are blocks, and `num_blocks`,
    `blocks_per_request_total` and `pool_block_bytes` say what their names say; else they count slabs.
    `max_concurrency` is num_blocks / blocks_per_request_total, not rounded; `tokens` is its exact product with the
    maximum length, rounded down.
    """

    strategy: str
    chosen: str
    layout: str
    max_model_len: int
    memory_bytes: int
    num_blocks: int
    pool_block_bytes: int
    slabs_per_request: Fraction
    groups: tuple[GroupReport, ...]
    block_tokens: Mapping[str, int]
    page_bytes: Mapping[str, int]
    groups_by_kind: Mapping[str, int]
    blocks_per_request: Mapping[str, int]
    padding_layer_slots: int
    prefix_cacheable: Mapping[str, bool]
    waste: Waste
    alternatives: tuple[Alternative, ...]
    stages: tuple[Mapping[str, Any], ...]
    engine: Mapping[str, Any]

    @property
    def blocks_per_request_total(self) -> int | float:
        """Blocks (or slabs) that one request of max_model_len takes, over all groups."""
        total = self.slabs_per_request
        return total.numerator if total.denominator == 1 else float(total)

    @property
    def usable_blocks(self) -> int:
        """Blocks (or slabs) without the null block's."""
        return max(self.num_blocks - 1, 0)

    @property
    def max_concurrency(self) -> float | None:
        """Requests of max_model_len at once; None for a model that keeps nothing."""
        return float(self.num_blocks / self.slabs_per_request) if self.slabs_per_request else None

    @property
    def tokens(self) -> int:
        """Tokens that fit in requests of max_model_len."""
        return (
            int(self.num_blocks * self.max_model_len / self.slabs_per_request)
            if self.slabs_per_request
            else 0
        )

    @property
    def unused_bytes(self) -> int:
        """Bytes of the budget that no slab uses."""
        return self.memory_bytes - self.num_blocks * self.pool_block_bytes

    @property
    def wasted_bytes_per_request(self) -> int:
        """Bytes that one request of max_model_len holds without content, over all groups."""
        return sum(group.wasted_bytes_per_request for group in self.groups)

    def as_dict(self) -> dict[str, Any]:
        """All numbers as plain values: what `--json` prints."""
        values = {
            **attrs.asdict(self, recurse=True, filter=lambda field, _: field.name != "slabs_per_request"),
            "groups": [group.as_dict() for group in self.groups],
        }
        derived = (
            "blocks_per_request_total",
            "usable_blocks",
            "max_concurrency",
            "tokens",
            "unused_bytes",
            "wasted_bytes_per_request",
        )
        return values | {name: getattr(self, name) for name in derived}


def make_report(
    configs: Sequence[KVCacheConfig],
    *,
    problem: Problem,
    strategy: str,
    chosen: Candidate,
    compared: Sequence[Candidate],
    kinds: Mapping[str, str],
    stages: Sequence[Mapping[str, Any]],
) -> PlanReport:
    """The report of a plan.

    Args:
        configs: one for each pipeline stage.
        problem: what was planned, on the stage that decides.
        chosen: the plan taken.
        compared: all plans that it was compared with.
        kinds: layer name to the kind it is reported under.
        stages: numbers of each pipeline stage.
    """
    host, engine = problem.host, problem.engine
    config = (
        configs[min(range(len(configs)), key=lambda i: int(stages[i]["num_blocks"]))]
        if stages
        else configs[0]
    )
    pool = config.pools[DEVICE]
    groups = [group for group in config.groups if group.pool == DEVICE]
    bound = exact_bound(host)
    reports = tuple(_group_report(group, groups, pool.slab_bytes, engine, bound, kinds) for group in groups)
    by_kind: dict[str, list[tuple[KVCacheGroupSpec, GroupReport, str]]] = {}
    for whole, report in zip(chosen.build(), reports, strict=True):
        for kind, layer in {kinds[layer]: layer for layer in whole.layer_names}.items():
            by_kind.setdefault(kind, []).append((whole, report, layer))
    return PlanReport(
        strategy=strategy,
        chosen=chosen.name,
        layout=pool.layout,
        max_model_len=engine.max_model_len,
        memory_bytes=pool.budget_bytes,
        num_blocks=pool.num_slabs,
        pool_block_bytes=pool.slab_bytes,
        slabs_per_request=sum(
            (Fraction(r.blocks_per_request, r.blocks_per_slab) for r in reports), Fraction(0)
        ),
        groups=reports,
        block_tokens={kind: found[0][1].block_tokens for kind, found in by_kind.items()},
        page_bytes={kind: max(g.page_of(layer) for g, _, layer in found) for kind, found in by_kind.items()},
        groups_by_kind={kind: len(found) for kind, found in by_kind.items()},
        blocks_per_request={
            kind: max(report.blocks_per_request for _, report, _ in found) for kind, found in by_kind.items()
        },
        padding_layer_slots=sum(report.empty_slots for report in reports),
        prefix_cacheable={
            kind: all(_cacheable(g.layer_specs[layer], host) for g, _, layer in found)
            for kind, found in by_kind.items()
        },
        waste=_waste(reports, problem, chosen),
        alternatives=tuple(_alternative(candidate, problem) for candidate in compared),
        stages=tuple(stages),
        engine=attrs.asdict(engine),
    )


def _group_report(
    group: KVCacheGroupSpec,
    groups: Sequence[KVCacheGroupSpec],
    slab_bytes: int,
    engine: EngineConfig,
    bound: Bound,
    kinds: Mapping[str, str],
) -> GroupReport:
    counted: dict[str, int] = {}
    for layer in group.layer_names:
        counted[kinds[layer]] = counted.get(kinds[layer], 0) + 1
    pages = {g.page_of(layer) for g in groups for layer in g.layer_names}
    widest = max(len(g.layer_specs) for g in groups)
    slots = len(pages) == 1 and group.blocks_per_slab == 1
    return GroupReport(
        kinds=counted,
        block_tokens=group.block_size,
        natural_page_bytes=sum(spec.unpadded_page_size_bytes for spec in group.layer_specs.values()),
        page_bytes=group.page_size_bytes,
        stride_bytes=slab_bytes // group.blocks_per_slab,
        blocks_per_slab=group.blocks_per_slab,
        empty_slots=widest - len(group.layer_specs) if slots else 0,
        blocks_per_request=bound(group, engine),
        steady_blocks_per_request=bound(group, attrs.evolve(engine, max_in_flight_tokens=1)),
    )


def _waste(groups: Sequence[GroupReport], problem: Problem, chosen: Candidate) -> Waste:
    layers = pages = remainder = 0
    for group in groups:
        between = group.stride_bytes - group.page_bytes
        pages += group.blocks_per_request * (group.page_bytes - group.natural_page_bytes)
        if group.empty_slots:
            layers += group.blocks_per_request * between
        else:
            remainder += group.blocks_per_request * between
    shares = dict(zip(problem.lengths, map(float, chosen.shares), strict=True))
    return Waste(
        structural_share=max(shares.values()),
        structural_share_by_length=shares,
        layer_padding_bytes=layers,
        page_padding_bytes=pages,
        slab_remainder_bytes=remainder,
        floor_bytes=problem.floor_bytes,
    )


def _alternative(candidate: Candidate, problem: Problem) -> Alternative:
    return Alternative(
        name=candidate.name,
        layout=candidate.layout.name,
        cost=candidate.cost,
        fits=candidate.fits,
        held_bytes=dict(zip(problem.lengths, (round(held) for held in candidate.held), strict=True)),
        structural_share=float(candidate.shares.max()),
    )


def _cacheable(spec: Any, host: PluginHost) -> bool:
    return bool(spec.prefix_cacheable) and host.family(spec).lifetime(spec).hits == "keyed"


def requests_at(config: KVCacheConfig, *, engine: EngineConfig, host: PluginHost, length: int) -> int:
    """Whole requests of `length` tokens that fit at once beside the null block."""
    bound, short = exact_bound(host), engine.with_max_model_len(length)
    groups = [group for group in config.groups if group.pool == DEVICE]
    each = sum((Fraction(bound(g, short), g.blocks_per_slab) for g in groups), Fraction(0))
    return int(max(config.num_blocks - 1, 0) / each) if each else 0
