"""A manager's statistics for Prometheus (extra `kvframe[metrics]`). Nothing is measured between two scrapes.

prometheus_client.REGISTRY.register(StatisticsCollector(manager))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvframe.blocks import KVCacheManager
from kvframe.blocks.statistics import GroupStatistics, Statistics
from kvframe.errors import MissingDependencyError

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        module="kvframe.metrics", needs="prometheus-client", extra="metrics"
    ) from error

Row = tuple[str, str, str]  # name, help, field of the statistics

_GAUGES: tuple[Row, ...] = (
    ("pool_units", "Slabs of the pool; blocks, where no group splits slabs.", "pool_units"),
    ("pool_free_units", "Slabs (blocks) that nobody holds a block of, cached ones included.", "free_units"),
    ("pool_usage_ratio", "Share of the pool that is not free.", "usage"),
    ("requests_running", "Requests with a slot.", "running"),
    ("running_tokens", "Tokens stored or scheduled for running requests.", "running_tokens"),
)
_COUNTERS: tuple[Row, ...] = (
    ("requests_admitted", "Requests that got a slot; one that resumes counts again.", "admitted"),
    ("requests_preempted", "Requests that gave everything back and wait.", "preempted"),
    ("requests_forked", "Requests made by a fork.", "forked"),
    ("requests_finished", "Requests that were released.", "finished"),
    ("admissions_refused", "Admissions that did not fit.", "refused"),
    ("steps_refused", "Running requests that did not fit, one a step and request.", "stuck"),
    ("asked_tokens", "Tokens of admitted requests when they asked.", "asked_tokens"),
    ("hit_tokens", "Of these, tokens found in the prefix cache.", "hit_tokens"),
)
_GROUP_GAUGES: tuple[Row, ...] = (
    ("group_block_tokens", "Tokens of a block of the group.", "block_tokens"),
    ("group_held_blocks", "Blocks that requests hold, shared ones once.", "held_blocks"),
    ("group_cached_blocks", "Blocks that nobody holds and later requests may find.", "cached_blocks"),
    ("group_empty_tokens", "Places in held blocks that no token has taken yet.", "empty_tokens"),
)
_GROUP_COUNTERS: tuple[Row, ...] = (
    ("group_hit_tokens", "Tokens that the group alone would have found.", "hit_tokens"),
    ("group_limited_hits", "Hits that the group ended before others would have.", "limited_hits"),
    ("group_evicted_blocks", "Cached blocks that were overwritten.", "evicted_blocks"),
)


class StatisticsCollector(Collector):  # type: ignore[misc]
    """Reads a manager's statistics when Prometheus asks.

    Args:
        manager: whose.
        labels: put on every metric, for instance {"rank": "0"}; managers of one process need different ones.
        prefix: of every metric's name.
    """

    def __init__(
        self, manager: KVCacheManager, labels: Mapping[str, str] | None = None, prefix: str = "kvframe"
    ) -> None:
        self._manager, self._prefix = manager, prefix
        self._labels = dict(labels or {})

    def collect(self) -> Iterator[Any]:
        """All metrics, as they are now."""
        found = self._manager.statistics()
        for kind, rows in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for row in rows:
                metric = self._family(kind, row)
                self._add(metric, getattr(found, row[2]))
                yield metric
        yield from self._causes(found)
        for kind, rows in ((GaugeMetricFamily, _GROUP_GAUGES), (CounterMetricFamily, _GROUP_COUNTERS)):
            for row in rows:
                yield self._by_group(kind, row, found.groups)

    def _family(self, kind: Any, row: Row, label: Sequence[str] = ()) -> Any:
        return kind(f"{self._prefix}_{row[0]}", row[1], labels=[*self._labels, *label])

    def _add(self, metric: Any, value: float | None, *label: str) -> None:
        if value is not None:
            metric.add_metric([*self._labels.values(), *label], value)

    def _causes(self, found: Statistics) -> Iterator[Any]:
        shares = self._family(
            GaugeMetricFamily, ("pool_share", "Share of the pool by what is there.", ""), ["cause"]
        )
        for cause, share in found.fragmentation.items():
            self._add(shares, share, cause)
        yield shares
        deferred = self._family(
            CounterMetricFamily, ("admissions_deferred", "Admissions that had to wait.", ""), ["reason"]
        )
        for reason, count in found.deferred.items():
            self._add(deferred, count, reason)
        yield deferred

    def _by_group(self, kind: Any, row: Row, groups: Sequence[GroupStatistics]) -> Any:
        metric = self._family(kind, row, ["group"])
        for group in groups:
            self._add(metric, getattr(group, row[2]), group.name)
        return metric
