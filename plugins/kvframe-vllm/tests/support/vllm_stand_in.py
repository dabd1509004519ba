"""A stand-in for vLLM's Request, and the traces of `alloc.json` replayed through the adapter's interface."""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np
import pytest

from kvframe.blocks import ExtraKeys, TokenChain
from kvframe.blocks.hashing import block_hash
from kvframe_vllm.manager import EngineManager
from kvframe_vllm.tables import Found
from tests.blocks.replay import Replay


class Status(Enum):
    WAITING = 1
    RUNNING = 2
    PREEMPTED = 3


class Request:
    """The attributes of vLLM's request that the manager reads."""

    def __init__(self, name: str, tokens: Any, unit: int, *, caching: bool = True, salt: str | None = None):
        self.request_id = name
        extra = ExtraKeys(salt=salt)
        self._chain = TokenChain(hash=block_hash("sha256_cbor") if caching else None, unit=unit, extra=extra)
        self.num_prompt_tokens = len(tokens)
        self.block_hashes: list[bytes] = []
        self.num_computed_tokens = self.num_in_flight_tokens = self.num_preemptions = 0
        self.skip_reading_prefix_cache = False
        self.status = Status.WAITING
        self.append(tokens)

    def append(self, tokens: Any) -> None:
        self._chain.extend(tokens)
        new = self._chain.digests[32 * len(self.block_hashes) :]
        self.block_hashes += [bytes(new[at : at + 32]) for at in range(0, len(new), 32)]

    @property
    def num_tokens(self) -> int:
        return self._chain.num_tokens


class AdapterReplay(Replay):
    """`tests.blocks.replay`, with every operation a call that vLLM's scheduler makes."""

    def __init__(self, case: dict[str, Any], manager: Any = None) -> None:
        super().__init__(case)
        if manager is None:
            specs = [group["layer"] for group in self.setup["groups"]]
            manager = EngineManager(self.config, specs)
        self.adapter, self.manager = manager, manager.core
        self.found: dict[str, tuple[Any, int, int]] = {}

    def pool(self) -> dict[str, int]:
        return {"free": self.adapter.block_pool.get_num_free_blocks(), "cached": self.manager.num_keys}

    def make(self, op: dict[str, Any], tokens: Any) -> Any:
        return Request(
            op["req"],
            tokens,
            self.config.hash_unit,
            caching=self.config.prefix_caching,
            salt=op.get("salt"),
        )

    def step(self, op: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
        self.adapter.new_step_starts()
        return {}

    def new(self, op: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
        runs = [np.arange(start, start + count, dtype=np.int32) for start, count in op["prompt"]]
        self.requests[op["req"]] = self.make(op, np.concatenate(runs))
        return self.counted(op["req"])

    def counted(self, name: str) -> dict[str, Any]:
        request: Any = self.requests[name]
        counts = {"num_tokens": request.num_tokens}
        return counts | (
            {"num_block_hashes": len(request.block_hashes)} if self.config.prefix_caching else {}
        )

    def output(self, op: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
        self.append(self.requests[op["req"]], op["tokens"])
        return self.counted(op["req"])

    def append(self, request: Any, tokens: list[int]) -> None:
        request.append(tokens)

    def lookup(self, op: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
        found, tokens, junction = self.adapter.get_computed_blocks(self.requests[op["req"]])
        ids = [list(row) for row in found.get_block_ids()]
        if [tokens, ids] != [want["hit_tokens"], want["blocks"]]:
            hit = found.hit
            if self.reference_is_limited(hit, want):
                super().lookup(op | {"req": self._core_request(op["req"])}, want)
                hit = self.hits.pop("fed")
                found = Found(hit, found.request)
                tokens, junction, ids = hit.tokens, hit.junction, list(hit.blocks)
        self.found[op["req"]] = (found, tokens, junction)
        return {"hit_tokens": tokens, "blocks": ids, "shared_prefix_boundary": junction}

    def _core_request(self, name: str) -> str:
        from kvframe_vllm.rows import block_request

        self.requests["fed"] = block_request(self.requests[name], self.config.hash_unit)
        return "fed"

    def alloc(self, op: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
        name, adapter = op["req"], self.adapter
        request: Any = self.requests[name]
        running = name in self.slots
        request.num_in_flight_tokens = op.get("in_flight", 0)
        more: dict[str, Any] = {"num_lookahead_tokens": op.get("lookahead", 0)}
        gained = op["new_tokens"]
        if not running:
            empty = (adapter.empty_kv_cache_blocks, 0, 0)
            found, tokens, _ = self.found.pop(name, empty) if op.get("use_lookup") else empty
            more |= {
                "num_new_computed_tokens": tokens,
                "new_computed_blocks": found,
                "num_external_computed_tokens": op.get("external_tokens", 0),
                "num_encoder_tokens": op.get("encoder_tokens", 0),
                "full_sequence_must_fit": op.get("full_must_fit", False),
                "delay_cache_blocks": op.get("delay_cache", False),
            }
            gained += tokens + op.get("external_tokens", 0)
        before = self.table(name)
        if "error" in want:
            with pytest.raises({"ValueError": ValueError}[want["error"]]):
                adapter.allocate_slots(request, op["new_tokens"], **more)
            return {}
        blocks = adapter.allocate_slots(request, op["new_tokens"], **more)
        got: dict[str, Any] = {"ok": blocks is not None}
        if blocks is not None:
            self.slots[name] = adapter._rows[name].slot
            request.num_computed_tokens += gained
            self.set_status(request, "RUNNING")
            got |= {"computed_tokens": request.num_computed_tokens, "new_blocks": list(blocks.ids)}
        zeroed = sorted(adapter.take_new_block_ids())
        if "to_zero" in want:
            assert zeroed == sorted(want["to_zero"])
        table = self.table(name)
        if blocks is None:
            assert [len(row) for row in table] == [len(row) for row in before]
            got["table"] = table
        else:
            got |= {"table": table, "null_blocks": [row.count(0) for row in table]}
        return got | self.pool()

    def set_status(self, request: Any, name: str) -> None:
        request.status = Status[name]

    def table(self, name: str) -> list[list[int]]:
        return [list(row) for row in self.adapter.get_blocks(name).get_block_ids()]

    def cache(self, op: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
        self.adapter.cache_blocks(self.requests[op["req"]], op["tokens"])
        return self.pool()

    def free(self, op: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
        self.adapter.free(self.requests[op["req"]])
        self.slots.pop(op["req"], None)
        return self.pool()

    def preempt(self, op: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
        request: Any = self.requests[op["req"]]
        self.free(op, want)
        request.num_computed_tokens = 0
        self.set_status(request, "PREEMPTED")
        return self.pool()

    def evict(self, op: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
        self.adapter.evict_blocks(set(op["blocks"]))
        return self.pool()

    def reset(self, op: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
        return {"ok": self.adapter.reset_prefix_cache()} | self.pool()


SERVED = {"full_attention", "mla", "sliding_window", "sliding_window_mla", "chunked_local"}


def served(case: dict[str, Any]) -> bool:
    """Whether the adapter serves all groups of a trace: full, window, chunked, latent; no context parallelism."""
    setup = case["input"]["setup"]
    return {group["layer"]["family"] for group in setup["groups"]} <= SERVED and setup.get("dcp", 1) == 1
