"""SlidingWindowSpec and the lifetime of a window."""

from __future__ import annotations

import attrs
import numpy as np

from kvframe import AttentionSpec, EngineConfig, kv_field
from kvframe.checks import at_least, cdiv
from kvframe.errors import SpecError
from kvframe.lifetime import Lifetime, Tokens


@attrs.frozen(kw_only=True, repr=False)
class SlidingWindowSpec(AttentionSpec):
    """A layer whose tokens attend to the last `sliding_window` tokens only (contract 2.7).

    Args:
        sliding_window: tokens, the current one included.
        extra_retained_tokens: tokens below the window that stay in the cache, and that attention does not read: several
            draft modules prefill them again.
    """

    sliding_window: int = kv_field(validator=at_least(0))
    extra_retained_tokens: int = kv_field(default=0, validator=at_least(0))

    @property
    def distance(self) -> int:
        """The window as kernels with an inclusive distance take it: tokens before the current one."""
        return self.sliding_window - 1

    @property
    def num_retained_tokens(self) -> int:
        """Tokens below the next position that must stay."""
        return self.distance + self.extra_retained_tokens

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        """The most blocks that one request can hold (contract 2.7).

        Args:
            max_in_flight_tokens: tokens that are scheduled and not settled.
            max_model_len: tokens of the longest request.
        """
        tokens = min(self.num_retained_tokens + max_in_flight_tokens, max_model_len)
        return cdiv(tokens, self.block_size) + 1  # the window may start inside a block

    def max_memory_usage_bytes(self, engine: EngineConfig) -> int:
        """Bytes of the admission bound's pages.

        Raises:
            SpecError: decode context parallelism would spread the window.
        """
        if self.dcp_sharded and engine.dcp > 1:
            raise SpecError(
                spec=type(self).__name__,
                field="dcp_sharded",
                value=True,
                rule=f"a window cannot be spread over {engine.dcp} decode context parallel ranks: "
                "run with dcp = 1, or make the layer dcp_sharded = False",
            )
        blocks = self.max_admission_blocks_per_request(engine.max_in_flight_tokens, engine.max_model_len)
        return blocks * self.page_size_bytes


@attrs.frozen(kw_only=True)
class WindowLifetime(Lifetime):
    """Entries die from the front, once all their tokens are below the window.

    Args:
        window: tokens, the current one included.
    """

    window: int = attrs.field(validator=at_least(1))

    @property
    def steady_from(self) -> int:
        """Once the window is full, each new entry takes the place of one that dies."""
        return self.window + self.slack + self.block

    def dead(self, n: Tokens, prompt: Tokens) -> tuple[Tokens, Tokens]:
        """The entries [0, max(0, n - window + 1 - slack) // block)."""
        return np.zeros_like(n), np.maximum(0, n - self.window + 1 - self.slack) // self.block


def window_lifetime(spec: SlidingWindowSpec, hits: str = "keyed") -> WindowLifetime:
    """The lifetime of a window's layer. A window of no token still holds the one that is being written."""
    return WindowLifetime(
        block=spec.block_size,
        window=max(1, spec.sliding_window),
        slack=spec.extra_retained_tokens,
        hits=hits,
    )
