"""ChunkedLocalAttentionSpec and the lifetime of chunks."""

from __future__ import annotations

import math

import attrs
import numpy as np

from kvframe import AttentionSpec, EngineConfig, kv_field
from kvframe.checks import at_least, cdiv
from kvframe.lifetime import Lifetime, Tokens


@attrs.frozen(kw_only=True, repr=False)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """A layer whose tokens attend to earlier tokens of their own chunk only (contract 2.11).

    Args:
        attention_chunk_size: tokens of a chunk; chunks start at its multiples.
    """

    attention_chunk_size: int = kv_field(validator=at_least(1))

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """The most blocks that one request can hold (contract 2.11).

        Args:
            max_in_flight_tokens: tokens that are scheduled and not settled.
            max_model_len: tokens of the longest request.
        """
        tokens = min(self.attention_chunk_size + max_in_flight_tokens, max_model_len)
        # A chunk that starts inside a block holds that block beside its own (lifetime.md, "Peak").
        straddled = 1 if self.attention_chunk_size % self.block_size else 0
        return cdiv(tokens, self.block_size) + straddled

    def max_memory_usage_bytes(self, engine: EngineConfig) -> int:
        """Bytes of the admission bound's pages."""
        blocks = self.max_admission_blocks_per_request(engine.max_in_flight_tokens, engine.max_model_len)
        return blocks * self.page_size_bytes


@attrs.frozen(kw_only=True)
class ChunkLifetime(Lifetime):
    """Entries die together, those of a whole chunk when the next chunk starts.

    Args:
        chunk: tokens of a chunk.
    """

    chunk: int = attrs.field(validator=at_least(1))

    @property
    def steady_from(self) -> int:
        """Holdings repeat with the first token count that is both whole chunks and whole blocks."""
        return math.lcm(self.chunk, self.block) + self.block

    def dead(self, n: Tokens, prompt: Tokens) -> tuple[Tokens, Tokens]:
        """The entries [0, (n // chunk * chunk) // block): those that end before the chunk of position n."""
        return np.zeros_like(n), n // self.chunk * self.chunk // self.block
