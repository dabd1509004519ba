"""What an engine tells the manager about a request, and how it asks for admission."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.blocks.hashing import TokenChain, Tokens, as_tokens
from kvframe.blocks.hits import Hit
from kvframe.checks import at_least


@attrs.define(kw_only=True, eq=False)
class BlockRequest:
    """A request as the manager knows it: how long its prompt is, and the hashes of its tokens.

    Made by `KVCacheManager.request`. While it is admitted its tokens are added through the manager.

    Args:
        prompt: prompt tokens, those of a resumed request's first life too.
        chain: the hashes of all tokens so far.
        junction: where other requests' prompts part from this one, as the last lookup saw it, in tokens; 0: nowhere.
        tokens: the ids, kept while the request is not admitted, for a watcher; None without one.
    """

    prompt: int
    chain: TokenChain
    junction: int = 0
    tokens: Tokens | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens known, generated ones included."""
        return self.chain.num_tokens

    def extend(self, tokens: Sequence[int] | npt.NDArray[np.integer[Any]]) -> None:
        """Add tokens while the request is not admitted."""
        self.chain.extend(tokens)
        if self.tokens is not None:
            self.tokens = np.concatenate((self.tokens, as_tokens(tokens)))


@attrs.frozen(kw_only=True)
class Admission:
    """One request that asks for a slot, its prefix hit, and blocks for its first chunk. All counts are tokens.

    Args:
        request: who asks.
        num_new_tokens: tokens of the first chunk after the hit; 0 while an external cache loads.
        lookahead: further tokens that need a place, for drafts.
        external_tokens: tokens after the hit that an external cache brings.
        encoder_tokens: encoder positions, for groups whose source is the encoder.
        whole_must_fit: admit only if the whole request fits, not just its first chunk.
        delay_caching: key nothing before `commit`, since the content is still on its way.
        hit: a hit from `lookup` to use; None: look it up now.
    """

    request: BlockRequest
    num_new_tokens: int = attrs.field(validator=at_least(0))
    lookahead: int = attrs.field(default=0, validator=at_least(0))
    external_tokens: int = attrs.field(default=0, validator=at_least(0))
    encoder_tokens: int = attrs.field(default=0, validator=at_least(0))
    whole_must_fit: bool = False
    delay_caching: bool = False
    hit: Hit | None = None
