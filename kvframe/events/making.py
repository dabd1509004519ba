"""EventMaker: facts that a recorder noted, as records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from kvframe.blocks import BlockConfig, TokenChain
from kvframe.blocks.keys import Digests
from kvframe.events.facts import Came, Fact, Went
from kvframe.events.records import AllBlocksCleared, BlockRemoved, BlockStored, Event, ExtraKey


class _Run(NamedTuple):
    """Keys of one group that follow one another in one request."""

    group: int
    chain: TokenChain | None
    width: int
    ends: list[int]
    digests: list[bytes]
    tokens: list[int]


class EventMaker:
    """Makes records, neighbours merged into one.

    Args:
        config: the groups.
        medium: where the blocks are.
    """

    def __init__(self, config: BlockConfig, medium: str) -> None:
        self._medium = medium
        self._blocks = tuple(group.lifetime.block for group in config.groups)
        self._copies: dict[tuple[int, bytes], int] = {}  # blocks that hold each key
        self._dense = tuple(group.dense for group in config.groups)

    def events(self, facts: Iterable[Fact]) -> Iterator[Event]:
        """The records, in order: of the first copy of a key, and when the last one goes."""
        last: _Run | Went | None = None
        for part in self._parts(facts):
            joined = None if last is None else self._joined(last, part)
            if joined is None and last is not None:
                yield self._record(last)
            last = joined or part
        if last is not None:
            yield self._record(last)

    def _parts(self, facts: Iterable[Fact]) -> Iterator[_Run | Went]:
        for fact in facts:
            if isinstance(fact, Came):
                yield from self._runs(fact)
            elif isinstance(fact, Went):
                if fact.digests is None:
                    self._copies.clear()
                    yield fact
                elif gone := self._last_copies(fact.group, fact.digests):
                    yield Went(fact.group, gone)

    def _joined(self, part: _Run | Went, following: _Run | Went) -> _Run | Went | None:
        """Two neighbours as one, if they can be."""
        if isinstance(part, _Run) and isinstance(following, _Run):
            if not self._follows(part, following):
                return None
            part.ends.extend(following.ends)
            part.digests.extend(following.digests)
            part.tokens.extend(following.tokens)
            return part
        if isinstance(part, _Run) or isinstance(following, _Run) or part.group != following.group:
            return None
        if not isinstance(part.digests, list) or not isinstance(following.digests, list):
            return None  # all were cleared
        part.digests.extend(following.digests)
        return part

    def _record(self, part: _Run | Went) -> Event:
        if isinstance(part, _Run):
            return self._stored(part)
        if part.digests is None:
            return AllBlocksCleared()
        return BlockRemoved(
            block_hashes=tuple(_hashes(part.digests)), medium=self._medium, group_idx=part.group
        )

    def _last_copies(self, group: int, digests: list[bytes] | Digests) -> list[bytes]:
        """Those of the keys of which no copy is left."""
        copies, last = self._copies, []
        for digest in _hashes(digests):
            left = copies.get((group, digest), 0) - 1
            if left > 0:
                copies[group, digest] = left
            elif copies.pop((group, digest), 0):
                last.append(digest)
        return last

    # --- runs ---

    def _runs(self, came: Came) -> Iterator[_Run]:
        """One fact's new keys, each alone."""
        ids, width = came.tokens.tolist(), came.tokens.shape[1]
        chains = came.chains if isinstance(came.chains, list) else [came.chains] * len(ids)
        copies = self._copies
        for chain, end, digest, tokens in zip(chains, came.ends, _hashes(came.digests), ids, strict=True):
            key = (came.group, digest)
            copies[key] = copies.get(key, 0) + 1
            if copies[key] == 1:
                yield _Run(came.group, chain, width, [end], [digest], tokens)

    def _follows(self, run: _Run, part: _Run) -> bool:
        if run.group != part.group or run.chain is not part.chain or run.width != part.width:
            return False
        whole = part.ends[0] % self._blocks[run.group] == 0
        return run.chain is None or (whole and run.ends[-1] + run.width == part.ends[0])

    # --- the record of a run ---

    def _stored(self, run: _Run) -> BlockStored:
        chain, block = run.chain, self._blocks[run.group]
        if chain is None:
            return BlockStored(
                block_hashes=tuple(run.digests),
                parent_block_hash=None,
                token_ids=(),
                block_size=block,
                medium=self._medium,
                group_idx=run.group,
            )
        return BlockStored(
            block_hashes=tuple(run.digests),
            parent_block_hash=chain.hash_at(run.ends[0] - run.width) or None,
            token_ids=tuple(run.tokens),
            block_size=run.width,
            medium=self._medium,
            lora_name=chain.extra.lora_name,
            extra_keys=None if chain.extra.plain else self._extra_keys(chain, run),
            group_idx=run.group,
            block_positions=(
                None if self._dense[run.group] else tuple([(end - 1) // block for end in run.ends])
            ),
        )

    def _extra_keys(self, chain: TokenChain, run: _Run) -> tuple[ExtraKey | None, ...]:
        return tuple(_untagged(chain.extra.of_unit(end - run.width, end)) for end in run.ends)


def _hashes(digests: list[bytes] | Digests) -> list[bytes]:
    return digests if isinstance(digests, list) else [row.tobytes() for row in digests]


def _untagged(keys: tuple[Any, ...] | None) -> ExtraKey | None:
    """Extra keys without their tags, as events carry them, and without the salt, which is the tenant's secret."""
    plain: list[Any] = []
    for tag, value, *more in keys or ():
        if tag == "mm":
            plain.append((value, *more))
        elif tag != "cache_salt":
            plain.append(value)
    return tuple(plain) or None
