"""A plain Python block manager, the peer where no vLLM is installed: objects and dicts, one call a request and step.

It does what engines' managers do for full and sliding-window groups with prefix caching, in the plainest way: a list of
block ids a request and group, an OrderedDict as the free queue, a dict from key to blocks.
"""

from __future__ import annotations

import hashlib
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
from blocks import BLOCK, WINDOW

NAME = "plain Python manager (no vLLM environment found)"


class PlainRequest:
    """A request: its tokens, their hashes, and its blocks by group."""

    def __init__(self, tokens: list[int], groups: int, caching: bool) -> None:
        self.tokens = list(tokens)
        self.caching = caching
        self.computed = 0
        self.hashes: list[bytes] = []
        self.blocks: list[list[int]] = [[] for _ in range(groups)]
        self.registered = [0] * groups
        self.new: list[list[int]] = []
        self.update_hashes()

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.update_hashes()

    def update_hashes(self) -> None:
        while self.caching and (len(self.hashes) + 1) * BLOCK <= len(self.tokens):
            start = len(self.hashes) * BLOCK
            parent = self.hashes[-1] if self.hashes else b"root"
            unit = pickle.dumps((parent, tuple(self.tokens[start : start + BLOCK]), None))
            self.hashes.append(hashlib.sha256(unit).digest())


class Peer:
    """One manager and its running requests."""

    def __init__(
        self, *, groups: Sequence[str], caching: bool, num_blocks: int, max_len: int, rows: int
    ) -> None:
        self.windows = [None if kind == "full" else WINDOW for kind in groups]
        self.caching = caching
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self.refs = [0] * num_blocks
        self.key_of: dict[int, tuple[int, bytes]] = {}
        self.cached: dict[tuple[int, bytes], list[int]] = {}
        self.requests: list[PlainRequest] = []

    def request(self, tokens: list[int]) -> PlainRequest:
        return PlainRequest(tokens, len(self.windows), self.caching)

    def admit(self, request: PlainRequest) -> None:
        hit = self.lookup(request)
        for g, window in enumerate(self.windows):
            dead = 0 if window is None else max(0, hit - window + 1) // BLOCK
            for entry in range(hit // BLOCK):
                block = 0 if entry < dead else self.cached[g, request.hashes[entry]][0]
                if block:
                    if not self.refs[block]:
                        del self.free[block]
                    self.refs[block] += 1
                request.blocks[g].append(block)
            request.registered[g] = hit // BLOCK
        request.computed = hit
        self.allocate(request, len(request.tokens) - hit)
        self.requests.append(request)

    def lookup(self, request: PlainRequest) -> int:
        for length in range((len(request.tokens) - 1) // BLOCK if self.caching else 0, 0, -1):
            needed = [
                (g, request.hashes[entry])
                for g, window in enumerate(self.windows)
                for entry in range(
                    0 if window is None else max(0, length * BLOCK - window + 1) // BLOCK, length
                )
            ]
            if all(key in self.cached for key in needed):
                return length * BLOCK
        return 0

    def allocate(self, request: PlainRequest, new: int) -> None:
        total = request.computed + new
        for g, window in enumerate(self.windows):
            if window is not None:
                self.drop(request, g, max(0, request.computed - window + 1) // BLOCK)
        needed = sum(-(-total // BLOCK) - len(blocks) for blocks in request.blocks)
        if needed > len(self.free):
            raise RuntimeError("the peer's pool is too small for this benchmark")
        request.new = []
        for blocks in request.blocks:
            taken = [self.take() for _ in range(-(-total // BLOCK) - len(blocks))]
            blocks.extend(taken)
            request.new.append(taken)
        request.computed = total
        if self.caching:
            self.register(request)

    def drop(self, request: PlainRequest, g: int, stop: int) -> None:
        blocks = request.blocks[g]
        for entry in range(min(stop, len(blocks)) - 1, -1, -1):
            if not blocks[entry]:
                break
            self.give_back(blocks[entry])
            blocks[entry] = 0

    def take(self) -> int:
        block, _ = self.free.popitem(last=False)
        key = self.key_of.pop(block, None)
        if key is not None:
            self.cached[key].remove(block)
            if not self.cached[key]:
                del self.cached[key]
        self.refs[block] = 1
        return block

    def give_back(self, block: int) -> None:
        self.refs[block] -= 1
        if not self.refs[block]:
            self.free[block] = None
            if block not in self.key_of:
                self.free.move_to_end(block, last=False)

    def register(self, request: PlainRequest) -> None:
        full = min(request.computed, len(request.tokens)) // BLOCK
        for g, blocks in enumerate(request.blocks):
            for entry in range(request.registered[g], full):
                if blocks[entry]:
                    key = (g, request.hashes[entry])
                    self.key_of[blocks[entry]] = key
                    self.cached.setdefault(key, []).append(blocks[entry])
            request.registered[g] = full

    def step(self) -> None:
        for request in self.requests:
            self.allocate(request, 1)

    def read(self) -> list[Any]:
        return [tuple(request.new) if any(request.new) else None for request in self.requests]

    def append(self, tokens: list[int]) -> None:
        for request, token in zip(self.requests, tokens, strict=True):
            request.append(token)

    def release(self, request: PlainRequest) -> None:
        for blocks in request.blocks:
            for block in reversed(blocks):
                if block:
                    self.give_back(block)

    def release_all(self) -> None:
        for request in self.requests:
            self.release(request)
        self.requests = []

    def tables(self) -> list[tuple[list[int], ...]]:
        return [tuple(request.blocks) for request in self.requests]

    def num_free(self) -> int:
        return len(self.free)


def tokens_of(array: np.ndarray[Any, np.dtype[np.int32]]) -> list[int]:
    """Token ids in the form that the peer takes."""
    listed: list[int] = array.tolist()
    return listed
