"""Accounts: which tenant's blocks are held and cached.

What happens in a step is only noted; `TenantManager` settles it when somebody asks, or before it could be lost. A block
belongs to the tenant for whom it was taken. A tenant is a salt, so no two tenants ever share a block. Counts are in
units of which a slab has `whole`, and a block of a group that cuts slabs into k has the k-th part of these.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvframe.blocks.config import BlockConfig
from kvframe.blocks.pool import BlockPool
from kvframe.blocks.prefix import PrefixCache
from kvframe.blocks.queues import Blocks
from kvframe.blocks.quotas import Quotas, Tenant, share_of
from kvframe.blocks.slabs import SlabPool
from kvframe.checks import cdiv

FREE, HELD, IDLE = 0, 1, 2


class Accounts:
    """What each tenant holds and has cached.

    Args:
        config: the groups.
        pool: the pool, which tells of blocks that are found or given back.
        cache: the prefix cache.
        quotas: what tenants may have.
    """

    def __init__(self, config: BlockConfig, pool: Any, cache: PrefixCache | None, quotas: Quotas) -> None:
        cuts = [group.blocks_per_slab for group in config.groups]
        self.whole = math.lcm(*cuts)  # what a slab counts
        self.weights = tuple(self.whole // k for k in cuts)
        self.pool, self.cache = pool, cache
        spaces = 1 if config.uniform else len(cuts)
        sizes = [config.num_blocks * k for k in cuts[:spaces]]
        self._space = [0] * len(cuts) if config.uniform else list(range(len(cuts)))
        self._state = [np.zeros(size, np.int8) for size in sizes]
        self._owner = [np.zeros(size, np.int32) for size in sizes]
        self._stamp = [np.zeros(size, np.int64) for size in sizes]
        self._refs = [pool.refs] if config.uniform else list(pool.refs)
        self._clock, self._quotas, self._ages = 0, quotas, quotas.bounds_cached
        self._noted: list[tuple[int, Blocks]] = []
        self._slack = 0  # what may be noted before a tenant could have too much cached
        self.safe = 0  # decode steps in which no tenant can come to its limit
        self.settle: Callable[[], None] = self.count_noted
        self._most = (config.num_blocks - 1) * self.whole
        self.names: dict[Tenant, int] = {}
        self.held: list[int] = []
        self.cached: list[int] = []
        self.running_limit: list[int] = []
        self.cached_limit: list[int] = []
        self._entries = sum(sizes)
        # By tenant (group, block, stamp) of what became idle, the oldest first; those used since are passed over.
        self._aging: list[deque[tuple[int, int, int]]] = []

    def index(self, tenant: Tenant) -> int:
        """A tenant's number."""
        if tenant not in self.names:
            self.names[tenant] = len(self.held)
            self.held.append(0)
            self.cached.append(0)
            self._aging.append(deque())
            quota = self._quotas.of(tenant)
            self.running_limit.append(share_of(quota.running, self._most))
            self.cached_limit.append(share_of(quota.cached, self._most))
        return self.names[tenant]

    def over(self, tenant: Tenant, needs: Sequence[int], found: Sequence[Sequence[int]]) -> int:
        """Slabs (blocks, where no group splits slabs) by which the tenant would hold too much; see `Limits`."""
        self.settle()
        number = self.index(tenant)
        wanted = sum(need * weight for need, weight in zip(needs, self.weights, strict=True))
        for group, blocks in enumerate(found):
            state = self._state[self._space[group]]
            wanted += self.weights[group] * sum(state[block] != HELD for block in blocks)
        if not wanted:
            return 0
        return cdiv(max(0, self.held[number] + wanted - self.running_limit[number]), self.whole)

    # --- blocks change hands ---

    def took(self, group: int, blocks: Blocks, tenants: npt.NDArray[np.intp]) -> None:
        """Blocks were taken from the pool for these tenants; those that were held already are passed over."""
        state, owner = self._state[self._space[group]], self._owner[self._space[group]]
        before = state.take(blocks)
        if (before == HELD).any():
            new = (before != HELD).nonzero()[0]
            blocks, tenants, before = blocks[new], tenants[new], before[new]
        if (before == IDLE).any():
            self._count(self.cached, group, owner[blocks[before == IDLE]], -1)
        state[blocks] = HELD
        owner[blocks] = tenants
        self._count(self.held, group, tenants, 1)

    def _count(self, counts: list[int], group: int, tenants: Any, sign: int) -> None:
        weight = sign * self.weights[group]
        for tenant, number in enumerate(np.bincount(tenants).tolist()):
            if number:
                counts[tenant] += weight * number

    def found(self, group: int, blocks: Sequence[int]) -> None:
        """Cached blocks are held again."""
        self.safe = 0
        state, owner = self._state[self._space[group]], self._owner[self._space[group]]
        weight = self.weights[group]
        for block in blocks:
            if state[block] != HELD:
                if state[block] == IDLE:
                    self.cached[owner[block]] -= weight
                state[block] = HELD
                self.held[owner[block]] += weight

    def returned(self, group: int, blocks: Sequence[int]) -> None:
        """Blocks were given back; those that others still hold are passed over."""
        refs = self._refs[self._space[group]]
        self._give_up(group, np.array([b for b in dict.fromkeys(blocks) if not refs[b]], np.intp))
        if self._ages and any(used > most for used, most in zip(self.cached, self.cached_limit, strict=True)):
            self.settle()

    def returned_many(self, group: int, blocks: Blocks) -> None:
        """Blocks were given back that nobody else holds; the array is copied, since they are counted later."""
        self._noted.append((group, blocks.copy()))
        if self._ages:
            self._slack -= len(blocks) * self.weights[group]
            if self._slack < 0:
                self.settle()

    def count_noted(self) -> None:
        """Count what `returned_many` noted."""
        noted, self._noted = self._noted, []
        for group, blocks in noted:
            self._give_up(group, blocks)

    def _give_up(self, group: int, blocks: Blocks) -> None:
        space = self._space[group]
        blocks = blocks[self._state[space].take(blocks) == HELD]
        self._count(self.held, group, self._owner[space].take(blocks), -1)
        self._state[space][blocks] = FREE
        if self.cache is not None and blocks.size:
            # A block that was noted may have been taken again since, for somebody else.
            cached = self.cache.index_of[group].keyed(blocks) & (self._refs[space].take(blocks) == 0)
            self._rest(group, blocks[cached])

    def _rest(self, group: int, blocks: Blocks) -> None:
        """Blocks that are cached are idle from now on, the first of them for longest."""
        space = self._space[group]
        tenants, stamps = self._owner[space].take(blocks), self._clock + np.arange(len(blocks))
        self._clock += len(blocks)
        self._state[space][blocks], self._stamp[space][blocks] = IDLE, stamps
        self._count(self.cached, group, tenants, 1)
        if self._ages:
            for tenant, block, stamp in zip(tenants.tolist(), blocks.tolist(), stamps.tolist(), strict=True):
                self._aging[tenant].append((group, block, stamp))

    def _is_resting(self, group: int, block: int, stamp: int) -> bool:
        space = self._space[group]
        return bool(self._state[space][block] == IDLE and self._stamp[space][block] == stamp)

    def copied(self, group: int, source: int, target: int) -> None:
        """A copy was taken for whoever has the source."""
        owner = self._owner[self._space[group]][source]
        self.took(group, np.array([target], np.intp), np.array([owner], np.intp))

    # --- keys go ---

    def dropped(self, group: int, blocks: Sequence[int]) -> None:
        """The keys of these blocks were taken."""
        state, owner = self._state[self._space[group]], self._owner[self._space[group]]
        for block in blocks:
            if state[block] == IDLE:
                state[block] = FREE
                self.cached[owner[block]] -= self.weights[group]

    def cleared(self) -> None:
        """All keys were taken."""
        for state in self._state:
            state[state == IDLE] = FREE
        self.cached = [0] * len(self.cached)

    def trim(self) -> None:
        """Evict what tenants have cached beyond their limits, in each what was given up longest ago."""
        if not self._ages:
            return
        for tenant, (aging, limit) in enumerate(zip(self._aging, self.cached_limit, strict=True)):
            while self.cached[tenant] > limit and self.cache is not None:
                group, block, stamp = aging.popleft()
                if self._is_resting(group, block, stamp):
                    self.dropped(group, [block])
                    self.cache.drop(group, block)
                    self.pool.forget(group, [block])
            if len(aging) > 64 + 4 * self._entries:
                self._aging[tenant] = deque(entry for entry in aging if self._is_resting(*entry))
        room = [most - used for used, most in zip(self.cached, self.cached_limit, strict=True)]
        self._slack = min(room, default=0)

    # --- for resizing and snapshots ---

    def owners(self) -> dict[tuple[int, int], Tenant]:
        """(group, block) to the tenant, of all blocks that are held or cached; group 0 where groups share ids."""
        names = {number: name for name, number in self.names.items()}
        return {
            (space, block): names[int(self._owner[space][block])]
            for space, state in enumerate(self._state)
            for block in state.nonzero()[0].tolist()
        }

    def adopt(self, blocks: Sequence[tuple[int, int]], owners: Mapping[tuple[int, int], Tenant]) -> None:
        """Begin with what a pool has: held blocks, and cached ones, those that go first in front.

        Args:
            blocks: (group, block).
            owners: as `owners` gave them; other blocks are those of the tenant None.
        """
        for group, block in blocks:
            space = self._space[group]
            tenant = self.index(owners.get((space, block)))
            self._owner[space][block] = tenant
            if self._refs[space][block]:
                self._state[space][block] = HELD
                self.held[tenant] += self.weights[group]
            elif self.cache is not None and block in self.cache.index_of[group]:
                self._rest(group, np.array([block], np.intp))


