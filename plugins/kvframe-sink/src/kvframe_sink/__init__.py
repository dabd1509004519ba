"""Full attention with sink tokens for kvframe: the first tokens of the cache hold the model's learned sinks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvframe import FullAttentionSpec, Lifetime, SpecFamily, Traits, hookimpl, kv_field
from kvframe.checks import optional_at_least


@attrs.frozen(kw_only=True, repr=False)
class SinkFullAttentionSpec(FullAttentionSpec):
    """A layer that keeps every token and attends to sinks as well (contract 2.14).

    Args:
        sink_len: tokens of the sink; None: the layer has none.
    """

    sink_len: int | None = kv_field(default=None, validator=optional_at_least(1))


_HEADS: Mapping[str, Any] = {"num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
_EXAMPLES = (
    SinkFullAttentionSpec(16, sink_len=4, **_HEADS),
    SinkFullAttentionSpec(16, sliding_window=128, **_HEADS),
)


@hookimpl
def kvframe_spec_families() -> list[SpecFamily[SinkFullAttentionSpec]]:
    """The family of layers with sinks. They may share a block table with full attention: nothing dies in either."""
    return [
        SpecFamily(
            name="sink",
            spec_type=SinkFullAttentionSpec,
            lifetime=lambda spec: Lifetime(block=spec.block_size),
            promote=lambda spec, block_size: spec,
            traits=Traits(event_kind="sink_full_attention"),
            examples=_EXAMPLES,
        )
    ]
