"""PagedCache against DynamicCache and StaticCache of transformers: memory and time on the same prompts, on the CPU.

Random models of two shapes, since weights do not change what a cache costs. Each kind of cache runs every round, in
turns, on one thread; times are the thread's CPU time, the median of the rounds. Memory is what the cache holds at the
end: the tensors of DynamicCache and StaticCache, the blocks in use (and at their peak) of PagedCache.

Run: python benchmarks/transformers_cache.py
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
)

from kvframe_transformers import PagedCache, PagedCachePool

BATCH, PROMPT, NEW, SYSTEM, CALLS = 4, 512, 64, 512, 6
SHAPE = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}


def models():
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=8)).eval()
    gemma = Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, num_hidden_layers=12, sliding_window=128)).eval()
    return {
        "Llama, 8 layers": llama,
        "Gemma-3, 10 sliding layers (window 128) and 2 full": gemma,
    }


def caches(model):
    given = {"memory": "64MiB", "max_batch_size": BATCH, "max_model_len": PROMPT + NEW}
    return {
        "DynamicCache": lambda: DynamicCache(config=model.config),
        "DynamicCache without the config": DynamicCache,
        "StaticCache": lambda: StaticCache(config=model.config, max_cache_len=PROMPT + NEW),
        "PagedCache": lambda: PagedCache.for_model(model, **given),
        "PagedCache, fp8": lambda: PagedCache.for_model(model, **given, cache_dtype="fp8"),
        "PagedCache, int8 per token and head": lambda: PagedCache.for_model(
            model, **given, cache_dtype="int8_per_token_head"
        ),
        "PagedCache, int4 per token and head": lambda: PagedCache.for_model(
            model, **given, cache_dtype="int4_per_token_head"
        ),
    }


def run(model, ids, cache):
    """Seconds of the prompt, seconds of a new token, and the tokens."""
    start = time.thread_time()
    logits = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1).logits
    middle = time.thread_time()
    tokens = []
    for _ in range(NEW):
        tokens.append(logits[:, -1:].argmax(-1))
        logits = model(input_ids=tokens[-1], cache=cache, use_cache=True).logits
    return middle - start, (time.thread_time() - middle) / NEW, torch.cat(tokens, 1)


def held(cache):
    """Bytes in use at the end, and at the peak."""
    if isinstance(cache, PagedCache):
        groups = cache.statistics().groups.values()
        return sum(group.held_bytes for group in groups), sum(group.peak_bytes for group in groups)
    now = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    return now, now


def compare(model, rounds):
    ids = torch.randint(3, SHAPE["vocab_size"], (BATCH, PROMPT))
    makers, times, memory, tokens = caches(model), {}, {}, {}
    for _ in range(rounds):
        for name, make in makers.items():
            cache = make()
            prompt, step, said = run(model, ids, cache)
            times.setdefault(name, []).append((prompt, step))
            memory[name], tokens[name] = held(cache), said
    for name in ("StaticCache", "PagedCache"):
        if not torch.equal(tokens[name], tokens["DynamicCache"]):
            raise SystemExit(f"{name} has said other tokens than DynamicCache")
    print("| cache | MiB in use | MiB at the peak | prompt, s | a new token, ms |")
    print("| --- | --- | --- | --- | --- |")
    for name, measured in times.items():
        prompt = statistics.median(first for first, _ in measured)
        step = statistics.median(second for _, second in measured)
        now, peak = (nbytes / 2**20 for nbytes in memory[name])
        print(f"| {name} | {now:.2f} | {peak:.2f} | {prompt:.2f} | {step * 1e3:.1f} |")


def shared_prompt(model):
    """Calls whose prompts begin alike, each with a fresh DynamicCache, and with caches of one pool."""
    system = torch.randint(3, SHAPE["vocab_size"], (1, SYSTEM))
    prompts = [torch.cat([system, torch.randint(3, 1000, (1, 32))], 1) for _ in range(CALLS)]
    pool = PagedCachePool.for_model(model, "64MiB", max_batch_size=8, max_model_len=1024)
    start = time.thread_time()
    plain = [generated(model, ids, DynamicCache(config=model.config)) for ids in prompts]
    middle = time.thread_time()
    pooled = []
    for ids in prompts:
        with pool.cache(ids) as cache:
            pooled.append(generated(model, ids, cache))
    end = time.thread_time()
    same = sum(torch.equal(a, b) for a, b in zip(plain, pooled, strict=True))
    saved = pool.statistics()
    print(
        f"{CALLS} calls of {SYSTEM} shared and 32 own tokens, 8 new ones each ({same} of {CALLS} answers equal):"
    )
    print(f"DynamicCache {middle - start:.2f} s, PagedCachePool {end - middle:.2f} s; ", end="")
    print(f"{saved.saved_tokens:,} of {saved.prompt_tokens:,} prompt tokens were not computed again")


def generated(model, ids, cache):
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, cache=cache
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(f"batch {BATCH}, prompts of {PROMPT} tokens, {NEW} new ones, float32, sdpa, one thread")
    for name, model in models().items():
        print(f"\n{name}\n")
        with torch.no_grad():
            compare(model, rounds)
            print()
            shared_prompt(model)


if __name__ == "__main__":
    main()
