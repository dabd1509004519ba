"""HiSparse for kvframe: sparse attention whose latent pages live on the host, with device pages for what is in use.

Two kinds of device pages stand beside the host's: hot regions, a fixed number of pages that a request swaps tokens in
and out of, and resident pages, which hold new tokens until they are written back. Both are raw storage without layer
views.
"""

from __future__ import annotations

from typing import Any

import attrs

from kvframe import EngineConfig, Lifetime, Paging, SpecBase, SpecFamily, Traits, hookimpl, kv_field
from kvframe.checks import at_least, cdiv

SOURCE_ROLE = "hisparse_source"  # the group of host pages
INDEXER_ROLE = "hisparse_indexer"  # the group of the caches that choose tokens


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


@hookimpl
def kvframe_spec_families() -> list[SpecFamily[Any]]:
    """Hot and resident pages. A resident page is given back when it is written back, which no count of tokens tells."""
    shared: dict[str, Any] = {
        "paging": Paging(scales=False, pads=False),
        "traits": Traits(transferable=False),  # both can be filled again from the host's pages
    }
    return [
        SpecFamily(
            name="hisparse_hot",
            spec_type=HiSparseHotSpec,
            lifetime=lambda spec: Lifetime(block=spec.block_size, fixed=spec.blocks_per_request, hits="free"),
            group_key=lambda spec: "hisparse_hot",
            **shared,
        ),
        SpecFamily(
            name="hisparse_resident",
            spec_type=HiSparseResidentSpec,
            lifetime=lambda spec: Lifetime(block=spec.block_size, hits="free"),
            group_key=lambda spec: "hisparse_resident",
            **shared,
        ),
    ]
