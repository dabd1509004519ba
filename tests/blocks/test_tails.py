"""The hashes of running requests, whichever way their tokens are told, against each request hashed at once."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest

from kvframe.blocks import Admission, BlockConfig, BlockRequest, ExtraKeys, GroupBlocks, KVCacheManager
from kvframe.blocks.hashing import cbor
from kvframe.lifetime import Lifetime

ROWS = 24
EXTRAS = (ExtraKeys(), ExtraKeys(), ExtraKeys(salt="a"), ExtraKeys(lora_name="b"))


def manager_of(unit: int, lookahead: int, name: str) -> KVCacheManager:
    group = GroupBlocks(name="full", lifetime=Lifetime(block=unit))
    config = BlockConfig(
        groups=[group],
        num_blocks=4000,
        max_model_len=600,
        max_requests=ROWS,
        hash_name=name,
        hash_lookahead=lookahead,
    )
    return KVCacheManager(config)


class Story:
    """Requests that come, grow and go, and what tokens each of them has."""

    def __init__(self, manager: KVCacheManager, choices: random.Random) -> None:
        self.manager, self.random = manager, choices
        self.tokens: dict[int, list[int]] = {}  # by slot
        self.requests: dict[int, BlockRequest] = {}
        self.extras: dict[int, ExtraKeys] = {}

    def some(self, most: int) -> list[int]:
        return [self.random.randrange(1 << 17) for _ in range(self.random.randint(1, most))]

    def come(self) -> None:
        extra, tokens = self.random.choice(EXTRAS), self.some(70)
        request = self.manager.request(tokens, extra=extra)
        if len(self.tokens) < ROWS:
            self.enter(request, tokens, extra)

    def enter(self, request: BlockRequest, tokens: list[int], extra: ExtraKeys) -> None:
        (answer,) = self.manager.admit([Admission(request=request, num_new_tokens=1)])
        self.tokens[answer.slot], self.extras[answer.slot] = tokens, extra
        self.requests[answer.slot] = request

    def go(self, slot: int) -> None:
        self.manager.release([slot])
        del self.tokens[slot]

    def pause(self, slot: int) -> None:
        """The request leaves its row, perhaps gets more tokens, and comes again, perhaps into another."""
        (request,) = self.manager.preempt([slot])
        tokens, extra = self.tokens.pop(slot), self.extras[slot]
        check(self.manager, request, tokens, extra)
        if self.random.random() < 0.5:
            more = self.some(20)
            request.extend(more)
            tokens = tokens + more
        self.enter(request, tokens, extra)

    def fork(self, slot: int) -> None:
        if len(self.tokens) < ROWS:
            twin = self.manager.fork(slot).slot
            self.tokens[twin], self.extras[twin] = [*self.tokens[slot]], self.extras[slot]
            self.requests[twin] = self.manager.ledger.request(twin)

    def tell_few(self, slot: int) -> None:
        more = self.some(40)
        self.manager.append([slot], [more])
        self.tokens[slot] = self.tokens[slot] + more

    def tell_picked(self) -> None:
        slots = [slot for slot in sorted(self.tokens) if self.random.random() < 0.5]
        self.tell(slots, slots)

    def tell_first(self) -> None:
        """One token for each of the first rows, for some steps; rows without a request take none."""
        rows = self.random.choice([max(self.tokens, default=-1) + 1, self.random.randint(0, ROWS)])
        for _ in range(self.random.choice([1, 2, 7, 40])):
            self.tell(rows, list(range(rows)))

    def tell(self, slots: int | list[int], rows: list[int]) -> None:
        new = self.some(1) * len(rows)
        self.manager.append(slots, np.array(new, np.int32))
        for row, token in zip(rows, new, strict=True):
            if row in self.tokens:
                self.tokens[row] = [*self.tokens[row], token]

    def run(self) -> None:
        over = [slot for slot, tokens in self.tokens.items() if len(tokens) > 400]
        for slot in over:
            self.go(slot)
        slots = sorted(self.tokens)
        change = self.random.choice(
            ["come", "come", "go", "pause", "fork", "few", "picked", "first", "first", "first"]
        )
        if change in ("go", "pause", "fork", "few") and slots:
            slot = self.random.choice(slots)
            {"go": self.go, "pause": self.pause, "fork": self.fork, "few": self.tell_few}[change](slot)
        elif change in ("come", "picked", "first"):
            {"come": self.come, "picked": self.tell_picked, "first": self.tell_first}[change]()


def check(manager: KVCacheManager, request: BlockRequest, tokens: list[int], extra: ExtraKeys) -> None:
    expected = manager.request(tokens, extra=extra).chain
    assert request.chain.digests == expected.digests
    assert request.chain.tail.tolist() == expected.tail.tolist()
    assert request.num_tokens == len(tokens)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("unit", "lookahead", "name"),
    [
        (16, 0, "sha256"),
        (4, 0, "sha256"),
        (1, 0, "sha256"),
        (4, 3, "sha256"),
        (4, 9, "sha256"),
        (6, 1, "sha256_cbor"),
    ],
)
def test_hashes_do_not_depend_on_how_tokens_are_told(unit: int, lookahead: int, name: str, seed: int) -> None:
    manager = manager_of(unit, lookahead, name)
    story = Story(manager, random.Random(seed))
    for _ in range(80):
        story.run()
        for slot, tokens in story.tokens.items():
            hashed = manager.request(tokens, extra=story.extras[slot]).chain.digests
            assert manager.ledger.request(slot).chain.digests == hashed
    for slot, tokens in list(story.tokens.items()):
        (request,) = manager.preempt([slot])
        check(manager, request, tokens, story.extras[slot])


def test_a_prompt_told_at_once_is_hashed_as_the_chain_says() -> None:
    """By hand: SHA-256 over the parent's hash and the tokens as four bytes each."""
    tokens = np.arange(50, dtype=np.int32)
    parent, digests = hashlib.sha256(cbor("vllm-none-hash")).digest(), b""
    for start in (0, 16, 32):
        parent = hashlib.sha256(parent + tokens[start : start + 16].tobytes()).digest()
        digests += parent
    assert manager_of(16, 0, "sha256").request(tokens).chain.digests == digests
