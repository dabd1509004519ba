"""kvframe: the KV-cache layer of an LLM engine as a plugin framework. Importing it imports no torch."""

from kvframe.config import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, LayerGroup, Pool
from kvframe.dtypes import CacheDType, KVQuantMode, PackedCell, ScaleStorage
from kvframe.engine import EngineConfig
from kvframe.errors import KVFrameError
from kvframe.family import Paging, SpecFamily, Traits
from kvframe.hookspecs import hookimpl
from kvframe.lifetime import Lifetime
from kvframe.merge import ANY, EQUAL, FIRST_SET, MAX, Refusal, kv_field
from kvframe.planning import Limits, Plan, plan
from kvframe.plugins import PluginHost, load_plugins, merge_specs
from kvframe.quant import get_kv_quant_mode, kv_cache_uses_per_token_head_scales
from kvframe.readers import Layer, LayerContext, LayerReader, ModelConfig, ModelReader
from kvframe.spec import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MultipleOf,
    SpecBase,
    UniformTypeKVCacheSpecs,
    is_full_attention_spec,
    iter_layer_specs,
    replace_as,
)
from kvframe.version import VERSION as __version__

__all__ = [
    "ANY",
    "EQUAL",
    "FIRST_SET",
    "MAX",
    "AttentionSpec",
    "CacheDType",
    "EngineConfig",
    "FullAttentionSpec",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCacheSpec",
    "KVCacheTensor",
    "KVFrameError",
    "KVQuantMode",
    "Layer",
    "LayerContext",
    "LayerGroup",
    "LayerReader",
    "Lifetime",
    "Limits",
    "ModelConfig",
    "ModelReader",
    "MultipleOf",
    "PackedCell",
    "Paging",
    "Plan",
    "PluginHost",
    "Pool",
    "Refusal",
    "ScaleStorage",
    "SpecBase",
    "SpecFamily",
    "Traits",
    "UniformTypeKVCacheSpecs",
    "__version__",
    "get_kv_quant_mode",
    "hookimpl",
    "is_full_attention_spec",
    "iter_layer_specs",
    "kv_cache_uses_per_token_head_scales",
    "kv_field",
    "load_plugins",
    "merge_specs",
    "plan",
    "replace_as",
]
