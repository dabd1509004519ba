"""PrefixIndex: what an engine has cached, kept by its events alone. For routers, and for tests of them."""

from __future__ import annotations

from kvframe.events.records import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch


class PrefixIndex:
    """The keys of one engine, by group.

    A subscriber that joined late replays from 0; one that sees a gap replays from `next_sequence`. Batches that it has
    seen already are passed over, so replayed and live ones may overlap.

    Attributes:
        next_sequence: the number of the batch that is due.
        complete: every batch so far was seen; False after a gap, until all keys are cleared.
    """

    def __init__(self) -> None:
        self.next_sequence = 0
        self.complete = True
        self._keys: dict[int, dict[bytes, BlockStored]] = {}

    def apply(self, batch: EventBatch) -> bool:
        """Take note of a batch; says whether it was new."""
        if batch.sequence < self.next_sequence:
            return False
        self.complete &= batch.sequence == self.next_sequence
        self.next_sequence = batch.sequence + 1
        for event in batch.events:
            if isinstance(event, BlockStored):
                self._keys.setdefault(event.group_idx, {}).update(dict.fromkeys(event.block_hashes, event))
            elif isinstance(event, BlockRemoved):
                group = self._keys.setdefault(event.group_idx, {})
                for digest in event.block_hashes:
                    group.pop(digest, None)
            elif isinstance(event, AllBlocksCleared):
                self._keys.clear()
                self.complete = True
        return True

    def __contains__(self, key: tuple[int, bytes]) -> bool:
        group, digest = key
        return digest in self._keys.get(group, ())

    def __len__(self) -> int:
        return sum(map(len, self._keys.values()))

    def keys(self) -> set[tuple[int, bytes]]:
        """(group, hash) of everything cached."""
        return {(group, digest) for group, digests in self._keys.items() for digest in digests}

    def event_of(self, group: int, digest: bytes) -> BlockStored | None:
        """The event that brought a key: its medium, adapter and tokens; None if it is not cached."""
        return self._keys.get(group, {}).get(digest)
