"""The traces once more, with vLLM's own requests, hashes and spec objects."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus
from vllm_stand_in import AdapterReplay, served

import kvframe_vllm
from tests import vectors
from tests.blocks.replay import config_of

CASES = [case for case in vectors.load("alloc") if "results" in case["expect"] and served(case)]


def manager_of(case: dict[str, Any]) -> Any:
    """The manager as the scheduler makes it, from vLLM's objects."""
    setup, config = case["input"]["setup"], config_of(case)
    groups = [
        KVCacheGroupSpec(
            [f"layers.{number}"],
            kvframe_vllm.to_vllm(vectors.spec_of(group["layer"])),
            is_eagle_group=config.groups[number].draft,
        )
        for number, group in enumerate(setup["groups"])
    ]
    return kvframe_vllm.KVCacheManager(
        KVCacheConfig(
            num_blocks=config.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=config.retention_interval,
        ),
        max_model_len=config.max_model_len,
        scheduler_block_size=config.step_unit,
        hash_block_size=config.hash_unit,
        max_in_flight_tokens=config.max_in_flight_tokens,
        enable_caching=config.prefix_caching,
        use_eagle=config.draft_drop,
        watermark=config.watermark,
        log_stats=True,
    )


class ObjectReplay(AdapterReplay):
    def make(self, op: dict[str, Any], tokens: Any) -> Request:
        hasher = get_request_block_hasher(self.config.hash_unit, sha256_cbor)
        params = SamplingParams(max_tokens=4096)
        return Request(
            op["req"],
            tokens.tolist(),
            params,
            None,
            block_hasher=hasher if self.config.prefix_caching else None,
            cache_salt=op.get("salt"),
        )

    def append(self, request: Request, tokens: list[int]) -> None:
        request.append_output_token_ids(tokens)

    def set_status(self, request: Request, name: str) -> None:
        request.status = RequestStatus[name]

    def alloc(self, op: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
        # Whether blocks are to be zeroed follows from the model here, not from the trace.
        return super().alloc(op, {name: value for name, value in want.items() if name != "to_zero"})


@pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in CASES])
def test_trace(case: dict[str, Any]) -> None:
    init_none_hash(sha256_cbor)
    notes = ObjectReplay(case, manager_of(case)).run()
    assert not notes or case["input"]["setup"].get("use_draft_drop") or case.get("quirk")
