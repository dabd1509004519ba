"""Row: one sequence of a batch, where it is in the block manager, and what must hold before a pass."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from kvframe.blocks import BlockRequest
from kvframe.errors import UsageError
from kvframe_transformers.engine import Engine


@attrs.define(kw_only=True, eq=False)
class Row:
    """One sequence of a batch.

    Args:
        slot: its row in the block manager, -1 before its first token.
        pad: columns before its first token.
        tokens: the ids of all its columns from `pad` on that are known; None: nobody says them, and it has no keys.
        request: what the manager is asked to admit.
    """

    slot: int = -1
    pad: int = 0
    tokens: list[int] | None = None
    request: BlockRequest

    def count(self, column: int) -> int:
        """Its tokens before a column."""
        return max(0, column - self.pad)


def check_length(rows: Sequence[Row], columns: int, engine: Engine) -> None:
    """No sequence is longer than planned, where its length costs anything.

    Raises:
        UsageError: one is.
    """
    longest = max((row.count(columns) for row in rows), default=0)
    limit = engine.planned.engine.max_model_len
    if longest > limit and engine.token_layers:
        rule = f"the cache was made for {limit:,} tokens a sequence: give for_model a larger max_model_len"
        raise UsageError(option="tokens", value=f"{longest:,}", rule=rule)


def check_padding(rows: Sequence[Row], pads: Sequence[int | None]) -> None:
    """What others may find does not depend on a mask.

    Raises:
        UsageError: a pass's mask hides something else than the padding that the pool was told of.
    """
    if [row.pad for row in rows] != list(pads):
        rule = "must be what the pool was told, and hide nothing but padding on the left: give it to both"
        raise UsageError(option="attention_mask", value=None, rule=rule)


def learn(rows: Sequence[Row], ids: torch.Tensor | None, length: int, new: int) -> None:
    """Compare the ids of a pass with those that are known, and note the new ones.

    Args:
        rows: the batch.
        ids: [batch, new].
        length: columns before the pass.
        new: its columns.

    Raises:
        UsageError: there are none, or they are not those that the cache was made for.
    """
    if ids is None:
        raise UsageError(option="input_ids", value=None, rule="are needed: blocks are found by them")
    learned = []
    for row, given in zip(rows, ids.tolist(), strict=True):
        tokens = row.tokens if row.tokens is not None else []
        before, after = row.count(length), row.count(length + new)
        fresh = given[len(given) - (after - before) :]
        known = max(0, len(tokens) - before)
        if tokens[before:after] != fresh[:known]:
            rule = f"are not those that the cache was made for, from token {before:,} on"
            raise UsageError(option="input_ids", value=None, rule=rule)
        learned.append((tokens, fresh[known:]))
    for tokens, fresh in learned:
        tokens += fresh
