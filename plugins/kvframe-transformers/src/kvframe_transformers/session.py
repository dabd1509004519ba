"""Session: the sequences of one batch, their rows in the block manager, and the forward pass that is under way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch

from kvframe.blocks import Admission, BlockRequest, Refused, Served
from kvframe.errors import UsageError
from kvframe_transformers.engine import Engine
from kvframe_transformers.errors import CacheStateError
from kvframe_transformers.forward import Forward, Numbers, Places, entries_of, state_blocks, still_own


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


class Session:
    """The rows of one batch. Columns count a batch's positions, padding included; tokens those of one sequence.

    Args:
        engine: the pool's manager and storage.
        rows: the sequences; None: as many as the first forward pass has, with no ids known.
        length: columns that are stored already, as a prefix hit.
    """

    def __init__(self, engine: Engine, rows: list[Row] | None = None, length: int = 0) -> None:
        self.engine = engine
        self.recording = False
        self._start(rows, length)

    def _start(self, rows: list[Row] | None, length: int) -> None:
        self.rows = rows
        self.length = length
        self.seen = dict.fromkeys(self.engine.token_layers, length)
        self.cross_seen: dict[str, int] = {}
        self.encoder_len = 0
        self.closed = False
        self._unsettled = 0
        self._forward: Forward | None = None
        self._loans: dict[tuple[str, str], torch.Tensor] = {}
        self._deferred: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    # --- a forward pass ---

    @property
    def tracked(self) -> bool:
        """Whether the ids of its tokens are known, so that its blocks get keys."""
        return self.rows is not None and self.rows[0].tokens is not None

    @property
    def unfinished(self) -> bool:
        """Whether a forward pass has not reached all layers."""
        return self._forward is not None and bool(self._forward.unwritten)

    @property
    def batch(self) -> int:
        """Sequences, 0 before the first pass."""
        return len(self.rows or ())

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, those of the pass under way included."""
        return max((row.count(self.length) for row in self.rows or ()), default=0)

    def begin(
        self,
        batch: int,
        new: int,
        ids: torch.Tensor | None = None,
        pads: Sequence[int | None] | None = None,
    ) -> Forward:
        """Start a forward pass: blocks for `new` columns of every sequence.

        Args:
            batch: sequences of the pass.
            new: its columns.
            ids: [batch, new], where they are known.
            pads: columns of padding before each sequence, as the pass's mask says; None: of a sequence whose mask hides
                others, or of all if nobody has seen the mask.

        Raises:
            PoolFullError: the pool has no room; the session is closed, others go on.
            CacheStateError: the cache is closed, or a pass before did not finish.
            UsageError: batch, ids or length are not what the cache was made for.
        """
        with self.engine.working():
            return self._begun(batch, new, ids, pads or [None] * batch, masked=pads is not None)

    def _begun(
        self, batch: int, new: int, ids: torch.Tensor | None, pads: Sequence[int | None], masked: bool
    ) -> Forward:
        self.engine.enter(self)
        self.settle()
        self._match(batch, pads)
        self._check_length(new)
        if masked:
            self._check_mask(pads)
        for row in self._rows():
            if row.slot >= 0:
                self.engine.tell(row, row.count(self.length))
        self._learn(ids, new)
        start, self.length = self.length, self.length + new
        self._forward = Forward(start=start, stop=self.length, unwritten=set(self.engine.written_layers))
        try:
            self._take_blocks(self._forward)
        except BaseException:
            self.abort()
            raise
        self.engine.counts.computed += sum(row.count(self.length) - row.count(start) for row in self._rows())
        self.engine.note_peak()
        return self._forward

    def forward_of(self, layer: str, batch: int, new: int) -> Forward | None:
        """The pass in which a layer stores `new` columns: the one under way, or one that begins with it.

        None where the encoder's length, which the blocks depend on, is not known yet: see `defer`.
        """
        if self.engine.has_encoder and self._forward is None and not self.length:
            if layer not in self._deferred:
                return None
            self.admit_encoder(batch, 0)  # a pass without an encoder has ended
        forward = self._forward
        if forward is None or self.seen[layer] + new > self.length:
            if self.tracked:
                rule = "its prompt is known to the pool: run the model that the pool was made for, with input_ids"
                raise UsageError(option="cache", value=None, rule=rule)
            forward = self.begin(batch, new)
        return forward

    def defer(self, layer: str, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep a layer's first keys and values until the encoder's length is known."""
        self._deferred[layer] = (key, value)
        self.seen[layer] += key.shape[2]

    def admit_encoder(self, batch: int, positions: int) -> None:
        """The encoder's output has so many positions: take blocks, and store what had to wait."""
        if self._forward is not None or self.length:
            return
        deferred, self._deferred = self._deferred, {}
        self.encoder_len = positions
        new = next((key.shape[2] for key, _ in deferred.values()), 1)
        forward = self.begin(batch, new)
        for layer, (key, value) in deferred.items():
            self.engine.storage.tokens[layer].store(forward, key, value)
            forward.unwritten.discard(layer)

    def admit_states(self, batch: int, new: int) -> None:
        """A layer with a state has `new` columns: take blocks if this is the first pass."""
        if self._forward is None and not self.length:
            self.begin(batch, new)

    def wrote(self, layer: str, new: int) -> None:
        """A layer has stored its `new` columns."""
        self.seen[layer] += new
        if self._forward is not None:
            self._forward.unwritten.discard(layer)

    def settle(self) -> None:
        """What was lent comes back, and the last pass is over.

        Raises:
            CacheStateError: the last pass did not reach all layers; the session is closed.
        """
        self.check_in()
        if self.unfinished:
            self.abort()
            raise CacheStateError(
                what="a forward pass stopped before all layers had stored their tokens",
                advice="The cache is closed; make a new one",
            )
        self._forward = None

    def abort(self) -> None:
        """Give up, with an unfinished pass: nothing that it was to store may be found later."""
        forward, self._forward = self._forward, None
        rows = self.rows or []
        if forward is not None and self.tracked:
            for group, entries in forward.recycled.items():
                self.engine.manager.evict([block for _, _, block in entries], group)
            for row in rows:
                if row.slot >= 0:
                    self.engine.forget(row.slot, row.count(forward.start))
        self._loans.clear()
        for row in rows:
            row.tokens = None  # a pool keeps no row whose tokens are unknown
        self.close()

    def _rows(self) -> list[Row]:
        if self.closed or self.rows is None:
            raise CacheStateError(what="this cache is closed", advice="Make a new one for each conversation")
        return self.rows

    def _match(self, batch: int, pads: Sequence[int | None]) -> None:
        if self.rows is None and not self.closed:
            request = self.engine.manager.request
            # columns that are hidden in other ways are stored as any other
            self.rows = [Row(pad=pad or 0, request=request([], prompt=1)) for pad in pads]
        rows = self._rows()
        if batch == len(rows):
            return
        if batch % len(rows) or (self.length and not self.tracked):
            rule = f"has {len(rows)} sequences, and the model runs {batch}"
            raise UsageError(option="cache", value=None, rule=rule)
        # generate() repeats each prompt for its beams, or for the sequences that it returns
        self.select([index for index in range(len(rows)) for _ in range(batch // len(rows))])

    def _check_length(self, new: int) -> None:
        longest = max((row.count(self.length + new) for row in self._rows()), default=0)
        limit = self.engine.planned.engine.max_model_len
        if longest > limit and self.engine.token_layers:
            rule = (
                f"the cache was made for {limit:,} tokens a sequence: give for_model a larger max_model_len"
            )
            raise UsageError(option="tokens", value=f"{longest:,}", rule=rule)

    def _check_mask(self, pads: Sequence[int | None]) -> None:
        """What others may find must not depend on a mask."""
        if self.tracked and [row.pad for row in self._rows()] != list(pads):
            rule = "must be what the pool was told, and hide nothing but padding on the left: give it to both"
            raise UsageError(option="attention_mask", value=None, rule=rule)

    def _learn(self, ids: torch.Tensor | None, new: int) -> None:
        """Compare ids with those that are known, and note the new ones."""
        if not self.tracked:
            return
        if ids is None:
            rule = "are needed: blocks are found by them"
            raise UsageError(option="input_ids", value=None, rule=rule)
        for row, given in zip(self._rows(), ids.tolist(), strict=True):
            tokens = row.tokens if row.tokens is not None else []
            before, after = row.count(self.length), row.count(self.length + new)
            fresh = given[len(given) - (after - before) :]
            if tokens[before:after] != fresh[: len(tokens) - before]:
                rule = f"are not those that the cache was made for, from token {before:,} on"
                raise UsageError(option="input_ids", value=None, rule=rule)
            tokens += fresh[max(0, len(tokens) - before) :]

    # --- blocks ---

    def _take_blocks(self, forward: Forward) -> None:
        """Blocks for all columns of a pass, a few at a time where earlier ones die meanwhile."""
        engine, rows, new = self.engine, self._rows(), forward.stop - forward.start
        before = np.array([row.count(forward.start) for row in rows], np.int64)
        after = np.array([row.count(forward.stop) for row in rows], np.int64)
        size = new if self.recording or engine.whole_steps else min(new, engine.step_tokens)
        if size < new:
            forward.recycled = {g: [] for g in engine.recycling}
            forward.early = self._early_reads(forward.start) if forward.start else {}
        forward.state_from = {g: self._states(g, before) for g in engine.state_groups}
        engine.manager.start_step()
        self._unsettled = self._unsettled if self.recording else 0
        done = before
        while (done < after).any():
            goal = np.minimum(after, done + size)
            self._grow(rows, goal - done)
            for group, entries in forward.recycled.items():
                entries += entries_of(self.places.table(group), engine.blocks[group], done, goal)
            done = goal
        self._unsettled += new if self.recording else 0
        forward.recycled = {
            group: still_own(entries, self._keeper(group)) for group, entries in forward.recycled.items()
        }
        forward.places = self.places
        forward.stored_whole = 0 < forward.start >= max(row.pad for row in rows) and not forward.recycled
        forward.state_to = {g: self._states(g, after) for g in engine.state_groups}

    @property
    def places(self) -> Places:
        """Where the batch's tokens lie now."""
        rows = self._rows()
        return Places(
            manager=self.engine.manager,
            storage=self.engine.storage,
            slots=np.array([row.slot for row in rows], np.int64),
            pads=np.array([row.pad for row in rows], np.int64),
        )

    def _early_reads(self, start: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """What layers that give blocks back read, taken before later blocks of this pass take their place."""
        found, places = {}, self.places
        for name, first in self.engine.first_columns(start).items():
            store = self.engine.storage.tokens[name]
            slots = places.slots_of(store.group, store.tokens, first, start)
            found[name] = store.read(slots)
        return found

    def _states(self, group: int, counts: Numbers) -> Numbers:
        lifetime = self.engine.planned.blocks.groups[group].lifetime
        table = self.places.table(group)
        slots = np.array([row.slot for row in self._rows()])
        return state_blocks(table, lifetime.block, np.where(slots < 0, 0, counts), lifetime.fixed is not None)

    def _keeper(self, group: int) -> Any:
        """Whether a block that this pass filled still holds what it was filled with: it is held, or it has its key."""
        table, rows = self.places.table(group), self._rows()

        def keep(row: int, entry: int, block: int) -> bool:
            return bool(table[row, entry] == block) or self.engine.has_key(
                group, block, rows[row].slot, entry
            )

        return keep

    def _grow(self, rows: list[Row], new: Numbers) -> None:
        """Blocks for new tokens of each row, all or an error."""
        engine = self.engine
        counts = {
            row.slot: int(count) for row, count in zip(rows, new, strict=True) if row.slot >= 0 and count
        }
        waiting = [(row, int(count)) for row, count in zip(rows, new, strict=True) if row.slot < 0 and count]
        slots = list(counts)
        while slots:
            result = engine.manager.step(
                slots,
                np.array([counts[slot] for slot in slots], np.int32),
                in_flight=[self._unsettled] * len(slots),
                starts=False,
            )
            slots = [answer.slot for answer in result.refused if answer.slot is not None]
            if slots:
                self._make_room(result.refused[0])
        engine.run_copies()
        for row, count in waiting:
            row.slot = self._admitted(row, count)
        engine.run_copies()

    def _admitted(self, row: Row, count: int) -> int:
        engine = self.engine
        admission = Admission(
            request=row.request, num_new_tokens=count, encoder_tokens=self.encoder_len, hit=engine.no_hit
        )
        while True:
            (result,) = engine.manager.admit([admission], busy=False)
            if isinstance(result, Served):
                return result.slot
            self._make_room(result if isinstance(result, Refused) else None)

    def _make_room(self, refused: Refused | None) -> None:
        self.engine.make_room(refused, self.batch, self.longest, self.abort)

    # --- states that the model changes in place ---

    def lend(self, layer: str, state: str, tensor: torch.Tensor) -> torch.Tensor:
        """Note that the model may change this tensor; it is stored when another layer asks for its own."""
        if any(name != layer for name, _ in self._loans):
            self.check_in()
        self._loans[layer, state] = tensor
        return tensor

    def loan(self, layer: str, state: str) -> torch.Tensor | None:
        """What is lent."""
        return self._loans.get((layer, state))

    def drop_loan(self, layer: str, state: str) -> None:
        """The model has given the new state itself."""
        self._loans.pop((layer, state), None)

    def check_in(self) -> None:
        """Store what was lent."""
        loans, self._loans = self._loans, {}
        for (layer, state), tensor in loans.items():
            self.write_state(layer, state, tensor)

    def write_state(self, layer: str, state: str, tensor: torch.Tensor) -> None:
        """Store a state of all rows that have tokens."""
        forward = self._forward
        if forward is None:
            blocks = self._states(self.engine.storage.states[layer].group, self._counts())
        else:
            blocks = forward.state_to[self.engine.storage.states[layer].group]
            forward.unwritten.discard(layer)
        rows = np.flatnonzero(blocks)
        index = self.engine.storage.index
        store = self.engine.storage.states[layer]
        write = store.write_conv if state == "conv" else store.write_ssm
        write(index(rows), index(blocks[rows]), tensor)

    def read_blocks(self, layer: str) -> torch.Tensor:
        """[B], the blocks of the state that the pass starts from."""
        group = self.engine.storage.states[layer].group
        if self._forward is not None and layer in self._forward.unwritten:
            blocks = self._forward.state_from[group]
        else:
            blocks = self._states(group, self._counts())
        return self.engine.storage.index(blocks)

    def _counts(self) -> Numbers:
        return np.array([row.count(self.length) for row in self._rows()], np.int64)

    # --- changes between passes ---

    def select(self, indices: Sequence[int]) -> None:
        """The sequences become those with these indices, some perhaps several times."""
        if self.rows is None and not self.closed:
            return  # nothing is stored yet
        with self.engine.working():
            self._choose(indices)

    def _choose(self, indices: Sequence[int]) -> None:
        self.engine.enter(self)
        self.settle()
        rows = self._rows()
        kept = set(indices)
        gone = [row.slot for at, row in enumerate(rows) if at not in kept and row.slot >= 0]
        self.engine.manager.release(gone)
        used: set[int] = set()
        chosen: list[Row] = []
        for at in indices:
            chosen.append(self._twin(rows[at]) if at in used else rows[at])
            used.add(at)
        self.rows = chosen

    def twin(self) -> Session:
        """A second session with the same tokens."""
        if self.rows is None and not self.closed:
            return Session(self.engine)
        with self.engine.working():
            self.engine.enter(self)
            self.settle()
            twin = Session(self.engine, [self._twin(row) for row in self._rows()], self.length)
        twin.seen, twin.cross_seen = dict(self.seen), dict(self.cross_seen)
        twin.encoder_len, twin.recording = self.encoder_len, self.recording
        return twin

    def _twin(self, row: Row) -> Row:
        tokens = None if row.tokens is None else list(row.tokens)
        if row.slot < 0:
            request = self.engine.manager.request(tokens or [])
            return Row(pad=row.pad, tokens=tokens, request=request)
        slot = self.engine.fork(row.slot, self._make_room)
        return Row(slot=slot, pad=row.pad, tokens=tokens, request=row.request)

    def crop(self, columns: int) -> None:
        """Take the last columns back; what past recording kept for that may go then.

        Raises:
            CacheStateError: blocks that the remaining tokens read were given back.
        """
        self.settle()
        self._unsettled = 0
        if not columns:
            return
        rows, length = self._rows(), max(0, self.length - columns)
        admitted = [row for row in rows if row.slot >= 0]
        self.engine.roll_back([row.slot for row in admitted], [row.count(length) for row in admitted])
        for row in rows:
            if row.tokens is not None:
                del row.tokens[row.count(length) :]
        self.length = length
        self.seen = dict.fromkeys(self.seen, length)

    def reset(self) -> None:
        """Forget all tokens; the next pass may be of another batch."""
        self.close(keep=False)
        self._start(None, 0)

    def close(self, *, keep: bool = True) -> None:
        """Give everything back.

        Args:
            keep: a pool may keep the rows for their next turn.
        """
        if self.closed:
            return
        self.check_in()
        if self.unfinished:
            self.abort()
            return
        self.closed = True
        rows, self.rows = self.rows or [], None
        self.engine.leave(self, [row for row in rows if row.slot >= 0], self.length, keep=keep)
