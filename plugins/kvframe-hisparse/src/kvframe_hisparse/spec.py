"""The specs of HiSparse's device pages: raw storage without layer views, whose inside only the runtime knows."""

from __future__ import annotations

import attrs
import numpy as np

from kvframe import EngineConfig, Lifetime, SpecBase, kv_field
from kvframe.checks import at_least, cdiv
from kvframe.lifetime import Tokens

TAIL = 2  # pages at a request's end that stay on the device, written back or not (contract 6.13)


@attrs.frozen(kw_only=True, repr=False)
class _RawPages(SpecBase):
    """Pages of a given size whose inside only the engine's own runtime knows.

    Args:
        page_size: bytes of one page, whatever the block size.
    """

    page_size: int = kv_field(validator=at_least(1))

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one page."""
        return self.page_size

    @property
    def packed_stride_bytes_multiple(self) -> int:
        """Pages are indexed over the whole pool, so each of them must lie at a multiple of its size (contract 5.6)."""
        return self.page_size

    @property
    def prefix_cacheable(self) -> bool:
        """Later requests find the host's pages, not these."""
        return False

    @property
    def has_layer_views(self) -> bool:
        """Storage stays raw pages."""
        return False


@attrs.frozen(kw_only=True, repr=False)
class HiSparseHotSpec(_RawPages):
    """A request's hot region: the pages that chosen tokens are swapped into (contract 2.15).

    Args:
        blocks_per_request: pages of a region, all claimed at once.
    """

    blocks_per_request: int = kv_field(validator=at_least(1))

    @property
    def uses_slot_mapping(self) -> bool:
        """The runtime decides where a token lies, not its position."""
        return False

    @property
    def block_table_token_alignment(self) -> None:
        """The row of the block table is not widened."""

    def max_memory_usage_bytes(self, engine: EngineConfig) -> int:
        """All pages of the region."""
        return self.blocks_per_request * self.page_size

    def max_num_blocks_per_req(self, engine: EngineConfig, max_len: int) -> int:
        """The pages of the region, whatever the length."""
        return self.blocks_per_request


@attrs.frozen(kw_only=True, repr=False)
class HiSparseResidentSpec(_RawPages):
    """Pages of tokens that are not written back to the host yet (contract 2.16)."""

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """Pages of the tokens in flight.

        Args:
            max_in_flight_tokens: tokens that are scheduled and not settled.
            max_model_len: tokens of the longest request.
        """
        return cdiv(min(max_in_flight_tokens, max_model_len), self.block_size)

    def max_memory_usage_bytes(self, engine: EngineConfig) -> int:
        """Bytes of the admission bound's pages."""
        blocks = self.max_admission_blocks_per_request(engine.max_in_flight_tokens, engine.max_model_len)
        return blocks * self.page_size


@attrs.frozen(kw_only=True)
class ResidentLifetime(Lifetime):
    """A page goes once its tokens are settled and it is no longer among the last two that hold any (contract 6.13).

    That is the latest moment at which its table entry is needed. The write-back holds the page itself until the host
    has it.
    """

    @property
    def steady_from(self) -> int:
        """From the second page on, each new page takes the place of one that goes."""
        return self.block

    def dead(self, n: Tokens, prompt: Tokens) -> tuple[Tokens, Tokens]:
        """The entries [0, max(0, n // block - 1))."""
        return np.zeros_like(n), np.maximum(0, n // self.block - (TAIL - 1))
