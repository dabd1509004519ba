"""Distributions of lengths, in tokens, as people write them."""

from __future__ import annotations

import re

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.checks import at_least
from kvframe.simulate.errors import StreamError

FORMS = (
    "512, 16-1024 (uniform), or lognormal:400,0.8 (median, sigma) with an upper end: lognormal:400,0.8,4096"
)
_FIXED = re.compile(r"(\d+)(?:-(\d+))?")
_LOGNORMAL = re.compile(r"lognormal:(\d+),(\d*\.?\d+)(?:,(\d+))?")
_FAR = 16  # a lognormal without an upper end is cut at so many times its median


@attrs.frozen(kw_only=True)
class Lengths:
    """A distribution of whole numbers from `low` to `high`.

    Args:
        low: the least.
        high: the most.
        median: of a lognormal distribution; None: all numbers are equally likely.
        sigma: of the logarithm.
    """

    low: int = attrs.field(validator=at_least(1))
    high: int = attrs.field(validator=at_least(1))
    median: int | None = None
    sigma: float = 0.0

    def draw(self, rng: np.random.Generator, count: int) -> npt.NDArray[np.int64]:
        """So many lengths."""
        if self.median is None:
            return rng.integers(self.low, self.high + 1, count)
        drawn = np.rint(rng.lognormal(np.log(self.median), self.sigma, count))
        return np.clip(drawn, self.low, self.high).astype(np.int64)


def parse_lengths(text: str) -> Lengths:
    """A distribution from its text.

    Raises:
        StreamError: the text is none of the forms.
    """
    if match := _FIXED.fullmatch(text):
        low, high = int(match[1]), int(match[2] or match[1])
        if 1 <= low <= high:
            return Lengths(low=low, high=high)
    elif match := _LOGNORMAL.fullmatch(text):
        median = int(match[1])
        high = int(match[3] or median * _FAR)
        if 1 <= median <= high:
            return Lengths(low=1, high=high, median=median, sigma=float(match[2]))
    raise StreamError(where=f"lengths {text!r}", reason=f"must be of the form {FORMS}")
