"""Recurrent state for kvframe: one fixed-size state a request, or one at every block border.

A state stands for all tokens before it, so a request reads only its last one; with caching, later requests can resume
from the states that it left at block borders.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import attrs
import numpy as np

from kvframe import Lifetime, Paging, SpecFamily, Traits, hookimpl
from kvframe.config import KVCacheConfig
from kvframe.lifetime import Tokens
from kvframe_mamba.checkpoint import get_mamba_prefill_checkpoint_position, is_mamba_prefill_checkpoint_valid
from kvframe_mamba.readers import kvframe_layer_readers, kvframe_model_readers
from kvframe_mamba.spec import MambaSpec
from kvframe_mamba.views import make_views

__all__ = [
    "MambaSpec",
    "StateLifetime",
    "get_mamba_prefill_checkpoint_position",
    "has_mamba_layers",
    "is_mamba_prefill_checkpoint_valid",
    "kvframe_layer_readers",
    "kvframe_model_readers",
    "kvframe_spec_families",
]

NAME = "mamba"


@attrs.frozen(kw_only=True)
class StateLifetime(Lifetime):
    """States at block borders: a step reads the state that it starts from, and none before it."""

    state: bool = True

    def dead(self, n: Tokens, prompt: Tokens) -> tuple[Tokens, Tokens]:
        """Entries before the one that holds the state after token n - 1."""
        return np.zeros_like(n), np.maximum(0, n - 1) // self.block


def _lifetime(spec: MambaSpec) -> Lifetime:
    spare = spec.num_speculative_blocks
    if spec.mamba_cache_mode == "none":
        return Lifetime(block=spec.block_size, fixed=1 + spare, hits="never")
    saves = spec.num_prefill_checkpoint_blocks > 0
    return StateLifetime(
        block=spec.block_size, spare=spare, export=spec.prefill_checkpoint_alignment if saves else None
    )


def _group_key(spec: MambaSpec) -> Hashable:
    saved = (spec.num_prefill_checkpoint_blocks, spec.prefill_checkpoint_alignment)
    return (spec.page_size_bytes, spec.tp_replicated, saved)


_SHAPES: Mapping[str, Any] = {"shapes": ((3, 320), (2, 64, 64)), "dtypes": ("bfloat16", "float32")}
_EXAMPLES = (
    MambaSpec(131_072, **_SHAPES),  # one state for the request's whole life
    MambaSpec(512, mamba_cache_mode="align", **_SHAPES),
    MambaSpec(512, mamba_cache_mode="align", num_speculative_blocks=2, **_SHAPES),
    MambaSpec(
        512,
        mamba_cache_mode="align",
        num_prefill_checkpoint_blocks=1,
        prefill_checkpoint_alignment=64,
        **_SHAPES,
    ),
)


def has_mamba_layers(config: KVCacheConfig) -> bool:
    """Whether any layer of a plan keeps recurrent state."""
    return config.has_family(NAME)


@hookimpl
def kvframe_spec_families() -> list[SpecFamily[MambaSpec]]:
    """The family of recurrent states."""
    return [
        SpecFamily(
            name=NAME,
            spec_type=MambaSpec,
            lifetime=_lifetime,
            group_key=_group_key,
            make_views=make_views,
            paging=Paging(scales=False, bucket="state"),
            traits=Traits(event_kind="mamba", needs_zeroing=True),
            examples=_EXAMPLES,
        )
    ]
