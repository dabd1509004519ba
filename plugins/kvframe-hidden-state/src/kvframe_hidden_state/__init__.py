"""A cache of hidden states for kvframe: rows that a draft model or a user reads back, one wide vector a token."""

from __future__ import annotations

import attrs

from kvframe import Lifetime, Paging, SpecFamily, Traits, hookimpl
from kvframe_mla import MLAAttentionSpec, make_views, merge_latent


@attrs.frozen(kw_only=True, repr=False)
class HiddenStateCacheSpec(MLAAttentionSpec):
    """A layer that stores hidden states in the rows of latent attention (contract 2.5).

    In a hybrid each layer is a group of its own: its rows are far wider than those of attention and must not set their
    pages. Where all layers keep every token it may share their block table, each layer with its own page.
    """


@hookimpl
def kvframe_spec_families() -> list[SpecFamily[HiddenStateCacheSpec]]:
    """The family of hidden-state caches. It derives from latent attention, and merges with nothing but itself."""
    return [
        SpecFamily(
            name="hidden_state",
            spec_type=HiddenStateCacheSpec,
            lifetime=lambda spec: Lifetime(block=spec.block_size),
            merge=merge_latent,
            promote=lambda spec, block_size: spec,
            make_views=make_views,
            paging=Paging(own_group=True),
            traits=Traits(event_kind="mla_attention"),
            examples=(
                HiddenStateCacheSpec(16, num_kv_heads=1, head_size=2048, dtype="bfloat16"),
                HiddenStateCacheSpec(16, num_kv_heads=3, head_size=1024, dtype="bfloat16"),
            ),
        )
    ]
