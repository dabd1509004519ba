"""HitSearch: the longest prefix whose alive entries are cached in every group at once, found in one pass."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.blocks.config import BlockConfig
from kvframe.blocks.hashing import TokenChain
from kvframe.blocks.keys import Digests
from kvframe.blocks.prefix import PrefixCache
from kvframe.blocks.results import HitLimit
from kvframe.checks import cdiv

Ids = npt.NDArray[np.int32]


@attrs.frozen(kw_only=True)
class Hit:
    """A prefix found in the cache. Nothing is held yet: use it before the next call that takes blocks.

    Args:
        tokens: its length.
        blocks: by group, one id an entry up to the hit's end, 0 where it needs none; empty for groups without keys.
        junction: a longer length that the dense groups hold and a sparser one does not, 0 if there is none.
    """

    tokens: int = 0
    blocks: tuple[list[int], ...] = ()
    junction: int = 0


@attrs.frozen(kw_only=True)
class _Dense:
    """What a dense group has: blocks of whole entries from the start, and perhaps the start of one more."""

    run: Ids
    tail: int
    covered: int


class HitSearch:
    """Searches the prefix cache for a request's longest hit (lifetime.md, "Hit").

    A length is valid in a group if every entry that is alive at it is cached. Dense groups bound it; among the lengths
    below, validity may come and go, so the others are asked about the longest candidate, and if that fails about all.
    """

    def __init__(self, config: BlockConfig, cache: PrefixCache | None) -> None:
        self._config = config
        self._groups = config.groups
        self._cache = cache if config.reads_cache else None
        self._dense = tuple(g for g in config.keyed if config.groups[g].dense)
        self._sparse = tuple(g for g in config.keyed if not config.groups[g].dense)
        self._align = config.alignment
        self._drop = {g: config.drop_unit(g) for g in config.keyed}
        self.miss = Hit(blocks=tuple([] for _ in config.groups))

    @property
    def has_dense(self) -> bool:
        """Whether a group needs every entry of a hit."""
        return bool(self._dense)

    def find(self, chain: TokenChain) -> Hit:
        """The longest hit, of at most all tokens but one."""
        cache = self._cache
        if cache is None or not chain.num_units or self._starts_nowhere(cache, chain):
            return self.miss
        words = _words(chain)
        dense = {g: self._covered(cache, g, words) for g in self._dense}
        length = self._bound(chain, dense)
        if length and not self._top_valid(cache, words, length):
            length = self._best(cache, words, length)
        junction = 0
        if self._dense:
            first = self._dense[0]
            alone = self._floor(min(dense[first].covered - self._drop[first], chain.num_tokens - 1))
            junction = alone if alone > length else 0
        if not length:
            return attrs.evolve(self.miss, junction=junction) if junction else self.miss
        blocks = tuple(self._blocks(cache, g, words, length, dense) for g in range(len(self._groups)))
        return Hit(tokens=length, blocks=blocks, junction=junction)

    def _starts_nowhere(self, cache: PrefixCache, chain: TokenChain) -> bool:
        """Whether a dense group lacks the first entry, so that there is nothing to search for."""
        if not self._dense or self._config.fine_grained:
            return False
        group = self._dense[0]
        first = chain.hash_at(self._groups[group].lifetime.block)
        return not first or not cache.find(group, first)

    def _floor(self, tokens: int) -> int:
        return max(0, tokens) // self._align * self._align

    def _bound(self, chain: TokenChain, dense: dict[int, _Dense]) -> int:
        hashed = chain.num_units * chain.unit
        limits = [chain.num_tokens - 1, *(hashed - self._drop[g] for g in self._config.keyed)]
        limits += [dense[g].covered - self._drop[g] for g in dense]
        return self._floor(min(limits))

    # --- dense groups ---

    def _covered(self, cache: PrefixCache, g: int, words: Digests) -> _Dense:
        unit, block = self._config.hash_unit, self._groups[g].lifetime.block
        per_block = block // unit
        ends = words[per_block - 1 :: per_block]
        parts: list[Ids] = []
        start, size = 0, 8
        while start < len(ends):
            found = cache.find_many(g, ends[start : start + size])
            missing = (found == 0).nonzero()[0]
            if missing.size:
                parts.append(found[: missing[0]])
                break
            parts.append(found)
            start, size = start + size, size * 8
        return self._tail(cache, g, words, np.concatenate(parts) if parts else np.zeros(0, np.int32))

    def _tail(self, cache: PrefixCache, g: int, words: Digests, run: Ids) -> _Dense:
        """What follows a run of whole entries: perhaps the start of one more."""
        unit, block = self._config.hash_unit, self._groups[g].lifetime.block
        per_block = block // unit
        first = len(run) * per_block
        if self._config.fine_grained and per_block > 1:
            for at in range(min(first + per_block - 1, len(words)) - 1, first - 1, -1):
                if tail := cache.find(g, words[at].tobytes()):
                    return _Dense(run=run, tail=tail, covered=(at + 1) * unit)
        return _Dense(run=run, tail=0, covered=len(run) * block)

    # --- sparse groups ---

    def _alive(self, g: int, length: Any) -> tuple[Any, Any, Any]:
        """The entries that a hit of `length` tokens needs: those below `stop` and outside [lo, hi)."""
        lifetime = self._groups[g].lifetime
        lo, hi = lifetime.dead(length + lifetime.slack, length)
        stop = -(-(length + self._drop[g]) // lifetime.block)
        hi = np.minimum(hi, stop)
        lo = np.minimum(lo, hi)
        return lo, hi, stop

    def _top_valid(self, cache: PrefixCache, words: Digests, bound: int) -> bool:
        return all(self._missing_entry(cache, g, words, bound) is None for g in self._sparse)

    def _missing_entry(self, cache: PrefixCache, g: int, words: Digests, length: int) -> int | None:
        """The last entry that a hit of `length` tokens lacks in group `g`, None if it lacks none."""
        lifetime = self._groups[g].lifetime
        if lifetime.state:
            held = cache.find(g, words[length // self._config.hash_unit - 1].tobytes())
            return None if held else cdiv(length, lifetime.block) - 1
        lo, hi, stop = (int(value) for value in self._alive(g, length))
        per_block = lifetime.block // self._config.hash_unit
        entries = np.concatenate((np.arange(lo), np.arange(hi, stop)))
        found = cache.find_many(g, words[(entries + 1) * per_block - 1])
        missing = (found == 0).nonzero()[0]
        return int(entries[missing[-1]]) if missing.size else None

    def _valid(
        self, cache: PrefixCache, g: int, words: Digests, lengths: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """Which of the lengths (multiples of the alignment) group `g` can serve."""
        lifetime, unit = self._groups[g].lifetime, self._config.hash_unit
        if lifetime.state:
            flags: npt.NDArray[np.bool_] = cache.find_many(g, words[lengths // unit - 1]) > 0
            return flags
        lo, hi, stop = self._alive(g, lengths)
        per_block = lifetime.block // unit
        ends = words[per_block - 1 :: per_block][: int(stop.max())]
        have = np.concatenate(([0], np.cumsum(cache.find_many(g, ends) > 0)))
        valid: npt.NDArray[np.bool_] = (have[lo] == lo) & (have[stop] - have[hi] == stop - hi)
        return valid

    def _best(self, cache: PrefixCache, words: Digests, bound: int) -> int:
        lengths = np.arange(self._align, bound + 1, self._align)
        for g in self._sparse:
            if lengths.size:
                lengths = lengths[self._valid(cache, g, words, lengths)]
        return int(lengths[-1]) if lengths.size else 0

    # --- the blocks of a hit ---

    def _blocks(
        self, cache: PrefixCache, g: int, words: Digests, length: int, dense: dict[int, _Dense]
    ) -> list[int]:
        if g not in self._drop:
            return []
        lifetime, unit = self._groups[g].lifetime, self._config.hash_unit
        count = cdiv(length, lifetime.block)
        if g in dense:
            ids: list[int] = dense[g].run[:count].tolist()
            return ids if len(ids) == count else [*ids, dense[g].tail]
        if lifetime.state:
            return [0] * (count - 1) + [cache.find(g, words[length // unit - 1].tobytes())]
        lo, hi, _ = (int(value) for value in self._alive(g, length))
        per_block = lifetime.block // unit
        row = np.zeros(count, np.int32)
        alive = np.concatenate((np.arange(min(lo, count)), np.arange(min(hi, count), count)))
        row[alive] = cache.find_many(g, words[(alive + 1) * per_block - 1])
        filled: list[int] = row.tolist()
        return filled

    # --- why it is no longer ---

    def explain(self, chain: TokenChain) -> HitLimit:
        """Which group and which entry ended the hit."""
        cache, words = self._cache, _words(chain)
        if cache is None:
            never = [group.name for group in self._groups if group.lifetime.hits == "never"]
            rule = f"group {never[0]} forbids hits" if never else "prefix caching is off"
            return HitLimit(
                hit_tokens=0, limited_by=never[0] if never else None, entry=None, rule=rule, by_group={}
            )
        hit = self.find(chain).tokens
        dense = {g: self._covered(cache, g, words) for g in self._dense}
        cap = self._floor(min(chain.num_tokens - 1, chain.num_units * chain.unit))
        alone = {g: self._alone(cache, g, words, cap, dense) for g in self._config.keyed}
        by_group = {self._groups[g].name: length for g, length in alone.items()}
        if hit == cap:
            rule = f"at least one of {chain.num_tokens} tokens is computed, in steps of {self._align}"
            return HitLimit(hit_tokens=hit, limited_by=None, entry=None, rule=rule, by_group=by_group)
        wanted = hit + self._align
        limiting = min(
            alone, key=lambda g: (alone[g] >= wanted and self._serves(cache, g, words, wanted), alone[g])
        )
        entry = self._first_gap(cache, limiting, words, wanted, dense)
        name = self._groups[limiting].name
        rule = f"a hit of {wanted} tokens needs entry {entry} of group {name}, which is not cached"
        if entry is None:
            rule = f"group {name} leaves its last {self._drop[limiting]} tokens to the draft model"
        return HitLimit(hit_tokens=hit, limited_by=name, entry=entry, rule=rule, by_group=by_group)

    def _alone(self, cache: PrefixCache, g: int, words: Digests, cap: int, dense: dict[int, _Dense]) -> int:
        if g in dense:
            return self._floor(min(cap, dense[g].covered - self._drop[g]))
        bound = self._floor(min(cap, len(words) * self._config.hash_unit - self._drop[g]))
        lengths = np.arange(self._align, bound + 1, self._align)
        lengths = lengths[self._valid(cache, g, words, lengths)] if lengths.size else lengths
        return int(lengths[-1]) if lengths.size else 0

    def _serves(self, cache: PrefixCache, g: int, words: Digests, length: int) -> bool:
        return g in self._dense or self._missing_entry(cache, g, words, length) is None

    def _first_gap(
        self, cache: PrefixCache, g: int, words: Digests, length: int, dense: dict[int, _Dense]
    ) -> int | None:
        reach = length + self._drop[g]
        if reach > len(words) * self._config.hash_unit:
            return None
        if g in dense:
            return len(dense[g].run) if dense[g].covered < reach else None
        return self._missing_entry(cache, g, words, length)


def _words(chain: TokenChain) -> Digests:
    return np.frombuffer(bytes(chain.digests), np.uint64).reshape(-1, 4)
