"""The msgpack form of batches, the one that the field's routers read: [time, [event, …], rank], each event a map."""

from __future__ import annotations

from typing import Any

from kvframe.errors import MissingDependencyError
from kvframe.events.records import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch, as_map

END = -1  # the sequence number that ends a replay


def needed(module: str, library: str) -> MissingDependencyError:
    """The error for a library of the extra `events` that is not installed."""
    return MissingDependencyError(module=module, needs=library, extra="events")


def _msgpack() -> Any:
    try:
        import msgspec
    except ImportError as error:
        raise needed("kvframe.events", "msgspec") from error
    return msgspec.msgpack


def encoder() -> Any:
    """A function from a batch to bytes.

    Raises:
        MissingDependencyError: msgspec is not installed.
    """
    encode = _msgpack().Encoder().encode

    def payload(batch: EventBatch) -> bytes:
        events = [as_map(event) for event in batch.events]
        made: bytes = encode([batch.time, events, batch.data_parallel_rank])
        return made

    return payload


def decode(sequence: int, payload: bytes) -> EventBatch:
    """A batch from its bytes; fields that a newer version has added are left out.

    Args:
        sequence: the number that came with it.
        payload: the bytes.

    Raises:
        MissingDependencyError: msgspec is not installed.
    """
    time, events, *rank = _msgpack().decode(payload)
    return EventBatch(
        sequence=sequence,
        time=time,
        events=tuple(_event(fields) for fields in events),
        data_parallel_rank=rank[0] if rank else None,
    )


def _event(fields: dict[str, Any]) -> Event:
    if fields["type"] == "AllBlocksCleared":
        return AllBlocksCleared()
    if fields["type"] == "BlockRemoved":
        return BlockRemoved(
            block_hashes=tuple(fields["block_hashes"]),
            medium=fields.get("medium"),
            group_idx=fields.get("group_idx") or 0,
        )
    extra, positions = fields.get("extra_keys"), fields.get("block_positions")
    return BlockStored(
        block_hashes=tuple(fields["block_hashes"]),
        parent_block_hash=fields["parent_block_hash"],
        token_ids=tuple(fields["token_ids"]),
        block_size=fields["block_size"],
        lora_id=fields.get("lora_id"),
        medium=fields.get("medium"),
        lora_name=fields.get("lora_name"),
        extra_keys=None if extra is None else tuple(None if keys is None else _keys(keys) for keys in extra),
        group_idx=fields.get("group_idx") or 0,
        block_positions=None if positions is None else tuple(positions),
    )


def _keys(keys: list[Any]) -> tuple[Any, ...]:
    return tuple(tuple(key) if isinstance(key, list) else key for key in keys)
