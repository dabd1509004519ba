"""kvframe: the KV-cache layer of an LLM engine as a plugin framework. Importing it imports no torch."""

from kvframe.dtypes import CacheDType, KVQuantMode, PackedCell, ScaleStorage
from kvframe.engine import EngineConfig
from kvframe.errors import KVFrameError
from kvframe.family import Paging, SpecFamily, Traits
from kvframe.hookspecs import hookimpl
from kvframe.lifetime import Lifetime
from kvframe.merge import ANY, EQUAL, FIRST_SET, MAX, Refusal, kv_field
from kvframe.plugins import PluginHost, load_plugins
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
    "KVCacheSpec",
    "KVFrameError",
    "KVQuantMode",
    "Layer",
    "LayerContext",
    "LayerReader",
    "Lifetime",
    "ModelConfig",
    "ModelReader",
    "MultipleOf",
    "PackedCell",
    "Paging",
    "PluginHost",
    "Refusal",
    "ScaleStorage",
    "SpecBase",
    "SpecFamily",
    "Traits",
    "UniformTypeKVCacheSpecs",
    "__version__",
    "hookimpl",
    "is_full_attention_spec",
    "iter_layer_specs",
    "kv_field",
    "load_plugins",
    "replace_as",
]
