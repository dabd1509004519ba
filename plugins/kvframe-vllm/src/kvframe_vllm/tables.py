"""What the manager hands to vLLM's scheduler: block ids by group, in the form that its `KVCacheBlocks` has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvframe.blocks import BlockRequest, Hit


class Block(NamedTuple):
    """One block, for callers that want objects."""

    block_id: int

    @property
    def is_null(self) -> bool:
        """Whether it is the null block, which stands where nothing is held."""
        return self.block_id == 0


class Blocks:
    """Block ids of one request, by group.

    Args:
        ids: one list a group.
    """

    __slots__ = ("ids",)

    def __init__(self, ids: tuple[list[int], ...]) -> None:
        self.ids = ids

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """The ids of all or some groups; with `allow_none`, None where there is none at all."""
        ids = self.ids if group_ids is None else tuple(self.ids[group] for group in group_ids)
        return ids if not allow_none or any(ids) else None

    @property
    def blocks(self) -> tuple[list[Block], ...]:
        """The same as objects."""
        return tuple([Block(block) for block in row] for row in self.ids)


class Nothing(Blocks):
    """No block in any group: by far the most frequent answer, so one object serves all requests."""

    __slots__ = ()

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """Empty lists, or None."""
        return None if allow_none else super().get_block_ids(group_ids=group_ids)


class Found(Blocks):
    """A prefix hit, on its way from the lookup to the admission.

    Args:
        hit: the hit; nothing is held yet.
        request: the request as the block manager knows it, with its hashes.
    """

    __slots__ = ("hit", "request")

    def __init__(self, hit: Hit, request: BlockRequest) -> None:
        super().__init__(hit.blocks)
        self.hit, self.request = hit, request
