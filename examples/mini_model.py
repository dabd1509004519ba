"""A small random model whose layers store what a family's spec says: the mathematics, with no word of paging.

`mini_engine.py` serves it over a paged cache; its tests run it over dense tensors.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import attrs
import numpy as np
import torch

import kvframe
from kvframe import ops
from kvframe.errors import LayoutError, UsageError
from kvframe.views import torch_dtype

WIDTH, WORDS, MAX_LEN = 32, 97, 160  # of the model's vectors; its vocabulary; tokens of the longest request
BLOCK = 16  # tokens
FULL = kvframe.FullAttentionSpec(BLOCK, num_kv_heads=8, head_size=128, dtype="bfloat16")


@functools.cache
def weight(seed: int, rows: int, columns: int) -> torch.Tensor:
    """A random matrix [rows, columns], the same for the same seed."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) / math.sqrt(rows)


def normed(x: torch.Tensor) -> torch.Tensor:
    """Vectors [..., WIDTH] with a mean square of 1."""
    return x / x.square().mean(-1, keepdim=True).add(1e-6).sqrt()


def embed(tokens: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    """What enters the first layer, [T, WIDTH]."""
    words, places = torch.tensor([tokens, positions], dtype=torch.long)
    return normed(weight(1, WORDS, WIDTH)[words] + weight(2, MAX_LEN, WIDTH)[places])


def logits(x: torch.Tensor) -> torch.Tensor:
    """The scores of the next token, [T, WORDS], from what leaves the last layer."""
    return normed(x) @ weight(3, WIDTH, WORDS)


@attrs.frozen(eq=False)
class Layer:
    """One layer: its spec, its family's lifetime, and the first seed of its weights."""

    spec: Any
    lifetime: kvframe.Lifetime
    seed: int

    @property
    def is_state(self) -> bool:
        """Whether it keeps a state instead of tokens."""
        return bool(self.spec.has_layer_views and self.spec.tokens_per_state < 0)

    @property
    def cells(self) -> Any:
        """The attention spec of what is stored for a token; raw pages hold one vector."""
        if self.spec.has_layer_views:
            return self.spec
        width = self.spec.page_size_bytes // self.spec.block_size // 2
        return kvframe.FullAttentionSpec(
            self.spec.block_size, num_kv_heads=1, head_size=width, head_size_v=0, dtype="bfloat16"
        )

    def query(self, x: torch.Tensor) -> torch.Tensor:
        """Two query heads for each KV head: x [T, WIDTH] to [T, heads, width]."""
        heads, width = 2 * self.cells.num_kv_heads, self.cells.head_size
        return (x @ weight(self.seed, WIDTH, heads * width)).unflatten(1, (heads, width))

    def key_value(self, x: torch.Tensor) -> list[torch.Tensor | None]:
        """What x [T, WIDTH] stores, [T, heads, width] each, in the cache's dtype; no value where K and V are one."""
        cells, heads = self.cells, self.cells.num_kv_heads
        both = (
            (x @ weight(self.seed + i, WIDTH, heads * width)).unflatten(1, (heads, width)) if width else None
            for i, width in enumerate((cells.head_size, cells.head_size_v), 1)
        )
        return [one if one is None else one.to(torch_dtype(cells.dtype)) for one in both]

    def output(self, attended: torch.Tensor) -> torch.Tensor:
        """[T, heads, width of V] to [T, WIDTH]."""
        flat = attended.float().flatten(1)
        return flat @ weight(self.seed + 3, flat.shape[1], WIDTH)

    def advance(self, states: Mapping[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Run one token x [WIDTH] into the states, which change in place, and give the output [WIDTH]."""
        out = torch.zeros(WIDTH)
        for i, state in enumerate(states.values()):
            moved = x @ weight(self.seed + 4 + 2 * i, WIDTH, state.numel())
            state.copy_(0.9 * state.float() + moved.view(state.shape))
            out += state.float().flatten() @ weight(self.seed + 5 + 2 * i, state.numel(), WIDTH)
        return out


@attrs.frozen(eq=False, kw_only=True)
class AliveMask(ops.Mask):
    """A query reads every key up to its own whose entry the lifetime keeps when the query's turn comes."""

    lifetime: kvframe.Lifetime
    prompts: Any

    def visible(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """[R, Q, S] for query positions [R, Q] and key positions [S]."""
        settled = queries.numpy() + self.lifetime.slack
        dead = self.lifetime.dead(settled, np.broadcast_to(self.prompts[:, None], settled.shape))
        low, high = (torch.from_numpy(np.asarray(edge))[..., None] for edge in dead)
        entry = keys // self.lifetime.block
        return (keys <= queries[..., None]) & ((entry < low) | (entry >= high))


def codec(host: kvframe.PluginHost, layer: Layer) -> ops.CellCodec | None:
    """How the reference operations store the layer's keys and values; None for states.

    Raises:
        LayoutError: only a kernel of the family knows its cells.
    """
    return None if layer.is_state else ops.cell_codec(layer.cells, host.cache_dtypes)


def example_spec(host: kvframe.PluginHost, family: str, number: int) -> Any:
    """One of a family's examples, in blocks of at most 16 tokens where its blocks may be smaller.

    Raises:
        UsageError: there is no such family or example, or the model has no kernel for it.
    """
    if family not in host.families:
        raise UsageError(
            option="FAMILY", value=family, rule=f"must be one of {', '.join(sorted(host.families))}"
        )
    known = host.families[family]
    if number < len(known.examples):
        spec = known.examples[number]
        if spec.block_size > BLOCK and known.lifetime(spec).fixed is None:
            spec = spec.copy_with_new_block_size(BLOCK)
        layer = Layer(spec, known.lifetime(spec), 0)
        with suppress(LayoutError):
            known_cells = layer.is_state or (layer.cells.tokens_per_state == 1 and codec(host, layer))
            if known_cells and layer.lifetime.export is None:
                return spec
    raise UsageError(option="--example", value=number, rule=f"{family} has no such example for plain kernels")
