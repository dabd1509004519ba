"""What a pool has of new prompts: conversations that go on, and blocks that earlier prompts left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import attrs
import torch

from kvframe.blocks import Admission, BlockRequest, Hit, Refused, Served
from kvframe.errors import UsageError
from kvframe_transformers.engine import Engine
from kvframe_transformers.rows import Row


@attrs.frozen(kw_only=True)
class Prompt:
    """One sequence of a batch: its ids, and the columns of padding before them."""

    pad: int
    tokens: list[int]


def prompts(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[Prompt]:
    """The sequences of a batch that is padded on the left.

    Raises:
        UsageError: a mask has a 0 behind a 1, or only zeros.
    """
    if attention_mask is None:
        return [Prompt(pad=0, tokens=ids) for ids in input_ids.tolist()]
    found = []
    for ids, mask in zip(input_ids.tolist(), attention_mask.tolist(), strict=True):
        pad = next((column for column, seen in enumerate(mask) if seen), len(mask))
        if pad == len(mask) or not all(mask[pad:]):
            rule = "must be zeros, then ones: prompts are padded on the left"
            raise UsageError(option="attention_mask", value=None, rule=rule)
        found.append(Prompt(pad=pad, tokens=ids[pad:]))
    return found


def paddings(attention_mask: torch.Tensor | None, batch: int) -> list[int | None]:
    """Columns of padding before each of `batch` sequences; None where a mask hides other columns than that.

    Args:
        attention_mask: [batch, columns]; None: nothing is hidden.
        batch: sequences.
    """
    if attention_mask is None:
        return [0] * batch
    if attention_mask.dim() != 2 or attention_mask.shape[0] != batch:
        return [None] * batch
    seen = attention_mask.bool()
    pads = (seen.cumsum(-1) == 0).sum(-1)
    whole = pads + seen.sum(-1) == seen.shape[1]
    return [pad if only else None for pad, only in zip(pads.tolist(), whole.tolist(), strict=True)]


@attrs.frozen(kw_only=True)
class _Found:
    """The tokens that a prompt need not compute, and where they are: a row that is parked, or cached blocks."""

    tokens: int = 0
    parked: int | None = None
    hit: Hit | None = None


class PrefixFinder:
    """Looks up a batch. All its sequences go on at one column, since the model runs them as one tensor."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def rows(self, batch: Sequence[Prompt], *, more: int = 0) -> tuple[list[Row], int]:
        """Rows that hold what was found, and the column from which the model is called.

        Args:
            batch: the prompts.
            more: tokens that prompts are to have later beyond these: a state at their end is then worth keeping.

        Raises:
            PoolFullError: there is no room to hold it.
        """
        engine = self._engine
        with engine.working():
            engine.settle()
            engine.manager.start_step()
            rows: list[Row] | None = None
            while rows is None:
                found, column = self._search(batch)
                rows = self._hold(batch, found, more)
        counts = engine.counts
        counts.prompts += len(batch)
        for prompt, have in zip(batch, found, strict=True):
            counts.prompt += len(prompt.tokens)
            counts.hit += have.tokens if have.hit else 0
            counts.resumed += have.tokens if have.parked is not None else 0
        return rows, column

    def _search(self, batch: Sequence[Prompt]) -> tuple[list[_Found], int]:
        """What there is of each prompt, all up to one column."""
        column = len(batch[0].tokens) + batch[0].pad - 1
        while True:
            found = [self._find(prompt, column - prompt.pad) for prompt in batch]
            reached = min(
                found_here.tokens + prompt.pad if column > prompt.pad else column
                for prompt, found_here in zip(batch, found, strict=True)
            )
            if reached == column:
                return found, column
            # a sequence that has less holds all others back, and they may have nothing that ends just there
            column = reached

    def _find(self, prompt: Prompt, limit: int) -> _Found:
        """The most that there is of the first `limit` tokens."""
        if limit <= 0:
            return _Found()
        engine, tokens = self._engine, prompt.tokens
        hit = engine.manager.lookup(engine.manager.request(tokens[: limit + 1]))
        best = _Found(tokens=hit.tokens, hit=hit) if hit.tokens else _Found()
        for slot, parked in engine.parked.items():
            if best.tokens < len(parked) <= limit and tuple(tokens[: len(parked)]) == parked:
                best = _Found(tokens=len(parked), parked=slot)
        return best

    def _hold(self, batch: Sequence[Prompt], found: Sequence[_Found], more: int) -> list[Row] | None:
        """Take what was found: parked rows first, which room for others could be made of.

        None where making room for one has cost what was found for another: all is given back, to search again.
        """
        manager, free = self._engine.manager, set()
        for have in found:
            if have.parked is not None:
                free.add(have.parked)
                self._engine.parked.pop(have.parked, None)
        rows: list[Row] = []
        for prompt, have in zip(batch, found, strict=True):
            request = manager.request(prompt.tokens, prompt=len(prompt.tokens) + more)
            row = Row(pad=prompt.pad, tokens=list(prompt.tokens), request=request)
            rows.append(row)
            room = partial(self._make_room, rows, len(batch), len(prompt.tokens))
            if have.parked is not None:
                row.slot = have.parked if have.parked in free else self._engine.fork(have.parked, room)
                free.discard(have.parked)
            elif have.hit is not None:
                slot = self._admitted(request, prompt.tokens[: have.tokens + 1], have.tokens, room)
                if slot is None:
                    manager.release([row.slot for row in rows if row.slot >= 0] + sorted(free))
                    return None
                row.slot = slot
        for row, have in zip(rows, found, strict=True):
            if have.parked is not None and row.tokens is not None:  # after all forks of it
                manager.append([row.slot], [row.tokens[have.tokens :]])
        return rows

    def _admitted(
        self, request: BlockRequest, tokens: list[int], wanted: int, room: Callable[[Refused | None], None]
    ) -> int | None:
        engine = self._engine
        while True:
            # looked up again: a copy for a sequence before may have taken blocks
            hit = engine.manager.lookup(engine.manager.request(tokens))
            if hit.tokens != wanted:
                return None
            (result,) = engine.manager.admit(
                [Admission(request=request, num_new_tokens=0, hit=hit)], busy=False
            )
            if isinstance(result, Served):
                engine.run_copies()
                return result.slot
            room(result if isinstance(result, Refused) else None)

    def _make_room(self, rows: Sequence[Row], batch: int, length: int, refused: Refused | None) -> None:
        def give_up() -> None:
            self._engine.manager.release([row.slot for row in rows if row.slot >= 0])

        self._engine.make_room(refused, batch, length, give_up)
