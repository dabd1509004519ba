"""EventMaker: facts that a recorder noted, as records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from kvframe.blocks import BlockConfig, TokenChain
from kvframe.blocks.hashing import DIGEST_BYTES
from kvframe.events.facts import Came, Went
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
        config: groups and hash unit.
        medium: where the blocks are.
    """

    def __init__(self, config: BlockConfig, medium: str) -> None:
        self._unit, self._medium = config.hash_unit, medium
        self._blocks = tuple(group.lifetime.block for group in config.groups)
        self._dense = tuple(group.dense for group in config.groups)

    def events(self, facts: Iterable[Came | Went]) -> Iterator[Event]:
        """The records, in order."""
        run: _Run | None = None
        gone: tuple[int, list[bytes]] | None = None
        for fact in facts:
            if run is not None and isinstance(fact, Went):
                yield self._stored(run)
                run = None
            if gone is not None and not (isinstance(fact, Went) and fact.digests and fact.group == gone[0]):
                yield self._removed(*gone)
                gone = None
            if isinstance(fact, Came):
                for part in self._runs(fact):
                    if run is not None and self._follows(run, part):
                        run = self._joined(run, part)
                        continue
                    if run is not None:
                        yield self._stored(run)
                    run = part
            elif fact.digests is None:
                yield AllBlocksCleared()
            else:
                gone = (fact.group, [*(gone[1] if gone else ()), *fact.digests])
        if run is not None:
            yield self._stored(run)
        if gone is not None:
            yield self._removed(*gone)

    def _removed(self, group: int, digests: list[bytes]) -> BlockRemoved:
        return BlockRemoved(block_hashes=tuple(digests), medium=self._medium, group_idx=group)

    # --- runs ---

    def _runs(self, came: Came) -> Iterator[_Run]:
        """One fact's keys, taken apart where they do not follow one another."""
        ids, width = came.tokens.tolist(), came.tokens.shape[1]
        chains = came.chains if isinstance(came.chains, list) else [came.chains] * len(ids)
        run: _Run | None = None
        for chain, end, digest, tokens in zip(chains, came.ends, came.digests, ids, strict=True):
            part = _Run(came.group, chain, width, [end], [digest], tokens)
            if run is not None and self._follows(run, part):
                run.ends.append(end)
                run.digests.append(digest)
                run.tokens.extend(tokens)
                continue
            if run is not None:
                yield run
            run = part
        if run is not None:
            yield run

    def _follows(self, run: _Run, part: _Run) -> bool:
        if run.group != part.group or run.chain is not part.chain or run.width != part.width:
            return False
        whole = part.ends[0] % self._blocks[run.group] == 0
        return run.chain is None or (whole and run.ends[-1] + run.width == part.ends[0])

    def _joined(self, run: _Run, part: _Run) -> _Run:
        return run._replace(
            ends=run.ends + part.ends, digests=run.digests + part.digests, tokens=run.tokens + part.tokens
        )

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
        start = (run.ends[0] - run.width) // self._unit * DIGEST_BYTES
        return BlockStored(
            block_hashes=tuple(run.digests),
            parent_block_hash=bytes(chain.digests[start - DIGEST_BYTES : start]) if start else None,
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


def _untagged(keys: tuple[Any, ...] | None) -> ExtraKey | None:
    """Extra keys without their tags, as events carry them, and without the salt, which is the tenant's secret."""
    plain: list[Any] = []
    for tag, value, *more in keys or ():
        if tag == "mm":
            plain.append((value, *more))
        elif tag != "cache_salt":
            plain.append(value)
    return tuple(plain) or None
