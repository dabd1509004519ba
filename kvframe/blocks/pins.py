"""Pins: cached prefixes that eviction may not take, such as a system prompt."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import attrs

from kvframe.blocks.errors import BlockError
from kvframe.blocks.hashing import TokenChain
from kvframe.blocks.hits import Hit
from kvframe.blocks.quotas import share_of
from kvframe.blocks.requests import BlockRequest
from kvframe.blocks.results import Deferred, Refused

if TYPE_CHECKING:
    from kvframe.blocks.wiring import Wiring


@attrs.frozen(kw_only=True)
class Pin:
    """A prefix that is held.

    Args:
        tokens: its length.
        blocks: the blocks that a request going on from its end reads, by group.
    """

    tokens: int
    blocks: tuple[tuple[int, ...], ...]


class Pins:
    """A manager's pinned prefixes, by name. They count as held blocks, and `BlockConfig.pin_limit` bounds them.

    What nobody may evict can still be lost by name: `KVCacheManager.evict` takes the keys of any block, and a step that
    is rolled back takes those that it brought.
    """

    def __init__(self, manager: Wiring) -> None:
        self._manager = manager
        self._pins: dict[str, Pin] = {}

    def __getitem__(self, name: str) -> Pin:
        return self._pins[name]

    def __contains__(self, name: str) -> bool:
        return name in self._pins

    def __iter__(self) -> Iterator[str]:
        return iter(self._pins)

    def __len__(self) -> int:
        return len(self._pins)

    def all(self) -> dict[str, Pin]:
        """The pins by name; the dict is the caller's."""
        return dict(self._pins)

    @property
    def num_units(self) -> int:
        """Blocks, or slabs where groups cut them, that pins keep from eviction."""
        return len(self._units(self._pins.values()))

    def pin(self, name: str, request: BlockRequest) -> Pin | Deferred | Refused:
        """Hold what is cached of a request's tokens, up to the last whole block of all groups; nothing is computed.

        To pin a prompt in full, admit a request with it first. The request given here need not run.

        Args:
            name: for `unpin`.
            request: whose tokens.

        Returns:
            The pin; Deferred ("not_cached") if none of it is cached; Refused ("pin_limit" or "tenant") if too much
            would be held.

        Raises:
            BlockError: the name is taken.
        """
        if name in self._pins:
            raise BlockError(what="name", value=name, rule="is pinned already; unpin it first")
        hit, ahead = self._whole_hit(request)
        if not hit.tokens:
            return Deferred(reason="not_cached")
        rows = [[*filter(None, row), *more] for row, more in zip(hit.blocks, ahead, strict=True)]
        pin = Pin(tokens=hit.tokens, blocks=tuple(map(tuple, rows)))
        config = self._manager.config
        limit = share_of(config.pin_limit, config.num_blocks - 1)
        excess = len(self._units([*self._pins.values(), pin])) - limit
        reason, limits = "pin_limit", self._manager.limits
        if excess <= 0 and limits is not None:
            excess = limits.over(request.chain.extra.salt, [0] * len(pin.blocks), pin.blocks)
            reason = "tenant"
        if excess > 0:
            needed = {group.name: len(row) for group, row in zip(config.groups, pin.blocks, strict=True)}
            return Refused(missing=excess, needed=needed, reason=reason)
        for group, row in enumerate(pin.blocks):
            self._manager.pool.touch(group, list(row))
        self._pins[name] = pin
        return pin

    def unpin(self, name: str) -> None:
        """Let a prefix go: it stays cached until it is evicted.

        Raises:
            BlockError: nothing is pinned by that name.
        """
        if name not in self._pins:
            raise BlockError(what="name", value=name, rule="is not pinned")
        pin = self._pins.pop(name)
        for group, row in enumerate(pin.blocks):
            self._manager.pool.give_back(group, list(row[::-1]))

    def replace(self, pins: dict[str, Pin]) -> None:
        """These pins are held from now on; the pool counts them already."""
        self._pins = pins

    def _units(self, pins: Iterable[Pin]) -> set[int]:
        cuts = [group.blocks_per_slab for group in self._manager.config.groups]
        return {block // k for pin in pins for k, row in zip(cuts, pin.blocks, strict=True) for block in row}

    def _whole_hit(self, request: BlockRequest) -> tuple[Hit, list[list[int]]]:
        """The longest hit that ends with a block of every group, and the blocks behind it that draft groups need.

        What is inside a block may move or be overwritten, so it cannot be pinned.
        """
        chain, unit = copy.copy(request.chain), self._manager.config.step_unit
        end = request.num_tokens // unit * unit
        while True:
            # A hit leaves out at least one token, so one more is claimed than there is.
            chain.num_tokens = end + 1
            hit = self._manager.longest_hit(chain)
            ahead = self._ahead(chain, hit.tokens)
            if not hit.tokens or (hit.tokens % unit == 0 and ahead is not None):
                return hit, ahead or []
            end = (hit.tokens - 1) // unit * unit

    def _ahead(self, chain: TokenChain, tokens: int) -> list[list[int]] | None:
        """By group the block behind a hit that it depends on, for a draft model; None if one is not whole."""
        config, cache = self._manager.config, self._manager.cache
        blocks: list[list[int]] = [[] for _ in config.groups]
        for g in config.keyed:
            if cache is not None and config.drop_unit(g):
                digest = chain.hash_at(tokens + config.groups[g].lifetime.block)
                block = cache.find(g, digest) if digest else 0
                if not block:
                    return None
                blocks[g] = [block]
        return blocks
