"""Session: the sequences of one batch, their rows in the block manager, and the forward pass that is under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvframe.blocks import Refused
from kvframe.errors import UsageError
from kvframe_transformers.engine import Engine
from kvframe_transformers.errors import CacheStateError
from kvframe_transformers.forward import Forward, Places
from kvframe_transformers.loans import Loans
from kvframe_transformers.rows import Row, check_length, check_padding, learn
from kvframe_transformers.taking import Taker, places_of


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
        self._loans = Loans(self.engine)
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
        check_length(self._rows(), self.length + new, self.engine)
        if masked and self.tracked:
            check_padding(self._rows(), pads)
        for row in self._rows():
            if row.slot >= 0:
                self.engine.tell(row, row.count(self.length))
        if self.tracked:
            learn(self._rows(), ids, self.length, new)
        start, self.length = self.length, self.length + new
        self._forward = Forward(start=start, stop=self.length, unwritten=set(self.engine.written_layers))
        self._unsettled = self._unsettled if self.recording else 0
        taker = Taker(
            self.engine,
            self._rows(),
            encoder_len=self.encoder_len,
            unsettled=self._unsettled,
            make_room=self._make_room,
        )
        try:
            taker.take(self._forward, whole=self.recording)
        except BaseException:
            self.abort()
            raise
        self._unsettled += new if self.recording else 0
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
        self._loans.drop()
        for row in rows:
            row.tokens = None  # a pool keeps no row whose tokens are unknown
        self.close()

    @property
    def loans(self) -> Loans:
        """The states that the model has in hand."""
        return self._loans.of(self._rows(), self.length, self._forward)

    def check_in(self) -> None:
        """Store the states that the model has changed in place."""
        if self.rows is not None:
            self.loans.check_in()

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

    @property
    def places(self) -> Places:
        """Where the batch's tokens lie now."""
        return places_of(self.engine, self._rows())

    def _make_room(self, refused: Refused | None) -> None:
        self.engine.make_room(refused, self.batch, self.longest, self.abort)

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
        rows, kept = self._rows(), set(indices)
        held = [row for at, row in enumerate(rows) if at in kept]
        self.rows = held  # what is given up if there is no room
        self.engine.manager.release([row.slot for row in rows if row not in held and row.slot >= 0])
        used: set[int] = set()
        chosen: list[Row] = []
        for at in indices:
            if at in used:
                held.append(self._copied(rows[at], self._make_room))
                chosen.append(held[-1])
            else:
                chosen.append(rows[at])
            used.add(at)
        self.rows = chosen

    def twin(self) -> Session:
        """A second session with the same tokens.

        Raises:
            PoolFullError: there is no room for it.
        """
        if self.rows is None and not self.closed:
            return Session(self.engine)
        copies: list[Row] = []

        def give_up() -> None:
            self.engine.manager.release([row.slot for row in copies if row.slot >= 0])

        def room(refused: Refused | None) -> None:
            self.engine.make_room(refused, self.batch, self.longest, give_up)

        with self.engine.working():
            self.engine.enter(self)
            self.settle()
            for row in self._rows():
                copies.append(self._copied(row, room))
        twin = Session(self.engine, copies, self.length)
        twin.seen, twin.cross_seen = dict(self.seen), dict(self.cross_seen)
        twin.encoder_len, twin.recording = self.encoder_len, self.recording
        return twin

    def _copied(self, row: Row, room: Callable[[Refused | None], None]) -> Row:
        tokens = None if row.tokens is None else list(row.tokens)
        if row.slot < 0:
            request = self.engine.manager.request(tokens or [], prompt=max(1, len(tokens or ())))
            return Row(pad=row.pad, tokens=tokens, request=request)
        slot = self.engine.fork(row.slot, room)
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
