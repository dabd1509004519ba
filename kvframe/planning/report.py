"""The report of a plan: every number that `kvframe plan` shows, defined once (docs/reference/cli.md has the keys)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import attrs

from kvframe.config import DEVICE, KVCacheConfig, KVCacheGroupSpec
from kvframe.planning.group_report import GroupReport, group_reports
from kvframe.planning.optimal import Candidate
from kvframe.planning.pools import PoolReport, plain, pool_reports
from kvframe.planning.problem import Problem
from kvframe.plugins import PluginHost


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
    """A plan that was compared: its cost (kvframe.planning.cost) and bytes held by one request at each length.

    `fits`: one request of max_model_len does. `within_limits`: at no length it holds too many bytes without content.
    """

    name: str
    layout: str
    cost: float
    fits: bool
    within_limits: bool
    held_bytes: Mapping[int, int]
    structural_share: float


@attrs.frozen(kw_only=True)
class PlanReport:
    """What a plan gives and costs, for one rank: with pipeline stages, the one with the fewest slabs.

    A pool is counted in slabs. Where every group cuts one block from a slab, slabs are blocks, and `num_blocks`,
    `blocks_per_request_total` and `pool_block_bytes` say what their names say; else they count slabs. These three, and
    what is wasted, are the device pool's; `pools` has all pools. `max_concurrency` is slabs / slabs a request of the
    pool that allows the fewest requests, not rounded; `tokens` is its exact product with the maximum length, rounded
    down.
    """

    strategy: str
    chosen: str
    layout: str
    max_model_len: int
    memory_bytes: int
    num_blocks: int
    pool_block_bytes: int
    pools: tuple[PoolReport, ...]
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
    def slabs_per_request(self) -> Fraction:
        """Slabs of the device pool that one request of max_model_len takes."""
        return self._device.slabs_per_request

    @property
    def _device(self) -> PoolReport:
        return next(pool for pool in self.pools if pool.name == DEVICE)

    @property
    def blocks_per_request_total(self) -> int | float:
        """Blocks (or slabs) of the device pool that one request of max_model_len takes, over all its groups."""
        return plain(self.slabs_per_request)

    @property
    def usable_blocks(self) -> int:
        """Blocks (or slabs) without the null block's."""
        return self._device.usable_slabs

    @property
    def limited_by(self) -> str | None:
        """The pool that allows the fewest requests of max_model_len; None for a model that keeps nothing."""
        allowed = {pool.name: pool.requests for pool in self.pools if pool.requests is not None}
        return min(allowed, key=allowed.__getitem__) if allowed else None

    @property
    def requests(self) -> Fraction | None:
        """Requests of max_model_len at once, not rounded; None for a model that keeps nothing."""
        return next((pool.requests for pool in self.pools if pool.name == self.limited_by), None)

    @property
    def max_concurrency(self) -> float | None:
        """`requests` as a float."""
        return None if self.requests is None else float(self.requests)

    @property
    def tokens(self) -> int:
        """Tokens that fit in requests of max_model_len."""
        return int((self.requests or 0) * self.max_model_len)

    @property
    def unused_bytes(self) -> int:
        """Bytes of the device's budget that no slab uses."""
        return self.memory_bytes - self.num_blocks * self.pool_block_bytes

    @property
    def wasted_bytes_per_request(self) -> int:
        """Bytes of the device that one request of max_model_len holds without content, over all groups."""
        return sum(group.wasted_bytes_per_request for group in self.groups if group.pool == DEVICE)

    def as_dict(self) -> dict[str, Any]:
        """All numbers as plain values: what `--json` prints."""
        values = {
            **attrs.asdict(self, recurse=True),
            "pools": [pool.as_dict() for pool in self.pools],
            "groups": [group.as_dict() for group in self.groups],
        }
        derived = (
            "blocks_per_request_total",
            "usable_blocks",
            "max_concurrency",
            "limited_by",
            "tokens",
            "unused_bytes",
            "wasted_bytes_per_request",
        )
        return values | {name: getattr(self, name) for name in derived}


def make_report(
    configs: Sequence[KVCacheConfig],
    groups: Sequence[KVCacheGroupSpec],
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
        groups: those of the whole model.
        problem: what was planned, on the stage that decides.
        chosen: the plan taken.
        compared: all plans that it was compared with.
        kinds: layer name to the kind it is reported under.
        stages: numbers of each pipeline stage.
    """
    host, engine = problem.host, problem.engine
    config, _ = min(zip(configs, stages, strict=True), key=lambda pair: int(pair[1]["num_blocks"]))
    pool = config.pools[DEVICE]
    reports = group_reports(config, engine=engine, host=host, kinds=kinds)
    by_kind: dict[str, list[tuple[KVCacheGroupSpec, GroupReport, str]]] = {}
    for whole, report in zip(groups, reports, strict=True):
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
        pools=pool_reports(config, engine=engine, host=host),
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
        waste=_waste([report for report in reports if report.pool == DEVICE], problem, chosen),
        alternatives=tuple(_alternative(candidate, problem) for candidate in compared),
        stages=tuple(stages),
        engine=attrs.asdict(engine),
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
    shares = dict(zip(problem.lengths, map(float, chosen.shares), strict=False))
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
        within_limits=problem.tier(candidate.held) < len(problem.ceilings),
        held_bytes=dict(zip(problem.lengths, (round(held) for held in candidate.held), strict=False)),
        structural_share=float(candidate.shares[: len(problem.lengths)].max()),
    )


def _cacheable(spec: Any, host: PluginHost) -> bool:
    return bool(spec.prefix_cacheable) and host.family(spec).lifetime(spec).hits == "keyed"
