"""From layers to specs: every layer's kinds are turned into specs by the plugins that own them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import attrs

from kvframe.errors import KVFrameError, PlanError
from kvframe.models.builtin import builtin_model_readers
from kvframe.models.reading import read_layers, reader_error
from kvframe.plugins import PluginHost
from kvframe.readers import Layer, LayerContext, ModelConfig, ReadOptions
from kvframe.spec import AttentionSpec, KVCacheSpec
from kvframe.spelling import OWN_NOTHING

# Model types of which the common spellings say everything: reading one gives no warning.
PLAIN_TYPES = frozenset(
    {
        "cohere",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "gemma",
        "glm4",
        "glm4_moe",
        "granite",
        "kimi_k2",
        "llama",
        "minimax_m2",
        "ministral3",
        "mistral",
        "mixtral",
        "olmo",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "step3p7",
    }
)


@attrs.frozen(kw_only=True)
class ModelSpecs:
    """What a model keeps on one rank.

    Args:
        specs: "layers.<index>.<suffix>" to its spec, in layer order.
        kinds: the same names to the layer kind that the spec came from.
        indices: the same names to the index of the layer that owns the cache.
        num_layers: layers of the model, those without a cache included.
        layers: layer kind to the number of layers of it, with those that own no cache.
        shares_with: index of a layer without a cache to that of the earlier layer whose cache it uses.
        kv_heads_total: attention kind to KV heads over all ranks, none counted twice; the most where layers differ.
        kv_heads_per_rank: attention kind to KV heads on one rank.
        warnings: what a person should know about how the config was read.
    """

    specs: Mapping[str, KVCacheSpec]
    kinds: Mapping[str, str]
    indices: Mapping[str, int]
    num_layers: int
    layers: Mapping[str, int]
    shares_with: Mapping[int, int]
    kv_heads_total: Mapping[str, int]
    kv_heads_per_rank: Mapping[str, int]
    warnings: tuple[str, ...] = ()


def model_specs(config: ModelConfig, host: PluginHost, options: ReadOptions) -> ModelSpecs:
    """Read a model: its layers, and the specs that the owners of their kinds make of them.

    Raises:
        ModelConfigError: a field is missing or wrong, a word unknown, or heads do not divide.
        MissingPluginError: a kind whose plugin is not in use.
        UsageError: the cache dtype does not serve a family of the model.
    """
    layers = read_layers(config, host)
    specs: dict[str, KVCacheSpec] = {}
    kinds: dict[str, str] = {}
    indices: dict[str, int] = {}
    for layer in layers:
        context = LayerContext(
            config=_laid_over(config, layer),
            layer=layer,
            options=options,
            family_name=lambda spec: host.family(spec).name,
        )
        for kind in layer.kinds:
            if kind in OWN_NOTHING:
                continue
            for suffix, spec in _read(kind, context, host).items():
                name = f"layers.{layer.index}.{suffix}"
                if name in specs:
                    reason = f"layer kinds {kinds[name]!r} and {kind!r} both name a cache {suffix!r}"
                    raise PlanError(reason=reason, layers=(name,))
                specs[name], kinds[name], indices[name] = spec, kind, layer.index
    total, per_rank = _heads(specs, kinds, options.tp)
    return ModelSpecs(
        specs=specs,
        kinds=kinds,
        indices=indices,
        num_layers=len(layers),
        layers=dict(Counter(kind for layer in layers for kind in layer.kinds)),
        shares_with={layer.index: layer.shares_with for layer in layers if layer.shares_with is not None},
        kv_heads_total=total,
        kv_heads_per_rank=per_rank,
        warnings=_warnings(config, host),
    )


def _read(kind: str, context: LayerContext, host: PluginHost) -> Mapping[str, KVCacheSpec]:
    try:
        return host.layer_readers[kind].read(context)
    except KVFrameError:
        raise
    except Exception as error:  # a reader is a plugin's code: its owner is named
        raise reader_error("kvframe_layer_readers", kind, host, error) from error


def _laid_over(config: ModelConfig, layer: Layer) -> ModelConfig:
    return ModelConfig(values={**config.values, **layer.facts}, file=config.file) if layer.facts else config


def _heads(
    specs: Mapping[str, KVCacheSpec], kinds: Mapping[str, str], tp: int
) -> tuple[dict[str, int], dict[str, int]]:
    """KV heads by kind, over all ranks and on one."""
    total: dict[str, int] = {}
    per_rank: dict[str, int] = {}
    for name, spec in specs.items():
        if isinstance(spec, AttentionSpec):
            kind, heads = kinds[name], spec.num_kv_heads
            # ranks beyond the distinct shards hold copies
            distinct = heads * min(tp, spec.max_tp_shards or tp)
            total[kind] = max(distinct, total.get(kind, 0))
            per_rank[kind] = max(heads, per_rank.get(kind, 0))
    return total, per_rank


def _warnings(config: ModelConfig, host: PluginHost) -> tuple[str, ...]:
    model_type = config.model_type
    if model_type in PLAIN_TYPES or model_type in host.model_readers or model_type in builtin_model_readers():
        return ()
    what = f"model type {model_type!r} is unknown" if model_type else "the config names no model_type"
    return (f"{what}: layers are read as the config's fields say, which may miss what they do not say",)
