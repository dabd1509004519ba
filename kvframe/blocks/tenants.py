"""Tenants: a manager that holds each tenant to its quota. The manager without quotas pays nothing for this.

A tenant is a salt: `ExtraKeys.salt` isolates its blocks, and `Quotas` says how many it may have. At the limit of what
it may hold, a tenant's new requests and forks and further pins are refused, and its running requests are refused their
next block in `step`, all with the reason "tenant": preempt one of its own. At the limit of what it may have cached, its
own blocks that were given up longest ago are evicted at once, whatever the pool's eviction policy says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.blocks.accounts import Accounts, ToldBlockPool, ToldSlabPool
from kvframe.blocks.config import BlockConfig
from kvframe.blocks.holding import HoldBack
from kvframe.blocks.making import Pools, make_pool
from kvframe.blocks.manager import KVCacheManager
from kvframe.blocks.pool import Pool
from kvframe.blocks.prefix import PrefixCache
from kvframe.blocks.queues import EvictionPolicy
from kvframe.blocks.quotas import Quotas, Tenant
from kvframe.blocks.requests import Admission, BlockRequest
from kvframe.blocks.results import Copy, Deferred, Refused, Served, StepResult
from kvframe.blocks.rules import NEVER, GroupRule
from kvframe.blocks.tables import Places
from kvframe.blocks.transplant import holders
from kvframe.blocks.watching import Watcher


@attrs.frozen(kw_only=True)
class Usage:
    """What one tenant has, in slabs (blocks, where no group splits slabs)."""

    running: float
    cached: float


class TenantManager(KVCacheManager):
    """A `KVCacheManager` with quotas.

    Args:
        config: groups and limits.
        quotas: what tenants may have.
        policies: as the manager's.
        watcher: as the manager's.
    """

    def __init__(
        self,
        config: BlockConfig,
        quotas: Quotas,
        policies: Mapping[str, EvictionPolicy] | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        self.quotas = quotas
        super().__init__(config, policies, watcher)

    def usage(self) -> dict[Tenant, Usage]:
        """What each tenant has that was seen so far."""
        self.settle()
        accounts = self.accounts
        return {
            name: Usage(
                running=accounts.held[number] / accounts.whole,
                cached=accounts.cached[number] / accounts.whole,
            )
            for name, number in accounts.names.items()
        }

    # --- the manager's parts, with accounts ---

    def make(self, config: BlockConfig) -> tuple[Pool, PrefixCache | None]:
        """A pool that tells accounts, and its cache."""
        return make_pool(config, self.policies, self.watcher, Pools(ToldBlockPool, ToldSlabPool))

    def join(self, config: BlockConfig, pool: Pool, cache: PrefixCache | None) -> None:
        """Let the rows go on with this pool; accounts begin anew, and `adopt` says whose the blocks are."""
        self.accounts = self.limits = Accounts(config, pool, cache, self.quotas)
        super().join(config, pool, cache)
        self.accounts.settle = self.settle
        pool.accounts = self.accounts  # type: ignore[attr-defined]
        requests = self.ledger.requests
        self._tenant_of = np.array([self._tenant(request) if request else 0 for request in requests], np.intp)
        self._seen = self.tables.length.copy()
        self._hold_back = HoldBack(self._ops, self.accounts, self._tenant_of)
        self._gap, self._moved = min((_gap(rule) for rule in self._rules), default=NEVER), 0
        self._safe_for = 0

    def _tenant(self, request: BlockRequest) -> int:
        return self.accounts.index(request.chain.extra.salt)

    def owners(self) -> dict[tuple[int, int], Tenant]:
        """Whose the blocks are, for a snapshot or a resize."""
        self.settle()
        return self.accounts.owners()

    def adopt(self, owners: Mapping[tuple[int, int], Tenant]) -> None:
        """Take over whose the blocks of this pool are."""
        self.accounts.adopt([*holders(self), *self.pool.idle()], owners)
        self.accounts.trim()

    def drop_keys(self, group: int, blocks: Sequence[int]) -> None:
        """Take the keys of blocks; their holders keep them."""
        super().drop_keys(group, blocks)
        self.accounts.dropped(group, blocks)

    # --- the manager's calls, with accounts settled after each ---

    def step(
        self,
        slots: int | Sequence[int] | npt.NDArray[np.intp],
        num_new_tokens: int | npt.NDArray[np.int32] = 1,
        *,
        lookahead: int = 0,
        in_flight: int | Sequence[int] | npt.NDArray[np.int32] = 0,
        starts: bool = True,
    ) -> StepResult:
        """As the manager's. Rows whose tenant would hold too much are refused with the reason "tenant"."""
        rows = slots if isinstance(slots, int) else np.asarray(slots, np.intp)
        most = (
            num_new_tokens if isinstance(num_new_tokens, int) else int(np.max(num_new_tokens, initial=0))
        ) + lookahead
        waiting: dict[int, Refused] = {}
        if not self._is_safe(most):
            waiting = self._hold_back.sort_out(rows, num_new_tokens, lookahead, in_flight)
        if waiting:
            count = rows if isinstance(rows, int) else len(rows)
            num_new_tokens = np.array(np.broadcast_to(np.asarray(num_new_tokens, np.int32), count))
            num_new_tokens[list(waiting)] = 0
        result = super().step(slots, num_new_tokens, lookahead=lookahead, in_flight=in_flight, starts=starts)
        self._moved += most
        if self._moved >= self._gap:
            self.settle()
        if not waiting:
            return result
        self.counters.stuck += len(waiting)
        place_of = {
            int(row): place for place, row in enumerate(range(rows) if isinstance(rows, int) else rows)
        }
        refused = [*result.refused, *waiting.values()]
        return StepResult(
            refused=tuple(sorted(refused, key=lambda one: -1 if one.slot is None else place_of[one.slot]))
        )

    def _is_safe(self, most: int) -> bool:
        """Whether no tenant can come to its limit in a step of so many tokens a row."""
        accounts = self.accounts
        if accounts.safe <= 0 or most > self._safe_for:
            self.settle()
            accounts.safe, self._safe_for = self._hold_back.safe_steps(most), most
        accounts.safe -= 1
        return accounts.safe >= 0

    def admit(
        self, admissions: Sequence[Admission], *, busy: bool = True
    ) -> list[Served | Deferred | Refused]:
        """As the manager's. A request whose tenant would hold too much is refused with the reason "tenant"."""
        results: list[Served | Deferred | Refused] = []
        for admission in admissions:
            (result,) = super().admit([admission], busy=busy)
            if isinstance(result, Served):
                self._opened(result.slot, self._tenant(admission.request))
            results.append(result)
        return results

    def fork(self, slot: int) -> Served | Deferred | Refused:
        """As the manager's. Refused with the reason "tenant" if its tenant would hold too much."""
        result = super().fork(slot)
        if isinstance(result, Served):
            self._opened(result.slot, int(self._tenant_of[slot]))
        return result

    def _opened(self, row: int, tenant: int) -> None:
        self._tenant_of[row] = tenant
        self.accounts.safe = 0
        self.settle()

    def roll_back(self, slots: Sequence[int], num_tokens: Sequence[int]) -> None:
        """As the manager's."""
        self.settle()
        super().roll_back(slots, num_tokens)
        self.settle()

    def release(self, slots: Sequence[int]) -> None:
        """As the manager's."""
        self.settle()
        super().release(slots)
        self.settle()

    def preempt(self, slots: Sequence[int]) -> list[BlockRequest]:
        """As the manager's."""
        self.settle()
        requests = super().preempt(slots)
        self.settle()
        return requests

    def take_copies(self) -> list[Copy]:
        """As the manager's."""
        if self.has_copies:
            self.settle()
        return super().take_copies()

    def reset(self) -> bool:
        """As the manager's."""
        self.settle()
        done = super().reset()
        if done:
            self.accounts.cleared()
        return done

    # --- whose the blocks are ---

    def settle(self) -> None:
        """Bring the accounts up to date: what was given back, and what came into the tables."""
        tables, accounts = self.tables, self.accounts
        self._moved = 0
        accounts.count_noted()
        for g, lengths in enumerate(tables.length):
            seen = self._seen[g]
            changed = (lengths != seen).nonzero()[0]
            if changed.size:
                self._own(g, changed, seen[changed], np.maximum(lengths[changed] - seen[changed], 0))
                seen[changed] = lengths[changed]
        for copy in self._ops.copies:
            accounts.copied(copy.group, copy.source, copy.target)
        accounts.trim()

    def _own(self, g: int, rows: Places, starts: Places, counts: Places) -> None:
        """The `counts` entries from `starts` on of each row are its tenant's."""
        whose = np.arange(len(rows)).repeat(counts)
        ends: Places = np.cumsum(counts, dtype=np.intp)
        first = self.tables.starts[g].take(rows) + starts - (ends - counts)
        blocks = self.tables.flat[g].take(first.take(whose) + np.arange(len(whose)))
        alive = blocks.nonzero()[0]
        if alive.size:
            tenants = self._tenant_of.take(rows).take(whose.take(alive))
            self.accounts.took(g, blocks.take(alive).astype(np.intp), tenants)


def _gap(rule: GroupRule) -> int:
    """Tokens that a row computes at least from when it takes an entry until the entry dies."""
    if not rule.frees:
        return NEVER
    if rule.state or rule.deaths is None:
        return 1
    return int((rule.deaths[1:] - np.arange(len(rule.deaths) - 1) * rule.block).min(initial=NEVER))
