"""Circular buffers for kvframe: one block a request for its whole life, written round and round.

Row `position % block_size` of the block holds what a position left, until the position one block later takes its place.
Both specs here are that one rule under the two names that engines use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

import kvframe_sliding_window
from kvframe import AttentionSpec, EngineConfig, Lifetime, Paging, SpecFamily, Traits, hookimpl
from kvframe_circular_buffer.views import make_views
from kvframe_sliding_window import SlidingWindowSpec


class _Ring:
    """What follows from having one block for life, whatever a row of it holds."""

    __slots__ = ()

    @property
    def prefix_cacheable(self) -> bool:
        """Later requests cannot use a block that is overwritten all the time."""
        return False

    @property
    def uses_slot_mapping(self) -> bool:
        """Kernels know a token's row from its position."""
        return False

    def max_num_blocks_per_req(self, engine: EngineConfig, max_len: int) -> int:
        """A block-table row has one entry."""
        return 1


@attrs.frozen(kw_only=True, repr=False)
class CircularBufferSpec(_Ring, AttentionSpec):
    """A ring of the last `block_size` tokens, such as the raw keys that a compressor still needs (contract 2.10).

    `block_size` must be at least the compression ratio plus the tokens of speculative look-ahead, or a row is
    overwritten before it is read; neither number is part of the spec.
    """

    @property
    def block_table_token_alignment(self) -> None:
        """The one-entry row of the block table is not widened."""

    def max_memory_usage_bytes(self, engine: EngineConfig) -> int:
        """One page."""
        return self.page_size_bytes


@attrs.frozen(kw_only=True, repr=False)
class KpoolTailSpec(_Ring, SlidingWindowSpec):
    """The raw keys that an indexer has not pooled yet, in a ring (contract 2.8).

    `sliding_window` is what block events report; the ring itself holds `block_size` tokens.
    """

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """One block, however long the request is."""
        return 1


_ROW: Mapping[str, Any] = {"num_kv_heads": 1, "head_size": 512, "head_size_v": 0, "dtype": "bfloat16"}


def _lifetime(spec: AttentionSpec) -> Lifetime:
    return Lifetime(block=spec.block_size, fixed=1, hits="free")


def _kpool_tail_family() -> SpecFamily[Any]:
    """As sliding windows in events, promotion and context parallelism; as rings in everything else."""
    families = kvframe_sliding_window.kvframe_spec_families()
    window = next(family for family in families if family.spec_type is SlidingWindowSpec)
    return attrs.evolve(
        window,
        name="kpool_tail",
        spec_type=KpoolTailSpec,
        lifetime=_lifetime,
        group_key=lambda spec: "kpool_tail",
        make_views=make_views,
        retain=None,
        paging=Paging(bucket="state"),
        examples=(
            KpoolTailSpec(8, sliding_window=8, **_ROW),
            KpoolTailSpec(64, sliding_window=4, **_ROW),
        ),
    )


@hookimpl
def kvframe_spec_families() -> list[SpecFamily[Any]]:
    """The ring under its two names. The group key keeps them apart: each has kernels of its own."""
    ring = SpecFamily(
        name="circular_buffer",
        spec_type=CircularBufferSpec,
        lifetime=_lifetime,
        group_key=lambda spec: "circular_buffer",
        make_views=make_views,
        paging=Paging(bucket="state"),
        traits=Traits(),
        examples=(CircularBufferSpec(8, **_ROW), CircularBufferSpec(128, **_ROW)),
    )
    return [ring, _kpool_tail_family()]
