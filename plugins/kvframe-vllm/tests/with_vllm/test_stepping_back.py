"""What kvframe does not serve runs on vLLM's own manager, with one warning; the rest of vLLM is as it was."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: make test-vllm")

import torch
from simulated import full, kv_cache_config, make_scheduler, vllm_config, window
from tiny_models import make_model
from vllm.v1 import kv_cache_interface as vllm_specs
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched import scheduler as stock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

import kvframe_vllm
from kvframe_vllm.reasons import why_not

MAMBA = vllm_specs.MambaSpec(block_size=16, shapes=((4, 16),), dtypes=(torch.float32,))
CROSS = vllm_specs.CrossAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def model(tmp_path_factory: Any) -> str:
    return str(make_model("llama", tmp_path_factory.mktemp("models")))


def changed(config: Any, **parts: Any) -> Any:
    """The configuration as the gate sees it, with some parts replaced."""
    names = (
        "parallel_config",
        "kv_events_config",
        "kv_transfer_config",
        "speculative_config",
        "observability_config",
        "model_config",
        "attention_config",
        "cache_config",
    )
    return SimpleNamespace(**{name: getattr(config, name) for name in names} | parts)


def reason(config: Any, specs: Any, block_size: int = 16) -> str | None:
    return why_not(config, kv_cache_config(specs, 64), block_size=block_size, hash_block_size=16)


def test_nothing_stands_against_the_kinds_that_are_served(model: str) -> None:
    assert reason(vllm_config(model), [full(), window(64)]) is None


def test_every_reason_of_the_engine(model: str) -> None:
    config, specs = vllm_config(model), [full()]
    parallel = config.parallel_config
    assert reason(changed(config, kv_transfer_config=object()), specs) == "a KV connector is configured"
    assert reason(changed(config, speculative_config=object()), specs) == "speculative decoding is on"
    for name, text in (
        ("decode_context_parallel_size", "decode"),
        ("prefill_context_parallel_size", "prefill"),
    ):
        more = SimpleNamespace(
            decode_context_parallel_size=parallel.decode_context_parallel_size,
            prefill_context_parallel_size=parallel.prefill_context_parallel_size,
        )
        setattr(more, name, 2)
        assert reason(changed(config, parallel_config=more), specs) == f"{text} context parallelism is on"
    events = SimpleNamespace(enable_kv_cache_events=True)
    assert reason(changed(config, kv_events_config=events), specs) == "KV cache events are on"
    observed = SimpleNamespace(kv_cache_metrics=True)
    assert (
        reason(changed(config, observability_config=observed), specs) == "KV cache residency metrics are on"
    )


def test_every_reason_of_the_groups(model: str) -> None:
    config = vllm_config(model)
    assert reason(config, [full(), MAMBA]) == "the model has Mamba layers"
    assert reason(config, [full(), CROSS]) == "the model has cross attention"
    sink = vllm_specs.SinkFullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    assert reason(config, [sink]) == "the model has layers of SinkFullAttentionSpec"
    assert reason(config, []) == "the model has no KV cache"
    odd = vllm_specs.SlidingWindowMLASpec(
        block_size=16,
        num_kv_heads=1,
        head_size=64,
        dtype=torch.bfloat16,
        sliding_window=64,
        bounded_replay=True,
    )
    assert reason(config, [full(), odd]) == "the model has windows that a prefix hit replays"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OddSpec(vllm_specs.FullAttentionSpec):
    pass


def test_a_spec_class_that_kvframe_does_not_know_is_a_reason(model: str) -> None:
    odd = OddSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)
    assert "OddSpec" in (reason(vllm_config(model), [odd]) or "")


@pytest.mark.parametrize(
    ("cls", "own"),
    [(kvframe_vllm.Scheduler, stock.Scheduler), (kvframe_vllm.AsyncScheduler, AsyncScheduler)],
)
def test_a_scheduler_that_steps_back_is_vllms_own(model: str, cls: Any, own: Any, caplog: Any) -> None:
    config = vllm_config(model, caching=False)
    logging.getLogger("vllm").propagate = True
    made = make_scheduler(cls, config, kv_cache_config([full(), MAMBA], 64))
    assert type(made) is own
    assert type(made.kv_cache_manager) is KVCacheManager
    assert stock.KVCacheManager is KVCacheManager
    lines = [record for record in caplog.records if "kvframe" in record.getMessage()]
    assert [line.levelname for line in lines] == ["WARNING"]
    assert "Mamba layers" in lines[0].getMessage()


def test_the_name_in_vllms_module_is_put_back(model: str) -> None:
    made = make_scheduler(kvframe_vllm.Scheduler, vllm_config(model), kv_cache_config([full()], 64))
    assert type(made.kv_cache_manager).__name__ == "EngineManager"
    assert stock.KVCacheManager is KVCacheManager
