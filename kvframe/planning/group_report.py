"""What each group of a plan takes: the rows of the table that `kvframe plan` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvframe.config import KVCacheConfig, KVCacheGroupSpec
from kvframe.engine import EngineConfig
from kvframe.planning.sequences import constant_blocks, most_at_once
from kvframe.planning.sizing import exact_bound
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
        max_sequences: requests of any length that the pool could hold, were it this group's alone; None where blocks
            grow with length.
        pool: the pool of its blocks.
        role: the word that a plugin gave it.
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
    max_sequences: int | None
    pool: str
    role: str

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


def group_reports(
    config: KVCacheConfig, *, engine: EngineConfig, host: PluginHost, kinds: Mapping[str, str]
) -> tuple[GroupReport, ...]:
    """A report of every group of a rank's plan, in order.

    Args:
        config: the rank's plan.
        engine: its limits.
        host: who knows the families.
        kinds: layer name to the kind it is reported under.
    """
    slots = {name: _slots([group for group in config.groups if group.pool == name]) for name in config.pools}
    return tuple(
        _group_report(group, slots[group.pool], config, engine, host, kinds) for group in config.groups
    )


def _max_sequences(
    group: KVCacheGroupSpec, config: KVCacheConfig, engine: EngineConfig, host: PluginHost
) -> int | None:
    blocks = constant_blocks(group, engine, host)
    usable = config.pools[group.pool].usable_slabs
    return most_at_once([(blocks, group.blocks_per_slab)], usable) if blocks else None


def _slots(groups: Sequence[KVCacheGroupSpec]) -> int | None:
    """Layer slots that each group has, those of the widest; None where pages differ or slabs are cut."""
    pages = {group.page_of(layer) for group in groups for layer in group.layer_names}
    equal = len(pages) == 1 and all(group.blocks_per_slab == 1 for group in groups)
    return max(len(group.layer_specs) for group in groups) if equal else None


def _group_report(
    group: KVCacheGroupSpec,
    slots: int | None,
    config: KVCacheConfig,
    engine: EngineConfig,
    host: PluginHost,
    kinds: Mapping[str, str],
) -> GroupReport:
    bound = exact_bound(host)
    counted: dict[str, int] = {}
    for layer in group.layer_names:
        counted[kinds[layer]] = counted.get(kinds[layer], 0) + 1
    return GroupReport(
        kinds=counted,
        block_tokens=group.block_size,
        natural_page_bytes=sum(spec.unpadded_page_size_bytes for spec in group.layer_specs.values()),
        page_bytes=group.page_size_bytes,
        stride_bytes=config.block_bytes_of(group),
        blocks_per_slab=group.blocks_per_slab,
        empty_slots=0 if slots is None else slots - len(group.layer_specs),
        blocks_per_request=bound(group, engine),
        steady_blocks_per_request=bound(group, attrs.evolve(engine, max_in_flight_tokens=1)),
        max_sequences=_max_sequences(group, config, engine, host),
        pool=group.pool,
        role=group.role,
    )
