"""Packed grouping: mixed page sizes in block-outermost layouts (contract 5.4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from kvframe.checks import cdiv
from kvframe.plugins import PluginHost

Bucket = dict[str, Any]


def packed_groups(specs: Mapping[str, Any], host: PluginHost) -> list[dict[str, Any]]:
    """Layers to groups whose blocks are about equally wide, each group with the pages its kinds have.

    Returns:
        one map from layer to spec per group.
    """
    buckets = _buckets(specs, host)
    repeats = _common_repeats(buckets)
    counts = [_group_count(bucket, repeats) for bucket in buckets]
    states = [_is_state(bucket, repeats, host) for bucket in buckets]
    anchor = max(
        sum(
            cdiv(len(layers), len(bucket) if state else count) * page
            for page, layers in _by_page(bucket).items()
        )
        for bucket, count, state in zip(buckets, counts, states, strict=True)
    )
    groups: list[dict[str, Any]] = []
    for bucket, count, state in zip(buckets, counts, states, strict=True):
        if state:
            fit = max(anchor // next(iter(bucket.values())).page_size_bytes, 1)
            count = max(count, cdiv(len(bucket), fit))  # as many as the widest group needs
        groups += _rows(bucket, count)
    return groups


def nearest_divisor(values: Sequence[int], lower: int) -> int:
    """The number d >= lower that wastes least when each value is rounded up to a multiple of d; ties: the larger."""
    low = max(1, lower)
    candidates = range(low, max(low, *values) + 1)
    return min(candidates, key=lambda d: (sum(-value % d for value in values), -d))


def _buckets(specs: Mapping[str, Any], host: PluginHost) -> list[Bucket]:
    buckets: dict[Any, Bucket] = {}
    for layer, spec in specs.items():
        buckets.setdefault(host.family(spec).table_key(spec), {})[layer] = spec
    return list(buckets.values())


def _by_page(bucket: Bucket) -> dict[int, list[str]]:
    pages: dict[int, list[str]] = {}
    for layer, spec in bucket.items():
        pages.setdefault(spec.page_size_bytes, []).append(layer)
    return pages


def _is_balanced(bucket: Bucket) -> bool:
    return len({len(layers) for layers in _by_page(bucket).values()}) == 1


def _repeats(bucket: Bucket) -> int:
    return max(len(layers) for layers in _by_page(bucket).values())


def _common_repeats(buckets: Sequence[Bucket]) -> int | None:
    """How many times the model's pattern of mixed pages repeats, None where no bucket mixes pages evenly."""
    balanced = [bucket for bucket in buckets if _is_balanced(bucket)]
    floor = max((_repeats(bucket) for bucket in balanced if len(_by_page(bucket)) > 1), default=0)
    return nearest_divisor([_repeats(bucket) for bucket in balanced], floor) if floor else None


def _group_count(bucket: Bucket, repeats: int | None) -> int:
    return cdiv(_repeats(bucket), repeats) if repeats and _is_balanced(bucket) else 1


def _is_state(bucket: Bucket, repeats: int | None, host: PluginHost) -> bool:
    kind = host.family(next(iter(bucket.values()))).paging.bucket
    return kind == "state" or (kind == "window" and repeats is None)


def _rows(bucket: Bucket, count: int) -> list[dict[str, Any]]:
    if count == 1:
        return [dict(bucket)]
    # one row holds a layer of each page size; uneven buckets have shorter rows at the end, so no layer is lost
    rows = [
        [layer for layer in row if layer is not None]
        for row in zip_longest(*_by_page(bucket).values(), fillvalue=None)
    ]
    return [{layer: bucket[layer] for row in rows[index::count] for layer in row} for index in range(count)]
