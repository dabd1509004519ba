"""The specs of latent layers. A page's padding follows from the alignment, so it is right at every block size."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

import attrs

from kvframe import ANY, FIRST_SET, FullAttentionSpec, Refusal, kv_field
from kvframe.checks import one_of, optional_at_least, round_up
from kvframe.merge import merge_fields, refuse
from kvframe_sliding_window import SlidingWindowSpec


class SparseCacheRole(str, Enum):
    """What a cache of a sparse layer holds: latent vectors, or the keys that the indexer scores."""

    SPARSE = "sparse"
    INDEXER = "indexer"


@attrs.frozen(kw_only=True, repr=False)
class MLAAttentionSpec(FullAttentionSpec):
    """A layer that stores one latent vector a token, or one for `tokens_per_state` tokens (contract 2.4).

    Args:
        head_size_v: 0, since K and V are one vector.
        alignment: bytes; pages are rounded up to a multiple of it at every block size.
        cache_dtype_str: the cache dtype as the operator gave it; opaque formats are keyed on it.
        model_version: the generation of the row's format, such as "deepseek_v4".
        cache_role: latent vectors, or the indexer's keys.
        is_index_group_leader: its indexer picks the tokens that the layers after it read too.
        storage_block_size: tokens by which kernels view the storage, where that is not their block.
        topk_buffer_width: padded width of the indexer's result.
        non_causal_multi_token_decode: the group can decode several tokens that see each other.
    """

    _head_size_v: int | None = kv_field(default=0, alias="head_size_v", validator=optional_at_least(0))
    alignment: int | None = kv_field(merge=FIRST_SET, default=None, validator=optional_at_least(1))
    cache_dtype_str: str | None = kv_field(default=None)
    model_version: str | None = kv_field(default=None)
    cache_role: SparseCacheRole = kv_field(default=SparseCacheRole.SPARSE, validator=one_of(*SparseCacheRole))
    is_index_group_leader: bool = kv_field(default=False)
    storage_block_size: int | None = kv_field(default=None, validator=optional_at_least(1))
    topk_buffer_width: int | None = kv_field(default=None, validator=optional_at_least(1))
    non_causal_multi_token_decode: bool = kv_field(merge=ANY, default=False)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one layer's page, padding included."""
        return _aligned_page(self)


@attrs.frozen(kw_only=True, repr=False)
class SlidingWindowMLASpec(SlidingWindowSpec):
    """A sliding-window layer that stores latent vectors (contract 2.9).

    Args:
        head_size_v: 0, since K and V are one vector.
        alignment: bytes; pages are rounded up to a multiple of it at every block size.
        cache_dtype_str: the cache dtype as the operator gave it.
        model_version: the generation of the row's format: None or "deepseek_v4".
        bounded_replay: its blocks are never looked up: a hit computes the window's tokens again.
    """

    _head_size_v: int | None = kv_field(default=0, alias="head_size_v", validator=optional_at_least(0))
    alignment: int | None = kv_field(merge=FIRST_SET, default=None, validator=optional_at_least(1))
    cache_dtype_str: str | None = kv_field(default=None)
    model_version: str | None = kv_field(default=None, validator=one_of(None, "deepseek_v4"))
    bounded_replay: bool = kv_field(default=False)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one layer's page, padding included."""
        return _aligned_page(self)

    @property
    def prefix_cacheable(self) -> bool:
        """Whether later requests may find its blocks."""
        return not self.bounded_replay

    @property
    def prefix_replay_tokens(self) -> int:
        """Tokens that a prefix hit computes again to rebuild the window."""
        return self.sliding_window if self.bounded_replay else 0


L = TypeVar("L", bound="MLAAttentionSpec | SlidingWindowMLASpec")


def _aligned_page(spec: MLAAttentionSpec | SlidingWindowMLASpec) -> int:
    # Derived, not stored: padding that is stored is wrong as soon as the block size changes (contract 8, Q7).
    wanted = max(spec.unpadded_page_size_bytes, spec.page_size_padded or 0)
    return round_up(wanted, spec.alignment or 1)


def merge_latent(specs: Mapping[str, L]) -> L | Refusal:
    """Layers' specs as one, where no layer's page changes by another layer's alignment."""
    merged = merge_fields(specs)
    pages = {layer: spec.page_size_bytes for layer, spec in specs.items()}
    if isinstance(merged, Refusal) or {merged.page_size_bytes}.issuperset(pages.values()):
        return merged
    alignments = {layer: spec.alignment for layer, spec in specs.items()}
    return refuse("alignment", "the alignment of one layer would change another layer's page", alignments)
