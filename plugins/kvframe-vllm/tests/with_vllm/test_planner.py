"""kvframe's planner in the place of vLLM's: equal to it by the engine strategy, field by field."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import torch
from tiny_models import make_model
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.v1 import kv_cache_interface as vllm_specs
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

from kvframe_vllm.planner import plan_for_vllm

GIB = 1 << 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> str:
    register_all_kvcache_specs(None)
    return str(make_model("llama", tmp_path_factory.mktemp("models")))


def full(heads: int = 2, block: int = 32, **more: Any) -> Any:
    return vllm_specs.FullAttentionSpec(
        block_size=block, num_kv_heads=heads, head_size=64, dtype=torch.bfloat16, **more
    )


def window(tokens: int = 256, heads: int = 2, block: int = 32) -> Any:
    return vllm_specs.SlidingWindowSpec(
        block_size=block, num_kv_heads=heads, head_size=64, dtype=torch.bfloat16, sliding_window=tokens
    )


def chunked(tokens: int = 256) -> Any:
    return vllm_specs.ChunkedLocalAttentionSpec(
        block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, attention_chunk_size=tokens
    )


def latent(**more: Any) -> Any:
    return vllm_specs.MLAAttentionSpec(
        block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16, **more
    )


def named(*specs: Any) -> dict[str, Any]:
    return {f"model.layers.{number}.attn": spec for number, spec in enumerate(specs)}


MODELS = {
    "llama": named(*[full()] * 4),
    "gemma2": named(*[window(), full()] * 4),
    "gemma3": named(*([window()] * 5 + [full()]) * 2),
    "gpt-oss": named(*[window(128), full()] * 6),
    "llama4": named(*([chunked()] * 3 + [full()]) * 2),
    "mla": named(*[latent()] * 4),
    "two windows": named(*[window(128), window(512), full()] * 2),
    "heads differ": named(*[window(heads=4), full(heads=2)] * 3),
    "pages do not divide": named(*[window(heads=3), full(heads=2)] * 3),
    "one kind, two pages": named(full(2), full(4), full(2)),
    "unequal counts": named(*[window()] * 7, *[full()] * 3),
}
LAYOUTS = ("LBHNC", "BLHNC")


def vllm_config(model: str, layout: str, **cache: Any) -> Any:
    config = VllmConfig(
        model_config=ModelConfig(model=model, skip_tokenizer_init=True, max_model_len=1024),
        cache_config=CacheConfig(block_size=32, **cache),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=512, max_num_seqs=16, max_model_len=1024, is_encoder_decoder=False
        ),
    )
    config.cache_config.kv_cache_layout = layout
    return config


def fail(*_: Any) -> Any:
    pytest.fail("vLLM's own planner was asked")


def both(config: Any, specs: list[dict[str, Any]], memory: list[int]) -> tuple[Any, Any]:
    ours_config, ours_specs = copy.deepcopy(config), copy.deepcopy(specs)
    theirs = get_kv_cache_configs(config, copy.deepcopy(specs), list(memory))
    ours = plan_for_vllm(ours_config, ours_specs, memory, stock=fail, strategy="engine")
    assert ours_config.model_config.max_model_len == config.model_config.max_model_len
    return ours, theirs


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_the_engine_strategy_is_vllms_own(model: str, name: str, layout: str) -> None:
    ours, theirs = both(vllm_config(model, layout), [MODELS[name]], [GIB])
    assert ours == theirs


@pytest.mark.parametrize("name", MODELS)
def test_two_workers_with_unequal_memory(model: str, name: str) -> None:
    ours, theirs = both(vllm_config(model, "LBHNC"), [MODELS[name]] * 2, [GIB, GIB // 3])
    assert ours == theirs


@pytest.mark.parametrize("name", ["llama", "gemma3", "unequal counts"])
def test_pipeline_stages(model: str, name: str) -> None:
    layers = list(MODELS[name].items())
    stages = [dict(layers[: len(layers) // 2]), dict(layers[len(layers) // 2 :])]
    ours, theirs = both(vllm_config(model, "LBHNC"), stages, [GIB, GIB // 2])
    assert ours == theirs


@pytest.mark.parametrize("name", MODELS)
def test_a_number_of_blocks_that_the_user_sets(model: str, name: str) -> None:
    config = vllm_config(model, "BLHNC", num_gpu_blocks_override=300)
    ours, theirs = both(config, [MODELS[name]], [GIB])
    assert ours == theirs
    assert ours[0].num_blocks == 300


@pytest.mark.parametrize("name", ["llama", "gemma3", "mla"])
def test_the_longest_request_is_found(model: str, name: str) -> None:
    config = vllm_config(model, "LBHNC")
    config.model_config.original_max_model_len = -1
    page = sum(spec.page_size_bytes for spec in MODELS[name].values())
    ours, theirs = both(config, [MODELS[name]], [9 * page])
    assert ours == theirs
    assert config.model_config.max_model_len < 1024


def test_too_little_memory_is_an_error_on_both_sides(model: str) -> None:
    config = vllm_config(model, "LBHNC")
    with pytest.raises(ValueError, match="max seq len"):
        get_kv_cache_configs(config, [dict(MODELS["llama"])], [1 << 20])
    with pytest.raises(ValueError, match="1,024"):
        plan_for_vllm(config, [MODELS["llama"]], [1 << 20], stock=fail, strategy="engine")


def test_what_kvframe_does_not_know_is_left_to_vllm(model: str) -> None:
    class OddSpec(vllm_specs.FullAttentionSpec):
        pass

    odd = OddSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
    asked = []
    answer = plan_for_vllm(
        vllm_config(model, "LBHNC"),
        [{"layers.0": odd}],
        [GIB],
        stock=lambda *args: asked.append(args) or "stock",
        strategy="engine",
    )
    assert answer == "stock"
    assert len(asked) == 1


@pytest.mark.parametrize("name", MODELS)
def test_an_optimal_plan_is_one_that_the_worker_can_hold(model: str, name: str) -> None:
    config = vllm_config(model, "BLHNC")
    (ours,) = plan_for_vllm(config, [MODELS[name]], [GIB], stock=fail, strategy="optimal")
    assert {layer for group in ours.kv_cache_groups for layer in group.layer_names} == set(MODELS[name])
    for group in ours.kv_cache_groups:
        assert group.kv_cache_spec.block_size % 32 == 0
    assert all(tensor.size <= GIB for tensor in ours.kv_cache_tensors)
