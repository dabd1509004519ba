"""R-SWA for kvframe: the prompt stays whole, and of the generated tokens the last `rswa_window` stay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from kvframe import FullAttentionSpec, SpecFamily, Traits, hookimpl, kv_field
from kvframe.checks import at_least
from kvframe.lifetime import Lifetime, Tokens


@attrs.frozen(kw_only=True, repr=False)
class RSWASpec(FullAttentionSpec):
    """A layer that reads the whole prompt and a window of what was generated (contract 2.6).

    It is sized as full attention: a prompt of the maximum length gives nothing back.

    Args:
        rswa_window: generated tokens that stay, below the one being computed.
    """

    rswa_window: int = kv_field(validator=at_least(1))


@attrs.frozen(kw_only=True)
class RSWALifetime(Lifetime):
    """Entries of generated tokens die once they are below the window; entries with a prompt token never do.

    Args:
        window: generated tokens that stay, below the one being computed.
    """

    window: int = attrs.field(validator=at_least(1))

    def dead(self, n: Tokens, prompt: Tokens) -> tuple[Tokens, Tokens]:
        """The entries [ceil(prompt / block), max(prompt, n - window) // block); lo may exceed hi."""
        first = np.zeros_like(n) - (-prompt // self.block)
        return first, np.maximum(prompt, n - self.window) // self.block


_HEADS: Mapping[str, Any] = {"num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
_EXAMPLES = (
    RSWASpec(16, rswa_window=256, **_HEADS),
    RSWASpec(16, rswa_window=50, **_HEADS),  # no multiple of the block
)


@hookimpl
def kvframe_spec_families() -> list[SpecFamily[RSWASpec]]:
    """The family of R-SWA layers."""
    return [
        SpecFamily(
            name="rswa",
            spec_type=RSWASpec,
            lifetime=lambda spec: RSWALifetime(block=spec.block_size, window=spec.rswa_window),
            traits=Traits(event_kind="full_attention"),
            examples=_EXAMPLES,
        )
    ]
