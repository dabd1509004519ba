"""What is counted while a simulation runs."""

from __future__ import annotations

import attrs

from kvframe.blocks import KVCacheManager
from kvframe.simulate.meter import Meter

_EVERY = 25  # of the refusals after the first, every so many-th is measured


@attrs.frozen(kw_only=True)
class Refusal:
    """The pool when a request did not fit.

    Args:
        seconds: after the start.
        alive: requests that run.
        useful_share: share of the pool in useful bytes.
    """

    seconds: float
    alive: int
    useful_share: float


@attrs.define(kw_only=True)
class Counts:
    """Totals of one run. Tokens of prompts and hits are those of first admissions.

    Args:
        unservable: requests that did not fit although nothing else ran.
        too_long: requests beyond the longest.
        recomputed_tokens: computed again after preemptions.
        request_rounds: requests that ran, summed over seconds.
        shares: useful shares at measured refusals after the first.
    """

    finished: int = 0
    unservable: int = 0
    too_long: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    output_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    refusals: int = 0
    peak_alive: int = 0
    request_seconds: float = 0.0
    seconds: float = 0.0
    first_refusal: Refusal | None = None
    shares: list[float] = attrs.field(factory=list)

    def note_round(self, alive: int, seconds: float) -> None:
        """A round is over."""
        self.peak_alive = max(self.peak_alive, alive)
        self.request_seconds += alive * seconds

    def note_refusal(self, meter: Meter, manager: KVCacheManager, now: float, alive: int) -> None:
        """A request did not fit."""
        self.refusals += 1
        if self.first_refusal is None:
            self.first_refusal = Refusal(seconds=now, alive=alive, useful_share=meter.useful_share(manager))
        elif self.refusals % _EVERY == 0:
            self.shares.append(meter.useful_share(manager))
