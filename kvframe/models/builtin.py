"""Readers of model types that have only full attention, and spell it in a way of their own."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from kvframe.readers import Layer, ModelConfig, ModelReader
from kvframe.spelling import FULL, NO_CACHE, common_layers


def builtin_model_readers() -> Mapping[str, ModelReader]:
    """The readers by the model type they own."""
    readers = (
        ModelReader(model_types=("nemotron-nas",), read=_searched_layers),
        ModelReader(model_types=("step3_text",), read=_attention_groups),
    )
    return {model_type: reader for reader in readers for model_type in reader.model_types}


def _searched_layers(config: ModelConfig) -> tuple[Layer, ...]:
    """`block_configs`: a layer may have no attention, and has its own number of query heads to a KV head."""
    heads = config.integer("num_attention_heads")
    layers = []
    for index, block in enumerate(config.per_layer("block_configs")):
        name = f"block_configs[{index}]"
        attention = attrs.evolve(config, values={name: block}).section(name).section("attention")
        if attention.flag("no_op"):
            layers.append(Layer(index=index, kinds=NO_CACHE))
            continue
        group = attention.integer("n_heads_in_group")
        if heads % group:
            raise attention.invalid(
                "n_heads_in_group", group, f"must divide num_attention_heads, which is {heads}"
            )
        layers.append(Layer(index=index, kinds=FULL, facts={"num_key_value_heads": heads // group}))
    return tuple(layers)


def _attention_groups(config: ModelConfig) -> tuple[Layer, ...]:
    """KV heads are called attention groups."""
    return common_layers(
        config, facts={"full_attention": {"num_key_value_heads": config.integer("num_attention_groups")}}
    )
