"""Engine: one pool's block manager and bytes, and the conversations that it keeps between calls."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from kvframe.blocks import BlockError, Hit, KVCacheManager, Refused, Served
from kvframe_transformers.errors import CacheStateError, PoolFullError
from kvframe_transformers.planning import ModelPlan
from kvframe_transformers.statistics import Counts, GroupStatistics, PoolStatistics
from kvframe_transformers.storage import Storage, block_bytes

if TYPE_CHECKING:
    from kvframe_transformers.rows import Row
    from kvframe_transformers.session import Session


class Engine:
    """What all caches of a pool share. Used by one thread at a time.

    Args:
        planned: the plan.
        device: of the bytes.
        windows: by layer's cache, what its attention is shown: the last window - 1 columns and the new ones.
    """

    def __init__(self, planned: ModelPlan, device: str, windows: Mapping[str, int]) -> None:
        self.planned = planned
        self.storage = Storage(planned, device)
        self.manager = KVCacheManager(planned.blocks, planned.host.eviction_policies)
        self.windows = windows
        self.counts = Counts()
        self.parked: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        groups = [group.lifetime for group in planned.blocks.groups]
        self.blocks = tuple(lifetime.block for lifetime in groups)
        self.no_hit = Hit(blocks=tuple([] for _ in groups))
        stores = self.storage.tokens.values()
        encoder = {g for g, lifetime in enumerate(groups) if lifetime.source == "encoder"}
        self.has_encoder = bool(encoder)
        self.token_layers = tuple(store.name for store in stores if store.group not in encoder)
        self.state_groups = tuple(sorted({store.group for store in self.storage.states.values()}))
        keyed_states = any(groups[g].state for g in self.state_groups)
        self.written_layers = (*self.token_layers, *(self.storage.states if keyed_states else ()))
        self.recycling = tuple(
            g for g, lifetime in enumerate(groups) if lifetime.recycles and not lifetime.state
        )
        self.whole_steps = keyed_states or not self.recycling
        self.step_tokens = planned.engine.max_in_flight_tokens
        self._peaks = [0] * len(groups)
        self._active: Session | None = None
        self._busy = 0
        self._orphans: list[Session] = []

    # --- one pass after the other ---

    @contextmanager
    def working(self) -> Iterator[None]:
        """Blocks are changing hands: sessions whose caches become garbage meanwhile are closed afterwards."""
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1
            while self._orphans and not self._busy:
                self._orphans.pop().close()

    def abandon(self, session: Session) -> None:
        """A session's cache is garbage, which a collector may find out at any moment."""
        if self._busy:
            self._orphans.append(session)
        else:
            session.close()

    def enter(self, session: Session) -> None:
        """A session goes on: what another left unfinished is settled first."""
        if self._active is not session:
            self.settle()
            self._active = session

    def settle(self) -> None:
        """What is lent comes back; a pass that stopped half-way is given up."""
        before, self._active = self._active, None
        if before is not None and not before.closed:
            before.check_in()
            if before.unfinished:
                before.abort()

    def run_copies(self) -> None:
        """Run the copies that the manager asks for, after zeroing its new blocks."""
        self.storage.zero(self.manager.take_fresh())
        copies = self.manager.take_copies()
        if copies:
            self.storage.copy(copies)

    def note_peak(self) -> None:
        """Count what is held now."""
        self._peaks = [max(pair) for pair in zip(self._peaks, self._held(), strict=True)]

    def first_columns(self, start: int) -> dict[str, int]:
        """By layer of a group that gives blocks back: the first column that it reads when `start` are stored."""
        names = [name for name in self.token_layers if self.storage.tokens[name].group in self.recycling]
        return {name: self.first_column(name, start) for name in names}

    def first_column(self, layer: str, start: int) -> int:
        """The first column that a layer reads when `start` are stored."""
        window = self.windows.get(layer)
        return 0 if window is None else max(0, start - window + 1)

    # --- rows ---

    def make_room(
        self, refused: Refused | None, batch: int, length: int, give_up: Callable[[], None]
    ) -> None:
        """Give back the conversation that has waited longest.

        Args:
            refused: what was asked for; None: a row.
            batch, length: of those who ask, for the error.
            give_up: gives back what they hold.

        Raises:
            PoolFullError: there is none.
        """
        if self.parked:
            slot, _ = self.parked.popitem(last=False)
            self.manager.release([slot])
            return
        give_up()
        raise PoolFullError(
            batch=batch,
            length=length,
            needed=dict(refused.needed) if refused else {},
            missing=refused.missing if refused else 0,
            largest_fitting_len=self.largest_fitting(batch),
        )

    def largest_fitting(self, batch: int) -> int:
        """Tokens that each of `batch` new sequences could have, in the pool as it is now."""
        in_flight, encoder = self.step_tokens, self.planned.engine.max_encoder_tokens

        def fits(length: int) -> bool:
            needs = [
                batch * group.lifetime.peak(in_flight, length, max_encoder_tokens=encoder)
                for group in self.planned.blocks.groups
            ]
            return not self.manager.pool.missing(needs)

        low, high = 0, self.planned.engine.max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return low

    def fork(self, slot: int, make_room: Callable[[Refused | None], None]) -> int:
        """A second row with the tokens of one."""
        while True:
            result = self.manager.fork(slot)
            if isinstance(result, Served):
                self.run_copies()
                return result.slot
            make_room(result if isinstance(result, Refused) else None)

    def roll_back(self, slots: Sequence[int], counts: Sequence[int]) -> None:
        """Rows go back to fewer tokens.

        Raises:
            CacheStateError: they read what was given back, or their tokens are known to others.
        """
        known = self.manager.ledger.known
        if any(known[slot] > count for slot, count in zip(slots, counts, strict=True)):
            raise CacheStateError(
                what="the prompt of a pool's cache cannot be cropped",
                advice="Ask the pool for a cache of the shorter prompt",
            )
        try:
            self.manager.roll_back(slots, counts)
        except BlockError as error:
            advice = "Call activate_past_recording() before the tokens that may be taken back"
            raise CacheStateError(what=f"the cache cannot go back so far: {error}", advice=advice) from error

    def tell(self, row: Row, count: int) -> None:
        """Tell the manager the ids of a row's first `count` tokens, which are settled."""
        known = int(self.manager.ledger.known[row.slot])
        if row.tokens is None or count <= known:
            return
        self.manager.append([row.slot], [row.tokens[known:count]])
        unit = self.planned.blocks.hash_unit
        if count // unit > known // unit:
            self.manager.commit([row.slot], [count])

    def leave(self, session: Session, rows: Sequence[Row], length: int, *, keep: bool) -> None:
        """A session is over: its rows are kept for a next turn if their tokens are known, else given back."""
        if self._active is session:
            self._active = None
        for row in rows:
            count = row.count(length)
            self.tell(row, count)
            if keep and row.tokens is not None and int(self.manager.ledger.known[row.slot]) == count:
                self.parked[row.slot] = tuple(row.tokens[:count])
            else:
                self.manager.release([row.slot])

    # --- keys ---

    def has_key(self, group: int, block: int, slot: int, entry: int) -> bool:
        """Whether a block is cached as this entry of the row's tokens."""
        cache, chain = self.manager.cache, self.manager.ledger.request(slot).chain
        if cache is None:
            return False
        index = cache.index_of[group]
        return block in index and index.digest(block) == chain.hash_at((entry + 1) * self.blocks[group])

    def forget(self, slot: int, count: int) -> None:
        """Take the keys of what a row holds beyond `count` tokens."""
        for group, table in enumerate(self.manager.block_ids(slot)):
            block = self.blocks[group]
            self.manager.evict([held for held in table[count // block :] if held], group)

    # --- numbers ---

    def _held(self) -> list[int]:
        tables = self.manager.tables
        held = []
        for table, lengths in zip(tables.tables, tables.length, strict=True):
            rows = np.flatnonzero(lengths)
            used = table[rows, : int(lengths.max(initial=0))]
            entries = np.arange(used.shape[1]) < lengths[rows, None]
            held.append(len(np.unique(used[entries & (used > 0)])))
        return held

    def statistics(self) -> PoolStatistics:
        """The pool as it is now."""
        planned, counts, held = self.planned, self.counts, self._held()
        sizes = block_bytes(planned.config)
        groups = {
            group.name: GroupStatistics(
                layers=planned.config.groups[g].layer_names,
                block_tokens=self.blocks[g],
                block_bytes=sizes[g],
                held_blocks=held[g],
                peak_blocks=max(held[g], self._peaks[g]),
            )
            for g, group in enumerate(planned.blocks.groups)
        }
        return PoolStatistics(
            prompts=counts.prompts,
            prompt_tokens=counts.prompt,
            hit_tokens=counts.hit,
            resumed_tokens=counts.resumed,
            computed_tokens=counts.computed,
            parked=len(self.parked),
            cached_prefixes=self.manager.num_keys,
            groups=groups,
            pool_bytes=sum(pool.size_bytes for pool in planned.config.pools.values()),
        )
