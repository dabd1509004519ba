"""Two pages a block for kvframe: one of keys, one of values, and beside them a side tensor for the block.

A kernel of this kind picks blocks by the smallest and the largest key of each, and only then reads their pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from kvframe import (
    EngineConfig,
    LayerContext,
    LayerReader,
    Lifetime,
    Paging,
    SpecBase,
    SpecFamily,
    Traits,
    hookimpl,
    kv_field,
)
from kvframe.checks import at_least
from kvframe.dtypes import dtype_name, element_size

if TYPE_CHECKING:
    import torch


@attrs.frozen(kw_only=True, repr=False)
class TwoPageSpec(SpecBase):
    """A block of a layer: its keys, its values, and the bounds of its keys, one after the other.

    Args:
        heads: KV heads.
        head_size: elements of a vector.
        dtype: of keys and values; bounds are float32.
    """

    heads: int = kv_field(validator=at_least(1))
    head_size: int = kv_field(validator=at_least(1))
    dtype: str = kv_field(converter=dtype_name)

    def __attrs_post_init__(self) -> None:
        element_size(self.dtype)

    @property
    def num_heads(self) -> int:
        """The heads are inside the pages."""
        return 1

    @property
    def tokens_per_state(self) -> int:
        """Negative: what a block holds is one state to the core, with an inside of its own."""
        return -1

    @property
    def plane_bytes(self) -> int:
        """Bytes of the keys, or of the values, of a block."""
        return self.heads * self.block_size * self.head_size * element_size(self.dtype)

    @property
    def side_bytes(self) -> int:
        """Bytes of the bounds: two float32 vectors a head."""
        return 2 * self.heads * self.head_size * 4

    @property
    def state_content_size_bytes(self) -> int:
        """Bytes of both pages and the bounds."""
        return 2 * self.plane_bytes + self.side_bytes

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one layer's block."""
        return self.state_content_size_bytes

    @property
    def uses_slot_mapping(self) -> bool:
        """The kernel finds a token by block and place."""
        return False

    def max_memory_usage_bytes(self, engine: EngineConfig) -> int:
        """Bytes of the longest request's blocks."""
        held = Lifetime(block=self.block_size).peak(engine.max_in_flight_tokens, engine.max_model_len)
        return held * self.page_size_bytes


def _make_views(spec: TwoPageSpec, cells: torch.Tensor) -> dict[str, torch.Tensor]:
    """ "key" and "value" [B, H, tokens, width], and "bounds" [B, 2, H, width]: the smallest and the largest key."""
    from kvframe.views import typed

    page, shape = cells[:, 0, 0], (spec.heads, spec.block_size, spec.head_size)
    count = spec.heads * spec.block_size * spec.head_size
    key = typed(page, spec.dtype, 0, count)
    value = typed(page, spec.dtype, spec.plane_bytes, count)
    bounds = typed(page, "float32", 2 * spec.plane_bytes)
    return {
        "key": key.unflatten(1, shape),
        "value": value.unflatten(1, shape),
        "bounds": bounds.unflatten(1, (2, spec.heads, spec.head_size)),
    }


def _read(layer: LayerContext) -> dict[str, TwoPageSpec]:
    options = layer.options
    heads = layer.split_heads(layer.kv_heads_total())
    return {
        "attn": TwoPageSpec(
            options.block_size, heads=heads, head_size=layer.head_dim(), dtype=options.model_dtype
        )
    }


EXAMPLES = (
    TwoPageSpec(16, heads=8, head_size=128, dtype="bfloat16"),
    TwoPageSpec(64, heads=1, head_size=64, dtype="float32"),
)


@hookimpl
def kvframe_spec_families() -> list[SpecFamily[TwoPageSpec]]:
    """The family of two-page layers."""
    return [
        SpecFamily(
            name="two_page",
            spec_type=TwoPageSpec,
            lifetime=lambda spec: Lifetime(block=spec.block_size),
            make_views=_make_views,
            # the bounds are there once a block: a page of twice the tokens is not twice as large
            paging=Paging(scales=False),
            traits=Traits(event_kind="two_page"),
            examples=EXAMPLES,
        )
    ]


@hookimpl
def kvframe_layer_readers() -> list[LayerReader]:
    """The reader of layers that a model's config calls "two_page"."""
    return [LayerReader(kind="two_page", read=_read)]
