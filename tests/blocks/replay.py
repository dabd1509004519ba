"""Replays one trace of `alloc.json` through the manager and compares every answer. One operation is one call."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvframe.blocks.config import BlockConfig, GroupBlocks
from kvframe.blocks.hashing import ExtraKeys
from kvframe.blocks.hits import Hit
from kvframe.blocks.manager import KVCacheManager
from kvframe.blocks.requests import Admission, BlockRequest
from kvframe.blocks.results import Served
from tests.blocks.lifetimes import StatesAsBlocks, lifetime_of


def config_of(case: dict[str, Any]) -> BlockConfig:
    """The manager's configuration of a trace's setup."""
    setup = case["input"]["setup"]
    layers = [group["layer"] for group in setup["groups"]]
    lifetimes = [lifetime_of(layer, setup.get("dcp", 1)) for layer in layers]
    if "uncached_state_block_per_block_size" in case.get("quirk", ()):
        lifetimes = [StatesAsBlocks(block=layer["block_size"]) for layer in layers]
    # A draft flag spreads to groups with an equal spec (lifetime.md, "Around it").
    drafts = [group["layer"] for group in setup["groups"] if group.get("draft")]
    more = {"hash_unit": setup["prefix_match_unit"]} if setup.get("prefix_match_unit") else {}
    return BlockConfig(
        groups=[
            GroupBlocks(name=f"{g}-{layer['family']}", lifetime=lifetime, draft=layer in drafts, zeroed=True)
            for g, (layer, lifetime) in enumerate(zip(layers, lifetimes, strict=True))
        ],
        num_blocks=setup["num_blocks"],
        max_model_len=setup["max_model_len"],
        max_in_flight_tokens=setup.get("max_in_flight_tokens"),
        max_requests=64,
        max_encoder_tokens=setup["max_model_len"],
        prefix_caching=setup["caching"],
        hash_name="sha256_cbor",
        draft_drop=setup.get("use_draft_drop", False),
        retention_interval=setup.get("retention_interval"),
        watermark=setup.get("watermark", 0.0),
        **more,
    )


class Replay:
    """One trace under way: the manager, and the requests by their names."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.setup = case["input"]["setup"]
        self.config = config_of(case)
        self.manager = KVCacheManager(self.config)
        self.requests: dict[str, BlockRequest] = {}
        self.slots: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.hits: dict[str, Hit] = {}
        self.notes: list[str] = []

    def check_setup(self) -> None:
        want, config = self.case["expect"], self.config
        assert config.watermark_blocks == want["watermark_blocks"]
        if config.prefix_caching:
            assert config.step_unit == want["scheduler_block_size"]
            assert config.hash_unit == want["hash_block_size"]
            assert config.fine_grained == want["fine_grained_hits"]

    def run(self) -> list[str]:
        self.check_setup()
        results = self.case["expect"]["results"]
        for number, (op, want) in enumerate(zip(self.case["input"]["ops"], results, strict=True)):
            got = getattr(self, op["op"])(op, want)
            for key, value in got.items():
                assert value == want.get(key), (
                    f"operation {number} {op}: {key} is {value}, wanted {want.get(key)}"
                )
        return self.notes

    def pool(self) -> dict[str, int]:
        return {"free": self.manager.num_free, "cached": self.manager.num_keys}

    # --- operations ---

    def step(self, op: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
        self.manager.start_step()
        return {}

    def new(self, op: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
        tokens = [np.arange(start, start + count, dtype=np.int32) for start, count in op["prompt"]]
        request = self.manager.request(np.concatenate(tokens), extra=ExtraKeys(salt=op.get("salt")))
        self.requests[op["req"]], self.computed[op["req"]] = request, 0
        return self.counted(op["req"])

    def counted(self, name: str) -> dict[str, Any]:
        request = self.requests[name]
        slot = self.slots.get(name)
        tokens = request.num_tokens if slot is None else int(self.manager.ledger.known[slot])
        hashes = request.chain.num_units
        return {"num_tokens": tokens} | ({"num_block_hashes": hashes} if self.config.prefix_caching else {})

    def output(self, op: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
        name = op["req"]
        if name in self.slots:
            self.manager.append([self.slots[name]], [op["tokens"]])
        else:
            self.requests[name].extend(op["tokens"])
        return self.counted(name)

    def lookup(self, op: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
        name = op["req"]
        hit = self.manager.lookup(self.requests[name])
        same = hit.tokens == want["hit_tokens"] and list(hit.blocks) == want["blocks"]
        if not same and self.reference_is_limited(hit, want):
            self.notes.append(f"hit {hit.tokens} for {want['hit_tokens']}")
            hit = Hit(
                tokens=want["hit_tokens"],
                blocks=tuple(want["blocks"]) if want["hit_tokens"] else self.manager._search.miss.blocks,
                junction=want["shared_prefix_boundary"],
            )
        self.hits[name] = hit
        blocks = list(hit.blocks)
        return {"hit_tokens": hit.tokens, "blocks": blocks, "shared_prefix_boundary": hit.junction}

    def reference_is_limited(self, hit: Hit, want: dict[str, Any]) -> bool:
        """Where the reference's hit is wrong, or shorter than need be (lifetime.md, "Around it")."""
        if self.case.get("quirk"):
            return True
        longer = hit.tokens > want["hit_tokens"]
        return longer and (self.config.draft_drop or self.config.fine_grained)

    def alloc(self, op: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
        name = op["req"]
        # The reference takes requests beyond the longest and gives them blocks up to there: kvframe is asked for those.
        tokens = min(op["new_tokens"], self.config.max_model_len - self.computed[name])
        before = [len(row) for row in self.table(name)]
        lookahead = op.get("lookahead", 0)
        if name in self.slots:
            result = self.manager.step(
                [self.slots[name]],
                tokens,
                lookahead=lookahead,
                in_flight=op.get("in_flight", 0),
                starts=False,
            )
            ok, gained = result.served, op["new_tokens"]
        else:
            hit = (
                self.hits.pop(name, self.manager._search.miss)
                if op.get("use_lookup")
                else self.manager._search.miss
            )
            admission = Admission(
                request=self.requests[name],
                num_new_tokens=tokens,
                lookahead=lookahead,
                external_tokens=op.get("external_tokens", 0),
                encoder_tokens=op.get("encoder_tokens", 0),
                whole_must_fit=op.get("full_must_fit", False),
                delay_caching=op.get("delay_cache", False),
                hit=hit,
            )
            (answer,) = self.manager.admit([admission])
            ok = isinstance(answer, Served)
            gained = hit.tokens + op.get("external_tokens", 0) + op["new_tokens"]
            if ok:
                self.slots[name] = answer.slot
        got: dict[str, Any] = {"ok": ok}
        if ok:
            self.computed[name] += gained
            got["computed_tokens"] = self.computed[name]
        copies = self.manager.take_copies()
        fresh = self.manager.take_fresh()
        self.check_lists(op, want, copies, fresh, before)
        table = self.table(name)
        got["table"] = table
        if ok:
            got["null_blocks"] = [row.count(0) for row in table]
        return got | self.pool()

    def check_lists(
        self,
        op: dict[str, Any],
        want: dict[str, Any],
        copies: list[Any],
        fresh: list[list[int]],
        before: list[int],
    ) -> None:
        assert [[copy.source, copy.target] for copy in copies] == want.get("copies", [])
        if not want["ok"]:
            assert not any(fresh)
            return
        table, layers = self.table(op["req"]), [group["layer"]["family"] for group in self.setup["groups"]]
        new, zeroed = [], []
        for g, blocks in enumerate(fresh):
            # A copy that the request itself goes on with counts as new in the reference.
            targets = [copy.target for copy in copies if copy.group == g and copy.target in table[g]]
            zeroed += [*targets, *blocks] if layers[g] != "mamba" else []
            # For states the reference lists every new entry: nulls and moved spare blocks too.
            added = table[g][before[g] :] if self.config.groups[g].lifetime.state and not targets else blocks
            assert set(blocks) <= set(added)
            new.append([*targets, *added])
        if op.get("use_lookup"):  # what is adopted or imported is not listed; `table` has it
            new = [row[len(row) - len(listed) :] for row, listed in zip(new, want["new_blocks"], strict=True)]
        assert new == want["new_blocks"], f"{op}: new {new}, wanted {want['new_blocks']}"
        if "to_zero" in want:
            assert sorted(zeroed) == sorted(want["to_zero"]), f"{op}: zero {zeroed}, wanted {want['to_zero']}"

    def table(self, name: str) -> list[list[int]]:
        if name not in self.slots:
            return [[] for _ in self.config.groups]
        return [list(row) for row in self.manager.block_ids(self.slots[name])]

    def cache(self, op: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
        slot = self.slots[op["req"]]
        self.manager.commit([slot], [op["tokens"]], in_flight=self.computed[op["req"]] - op["tokens"])
        return self.pool()

    def free(self, op: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
        if op["req"] in self.slots:
            self.manager.release([self.slots.pop(op["req"])])
        return self.pool()

    def preempt(self, op: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
        (self.requests[op["req"]],) = self.manager.preempt([self.slots.pop(op["req"])])
        self.computed[op["req"]] = 0
        return self.pool()

    def evict(self, op: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
        self.manager.evict(op["blocks"])
        return self.pool()

    def reset(self, op: dict[str, Any], want: dict[str, Any]) -> dict[str, Any]:
        return {"ok": self.manager.reset()} | self.pool()


def replay(case: dict[str, Any]) -> list[str]:
    """Run a trace; returns where kvframe's hit was fed the reference's instead."""
    return Replay(case).run()
