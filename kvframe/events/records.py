"""Event records: what a router is told of the prefix cache, in the form that the field's routers read."""

from __future__ import annotations

from typing import Any

import attrs

ExtraKey = tuple[Any, ...]  # of one block, the salt left out


@attrs.frozen(kw_only=True)
class BlockStored:
    """Keys whose first copy came. The blocks follow one another in one request, so each is the next one's parent.

    `len(block_hashes) * block_size == len(token_ids)`, unless the tokens are not known (a restored snapshot): then
    there are none.

    Args:
        block_hashes: the keys. A key is one of its group only: the same hash may be stored in several.
        parent_block_hash: hash of the tokens before the first block; None at a prompt's start. It may not be stored.
        token_ids: the blocks' tokens, one block after the other.
        block_size: tokens of a block; of a hash unit, for a block of which only the start is keyed.
        lora_id: always None; adapters go by name.
        medium: where the blocks are, such as "GPU".
        lora_name: the adapter.
        extra_keys: for each block what beside tokens its hash covers, without the salt: adapter name, (identifier,
            offset) of images and the like, digest of prompt embeddings; None if no block has any.
        group_idx: index of the group.
        block_positions: for each block its table entry, in groups that do not keep every block; else None.
    """

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: tuple[ExtraKey | None, ...] | None = None
    group_idx: int = 0
    block_positions: tuple[int, ...] | None = None


@attrs.frozen(kw_only=True)
class BlockRemoved:
    """Keys whose last copy went."""

    block_hashes: tuple[bytes, ...]
    medium: str | None = None
    group_idx: int = 0


@attrs.frozen(kw_only=True)
class AllBlocksCleared:
    """All keys went."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


@attrs.frozen(kw_only=True)
class EventBatch:
    """Events since the batch before, in order.

    Args:
        sequence: 0, 1, 2, … without gaps, from the recorder's start.
        time: seconds since the epoch.
        events: what happened.
        data_parallel_rank: whose events they are, where several engines serve one model.
    """

    sequence: int
    time: float
    events: tuple[Event, ...]
    data_parallel_rank: int | None = None


def as_map(event: Event) -> dict[str, Any]:
    """An event as the wire has it: its fields, and its type's name under "type"."""
    fields = {name: getattr(event, name) for name in _FIELDS[type(event)]}
    return {"type": type(event).__name__, **fields}


_FIELDS: dict[type, tuple[str, ...]] = {
    kind: tuple(field.name for field in attrs.fields(kind))
    for kind in (BlockStored, BlockRemoved, AllBlocksCleared)
}
