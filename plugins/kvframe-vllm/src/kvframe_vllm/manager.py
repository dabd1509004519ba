"""EngineManager: kvframe's block manager behind the interface that vLLM's scheduler asks of its KVCacheManager.

Nothing of vLLM is imported here: requests are read by their attributes, so that the whole interface can be tested
without an engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvframe.blocks import Admission, BlockConfig, BlockError, Hit, KVCacheManager, Served
from kvframe.checks import cdiv
from kvframe_vllm.ahead import Ahead
from kvframe_vllm.rows import Ledger, Row, block_request
from kvframe_vllm.tables import Blocks, Found, Nothing
from kvframe_vllm.views import Coordinator, GroupView, PoolView, Stateless


class EngineManager(Stateless):
    """The block manager as vLLM's scheduler sees it. `allocate_slots` is asked for every request in every step.

    Args:
        config: groups and limits.
        specs: the groups' specs, vLLM's own objects.
        new_stats: makes vLLM's prefix-cache statistics; None: nothing is counted.
    """

    def __init__(
        self, config: BlockConfig, specs: Sequence[Any], new_stats: Callable[[], Any] | None = None
    ) -> None:
        self.core = KVCacheManager(config)
        self.max_model_len = config.max_model_len
        self.enable_caching = config.prefix_caching
        self.watermark_blocks = config.watermark_blocks
        self.num_kv_cache_groups = len(config.groups)
        self._rows: dict[str, Row] = {}
        views = [
            GroupView(block_size=group.lifetime.block, kv_cache_spec=spec, req_to_blocks=self._rows)
            for group, spec in zip(config.groups, specs, strict=True)
        ]
        self.coordinator = Coordinator(single_type_managers=tuple(views))
        self.block_pool = PoolView(self.core)
        self.mamba_shared_prefix_checkpoint = False
        self.empty_kv_cache_blocks = Nothing(tuple([] for _ in config.groups))
        self.prefix_cache_stats = new_stats() if new_stats else None
        self._new_stats = new_stats
        self._unit = config.hash_unit
        self._ledger = Ledger(self.core)
        self._ahead = Ahead(self.core, self._ledger, self._rows, self.empty_kv_cache_blocks)

    # --- a step ---

    def new_step_starts(self) -> None:
        """A call of `schedule` begins."""
        self._ahead.soon.clear()  # where nobody asks for what is needed ahead
        self.core.start_step()

    def allocate_ahead(self, steady: Callable[[Any], bool]) -> None:
        """One call for all running requests that need something; see `Ahead.step`."""
        self._ahead.step(steady)

    def end_ahead(self) -> None:
        """The running requests have been asked for; what was not is taken back."""
        self._ahead.take_back()

    def allocate_slots(
        self,
        request: Any,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Any = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
        skip_zeroing_group_ids: tuple[int, ...] = (),
    ) -> Blocks | None:
        """Room for a request's next tokens.

        Args:
            request: vLLM's request; it is running if it has been served before and not freed since.
            num_new_tokens: tokens computed in this step.
            num_new_computed_tokens: tokens of the prefix hit, for a waiting request.
            new_computed_blocks: the hit, as `get_computed_blocks` gave it; None for running requests.
            num_lookahead_tokens: further tokens that need a place.
            num_external_computed_tokens: tokens after the hit that an external cache brings.
            delay_cache_blocks: key nothing before `cache_blocks`.
            num_encoder_tokens: encoder positions.
            full_sequence_must_fit: admit only if the whole request fits.
            reserved_blocks: free blocks that this request must leave for others.
            has_scheduled_reqs: something else runs, so the watermark stays free.
            skip_zeroing_group_ids: groups whose external blocks must not be zeroed.

        Returns:
            The new blocks, or None: it does not fit, and nothing was taken.

        Raises:
            BlockError: nothing is asked for.
            NotImplementedError: an argument of asynchronous loads from a connector.
        """
        if not (num_new_tokens or num_new_computed_tokens or num_external_computed_tokens):
            rule = "must be above 0 where no computed tokens are adopted"
            raise BlockError(what="num_new_tokens", value=num_new_tokens, rule=rule)
        row = self._rows.get(request.request_id)
        if row is not None:
            after = request.num_computed_tokens + num_new_tokens
            if after < row.due and not num_lookahead_tokens and new_computed_blocks is None:
                if after + 1 >= row.due:
                    self._ahead.soon[row.slot] = (row, request)
                return self.empty_kv_cache_blocks
            blocks = self._grow(row, request, num_new_tokens, num_lookahead_tokens, new_computed_blocks)
            if after + 1 >= row.due:
                self._ahead.soon[row.slot] = (row, request)
            return blocks
        if reserved_blocks or skip_zeroing_group_ids:
            raise NotImplementedError("kvframe's manager serves no asynchronous loads of a KV connector")
        hit = self._hit(new_computed_blocks, num_new_computed_tokens)
        room = self.max_model_len - hit.tokens - num_external_computed_tokens
        admission = Admission(
            request=self._known(new_computed_blocks, request),
            num_new_tokens=min(num_new_tokens, room),
            lookahead=num_lookahead_tokens,
            external_tokens=num_external_computed_tokens,
            encoder_tokens=num_encoder_tokens,
            whole_must_fit=full_sequence_must_fit,
            delay_caching=delay_cache_blocks,
            hit=hit,
        )
        waits = request.status.name in ("WAITING", "PREEMPTED")
        return self._admit(request, admission, busy=has_scheduled_reqs and waits)

    def _grow(self, row: Row, request: Any, new: int, lookahead: int, resumed: Any) -> Blocks | None:
        computed = request.num_computed_tokens
        after = computed + new
        if row.ready is not None:
            if row.ready_at == after and not lookahead:
                return self._ahead.consume(row)
            self._ahead.take_back()
        if resumed is not None:
            self._ledger.rewrite(row, request)
        elif (
            after + lookahead < row.grow
            and min(after, request.num_tokens) < row.keys
            and computed - request.num_in_flight_tokens + 1 < row.die
        ):
            return self.empty_kv_cache_blocks
        self._ledger.settle(row, computed)
        before = self._ledger.lengths(row.slot)
        result = self.core.step(
            [row.slot],
            min(new, self.max_model_len - computed),
            lookahead=lookahead,
            in_flight=request.num_in_flight_tokens,
            starts=False,
        )
        self._ledger.wake(row)
        if not result.served:
            return None
        blocks = self._ledger.since(row.slot, before)
        return Blocks(blocks) if any(blocks) else self.empty_kv_cache_blocks

    def _hit(self, found: Any, tokens: int) -> Hit:
        if isinstance(found, Found) and found.hit.tokens == tokens:
            return found.hit
        return Hit(blocks=tuple([] for _ in self.core.config.groups))

    def _known(self, found: Any, request: Any) -> Any:
        return found.request if isinstance(found, Found) else block_request(request, self._unit)

    def _admit(self, request: Any, admission: Admission, busy: bool) -> Blocks | None:
        (answer,) = self.core.admit([admission], busy=busy)
        if not isinstance(answer, Served):
            return None
        row = self._rows[request.request_id] = Row(answer.slot, admission.request.chain)
        self._ledger.wake(row)
        self._ahead.soon[row.slot] = (row, request)
        if admission.delay_caching:
            row.keys = row.due = 0  # nothing is keyed, and so nothing is armed, before `cache_blocks`
        return Blocks(self._ledger.since(answer.slot, self._adopted(answer, admission)))

    def _adopted(self, answer: Served, admission: Admission) -> list[int]:
        """Table entries that an admission adopted or imported, by group."""
        computed, counts = answer.hit_tokens + admission.external_tokens, []
        for group in self.core.config.groups:
            lifetime = group.lifetime
            if lifetime.fixed is not None:
                counts.append(0)
            elif group.keyed or admission.external_tokens:
                counts.append(cdiv(computed, lifetime.block))
            else:
                counts.append(int(lifetime.dead(computed, computed)[1]))
        return counts

    def cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        """The first so many tokens of a request are final: key what they fill."""
        row = self._rows.get(request.request_id)
        if row is None or num_computed_tokens < row.keys:
            return
        computed = max(request.num_computed_tokens, num_computed_tokens)
        self._ledger.settle(row, computed)
        self.core.commit([row.slot], [num_computed_tokens], in_flight=computed - num_computed_tokens)
        self._ledger.wake(row)

    # --- hits ---

    def get_computed_blocks(self, request: Any) -> tuple[Blocks, int, int]:
        """The longest prefix hit: blocks, tokens, and the junction with other requests' prompts; nothing is held."""
        self._ahead.take_back()  # keys of what is not computed after all must not be found
        if not self.prefix_cache_lookup_enabled(request):
            return self.empty_kv_cache_blocks, 0, 0
        known = block_request(request, self._unit)
        hit = self.core.lookup(known)
        return Found(hit, known), hit.tokens, hit.junction

    def get_computed_blocks_for_connector(self, request: Any) -> tuple[Blocks, int, int, bool]:
        """The same; without groups of states no group's hit differs from the others'."""
        return (*self.get_computed_blocks(request), False)

    def prefix_cache_lookup_enabled(self, request: Any) -> bool:
        """Whether hits may be looked up for the request."""
        return self.enable_caching and not request.skip_reading_prefix_cache

    def estimate_cached_tokens(self, request: Any) -> int:
        """Tokens of the request that every group has keyed, by the furthest key of each."""
        row, cache = self._rows.get(request.request_id), self.core.cache
        if row is None or cache is None:
            return 0
        ends = []
        for group in self.core.config.keyed:
            index, block = cache.index_of[group], self.core.config.groups[group].lifetime.block
            ids = self.core.tables.row(group, row.slot).tolist()
            last = max((entry for entry, one in enumerate(ids) if one and one in index), default=-1)
            ends.append((last + 1) * block)
        return min(ends, default=0)

    # --- the end of a request ---

    def free(self, request: Any) -> None:
        """A request is finished, preempted or aborted; one that was never served is fine."""
        row = self._rows.pop(request.request_id, None)
        if row is not None:
            self._ahead.forget(row)
            self.core.release([row.slot])

    # --- tables ---

    def get_blocks(self, request_id: str) -> Blocks:
        """All blocks of a request, null blocks included."""
        row = self._rows.get(request_id)
        if row is None:
            return self.empty_kv_cache_blocks
        return Blocks(self.core.block_ids(row.slot))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The same as ids."""
        return self.get_blocks(request_id).ids

    def take_new_block_ids(self) -> list[int]:
        """Blocks handed out since the last call that the worker must zero."""
        return [block for group in self.core.take_fresh() for block in group]

    # --- the cache as a whole ---

    @property
    def usage(self) -> float:
        """The share of the blocks that requests hold, 0 to 1."""
        return self.block_pool.get_usage()

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Take the keys of blocks; their holders keep them."""
        self.core.evict(sorted(block_ids))

    def reset_prefix_cache(self) -> bool:
        """Forget every prefix, if no request holds a block; says whether it did."""
        self._ahead.take_back()
        done = self.core.reset()
        if done and self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return done

    def record_prefix_cache_stats(self, request: Any, num_hits: int) -> None:
        """Count one admission's lookup."""
        if self.prefix_cache_stats is not None and self.prefix_cache_lookup_enabled(request):
            self.prefix_cache_stats.record(
                num_tokens=request.num_tokens, num_hits=num_hits, preempted=request.num_preemptions > 0
            )

    def make_prefix_cache_stats(self) -> Any:
        """The statistics since the last call; None where nothing is counted."""
        stats = self.prefix_cache_stats
        if self._new_stats is not None:
            self.prefix_cache_stats = self._new_stats()
        return stats
