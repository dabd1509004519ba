"""vLLM's schedulers with kvframe's manager: one call of the block manager for all running requests of a step.

Where kvframe cannot serve an engine, making one of these classes gives vLLM's own scheduler instead, with one warning.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched import scheduler as stock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler as StockAsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler as StockScheduler

from kvframe_vllm.making import make_manager
from kvframe_vllm.reasons import why_not

_LOG = init_logger("vllm.kvframe")


@contextlib.contextmanager
def _managers_made_by(make: Any) -> Iterator[None]:
    """vLLM's scheduler makes its manager from a name in its own module: for this long it is ours."""
    kept = stock.KVCacheManager
    stock.KVCacheManager = make
    try:
        yield
    finally:
        stock.KVCacheManager = kept


class _OnKVFrame:
    """Mixed into a scheduler class of vLLM, in front of it. `stock_scheduler` is that class."""

    stock_scheduler: type

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        reason = _reason(*args, **kwargs)
        if reason is None:
            return super().__new__(cls)
        _LOG.warning("kvframe does not manage this KV cache: %s. vLLM's own manager does.", reason)
        return cls.stock_scheduler(*args, **kwargs)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        limits = _argument("vllm_config", 0, args, kwargs).scheduler_config
        rows = max(limits.max_num_seqs, limits.max_num_active_seqs or 0)
        with _managers_made_by(functools.partial(make_manager, max_requests=rows)):
            super().__init__(*args, **kwargs)

    def schedule(self: Any, throttle_prefills: bool = False) -> Any:
        """A step: what the running requests need is allocated first, in one call."""
        manager = self.kv_cache_manager
        if (
            len(self.running) <= self.max_num_scheduled_tokens
            and self._pause_state != PauseState.PAUSED_ALL
            and self.ec_connector is None
        ):
            manager.allocate_ahead(self._steady)
        output = super().schedule(throttle_prefills)  # type: ignore[misc]
        manager.end_ahead()
        return output

    def _steady(self: Any, request: Any) -> bool:
        """Whether this step will compute exactly one token of a running request, as `schedule` decides it."""
        computed, placeholders = request.num_computed_tokens, request.num_output_placeholders
        if request.num_tokens_with_spec + placeholders - computed != 1 or request.is_prefill_chunk:
            return False
        if computed + 1 + self.num_sampled_tokens_per_step > self.max_model_len:
            return False
        if self.current_step + 1 < request.next_decode_eligible_step:
            return False
        ends = computed + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens
        return not (placeholders > 0 and ends)


def _argument(name: str, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kwargs[name] if name in kwargs else args[position]


def _reason(*args: Any, **kwargs: Any) -> str | None:
    block_size = _argument("block_size", 3, args, kwargs)
    hash_block_size = kwargs.get("hash_block_size", args[4] if len(args) > 4 else None)
    return why_not(
        _argument("vllm_config", 0, args, kwargs),
        _argument("kv_cache_config", 1, args, kwargs),
        block_size=block_size,
        hash_block_size=hash_block_size or block_size,
    )


class Scheduler(_OnKVFrame, StockScheduler):  # type: ignore[misc]
    """vLLM's scheduler on kvframe's manager: `scheduler_cls="kvframe_vllm.Scheduler"`."""

    stock_scheduler = StockScheduler


class AsyncScheduler(_OnKVFrame, StockAsyncScheduler):  # type: ignore[misc]
    """The same under asynchronous scheduling: `scheduler_cls="kvframe_vllm.AsyncScheduler"`."""

    stock_scheduler = StockAsyncScheduler


def on_kvframe(cls: Any) -> Any:
    """A scheduler class of vLLM with kvframe's manager; a class that is not one of these two stays as it is."""
    return {StockScheduler: Scheduler, StockAsyncScheduler: AsyncScheduler}.get(cls, cls)
