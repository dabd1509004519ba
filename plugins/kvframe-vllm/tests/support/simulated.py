"""vLLM's scheduler without a model: requests come and go, tokens are a function of request and position.

Two of these, one on vLLM's own manager and one on kvframe's, must schedule the same.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

LONGEST = 512
HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}


def full(block: int = 16) -> Any:
    return FullAttentionSpec(block_size=block, **HEADS)


def window(tokens: int, block: int = 16) -> Any:
    return SlidingWindowSpec(block_size=block, sliding_window=tokens, **HEADS)


def chunked(tokens: int, block: int = 16) -> Any:
    return ChunkedLocalAttentionSpec(block_size=block, attention_chunk_size=tokens, **HEADS)


def latent(block: int = 16) -> Any:
    return MLAAttentionSpec(block_size=block, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)


SHAPES: dict[str, list[Any]] = {
    "llama": [full()],
    "gemma2": [full(), window(64)],
    "gemma3": [full(), *[window(64)] * 5],
    "gpt-oss": [full(), window(40)],
    "llama4": [full(), chunked(64), chunked(64)],
    "mla": [latent()],
    "two windows": [full(), window(33), window(100)],
    "block sizes": [full(32), window(64, 16)],
}


def vllm_config(model: str, *, caching: bool = True, rows: int = 16, **more: Any) -> Any:
    asynchronous = more.pop("async_scheduling", False)
    retention = more.pop("retention", 0)
    config = VllmConfig(
        model_config=ModelConfig(model=model, skip_tokenizer_init=True, max_model_len=LONGEST),
        cache_config=CacheConfig(
            block_size=16, enable_prefix_caching=caching, prefix_cache_retention_interval=retention
        ),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=128,
            max_num_seqs=rows,
            max_model_len=LONGEST,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            watermark=more.pop("watermark", 0.0),
            **more,
        ),
    )
    config.scheduler_config.async_scheduling = asynchronous
    return config


def kv_cache_config(specs: Sequence[Any], num_blocks: int, retention: int | None = 0) -> Any:
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layers.{n}"], spec) for n, spec in enumerate(specs)],
        prefix_cache_retention_interval=retention,
    )


def make_scheduler(cls: Any, config: Any, groups: Any) -> Any:
    register_all_kvcache_specs(None)
    init_none_hash(sha256)
    config.cache_config.num_gpu_blocks = groups.num_blocks
    sizes = [group.kv_cache_spec.block_size for group in groups.kv_cache_groups]
    return cls(
        vllm_config=config,
        kv_cache_config=groups,
        structured_output_manager=StructuredOutputManager(config),
        block_size=max(sizes),
        hash_block_size=min(sizes),
        log_stats=True,
    )


class Engine:
    """A scheduler, and steps in flight: none, or one under asynchronous scheduling."""

    def __init__(self, scheduler: Any, depth: int, unit: int) -> None:
        self.scheduler, self.depth = scheduler, depth
        self.hasher = get_request_block_hasher(unit, sha256)
        self.flying: deque[Any] = deque()
        self.finished: dict[str, list[int]] = {}

    @property
    def manager(self) -> Any:
        return self.scheduler.kv_cache_manager

    def add(self, name: str, prompt: list[int], max_tokens: int, priority: int = 0) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        params.update_from_generation_config({}, eos_token_id=None)
        request = Request(name, prompt, params, None, block_hasher=self.hasher, priority=priority)
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        if name in self.scheduler.requests:
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> dict[str, Any]:
        """One call of `schedule`; the output of a step arrives `depth` steps later."""
        output = self.scheduler.schedule()
        requests = self.scheduler.requests
        sampling = {name: not requests[name].is_prefill_chunk for name in output.num_scheduled_tokens}
        self.flying.append((output, sampling))
        seen = {
            "scheduled": list(output.num_scheduled_tokens.items()),
            "preempted": sorted(output.preempted_req_ids or ()),
            "hits": [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs],
        }
        if len(self.flying) > self.depth:
            self.settle()
        return seen

    def settle(self) -> None:
        output, sampling = self.flying.popleft()
        names = list(output.num_scheduled_tokens)
        tokens = [[self.token(name)] if sampling[name] else [] for name in names]
        made = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=tokens,
        )
        self.scheduler.update_from_output(output, made)

    def token(self, name: str) -> int:
        request = self.scheduler.requests.get(name)
        made = 0 if request is None else request.num_output_tokens
        return (hash_of(name) * 31 + made * 7) % 500

    def drain(self) -> None:
        while self.flying:
            self.settle()

    def state(self) -> dict[str, Any]:
        """Free blocks, and of every request which entries of its tables hold a block."""
        held = {
            name: [[block > 0 for block in row] for row in self.manager.get_block_ids(name)]
            for name in self.scheduler.requests
        }
        return {"free": self.manager.block_pool.get_num_free_blocks(), "held": held}

    def blocks(self) -> list[int]:
        """The blocks of all running requests, as often as tables name them."""
        return [
            block
            for request in self.scheduler.running
            for row in self.manager.get_block_ids(request.request_id)
            for block in row
            if block
        ]


def hash_of(name: str) -> int:
    return sum(map(ord, name))


class Workload:
    """Requests of mixed lengths with shared prefixes, some aborted: the same sequence for every engine."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.shared = [[self.draw.randrange(500) for _ in range(200)] for _ in range(3)]
        self.made = 0

    def events(self) -> list[tuple[Any, ...]]:
        """What happens before the next step."""
        found: list[tuple[Any, ...]] = []
        if self.draw.random() < 0.4:
            prefix = self.draw.choice(self.shared)[: self.draw.choice((0, 48, 100, 200))]
            own = [self.draw.randrange(500) for _ in range(self.draw.randrange(1, 120))]
            name = f"r{self.made}"
            found.append(("add", name, prefix + own, self.draw.randrange(1, 80), self.draw.randrange(3)))
            self.made += 1
        if self.made and self.draw.random() < 0.03:
            found.append(("abort", f"r{self.draw.randrange(self.made)}"))
        return found
