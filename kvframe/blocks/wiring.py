"""Wiring: the block manager's parts, made and joined. Resizing joins them anew with another pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvframe.blocks.admission import Admitter
from kvframe.blocks.config import BlockConfig
from kvframe.blocks.counters import Counters
from kvframe.blocks.forks import Forker, RollBack
from kvframe.blocks.hashing import TokenChain, block_hash
from kvframe.blocks.hits import Hit, HitSearch
from kvframe.blocks.keying import Keying, StateNotes
from kvframe.blocks.ledger import Ledger
from kvframe.blocks.limits import Limits
from kvframe.blocks.making import make_pool
from kvframe.blocks.pins import Pins
from kvframe.blocks.pool import Pool
from kvframe.blocks.prefix import PrefixCache
from kvframe.blocks.queues import EvictionPolicy
from kvframe.blocks.rowops import RowOps
from kvframe.blocks.rules import group_rule
from kvframe.blocks.stepping import Stepper
from kvframe.blocks.tables import BlockTables
from kvframe.blocks.tails import Tails
from kvframe.blocks.watching import Watcher


class Wiring:
    """What a manager is made of.

    Args:
        config: groups and limits.
        policies: eviction policies by name, beside kvframe's own.
        watcher: told of keys and tokens.
    """

    limits: Limits | None = None  # what bounds requests beside the pool

    def __init__(
        self,
        config: BlockConfig,
        policies: Mapping[str, EvictionPolicy] | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        self.policies = dict(policies or {})
        self._hash = block_hash(config.hash_name)
        # Where hits are forbidden no key can be looked up, so nobody is told of any.
        self._watcher = watcher if config.reads_cache else None
        rules = tuple(group_rule(config, g) for g in range(len(config.groups)))
        pool, cache = self.make(config)
        self._rules, self._notes = rules, StateNotes()
        self.counters = Counters(config=config)
        self.tables = BlockTables(config.max_requests, [rule.width for rule in rules])
        self.ledger = Ledger(config, rules)
        self._tails = Tails(self.ledger, config)
        self.join(config, pool, cache)
        self.pins = Pins(self)

    def make(self, config: BlockConfig) -> tuple[Pool, PrefixCache | None]:
        """A pool and its cache."""
        return make_pool(config, self.policies, self._watcher)

    def join(self, config: BlockConfig, pool: Pool, cache: PrefixCache | None) -> None:
        """Let the rows go on with this pool and this cache, which know their blocks."""
        self.config, self.pool, self.cache = config, pool, cache
        rules, ledger, tables, notes = self._rules, self.ledger, self.tables, self._notes
        self._ops = RowOps(config, rules, ledger, tables, pool, cache, notes)
        self._keying = Keying(config, rules, ledger, tables, cache, notes)
        self._search = HitSearch(config, cache)
        self._admitter = Admitter(self._ops, self._keying, self._search, self.limits, self.counters)
        if cache is not None:
            cache.evicted = self.counters.evicted
        self._stepper = Stepper(self._ops, self._keying, self._tails)
        self._forker, self._roll_back = Forker(self._ops, self.limits), RollBack(self._ops, self._keying)

    def rejoin(
        self, config: BlockConfig, pool: Pool, cache: PrefixCache | None, rename: Callable[[int, int], int]
    ) -> None:
        """`join`, where blocks have other ids: `rename` says which, by group and old id."""
        for row, request in enumerate(self.ledger.requests):
            for g in range(len(self._rules)) if request is not None else ():
                for entry, block in enumerate(self.tables.row(g, row).tolist()):
                    if block and rename(g, block) != block:
                        self.tables.put(g, row, entry, rename(g, block))
        ends = [config.num_blocks * group.blocks_per_slab for group in config.groups]
        fresh = [[rename(g, block) for block in row] for g, row in enumerate(self._ops.fresh)]
        self._notes.keyed_now = {(g, rename(g, block)) for g, block in self._notes.keyed_now}
        self.join(config, pool, cache)
        self._ops.fresh = [[b for b in row if b < end] for row, end in zip(fresh, ends, strict=True)]

    @property
    def has_copies(self) -> bool:
        """Whether copies wait to be taken."""
        return bool(self._ops.copies)

    @property
    def watcher(self) -> Watcher | None:
        """Who is told of keys and tokens; None where there is nobody, or nothing to tell."""
        return self._watcher

    def drop_keys(self, group: int, blocks: Sequence[int]) -> None:
        """Take the keys of blocks; their holders keep them."""
        if self.cache is not None:
            for block in blocks:
                self.cache.drop(group, block)

    def owners(self) -> Mapping[tuple[int, int], str | None]:
        """(id space, block) to the tenant whose it is, where there are tenants with quotas."""
        return {}

    def adopt(self, owners: Mapping[tuple[int, int], str | None]) -> None:
        """Take over whose the blocks of this pool are, where there are tenants with quotas."""

    def longest_hit(self, chain: TokenChain) -> Hit:
        """The longest prefix of these tokens that every group has cached."""
        return self._search.find(chain)
