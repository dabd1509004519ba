"""Latent layers and their indexers, and models in which some layers use the indexer of an earlier one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from kvframe import Layer, LayerContext, LayerReader, ModelConfig, ModelReader, hookimpl
from kvframe.checks import cdiv
from kvframe.spelling import common_layers, listed
from kvframe_mla.spec import MLAAttentionSpec, SparseCacheRole


def _latent(layer: LayerContext) -> dict[str, MLAAttentionSpec]:
    # One vector for all heads: every rank holds the whole of it.
    config = layer.config
    spec = layer.attention(
        MLAAttentionSpec,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=config.integer("kv_lora_rank") + config.integer("qk_rope_head_dim", low=0),
        cache_dtype_str=layer.options.cache_dtype.name,
        topk_buffer_width=config.integer("index_topk") if config.get("index_topk") is not None else None,
        is_index_group_leader="indexer" in layer.layer.kinds,
    )
    return {"attn": spec}


def _indexer(layer: LayerContext) -> dict[str, MLAAttentionSpec]:
    # fp8 keys and a float32 scale for each 128 of them, whatever the cache dtype.
    width = layer.config.integer("index_head_dim")
    spec = MLAAttentionSpec(
        layer.options.block_size,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=width + 4 * cdiv(width, 128),
        dtype="uint8",
        cache_role=SparseCacheRole.INDEXER,
    )
    return {"indexer": spec}


@hookimpl
def kvframe_layer_readers() -> list[LayerReader]:
    """The readers of latent layers and of their indexers."""
    return [LayerReader(kind="mla", read=_latent), LayerReader(kind="indexer", read=_indexer)]


@hookimpl
def kvframe_model_readers() -> list[ModelReader]:
    """The reader of models that share indexers."""
    return [ModelReader(model_types=("glm_moe_dsa",), read=_shared_indexers)]


def _shared_indexers(config: ModelConfig) -> Sequence[Layer]:
    owns = _owns_indexer(config)
    return [layer if owns(layer.index) else _without_indexer(layer) for layer in common_layers(config)]


def _owns_indexer(config: ModelConfig) -> Callable[[int], bool]:
    if config.get("indexer_types") is not None:
        return listed(config, "indexer_types", {"full": True, "shared": False})
    if config.get("index_topk_pattern") is not None:
        return listed(config, "index_topk_pattern", {"F": True, "S": False})
    period = config.integer("index_topk_freq", default=1)
    first = config.integer("index_skip_topk_offset", default=2, low=0) - 1
    return lambda index: max(index - first, 0) % period == 0


def _without_indexer(layer: Layer) -> Layer:
    return attrs.evolve(layer, kinds=tuple(kind for kind in layer.kinds if kind != "indexer"))
