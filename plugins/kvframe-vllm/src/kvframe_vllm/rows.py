"""Rows: running requests of vLLM as rows of kvframe's block manager, each with the token counts that wake it.

vLLM asks for every running request in every step, and nearly always there is nothing to do: a row remembers the counts
at which there is, so that the question costs one comparison. The ledger of the block manager learns a row's counts
only when the row wakes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from kvframe.blocks import BlockRequest, KVCacheManager, TokenChain
from kvframe.blocks.hashing import DIGEST_BYTES, BlockHash
from kvframe_vllm.tables import Blocks

NEVER = int(np.iinfo(np.int32).max)


def _not_hashed_here(*unit: Any) -> bytes:
    raise NotImplementedError("vLLM computes the hashes")


# Chains of hashes that vLLM computed; no unit is ever hashed again, so the root is never read.
_GIVEN = BlockHash(name="vllm", unit=_not_hashed_here, root=bytes(DIGEST_BYTES))


@attrs.define(kw_only=True)
class EngineChain(TokenChain):
    """The hashes of a request of vLLM, which it has computed: `extend` takes over what is new.

    Args:
        request: vLLM's `Request`.
    """

    request: Any

    def extend(self, tokens: Any) -> None:
        """Take over the count of tokens, and the hashes that are new; what `tokens` are, vLLM knows."""
        request, have = self.request, len(self.digests) // DIGEST_BYTES
        self.num_tokens, hashes = request.num_tokens, request.block_hashes
        if have < len(hashes):
            self.digests += _digests(hashes[have:] if have else hashes)


def _digests(hashes: Sequence[bytes]) -> bytes:
    """vLLM's hashes as digests of 32 bytes; shorter ones (xxhash) are filled up."""
    joined = b"".join(hashes)
    if len(joined) == DIGEST_BYTES * len(hashes):
        return joined
    return b"".join(one.ljust(DIGEST_BYTES, b"\0") for one in hashes)


def block_request(request: Any, unit: int) -> BlockRequest:
    """A request of vLLM as the block manager knows it.

    Args:
        request: vLLM's `Request`.
        unit: tokens of one of its hashes.
    """
    chain = EngineChain(hash=_GIVEN, unit=unit, request=request)
    chain.extend(())
    return BlockRequest(prompt=request.num_prompt_tokens, chain=chain)


class Row:
    """One running request.

    Args:
        slot: its row of the block manager.
        chain: its hashes there.
    """

    __slots__ = ("chain", "die", "due", "grow", "keys", "ready", "ready_at", "slot")

    def __init__(self, slot: int, chain: TokenChain) -> None:
        self.slot, self.chain = slot, chain
        self.die = self.grow = self.keys = self.due = 0
        self.ready: Blocks | None = None  # allocated ahead, and not yet asked for
        self.ready_at = 0


class Ledger:
    """Reads and writes the counts of rows in a block manager.

    Args:
        core: the block manager.
    """

    def __init__(self, core: KVCacheManager) -> None:
        self._core, self._ledger, self._tables = core, core.ledger, core.tables
        self._groups = range(len(core.config.groups))
        self._die = tuple(core.ledger.die_at.values())
        self._grow = tuple(core.ledger.grow_at.values())
        self._keys = tuple(core.ledger.key_at.values())
        self._deaths, _, self._states = core.ledger.cuts

    # --- from vLLM ---

    def settle(self, row: Row, computed: int) -> None:
        """Tell the counts of one row: tokens computed, tokens known, and the hashes that are new."""
        self._core.append([row.slot], [()])
        self._ledger.computed_at[row.slot] = computed

    def settle_all(self, rows: Sequence[Row], slots: Any, computed: Any) -> None:
        """`settle` for many rows. Those that are far from a key need not learn of tokens and hashes yet."""
        keyed = [
            row.slot for row, count in zip(rows, computed.tolist(), strict=True) if count + 1 >= row.keys
        ]
        self._core.append(keyed, [()] * len(keyed))
        self._ledger.computed[slots] = computed

    def rewrite(self, row: Row, request: Any) -> None:
        """A streaming session goes on: tokens after the last turn were replaced, and its prompt is longer."""
        del row.chain.digests[:]
        self._ledger.prompt_at[row.slot] = request.num_prompt_tokens
        self._ledger.request(row.slot).prompt = request.num_prompt_tokens

    # --- to vLLM ---

    def wake(self, row: Row) -> None:
        """Read the counts at which the row next needs work."""
        slot = row.slot
        row.die = min([at[slot] for at in self._die], default=NEVER)
        row.grow = min([at[slot] for at in self._grow], default=NEVER)
        row.keys = min([at[slot] for at in self._keys], default=NEVER)
        row.due = min(row.die, row.grow, row.keys)

    def wake_all(self, rows: Sequence[Row], slots: Any) -> None:
        """`wake` for many rows; `slots` are theirs as an array."""
        limits, deaths, states = self._ledger.thresholds[:, slots], self._deaths, self._states
        parts = (limits[:deaths], limits[deaths:states], limits[states:])
        counts = (part.min(axis=0, initial=NEVER).tolist() for part in parts)
        for row, die, grow, keys in zip(rows, *counts, strict=True):
            row.die, row.grow, row.keys = die, grow, keys
            row.due = min(die, grow, keys)

    def lengths(self, slot: int) -> list[int]:
        """Table entries of a row, by group."""
        return [self._tables.entries(group, slot) for group in self._groups]

    def since(self, slot: int, lengths: Sequence[int]) -> tuple[list[int], ...]:
        """The blocks of a row from these entries on, by group."""
        return tuple(
            self._tables.row(group, slot)[start:].tolist()
            for group, start in zip(self._groups, lengths, strict=True)
        )

    def growing(self, slots: Any, counts: Any) -> int:
        """How many tables grow, by at least one block, when the rows reach these counts."""
        kinds = slice(self._deaths, self._states)
        woken = (self._ledger.thresholds[kinds, slots] <= counts).sum(axis=1).tolist()
        return sum(
            number * len(groups) for number, groups in zip(woken, self._ledger.groups[kinds], strict=True)
        )
