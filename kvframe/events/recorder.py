"""Recorder: watches a manager, and turns what happens to its keys into batches of events for sinks.

While the manager works only bare facts are noted. `publish` makes the records and hands them on: call it once a step,
for instance while the device computes; or let a thread do what it can.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvframe.blocks import KVCacheManager, TokenChain
from kvframe.blocks.keys import Digests
from kvframe.events.errors import EventSinkError
from kvframe.events.facts import Came, Fact, Noted, Went
from kvframe.events.making import EventMaker
from kvframe.events.records import EventBatch
from kvframe.events.tokens import TokenLog

EventSink = Callable[[EventBatch], Any]


class Recorder:
    """A manager's `watcher` that feeds event sinks.

    Args:
        sinks: called with each batch, in this order.
        medium: where the blocks are, as events name it.
        data_parallel_rank: this engine's rank, as batches name it.
        background: records are made, and sinks called, in a thread of the recorder's own.
    """

    def __init__(
        self,
        sinks: Sequence[EventSink] = (),
        medium: str = "GPU",
        data_parallel_rank: int | None = None,
        *,
        background: bool = False,
    ) -> None:
        self.sinks = list(sinks)
        self._medium, self._rank = medium, data_parallel_rank
        self._facts: list[Fact] = []
        self._noted: list[int] = []  # places of facts that are yet to be looked up
        self._sequence = 0
        self._manager: KVCacheManager | None = None
        self._failures: list[EventSinkError] = []
        self._queue: queue.SimpleQueue[tuple[EventMaker, list[Fact]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if background:
            self._thread = threading.Thread(target=self._deliver_all, name="kvframe-events", daemon=True)
            self._thread.start()

    # --- what the manager tells ---

    def attach(self, manager: KVCacheManager) -> None:
        """Watch this manager from now on. Keys that an earlier one had are cleared."""
        if self._manager is not None:
            self._hand_over()
            self._facts.append(Went(0, None))
        self._manager, self._ledger = manager, manager.ledger
        self._log = TokenLog(manager)
        self._maker = EventMaker(manager.config, self._medium)
        self._unit = manager.config.hash_unit
        self._blocks = tuple(group.lifetime.block for group in manager.config.groups)

    def opened(self, row: int) -> None:
        """A request has got this row."""
        self._log.row(row)

    def forked(self, parent: int, row: int) -> None:
        """A request has got this row, with the tokens of another."""
        self._log.fork(parent, row)

    def appending(self, slots: int | npt.NDArray[np.intp], tokens: npt.NDArray[np.int32]) -> None:
        """One token for each of these rows."""
        self._log.append_one(slots, tokens)

    def appending_some(self, row: int, tokens: Sequence[Any]) -> None:
        """Tokens for a row."""
        self._log.append(row, tokens)

    def closing(self, row: int) -> None:
        """The row's request leaves it."""
        self._look_up()
        self._log.close(row)

    def came(self, group: int, digest: bytes, row: int, end: int) -> None:
        """A block got a key."""
        if row < 0:
            self._facts.append(Came(group, [digest], None, [end], np.zeros((1, 0), np.uint32)))
            return
        width = self._unit if end % self._blocks[group] else self._blocks[group]
        tokens = self._log.row(row)[end - width : end].reshape(1, -1).copy()
        self._facts.append(Came(group, [digest], self._ledger.request(row).chain, [end], tokens))

    def came_many(self, group: int, digests: Digests, rows: Any, ends: Any) -> None:
        """Whole blocks got keys."""
        self._noted.append(len(self._facts))
        self._facts.append(Noted(group, digests, rows, ends))

    def went(self, group: int, digests: list[bytes] | Digests) -> None:
        """Blocks lost these keys."""
        self._facts.append(Went(group, digests))

    def cleared(self) -> None:
        """All keys went."""
        self._facts.append(Went(0, None))

    def _look_up(self) -> None:
        """Whose tokens keys cover, as long as the rows are theirs."""
        noted, self._noted = self._noted, []
        for place in noted:
            fact = self._facts[place]
            if isinstance(fact, Noted):
                self._facts[place] = self._looked_up(*fact)

    def _looked_up(self, group: int, digests: Digests, rows: Any, ends: Any) -> Came:
        chains: TokenChain | list[TokenChain]
        if isinstance(rows, np.ndarray):
            requests = self._ledger.requests
            chains = [request.chain for row in rows.tolist() if (request := requests[row]) is not None]
        elif rows >= 0:
            self._log.row(rows)
            chains = self._ledger.request(rows).chain
            rows = np.full(len(ends), rows)
        else:
            return Came(group, digests, None, [0] * len(digests), np.zeros((len(digests), 0), np.uint32))
        tokens = self._log.blocks(rows, np.asarray(ends, np.intp), self._blocks[group])
        return Came(group, digests, chains, ends.tolist(), tokens)

    # --- what the sinks get ---

    def publish(self) -> EventBatch | None:
        """Make a batch of what happened since the last call, and hand it to the sinks.

        Returns:
            The batch; None if nothing happened, or if a thread makes it.

        Raises:
            EventSinkError: a sink failed, in a thread perhaps at an earlier batch; the others have got the batch.
        """
        batch = self._hand_over()
        self._raise()
        return batch

    def _hand_over(self) -> EventBatch | None:
        self._look_up()
        facts, self._facts = self._facts, []
        if facts and self._thread is not None:
            self._queue.put((self._maker, facts))
            return None
        return self._deliver(self._maker, facts) if facts else None

    def _deliver_all(self) -> None:
        while (work := self._queue.get()) is not None:
            self._deliver(*work)

    def _deliver(self, maker: EventMaker, facts: list[Fact]) -> EventBatch | None:
        events = tuple(maker.events(facts))
        if not events:
            return None  # copies of keys that others hold came or went
        batch = EventBatch(
            sequence=self._sequence, time=time.time(), events=events, data_parallel_rank=self._rank
        )
        self._sequence += 1
        self._failures += [error for sink in self.sinks if (error := _handed(sink, batch)) is not None]
        return batch

    def _raise(self) -> None:
        failures, self._failures = self._failures, []
        if failures:
            raise failures[0]

    def close(self) -> None:
        """Publish what is left, and close the sinks that can be closed.

        Raises:
            EventSinkError: a sink failed; all are closed.
        """
        try:
            self.publish()
        finally:
            if self._thread is not None:
                self._queue.put(None)
                self._thread.join()
            for sink in self.sinks:
                close = getattr(sink, "close", None)
                if close is not None:
                    close()
        self._raise()


def _handed(sink: EventSink, batch: EventBatch) -> EventSinkError | None:
    """Hand a batch to a sink. Whatever goes wrong there, the other sinks must not miss it."""
    try:
        sink(batch)
    except Exception as error:
        name = getattr(sink, "__name__", type(sink).__name__)
        failure = EventSinkError(
            sink=name, sequence=batch.sequence, reason=f"{type(error).__name__}: {error}"
        )
        failure.__cause__ = error
        return failure
    return None
