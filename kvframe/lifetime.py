"""The lifetime rule: for a request with n settled tokens, which block-table entries no later step reads.

A family gives one such rule; freeing, prefix hits, admission and pool sizing follow from it (design.md, idea 2).
Rules take numpy arrays over a whole batch as well as single numbers.
"""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.checks import at_least, cdiv, one_of, optional_at_least

Tokens = Any  # an int, or an integer array over the batch

# Far beyond any context, yet small enough that arithmetic on it stays within int64.
_FAR = 1 << 40


@attrs.frozen(kw_only=True)
class Lifetime:
    """Nothing ever dies: the rule of full attention, and the base of all others.

    Args:
        block: tokens per table entry, after context-parallel scaling.
        source: "decoder", entries follow the request's positions; "encoder", its encoder tokens, filled once.
        fixed: the table has this many entries for the request's whole life; None: ceil(n / block) + spare.
        spare: trailing entries without committed content (draft states).
        state: an entry stands for the state after one position, not for `block` tokens.
        export: a state kernel can also save one state inside a chunk, at multiples of this many tokens.
        hits: "keyed", later requests find its blocks; "free", a hit needs nothing of it; "never", it forbids hits.
        slack: tokens kept longer than a hit needs.
    """

    block: int = attrs.field(validator=at_least(1))
    source: str = attrs.field(default="decoder", validator=one_of("decoder", "encoder"))
    fixed: int | None = attrs.field(default=None, validator=optional_at_least(0))
    spare: int = attrs.field(default=0, validator=at_least(0))
    state: bool = False
    export: int | None = attrs.field(default=None, validator=optional_at_least(1))
    hits: str = attrs.field(default="keyed", validator=one_of("keyed", "free", "never"))
    slack: int = attrs.field(default=0, validator=at_least(0))

    def dead(self, n: Tokens, prompt: Tokens) -> tuple[Tokens, Tokens]:
        """The entries [lo, hi) that no step starting at a position >= n reads; lo >= hi means none.

        Args:
            n: settled tokens.
            prompt: prompt tokens of the request.

        Returns:
            lo and hi, in entries, of the shape of `n`. hi never falls as n grows.
        """
        nothing = np.zeros_like(n)
        return nothing, nothing

    def scaled(self, ranks: int) -> Lifetime:
        """The rule where context parallelism spreads a block's tokens over `ranks` ranks."""
        return attrs.evolve(self, block=self.block * ranks)

    def entries(self, n: Tokens) -> Tokens:
        """Table entries of a request that holds n tokens (of its source)."""
        if self.fixed is not None:
            return np.full_like(n, self.fixed) if isinstance(n, np.ndarray) else self.fixed
        return -(-n // self.block) + self.spare

    def alive(self, settled: Tokens, held: Tokens, prompt: Tokens) -> Tokens:
        """Entries that hold something when `settled` tokens are settled and `held` are stored or in flight."""
        lo, hi = self.dead(settled, prompt)
        return self.entries(held) - np.maximum(0, hi - lo)

    def peak(self, in_flight: int, max_len: int, *, max_encoder_tokens: int = 0) -> int:
        """The most entries one request can hold at once: the exact bound for admission and pool sizing.

        max over 0 <= n < max_len of entries(min(n + in_flight, max_len)) - dead(n); a cached state holds the
        previous state, the running one, its spares, and an exported one where the kernel can export
        (contract 5.9, lifetime.md "Peak").

        Args:
            in_flight: tokens scheduled and not settled, 1 in steady decode.
            max_len: the longest request, tokens.
            max_encoder_tokens: encoder positions, for families whose source is the encoder.
        """
        if self.fixed is not None:
            return self.fixed
        if self.source == "encoder":
            return int(self.entries(max_encoder_tokens))
        if self.state:
            return min(2, cdiv(max_len, self.block)) + self.spare + (self.export is not None)
        if not self.recycles:
            return int(self.entries(max_len))
        longest = max_len
        if self.steady_from is not None:
            longest = min(max_len, self.steady_from + in_flight + self.block)
        n = self._growth_points(in_flight, longest)
        # No prompt frees more than a shorter one, so the longest prompt is the worst case.
        return int(self.alive(n, np.minimum(n + in_flight, max_len), np.full_like(n, max_len)).max())

    @property
    def steady_from(self) -> int | None:
        """Settled tokens after which a request's holdings only repeat what they were before, so that they have peaked.

        None where the rule does not say; then every length up to the longest is looked at.
        """
        return None

    def _growth_points(self, in_flight: int, max_len: int) -> npt.NDArray[np.int64]:
        # Holdings grow only where one more token opens an entry, and nothing is gained by settling more before
        # that: the first n at which each entry count is reached are the only candidates for the maximum.
        first = np.arange(0, max_len, self.block, dtype=np.int64) + 1 - in_flight
        return np.clip(first, 0, max_len - 1)

    @property
    def recycles(self) -> bool:
        """Whether a long request gives entries back while it runs."""
        lo, hi = self.dead(_FAR, 1)
        return bool(hi > lo)

    @property
    def thins(self) -> bool:
        """Whether a prefix hit may lack entries: some are dead at n for a request that is n tokens long."""
        lo, hi = self.dead(_FAR, _FAR)
        return bool(hi > lo)

    def next_death(self, n: int, prompt: int, limit: int) -> int | None:
        """The fewest settled tokens, above n and up to `limit`, at which more entries are dead than at n.

        None if there are none. Found by doubling, then halving, since the end of the dead range never falls.
        """

        def more(at: int) -> bool:
            return bool(self.dead(at, prompt)[1] > dead_now)

        dead_now = self.dead(n, prompt)[1]
        low, step = n, 1
        while low + step < limit and not more(low + step):
            low, step = low + step, step * 2
        high = min(low + step, limit)
        if high <= n or not more(high):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if more(middle) else (middle, high)
        return high

    @property
    def per_token(self) -> bool:
        """Whether holdings grow with the request's tokens at all (rings and uncached states do not)."""
        return self.fixed is None and not self.state
