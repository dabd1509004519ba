"""Recorder: watches a manager, and turns what happens to its keys into batches of events for sinks.

While the manager works only bare facts are noted. `publish` makes the records and hands them on: call it once a step,
for instance while the device computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvframe.blocks import KVCacheManager, TokenChain
from kvframe.blocks.keys import Digests
from kvframe.events.errors import EventSinkError
from kvframe.events.facts import Came, Went
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
    """

    def __init__(
        self, sinks: Sequence[EventSink] = (), medium: str = "GPU", data_parallel_rank: int | None = None
    ) -> None:
        self.sinks = list(sinks)
        self._medium, self._rank = medium, data_parallel_rank
        self._facts: list[Came | Went] = []
        self._sequence = 0
        self._manager: KVCacheManager | None = None

    # --- what the manager tells ---

    def attach(self, manager: KVCacheManager) -> None:
        """Watch this manager from now on. Keys that an earlier one had are cleared."""
        if self._sequence or self._facts:
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
        self._catch_up()
        self._log.close(row)

    def stored(self, group: int, digest: bytes, row: int, end: int) -> None:
        """A key came."""
        if row < 0:
            self._facts.append(Came(group, [digest], None, [end], np.zeros((1, 0), np.uint32)))
            return
        width = self._unit if end % self._blocks[group] else self._blocks[group]
        tokens = self._log.row(row)[end - width : end].reshape(1, -1).copy()
        self._facts.append(Came(group, [digest], self._ledger.request(row).chain, [end], tokens))

    def stored_many(self, group: int, digests: Digests, rows: Any, ends: npt.NDArray[np.intp]) -> None:
        """Whole blocks' keys came."""
        hashes = [row.tobytes() for row in digests]
        chains: TokenChain | list[TokenChain]
        if isinstance(rows, np.ndarray):
            requests = self._ledger.requests
            chains = [request.chain for row in rows.tolist() if (request := requests[row]) is not None]
        elif rows >= 0:
            self._log.row(rows)
            chains = self._ledger.request(rows).chain
            rows = np.full(len(ends), rows)
        else:
            no_ids = np.zeros((len(hashes), 0), np.uint32)
            self._facts.append(Came(group, hashes, None, [0] * len(hashes), no_ids))
            return
        tokens = self._log.blocks(rows, np.asarray(ends, np.intp), self._blocks[group])
        self._facts.append(Came(group, hashes, chains, ends.tolist(), tokens))

    def removed(self, group: int, digests: list[bytes]) -> None:
        """Keys went."""
        self._facts.append(Went(group, digests))

    def cleared(self) -> None:
        """All keys went."""
        self._facts.append(Went(0, None))

    def _catch_up(self) -> None:
        if self._manager is not None and self._manager.cache is not None:
            self._manager.cache.tell()

    # --- what the sinks get ---

    def publish(self) -> EventBatch | None:
        """Make a batch of what happened since the last call, and hand it to the sinks; None if nothing did.

        Raises:
            EventSinkError: a sink failed; the others have got the batch.
        """
        self._catch_up()
        facts, self._facts = self._facts, []
        if not facts:
            return None
        batch = EventBatch(
            sequence=self._sequence,
            time=time.time(),
            events=tuple(self._maker.events(facts)),
            data_parallel_rank=self._rank,
        )
        self._sequence += 1
        failures = [error for sink in self.sinks if (error := _handed(sink, batch)) is not None]
        if failures:
            raise failures[0]
        return batch

    def close(self) -> None:
        """Publish what is left, and close the sinks that can be closed."""
        try:
            self.publish()
        finally:
            for sink in self.sinks:
                close = getattr(sink, "close", None)
                if close is not None:
                    close()


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
