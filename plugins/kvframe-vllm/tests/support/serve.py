"""Engine runs in this process, one after the other: `python serve.py '[SETTINGS, …]'` prints a RESULT line for each.

Settings: model (folder), scheduler ("stock", "kvframe" or "faulty"), caching, blocks, count; and where they apply
scheduler_cls, async, ask, engine, env, multiprocessing (of all runs). A result has tokens and log-probabilities of each
request, and the batches that the scheduler made, where it is in this process.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import sys
from collections.abc import Iterator
from typing import Any


def prompts(count: int, longest: int) -> list[list[int]]:
    """Mixed lengths; half of them share one of three prefixes."""
    draw = random.Random(11)
    shared = [[draw.randrange(3, 500) for _ in range(96)] for _ in range(3)]
    made = []
    for number in range(count):
        own = [draw.randrange(3, 500) for _ in range(draw.randrange(5, longest))]
        made.append((shared[number % 3][: draw.randrange(33, 97)] if number % 2 else []) + own)
    return made


def make_faulty(on: bool) -> None:
    """A pool that now and then hands out a block that another request holds."""
    from kvframe.blocks.pool import BlockPool

    kept = getattr(BlockPool.take, "kept", None)
    if kept is not None:
        BlockPool.take = kept
    if not on:
        return
    take, drawn = BlockPool.take, random.Random(5)

    def twice(self: Any, group: int, count: int) -> list[int]:
        blocks = take(self, group, count)
        held = [block for block in range(1, self.num_blocks) if self.refs[block] > 0 and block not in blocks]
        if len(held) > 4 and drawn.random() < 0.2:
            blocks[-1] = drawn.choice(held)
            self.refs[blocks[-1]] += 1  # so that giving it back twice is not an error
        return blocks

    twice.kept = take  # type: ignore[attr-defined]
    BlockPool.take = twice  # type: ignore[method-assign]


@contextlib.contextmanager
def keeping_async(on: bool) -> Iterator[None]:
    """The CPU platform switches asynchronous scheduling off; leave it on."""
    from vllm.platforms.cpu import CpuPlatform

    kept = CpuPlatform.__dict__["check_and_update_config"]

    def checked(cls: Any, vllm_config: Any) -> None:
        kept.__func__(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    if on:
        CpuPlatform.check_and_update_config = classmethod(checked)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = kept  # type: ignore[method-assign]


def activate(settings: dict[str, Any]) -> None:
    from kvframe_vllm import activation

    activation.deactivate()
    if settings["scheduler"] != "stock" and not settings.get("scheduler_cls"):
        activation.activate(frozenset(settings.get("ask", "manager").split(",")))
    make_faulty(settings["scheduler"] == "faulty")


def watch(scheduler: Any, batches: list[Any]) -> None:
    """Note the batches that a scheduler makes."""
    schedule = scheduler.schedule

    def noted(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        batches.append([(name.split("-")[0], count) for name, count in output.num_scheduled_tokens.items()])
        return output

    scheduler.schedule = noted


def make_engine(settings: dict[str, Any]) -> Any:
    from vllm import LLM

    own = {"scheduler_cls": settings["scheduler_cls"]} if settings.get("scheduler_cls") else {}
    with keeping_async(bool(settings.get("async"))):
        return LLM(
            model=settings["model"],
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=512,
            dtype="bfloat16",
            block_size=32,
            max_num_seqs=settings.get("max_num_seqs", 24),
            max_num_batched_tokens=256,
            enable_prefix_caching=settings["caching"],
            num_gpu_blocks_override=settings["blocks"],
            disable_log_stats=False,
            seed=0,
            **own,
            **settings.get("engine", {}),
        )


def run(settings: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    engine = make_engine(settings)
    core = getattr(engine.llm_engine.engine_core, "engine_core", None)
    scheduler, batches = (core.scheduler if core is not None else None), []
    if scheduler is not None:
        watch(scheduler, batches)
    count = settings["count"]
    params = [
        SamplingParams(max_tokens=24 + n % 41, ignore_eos=True, detokenize=False, temperature=0.0, logprobs=1)
        for n in range(count)
    ]
    texts = prompts(count, settings.get("longest", 200))
    outputs = engine.generate([{"prompt_token_ids": one} for one in texts], params, use_tqdm=False)
    metrics = {metric.name: getattr(metric, "value", None) for metric in engine.get_metrics()}
    tokens = [list(one.outputs[0].token_ids) for one in outputs]
    result = {
        "tokens": tokens,
        "logprobs": [
            [step[token].logprob for step, token in zip(one.outputs[0].logprobs, ids, strict=True)]
            for one, ids in zip(outputs, tokens, strict=True)
        ],
        "batches": batches,
        "preemptions": metrics.get("vllm:num_preemptions"),
        "hits": metrics.get("vllm:prefix_cache_hits"),
        "manager": type(scheduler.kv_cache_manager).__name__ if scheduler else None,
        "scheduler": type(scheduler).__name__ if scheduler else None,
    }
    if core is not None:
        core.shutdown()
    del engine, core, scheduler
    gc.collect()
    return result


def main() -> None:
    runs = json.loads(sys.argv[1])
    first = runs[0]
    os.environ.update(
        {
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if first.get("multiprocessing") else "0",
            "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        }
        | first.get("env", {})
    )
    if first.get("multiprocessing"):  # the engine's process reads the variable itself
        os.environ["KVFRAME_VLLM"] = "" if first["scheduler"] == "stock" else first.get("ask", "manager")
    for settings in runs:
        if not first.get("multiprocessing"):
            activate(settings)
        sys.stdout.write("\nRESULT " + json.dumps(run(settings)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