class _Told:
    """A pool that tells accounts of blocks that are found and given back."""

    accounts: Accounts | None = None

    def touch(self, group: int, blocks: list[int]) -> None:
        """Hold blocks that a request found."""
        super().touch(group, blocks)  # type: ignore[misc]
        if self.accounts is not None:
            self.accounts.found(group, blocks)

    def give_back(self, group: int, blocks: list[int]) -> None:
        """Release blocks in this order."""
        super().give_back(group, blocks)  # type: ignore[misc]
        if self.accounts is not None:
            self.accounts.returned(group, blocks)

    def retire(self, group: int, blocks: list[int]) -> None:
        """`give_back` for blocks that a running request has left behind."""
        super().retire(group, blocks)  # type: ignore[misc]
        if self.accounts is not None:
            self.accounts.returned(group, blocks)


class ToldBlockPool(_Told, BlockPool):
    """A `BlockPool` with accounts."""

    def give_back_many(self, group: int, blocks: Blocks) -> bool:
        """`give_back` for many blocks, if each has just this one holder; says whether it did."""
        done = super().give_back_many(group, blocks)
        if done and self.accounts is not None:
            self.accounts.returned_many(group, blocks)
        return done


class ToldSlabPool(_Told, SlabPool):
    """A `SlabPool` with accounts."""

    def _vacate(self, slab: int) -> None:
        # Another group gets the slab, and its blocks have other ids there: the idle ones are not taken, but gone.
        if self.accounts is not None:
            group = self._owner[slab]
            first = slab * self.blocks_per_slab[group]
            self.accounts.dropped(group, range(first, first + self.blocks_per_slab[group]))
        super()._vacate(slab)
