"""What each pool of a plan gives: how many requests it holds at once, and which pool limits their number."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import attrs

from kvframe.config import KVCacheConfig, KVCacheGroupSpec
from kvframe.engine import EngineConfig
from kvframe.planning.sequences import most_at_once
from kvframe.planning.sizing import Bound, exact_bound
from kvframe.plugins import PluginHost


@attrs.frozen(kw_only=True)
class PoolReport:
    """One pool's numbers on the rank that decides. Sizes are bytes.

    Args:
        name: the pool.
        layout: of its memory.
        budget_bytes: what was given for it.
        slab_bytes: one slab, which with one block a slab is a block.
        num_slabs: slabs that fit.
        usable_slabs: those that requests can hold, without the null block's and what copies need.
        shared_by_ranks: tensor-parallel ranks that map this one memory.
        slabs_per_request: what one request of max_model_len takes at most.
        steady_slabs_per_request: what it takes in steady decode, with no chunk of a prompt in flight.
    """

    name: str
    layout: str
    budget_bytes: int
    slab_bytes: int
    num_slabs: int
    usable_slabs: int
    shared_by_ranks: int
    slabs_per_request: Fraction
    steady_slabs_per_request: Fraction

    @property
    def requests(self) -> Fraction | None:
        """Requests of max_model_len at once, not rounded; None where they take nothing."""
        return self.num_slabs / self.slabs_per_request if self.slabs_per_request else None

    @property
    def steady_requests(self) -> Fraction | None:
        """Requests at once where one takes its most and the others decode (contract 5.10); None as `requests`."""
        most, steady = self.slabs_per_request, self.steady_slabs_per_request
        if self.num_slabs < most or not steady:
            return self.requests
        return 1 + (self.num_slabs - most) / steady

    def as_dict(self) -> dict[str, Any]:
        """All numbers as plain values."""
        return {
            **attrs.asdict(self),
            "slabs_per_request": plain(self.slabs_per_request),
            "steady_slabs_per_request": plain(self.steady_slabs_per_request),
            "max_concurrency": None if self.requests is None else float(self.requests),
            "steady_concurrency": None if self.steady_requests is None else float(self.steady_requests),
        }


def plain(number: Fraction) -> int | float:
    """A whole number as int, any other as float."""
    return number.numerator if number.denominator == 1 else float(number)


def pool_reports(config: KVCacheConfig, *, engine: EngineConfig, host: PluginHost) -> tuple[PoolReport, ...]:
    """A report of every pool of a rank's plan.

    Args:
        config: the rank's plan.
        engine: its limits, max_model_len among them.
        host: who knows the families.
    """
    bound, steady = exact_bound(host), attrs.evolve(engine, max_in_flight_tokens=1)
    return tuple(
        PoolReport(
            name=name,
            layout=pool.layout,
            budget_bytes=pool.budget_bytes,
            slab_bytes=pool.slab_bytes,
            num_slabs=pool.num_slabs,
            usable_slabs=pool.usable_slabs,
            shared_by_ranks=pool.shared_by_ranks,
            slabs_per_request=_slabs_per_request(config.groups, name, engine, bound),
            steady_slabs_per_request=_slabs_per_request(config.groups, name, steady, bound),
        )
        for name, pool in config.pools.items()
    )


def _slabs_per_request(
    groups: Sequence[KVCacheGroupSpec], pool: str, engine: EngineConfig, bound: Bound
) -> Fraction:
    """Slabs of a pool that one request of max_model_len takes, a partly used slab counted by the blocks it uses."""
    return sum(
        (Fraction(bound(group, engine), group.blocks_per_slab) for group in groups if group.pool == pool),
        Fraction(0),
    )


def requests_at(
    config: KVCacheConfig, *, engine: EngineConfig, host: PluginHost, length: int
) -> dict[str, int]:
    """Whole requests of `length` tokens that fit at once beside what a pool reserves, by pool that they use."""
    bound, limits = exact_bound(host), engine.with_max_model_len(length)
    found = {}
    for name, pool in config.pools.items():
        groups = [group for group in config.groups if group.pool == name]
        blocks = [(bound(group, limits), group.blocks_per_slab) for group in groups]
        if any(held for held, _ in blocks):
            found[name] = most_at_once(blocks, pool.usable_slabs)
    return found
