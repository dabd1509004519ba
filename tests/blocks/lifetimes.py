"""The families' lifetime rules, written out once more from the shared document, so that these tests need no plugin."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from kvframe.lifetime import Lifetime


@attrs.frozen(kw_only=True)
class Window(Lifetime):
    window: int

    def dead(self, n: Any, prompt: Any) -> tuple[Any, Any]:
        hi = np.maximum(0, n - self.window + 1 - self.slack) // self.block
        return np.zeros_like(hi), hi


@attrs.frozen(kw_only=True)
class Chunks(Lifetime):
    chunk: int

    def dead(self, n: Any, prompt: Any) -> tuple[Any, Any]:
        hi = (n // self.chunk * self.chunk) // self.block
        return np.zeros_like(hi), hi


@attrs.frozen(kw_only=True)
class PromptAndWindow(Lifetime):
    window: int

    def dead(self, n: Any, prompt: Any) -> tuple[Any, Any]:
        return -(-prompt // self.block), np.maximum(prompt, n - self.window) // self.block


@attrs.frozen(kw_only=True)
class States(Lifetime):
    state: bool = True

    def dead(self, n: Any, prompt: Any) -> tuple[Any, Any]:
        hi = np.maximum(0, n - 1) // self.block
        return np.zeros_like(hi), hi


@attrs.frozen(kw_only=True)
class StatesAsBlocks(Lifetime):
    """An uncached state kept as one block per `block` tokens: what the reference does, and kvframe does not."""

    def dead(self, n: Any, prompt: Any) -> tuple[Any, Any]:
        hi = np.maximum(0, n - 1) // self.block
        return np.zeros_like(hi), hi


def lifetime_of(words: dict[str, Any], dcp: int = 1) -> Lifetime:
    """The rule of a layer in the vectors' words."""
    family, block = words["family"], words["block_size"]
    sharded = words.get("dcp_sharded", family not in ("mamba", "circular_buffer", "kpool_tail"))
    block *= dcp if sharded else 1
    if family in ("full_attention", "mla", "hidden_state", "sink"):
        return Lifetime(block=block)
    if family in ("sliding_window", "sliding_window_mla"):
        hits = "free" if words.get("bounded_replay") else "keyed"
        slack = words.get("extra_retained_tokens", 0)
        return Window(block=block, window=words["sliding_window"], slack=slack, hits=hits)
    if family == "chunked_local":
        return Chunks(block=block, chunk=words["attention_chunk_size"])
    if family == "rswa":
        return PromptAndWindow(block=block, window=words["rswa_window"])
    if family == "cross_attention":
        return Lifetime(block=block, source="encoder", hits="never")
    if family in ("circular_buffer", "kpool_tail"):
        return Lifetime(block=block, fixed=1, hits="free")
    spare = words.get("num_speculative_blocks", 0)
    if words.get("mamba_cache_mode") == "align":
        export = (
            words.get("prefill_checkpoint_alignment") if words.get("num_prefill_checkpoint_blocks") else None
        )
        return States(block=block, spare=spare, export=export)
    return Lifetime(block=block, fixed=1 + spare, state=True, hits="never")
