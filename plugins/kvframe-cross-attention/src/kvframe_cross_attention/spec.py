"""The specs of encoder-decoder and encoder-only attention."""

from __future__ import annotations

import attrs

from kvframe import AttentionSpec, EngineConfig
from kvframe.checks import cdiv


@attrs.frozen(kw_only=True, repr=False)
class CrossAttentionSpec(AttentionSpec):
    """A decoder layer that attends to the encoder's output: filled once a request (contract 2.12)."""

    def max_memory_usage_bytes(self, engine: EngineConfig) -> int:
        """Bytes of ceil(E / block) pages, E the most encoder tokens of a request."""
        return cdiv(engine.max_encoder_tokens, self.block_size) * self.page_size_bytes


@attrs.frozen(kw_only=True, repr=False)
class EncoderOnlyAttentionSpec(AttentionSpec):
    """A layer that attends in both directions within one step, and so keeps nothing (contract 2.13)."""

    def max_memory_usage_bytes(self, engine: EngineConfig) -> int:
        """Nothing is kept: 0 bytes."""
        return 0
