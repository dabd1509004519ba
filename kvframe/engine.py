"""EngineConfig: the limits of the running engine that sizing needs. Nothing here is ever read from a global."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvframe.checks import at_least, one_of, optional_at_least


@attrs.frozen(kw_only=True)
class EngineConfig:
    """What an engine may run at once (contract section 2, "configuration inputs").

    Lengths are tokens. `max_in_flight_tokens` (F) counts tokens that are scheduled but not yet settled, over all
    concurrent steps: 1 in steady decode. `attention_tp` is the tensor parallel size that attention itself sees; it
    differs from `tp` only when attention runs data parallel. `extras` holds settings of plugins by name; each plugin
    says what it reads, and the core none.

    Raises:
        SpecError: a limit is not a whole number in its range; names the field, the value and the rule.
    """

    max_model_len: int = attrs.field(validator=at_least(1))
    max_in_flight_tokens: int = attrs.field(default=1, validator=at_least(1))
    max_encoder_tokens: int = attrs.field(default=0, validator=at_least(0))
    max_num_seqs: int | None = attrs.field(default=None, validator=optional_at_least(1))
    tp: int = attrs.field(default=1, validator=at_least(1))
    dcp: int = attrs.field(default=1, validator=at_least(1))
    pcp: int = attrs.field(default=1, validator=at_least(1))
    state_cache_mode: str = attrs.field(default="none", validator=one_of("none", "align"))
    prefix_caching: bool = True
    prefill_lookahead: int = attrs.field(default=0, validator=at_least(0))
    draft_drop: bool = False
    attention_tp: int = attrs.field(
        default=attrs.Factory(lambda self: self.tp, takes_self=True), validator=at_least(1)
    )
    extras: Mapping[str, Any] = attrs.field(factory=dict, hash=False)

    def with_max_model_len(self, max_model_len: int) -> EngineConfig:
        """The same limits at another maximum length: what a search over lengths evaluates."""
        return attrs.evolve(self, max_model_len=max_model_len)
