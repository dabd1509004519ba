"""Reference operations on paged caches in plain torch, for any device: what a kernel must do, and CPU engines can use.

Each takes a step's whole batch in one call. `layer_cache` prepares a layer's cells once; a codec says how keys and
values are stored in them.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvframe.errors import LayoutError, MissingDependencyError

try:
    import torch
except ModuleNotFoundError as error:
    raise MissingDependencyError(module="kvframe.ops", needs="torch", extra="torch") from error

from kvframe.ops.attention import CAUSAL, Mask, attend
from kvframe.ops.cache import LayerCache, layer_cache
from kvframe.ops.codecs import CellCodec, cell_codec
from kvframe.ops.slots import PAD_SLOT, TokenMap, kernel_block_table, slot_mapping, token_map

__all__ = [
    "PAD_SLOT",
    "CellCodec",
    "LayerCache",
    "Mask",
    "TokenMap",
    "cell_codec",
    "copy_blocks",
    "gather_kv",
    "kernel_block_table",
    "layer_cache",
    "paged_attention",
    "slot_mapping",
    "token_map",
    "write_kv",
    "zero_blocks",
]


def write_kv(cache: LayerCache, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor | None) -> None:
    """Store keys and values of a step's tokens, quantised where the cache's codec does.

    Args:
        cache: one layer's.
        slots: [K], int64; PAD_SLOT for tokens that only fill the batch. No other slot may come twice.
        key: [K, heads, width], or the one vector of a joint cache.
        value: [K, heads, width of V], None for a joint cache.

    Raises:
        LayoutError: the cache has no codec.
    """
    cache.put(slots, cache.need_codec().encode(key, value))


def gather_kv(cache: LayerCache, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of `slots`, [*slots.shape, heads, width] each; of joint caches the one vector twice.

    Args:
        cache: one layer's.
        slots: int64, of any shape.

    Raises:
        LayoutError: the cache has no codec.
    """
    key, value = cache.need_codec().decode(cache.take(slots.reshape(-1)))
    if slots.dim() == 1:
        return key, value
    return key.unflatten(0, slots.shape), value.unflatten(0, slots.shape)


def copy_blocks(sources: Sequence[LayerCache], targets: Sequence[LayerCache], pairs: torch.Tensor) -> None:
    """Copy whole blocks of all layers of a group, for copy-on-write, within a pool or from one to another.

    All blocks are read before any is written, so a block may be source and target of different pairs.

    Args:
        sources: each layer's cache, where the blocks are.
        targets: the same layers where they go: the same list, or that of another pool, device or layout.
        pairs: [K, 2], (from, to) block ids; no two have one target.

    Raises:
        LayoutError: the lists do not pair up, or a layer's blocks differ in shape.
    """
    if len(sources) != len(targets):
        raise LayoutError(
            layout="any", reason=f"{len(sources)} source layers and {len(targets)} target layers"
        )
    for source, target in zip(sources, targets, strict=True):
        here, there = tuple(source.cells.shape[1:]), tuple(target.cells.shape[1:])
        if here != there:
            raise LayoutError(layout="any", reason=f"blocks of {here} bytes cannot go into blocks of {there}")
    origin, goal = pairs.to(torch.int64).unbind(1)
    taken = [
        source.blocks.take(source.blocks.of_blocks(origin.to(source.cells.device)), len(origin))
        for source in sources
    ]
    for values, target in zip(taken, targets, strict=True):
        device = target.cells.device
        target.blocks.put(target.blocks.of_blocks(goal.to(device)), values.to(device))


def zero_blocks(layers: Sequence[LayerCache], blocks: torch.Tensor) -> None:
    """Zero whole blocks of all layers of a group; needed where a plan says `needs_kv_cache_zeroing`.

    Args:
        layers: each layer's cache.
        blocks: [K], block ids.
    """
    for layer in layers:
        layer.blocks.fill(layer.blocks.of_blocks(blocks.to(layer.cells.device, torch.int64)), 0)


def paged_attention(
    query: torch.Tensor,
    cache: LayerCache,
    tokens: TokenMap,
    block_table: torch.Tensor,
    *,
    query_starts: torch.Tensor,
    lengths: torch.Tensor,
    max_query_len: int,
    scale: float,
    mask: Mask = CAUSAL,
    softcap: float | None = None,
    value_width: int | None = None,
) -> torch.Tensor:
    """Attention of a step's tokens over the cache that their requests' block tables name.

    Args:
        query: [T, query heads, width], the requests' tokens one after the other.
        cache: one layer's; this step's keys and values are already written.
        tokens: the group's token map.
        block_table: [R, entries], block ids; entries that the mask hides may be null.
        query_starts: [R + 1], where each request's tokens start in `query`.
        lengths: [R], tokens of each request, those of this step included; its queries are the last.
        max_query_len: the most tokens of one request in this step.
        scale: of the scores.
        mask: which keys a query sees.
        softcap: scores s become softcap * tanh(s / softcap).
        value_width: the first elements of a joint vector that serve as its value (MLA); None: all of the value.

    Returns:
        [T, query heads, width of V], in the query's dtype.

    Raises:
        LayoutError: the cache has no codec.
        SpecError: the query's heads are no multiple of the cache's.
    """
    rows = torch.arange(len(block_table), device=query.device)
    positions = torch.arange(block_table.shape[1] * tokens.block, device=query.device)
    key, value = gather_kv(cache, slot_mapping(tokens, block_table, rows[:, None], positions[None]))
    return attend(
        query,
        key,
        value[..., :value_width],
        query_starts=query_starts,
        lengths=lengths,
        max_query_len=max_query_len,
        scale=scale,
        mask=mask,
        softcap=softcap,
    )
