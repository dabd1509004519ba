"""KVCacheManager: allocate, share, cache, evict and free the blocks of all running requests, one call a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvframe.blocks.config import BlockConfig
from kvframe.blocks.errors import BlockError
from kvframe.blocks.hashing import NO_EXTRA_KEYS, ExtraKeys, TokenChain, as_tokens
from kvframe.blocks.hits import Hit
from kvframe.blocks.questions import Questions
from kvframe.blocks.queues import EvictionPolicy
from kvframe.blocks.requests import Admission, BlockRequest
from kvframe.blocks.results import Copy, Deferred, Refused, Served, StepResult
from kvframe.blocks.watching import Watcher


class KVCacheManager(Questions):
    """The scheduler's side of the KV cache. It knows groups by their lifetimes and nothing of what they store.

    A step of an engine is `step` for what runs, then `admit` for what waits, `take_copies` and `take_fresh` for the
    worker, the forward pass, then `append` for the new tokens, and `release` for what is finished.

    Args:
        config: groups and limits.
        policies: eviction policies by name, beside kvframe's own: `PluginHost.eviction_policies`.
        watcher: told of keys and tokens as they come and go, such as `kvframe.events.Recorder`; None costs nothing.

    Raises:
        SpecError: the configuration names an unknown hash or eviction policy.
    """

    def __init__(
        self,
        config: BlockConfig,
        policies: Mapping[str, EvictionPolicy] | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        super().__init__(config, policies, watcher)
        if watcher is not None:
            watcher.attach(self)

    # --- requests and hits ---

    def request(
        self,
        tokens: Sequence[int] | npt.NDArray[np.integer[Any]],
        *,
        prompt: int | None = None,
        extra: ExtraKeys = NO_EXTRA_KEYS,
    ) -> BlockRequest:
        """A request with these tokens, hashed.

        Args:
            tokens: the ids, prompt first; an int32 array is not copied.
            prompt: how many of them are the prompt; None: all.
            extra: salt, adapter, multimodal items.
        """
        chain = TokenChain(
            hash=self._hash if self.config.prefix_caching else None,
            unit=self.config.hash_unit,
            lookahead=self.config.hash_lookahead,
            extra=extra,
        )
        chain.extend(tokens)
        kept = None if self._watcher is None else as_tokens(tokens)
        return BlockRequest(prompt=len(tokens) if prompt is None else prompt, chain=chain, tokens=kept)

    def lookup(self, request: BlockRequest) -> Hit:
        """The request's longest prefix hit; nothing is held for it yet."""
        return self.longest_hit(request.chain)

    # --- a step ---

    def start_step(self) -> None:
        """A new step begins: states keyed in the last one are written now. `step` does this unless told not to."""
        self._notes.keyed_now.clear()

    def step(
        self,
        slots: int | Sequence[int] | npt.NDArray[np.intp],
        num_new_tokens: int | npt.NDArray[np.int32] = 1,
        *,
        lookahead: int = 0,
        in_flight: int | Sequence[int] | npt.NDArray[np.int32] = 0,
        starts: bool = True,
    ) -> StepResult:
        """Give running requests room for their next tokens, all of them in one call.

        Args:
            slots: the rows, or a number R for the rows 0 … R − 1, which costs least; free rows among these are idle.
            num_new_tokens: tokens that each row computes in this step, one number or one a row; 0 leaves a row alone.
            lookahead: further tokens that need a place, for drafts.
            in_flight: tokens of earlier steps that have not settled, by row: nothing that they read is given back.
            starts: this is the step's first call.

        Returns:
            Which requests could not be served. They keep what they had; preempt some and call again for them.

        Raises:
            BlockError: a request would grow beyond the longest; nothing was changed.
        """
        if starts and self._notes.keyed_now:
            self._notes.keyed_now.clear()
        result = self._stepper.step(slots, num_new_tokens, lookahead, in_flight)
        if result.refused:
            self.counters.stuck += len(result.refused)
        return result

    def admit(
        self, admissions: Sequence[Admission], *, busy: bool = True
    ) -> list[Served | Deferred | Refused]:
        """Serve waiting requests in this order, each with its prefix hit and blocks for its first chunk.

        Args:
            admissions: who asks, and for what.
            busy: something else runs in this step, so the watermark stays free.

        Raises:
            BlockError: one asks for nothing, or for more than the longest request.
        """
        results = []
        for admission in admissions:
            result = self._admitter.admit(admission, busy)
            if isinstance(result, Served):
                self._tails.load(result.slot)
                if self._watcher is not None:
                    self._watcher.opened(result.slot)
            results.append(result)
        return results

    def append(self, slots: int | Sequence[int], tokens: Sequence[Any] | npt.NDArray[np.int32]) -> None:
        """Tell the tokens that were generated.

        Args:
            slots: the rows, or R for the rows 0 … R − 1.
            tokens: one id a row, or a list of ids a row.
        """
        if isinstance(tokens, np.ndarray):
            rows = slots if isinstance(slots, int) else np.asarray(slots, np.intp)
            if self._watcher is not None:
                self._watcher.appending(rows, tokens)
            self._tails.append_one(rows, tokens)
            return
        for row, new in zip(range(slots) if isinstance(slots, int) else slots, tokens, strict=True):
            some = new if isinstance(new, Sequence) else (new,)
            if self._watcher is not None:
                self._watcher.appending_some(row, some)
            self._tails.append(row, some)

    def commit(
        self, slots: Sequence[int], num_tokens: Sequence[int], in_flight: Sequence[int] | int = 0
    ) -> None:
        """Say how many tokens of each request are final, and take back what lies beyond them.

        For drafts: the accepted tokens count, the rejected ones are rolled back. For external caches: the content has
        come. Blocks stay, for the next tokens; full blocks of final tokens get their keys.

        Args:
            slots: the rows.
            num_tokens: final tokens of each, prompt included.
            in_flight: tokens after these that later steps have already scheduled.

        Raises:
            BlockError: a request has fewer tokens, or gave back an entry that it would need again.
        """
        flying = [in_flight] * len(slots) if isinstance(in_flight, int) else in_flight
        for row, tokens, later in zip(slots, num_tokens, flying, strict=True):
            self._roll_back.check(row, tokens + later)
        for row, tokens, later in zip(slots, num_tokens, flying, strict=True):
            self.ledger.computed_at[row] = tokens + later
            self.ledger.moved.append(row)
            if self.cache is not None:
                self._keying.register(row, min(tokens, self.ledger.known_at[row]))

    def roll_back(self, slots: Sequence[int], num_tokens: Sequence[int]) -> None:
        """Steps of these requests never ran, or ran in vain: they go back to fewer computed tokens.

        Blocks beyond go back to the pool, and what they were keyed for is forgotten. The tokens stay known. For drafts
        that were rejected use `commit`, which keeps the blocks.

        Args:
            slots: the rows.
            num_tokens: computed tokens that remain of each.

        Raises:
            BlockError: a request cannot go back so far; nothing was changed.
        """
        for row, tokens in zip(slots, num_tokens, strict=True):
            self._roll_back.check(row, tokens)
        for row, tokens in zip(slots, num_tokens, strict=True):
            self._roll_back.undo(row, tokens)

    def fork(self, slot: int) -> Served | Deferred | Refused:
        """A second request with the same tokens so far, for parallel samples or beams; only between steps.

        Whole entries are shared. Entries that are partly used, and running states, are copied: see `take_copies`.

        Returns:
            Served with the new slot, or why not.
        """
        self._tails.store(slot)
        result = self._forker.fork(slot)
        if isinstance(result, Served):
            self.counters.forked += 1
            self._tails.load(result.slot)
            if self._watcher is not None:
                self._watcher.forked(slot, result.slot)
        return result

    # --- the end ---

    def release(self, slots: Sequence[int]) -> None:
        """Finished requests give everything back; what has a key stays cached until it is evicted.

        Raises:
            BlockError: a slot holds no request, or is named twice; nothing was released.
        """
        self._check_rows(slots)
        self._close(slots)

    def preempt(self, slots: Sequence[int]) -> list[BlockRequest]:
        """Requests give everything back and wait; the requests returned resume by `admit`, with their tokens kept."""
        self._check_rows(slots)
        for row in slots:
            self._tails.store(row)
        self.counters.preempted += len(slots)
        return self._close(slots)

    def _check_rows(self, slots: Sequence[int]) -> None:
        for row in slots:
            self.ledger.request(row)
        if len(set(slots)) < len(slots):
            raise BlockError(what="slots", value=list(slots), rule="names a slot twice")

    def _close(self, rows: Sequence[int]) -> list[BlockRequest]:
        for row in rows:
            if self._watcher is not None:
                self._watcher.closing(row)
            self._tails.leave(row)
        self._ops.release(rows)
        return [self.ledger.close(row) for row in rows]

    # --- the worker's lists ---

    def take_copies(self) -> list[Copy]:
        """Copies that the worker runs before this step's kernels, after it has zeroed fresh blocks. Drains the list."""
        return self._ops.take_copies()

    def take_fresh(self) -> list[list[int]]:
        """Blocks handed out since the last call, by group, for the worker to zero; of zeroed groups only.

        Targets of copies are not among them: the copy fills those. Drains the lists.
        """
        fresh, self._ops.fresh = self._ops.fresh, [[] for _ in self._ops.rules]
        return fresh

    # --- the cache as a whole ---

    def evict(self, blocks: Sequence[int], group: int = 0) -> None:
        """Take the keys of blocks, for instance because their content was damaged. Their holders keep them.

        Raises:
            BlockError: an id is none of the pool's.
        """
        self.pool.check_ids(group, blocks)
        self.drop_keys(group, blocks)

    def reset(self) -> bool:
        """Forget every prefix. Only while no block is held or pinned: its holders would go on under keys that are gone.

        Returns:
            Whether it was done.
        """
        if self.pool.num_held:
            return False
        if self.cache is not None:
            self.cache.clear()
        return True

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached ones included, the null block not."""
        return self.pool.num_free

    @property
    def num_keys(self) -> int:
        """Different prefixes in the cache; slow, for reports."""
        return 0 if self.cache is None else self.cache.num_keys

    def block_ids(self, slot: int) -> tuple[list[int], ...]:
        """A request's tables, null blocks included, by group."""
        self.ledger.request(slot)
        return tuple(self.tables.row(g, slot).tolist() for g in range(len(self.config.groups)))
