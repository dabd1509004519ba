"""vLLM's spec objects and kvframe's: the same both ways, pages of equal size."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import torch
from vllm.v1 import kv_cache_interface as vllm_specs
from vllm.v1.attention.backend import MultipleOf

from kvframe import load_plugins
from kvframe_vllm.errors import UnknownSpecError, UntranslatableError
from kvframe_vllm.specs import COUNTERPARTS, bridges, to_kvframe, to_vllm

HEADS: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
LATENT: dict[str, Any] = {"num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
BYTES: dict[str, Any] = {"num_kv_heads": 1, "head_size": 132, "dtype": torch.uint8}
SPECS = [
    vllm_specs.FullAttentionSpec(**HEADS),
    vllm_specs.FullAttentionSpec(**HEADS, head_size_v=32, page_size_padded=16384, max_tp_shards=2),
    vllm_specs.FullAttentionSpec(**HEADS, sliding_window=128, non_causal=True),
    vllm_specs.FullAttentionSpec(**HEADS, attention_chunk_size=64, block_stride_alignment=MultipleOf(8)),
    vllm_specs.FullAttentionSpec(**HEADS, tokens_per_state=Fraction(1, 2), block_stride_alignment=256),
    vllm_specs.FullAttentionSpec(
        **HEADS, kv_quant_mode=vllm_specs.KVQuantMode.NVFP4, state_content_bytes=72, num_head_slots=4
    ),
    vllm_specs.SlidingWindowSpec(**HEADS, sliding_window=1024, extra_retained_tokens=2),
    vllm_specs.ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=8192),
    vllm_specs.MLAAttentionSpec(block_size=64, **LATENT),
    vllm_specs.MLAAttentionSpec(
        block_size=256,
        **BYTES,
        tokens_per_state=4,
        alignment=576,
        model_version="deepseek_v4",
        cache_dtype_str="fp8_ds_mla",
        cache_role=vllm_specs.SparseCacheRole.INDEXER,
        is_index_group_leader=True,
        non_causal_multi_token_decode=True,
    ),
    vllm_specs.SlidingWindowMLASpec(
        block_size=64, **LATENT, sliding_window=128, alignment=512, bounded_replay=True
    ),
    vllm_specs.RSWASpec(**HEADS, rswa_window=256),
    vllm_specs.SinkFullAttentionSpec(**HEADS, sink_len=4),
    vllm_specs.HiddenStateCacheSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16),
    vllm_specs.CircularBufferSpec(**HEADS),
    vllm_specs.CrossAttentionSpec(**HEADS),
    vllm_specs.EncoderOnlyAttentionSpec(**HEADS),
    vllm_specs.HiSparseHotSpec(block_size=64, page_size=41984, blocks_per_request=64),
    vllm_specs.HiSparseResidentSpec(block_size=64, page_size=41984),
    vllm_specs.MambaSpec(
        block_size=512,
        shapes=((4, 16), (2, 8, 8)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=4096,
        mamba_cache_mode="align",
        num_speculative_blocks=1,
    ),
]


def test_every_class_that_both_sides_have_is_looked_at() -> None:
    assert {type(spec).__name__ for spec in SPECS} == set(COUNTERPARTS)
    assert len(bridges()) == len(COUNTERPARTS)
    classes = {
        cls.__name__
        for cls in vars(vllm_specs).values()
        if isinstance(cls, type)
        and issubclass(cls, vllm_specs.KVCacheSpec)
        and cls.__module__ == vllm_specs.__name__
    }
    abstract = {"KVCacheSpec", "AttentionSpec", "UniformTypeKVCacheSpecs"}
    assert classes - abstract == set(COUNTERPARTS)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
def test_there_and_back(spec: Any) -> None:
    there = to_kvframe(spec, "layer")
    assert there.page_size_bytes == spec.page_size_bytes
    assert there.block_size == spec.block_size
    back = to_vllm(there, "layer")
    assert type(back) is type(spec)
    assert back == spec
    assert to_kvframe(back) == there


def example_specs() -> list[Any]:
    known = {pair.spec_type for pair in bridges()}
    families = load_plugins().families.values()
    return [spec for family in families for spec in family.examples if type(spec) in known]


@pytest.mark.parametrize("spec", example_specs(), ids=repr)
def test_back_and_there(spec: Any) -> None:
    there = to_vllm(spec, "layer")
    assert there.page_size_bytes == spec.page_size_bytes
    assert to_kvframe(there, "layer") == spec


def test_groups_of_several_pages_go_layer_by_layer() -> None:
    wide = vllm_specs.FullAttentionSpec(**HEADS)
    narrow = vllm_specs.FullAttentionSpec(**HEADS | {"num_kv_heads": 1})
    both = vllm_specs.UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": wide, "b": narrow})
    there = to_kvframe(both)
    assert there.page_size_bytes == wide.page_size_bytes + narrow.page_size_bytes
    assert to_vllm(there) == both


@dataclasses.dataclass(frozen=True, kw_only=True)
class OddSpec(vllm_specs.FullAttentionSpec):
    oddness: int = 3


def test_an_unknown_class_is_named_with_its_layer() -> None:
    with pytest.raises(UnknownSpecError, match=r"layers\.7: kvframe has no counterpart of OddSpec"):
        to_kvframe(OddSpec(**HEADS), "layers.7")


def test_a_value_without_counterpart_is_named_with_its_layer() -> None:
    spec = vllm_specs.FullAttentionSpec(**HEADS, kv_quant_mode=vllm_specs.KVQuantMode.ULTRAQUANT_4BIT)
    with pytest.raises(UntranslatableError, match=r"layers\.2: FullAttentionSpec .*kv_quant_mode"):
        to_kvframe(spec, "layers.2")
