"""The report of a plan: every number that `kvframe plan` shows, defined once. Keys are documented in docs/reference/cli.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvframe.config import DEVICE, KVCacheConfig, KVCacheGroupSpec
from kvframe.engine import EngineConfig
from kvframe.planning.sizing import Bound, exact_bound
from kvframe.plugins import PluginHost


@attrs.frozen(kw_only=True)
class GroupReport:
    """One group's numbers. Bytes are of one rank; page bytes sum over the group's layers.

    Args:
        kinds: layer kinds to number of layers.
        block_tokens: tokens of one block.
        natural_page_bytes: bytes of one block's content over all layers, nothing padded.
        page_bytes: the same with page padding.
        empty_slots: layer slots of the widest group that this one leaves empty.
        blocks_per_request: the most blocks that one request of max_model_len holds.
        wasted_bytes_per_block: bytes of the pool's block that hold no content of the group.
    """

    kinds: Mapping[str, int]
    block_tokens: int
    natural_page_bytes: int
    page_bytes: int
    empty_slots: int
    blocks_per_request: int
    wasted_bytes_per_block: int

    @property
    def wasted_bytes_per_request(self) -> int:
        """Bytes that one request of max_model_len holds in this group without content."""
        return self.blocks_per_request * self.wasted_bytes_per_block


@attrs.frozen(kw_only=True)
class PlanReport:
    """What a plan gives and costs, for one rank.

    `max_concurrency` is num_blocks / blocks_per_request_total, not rounded; `tokens` is its exact product with the
    maximum length, rounded down.
    """

    strategy: str
    layout: str
    max_model_len: int
    memory_bytes: int
    num_blocks: int
    pool_block_bytes: int
    blocks_per_request_total: int
    groups: tuple[GroupReport, ...]
    block_tokens: Mapping[str, int]
    page_bytes: Mapping[str, int]
    groups_by_kind: Mapping[str, int]
    blocks_per_request: Mapping[str, int]
    padding_layer_slots: int
    prefix_cacheable: Mapping[str, bool]

    @property
    def usable_blocks(self) -> int:
        """Blocks without the null block."""
        return max(self.num_blocks - 1, 0)

    @property
    def max_concurrency(self) -> float | None:
        """Requests of max_model_len at once; None for a model that keeps nothing."""
        return self.num_blocks / self.blocks_per_request_total if self.blocks_per_request_total else None

    @property
    def tokens(self) -> int:
        """Tokens that fit in requests of max_model_len."""
        total = self.blocks_per_request_total
        return self.num_blocks * self.max_model_len // total if total else 0

    @property
    def unused_bytes(self) -> int:
        """Bytes of the budget that no block uses."""
        return self.memory_bytes - self.num_blocks * self.pool_block_bytes

    @property
    def wasted_bytes_per_request(self) -> int:
        """Bytes that one request of max_model_len holds without content, over all groups."""
        return sum(group.wasted_bytes_per_request for group in self.groups)

    def as_dict(self) -> dict[str, Any]:
        """All numbers as plain values: what `--json` prints."""
        values = attrs.asdict(self, recurse=True)
        values["groups"] = [
            {**attrs.asdict(group), "wasted_bytes_per_request": group.wasted_bytes_per_request}
            for group in self.groups
        ]
        for name in ("usable_blocks", "max_concurrency", "tokens", "unused_bytes", "wasted_bytes_per_request"):
            values[name] = getattr(self, name)
        return values


def make_report(
    config: KVCacheConfig,
    *,
    host: PluginHost,
    engine: EngineConfig,
    bound: Bound,
    strategy: str,
    kinds: Mapping[str, str],
) -> PlanReport:
    """The report of one rank's config.

    Args:
        kinds: layer name to the kind it is reported under.
    """
    pool = config.pools[DEVICE]
    groups = [group for group in config.groups if group.pool == DEVICE and group.layer_specs]
    reports = tuple(_group_report(group, groups, pool.slab_bytes, engine, bound, kinds) for group in groups)
    by_kind: dict[str, list[tuple[KVCacheGroupSpec, GroupReport, str]]] = {}
    for group, report in zip(groups, reports, strict=True):
        for kind, layer in {kinds[layer]: layer for layer in group.layer_names}.items():
            by_kind.setdefault(kind, []).append((group, report, layer))
    return PlanReport(
        strategy=strategy,
        layout=pool.layout,
        max_model_len=engine.max_model_len,
        memory_bytes=pool.budget_bytes,
        num_blocks=pool.num_slabs,
        pool_block_bytes=pool.slab_bytes,
        blocks_per_request_total=sum(report.blocks_per_request for report in reports),
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
    )


def _group_report(
    group: KVCacheGroupSpec,
    groups: Sequence[KVCacheGroupSpec],
    block_bytes: int,
    engine: EngineConfig,
    bound: Bound,
    kinds: Mapping[str, str],
) -> GroupReport:
    counted: dict[str, int] = {}
    for layer in group.layer_names:
        counted[kinds[layer]] = counted.get(kinds[layer], 0) + 1
    natural = sum(spec.unpadded_page_size_bytes for spec in group.layer_specs.values())
    pages = {g.page_of(layer) for g in groups for layer in g.layer_names}
    widest = max(len(g.layer_specs) for g in groups)
    return GroupReport(
        kinds=counted,
        block_tokens=group.block_size,
        natural_page_bytes=natural,
        page_bytes=group.page_size_bytes,
        empty_slots=widest - len(group.layer_specs) if len(pages) == 1 else 0,
        blocks_per_request=bound(group, engine),
        wasted_bytes_per_block=block_bytes - natural,
    )


def _cacheable(spec: Any, host: PluginHost) -> bool:
    return bool(spec.prefix_cacheable) and host.family(spec).lifetime(spec).hits == "keyed"


def mean_len_concurrency(
    config: KVCacheConfig, *, engine: EngineConfig, host: PluginHost, mean_len: int
) -> int:
    """Requests of `mean_len` tokens that fit at once beside the null block, whole requests."""
    short, bound = engine.with_max_model_len(mean_len), exact_bound(host)
    each = sum(bound(g, short) for g in config.groups if g.pool == DEVICE)
    return math.floor(max(config.num_blocks - 1, 0) / each) if each else 0
