"""Facts: what a recorder notes while the manager works, before records are made of it."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvframe.blocks import TokenChain
from kvframe.blocks.hashing import Tokens
from kvframe.blocks.keys import Digests


class Came(NamedTuple):
    """Keys that came, of each copy; each is the hash of the first `ends[i]` tokens of `chains[i]`.

    Args:
        group: their group.
        digests: the hashes.
        chains: the requests' hashes; one for all, or one each; None where it is not known whose they are.
        ends: tokens that each covers.
        tokens: the ids of the last block, or hash unit, of each: [keys, block].
    """

    group: int
    digests: list[bytes] | Digests
    chains: TokenChain | list[TokenChain] | None
    ends: list[int]
    tokens: Tokens


class Went(NamedTuple):
    """Keys that went, of each copy; all, if `digests` is None."""

    group: int
    digests: list[bytes] | Digests | None


class Noted(NamedTuple):
    """Whole blocks' keys that came, before it was looked up whose tokens they cover: rows by number."""

    group: int
    digests: Digests
    rows: Any
    ends: Any


Fact = Came | Went | Noted
