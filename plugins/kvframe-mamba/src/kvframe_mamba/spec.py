"""MambaSpec: what one layer of recurrent state stores."""

from __future__ import annotations

import math
from typing import Any

import attrs

from kvframe import EngineConfig, SpecBase, kv_field
from kvframe.checks import at_least, cdiv, one_of, optional_at_least
from kvframe.dtypes import dtype_name, element_size
from kvframe.errors import SpecError
from kvframe.spec import check_padding


def _check_shapes(spec: Any, attribute: attrs.Attribute[Any], shapes: tuple[tuple[int, ...], ...]) -> None:
    sizes = [size for shape in shapes for size in shape]
    if not shapes or not all(shapes) or any(type(size) is not int or size < 1 for size in sizes):
        rule = "must be shapes of whole numbers of at least 1, one a state and at least one"
        raise SpecError(spec=type(spec).__name__, field=attribute.name, value=shapes, rule=rule)


@attrs.frozen(kw_only=True, repr=False)
class MambaSpec(SpecBase):
    """A layer that keeps recurrent state instead of tokens (contract 2.17). A page is one block's states, side by side.

    Args:
        block_size: tokens between two kept states; where states are not cached, the longest request.
        shapes: shape of each state, in elements.
        dtypes: element dtype of each state, names or torch dtypes.
        page_size_padded: bytes of the page if it must be larger than the states.
        mamba_type: which kernels run the layer.
        mamba_cache_mode: "none", only the running state is kept; "align", also one at every block border.
        num_speculative_blocks: further states that draft tokens are computed in.
        num_prefill_checkpoint_blocks: a block for a state saved in the middle of a prefill.
        prefill_checkpoint_alignment: tokens; the kernel can save a state at multiples of it. None: it cannot.
        tp_replicated: every tensor-parallel rank holds the whole state.
    """

    shapes: tuple[tuple[int, ...], ...] = kv_field(
        converter=lambda shapes: tuple(tuple(shape) for shape in shapes), validator=_check_shapes
    )
    dtypes: tuple[str, ...] = kv_field(converter=lambda dtypes: tuple(map(dtype_name, dtypes)))
    page_size_padded: int | None = kv_field(default=None, validator=optional_at_least(1))
    mamba_type: str = kv_field(default="mamba2", converter=str)
    mamba_cache_mode: str = kv_field(default="none", validator=one_of("none", "align"))
    num_speculative_blocks: int = kv_field(default=0, validator=at_least(0))
    num_prefill_checkpoint_blocks: int = kv_field(default=0, validator=at_least(0))
    prefill_checkpoint_alignment: int | None = kv_field(default=None, validator=optional_at_least(1))
    tp_replicated: bool = kv_field(default=False)

    def __attrs_post_init__(self) -> None:
        for dtype in self.dtypes:
            element_size(dtype)
        if len(self.dtypes) != len(self.shapes):
            rule = f"must be one a state, and shapes has {len(self.shapes)}"
            raise SpecError(spec=type(self).__name__, field="dtypes", value=self.dtypes, rule=rule)
        check_padding(self, self.page_size_padded)

    @property
    def num_heads(self) -> int:
        """Head slots of a page: states have no heads for the cache to tell apart."""
        return 1

    @property
    def tokens_per_state(self) -> int:
        """Negative: one state a block, however many tokens it covers."""
        return -1

    @property
    def state_content_size_bytes(self) -> int:
        """Bytes of all states of one block, without padding."""
        return sum(
            math.prod(shape) * element_size(dtype)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of one layer's page without padding."""
        return self.state_content_size_bytes

    @property
    def real_page_size_bytes(self) -> int:
        """The field's other name for `unpadded_page_size_bytes`."""
        return self.unpadded_page_size_bytes

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one layer's page, padding included; the block size does not change it."""
        return self.page_size_padded or self.unpadded_page_size_bytes

    @property
    def block_table_token_alignment(self) -> None:
        """Rows of the block table are not widened: kernels look up single states."""

    def max_memory_usage_bytes(self, engine: EngineConfig) -> int:
        """The running state and its draft states; cached: also the one before it and a saved one."""
        states = 1 + self.num_speculative_blocks
        if engine.state_cache_mode == "align":
            states += 1 + self.num_prefill_checkpoint_blocks
        return states * self.page_size_bytes

    def max_num_blocks_per_req(self, engine: EngineConfig, max_len: int) -> int:
        """Entries of a block-table row: by position where states are cached, else the running state's."""
        states = cdiv(max_len, self.block_size) if engine.state_cache_mode == "align" else 1
        return states + self.num_speculative_blocks
