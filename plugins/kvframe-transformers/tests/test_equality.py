"""Logits are bit-equal to those with DynamicCache, at every step, while freed blocks hold NaN."""

import pytest

torch = pytest.importorskip("torch", reason="the bridge needs torch and transformers")
pytest.importorskip("transformers", reason="the bridge needs transformers")

from transformers import DynamicCache  # noqa: E402

from kvframe_transformers import PagedCache  # noqa: E402

ARCHITECTURES = [
    *("llama", "mistral", "qwen3", "gemma2", "gemma3", "gpt_oss", "olmo3", "cohere2", "llama4"),
    *("deepseek_v2", "deepseek_v3", "mamba2", "jamba", "bamba", "qwen3_next", "falcon_h1"),
]
NO_SDPA = {"gemma2", "gpt_oss", "mamba2"}  # transformers refuses it for them
CASES = [
    (name, dtype, attention)
    for name in ARCHITECTURES
    for dtype in ("float32", "bfloat16")
    for attention in ("eager", "sdpa")
    if attention == "eager" or name not in NO_SDPA
]
# The window (or chunk) is 16. Prompts shorter than it, equal to it, and much longer; then single tokens, and a second
# prompt as in a chat, itself longer than the 16 tokens that are taken at a time.
RUNS = {
    "shorter": [5, 1, 9, 1, 1],
    "equal": [16, 1, 20, 1],
    "longer": [70, 1, 18, 1],
}


def paged(model, **given):
    return PagedCache.for_model(model, "1MiB", block_size=4, max_batch_size=4, **given)


def differing(ours, theirs):
    return [step for step, (a, b) in enumerate(zip(ours, theirs, strict=True)) if not torch.equal(a, b)]


@pytest.mark.parametrize(("name", "dtype", "attention"), CASES)
def test_logits_are_bit_equal_for_prompts_around_the_window(name, dtype, attention, tiny):
    model = tiny.make(name, dtype, attention)
    wrong = {}
    for length, chunks in RUNS.items():
        ids = tiny.ids(2, sum(chunks))
        theirs = tiny.steps(model, ids, DynamicCache(config=model.config), chunks)
        wrong[length] = differing(tiny.steps(model, ids, paged(model), chunks, poisoned=True), theirs)
    assert wrong == {length: [] for length in RUNS}


@pytest.mark.parametrize(("name", "dtype", "attention"), CASES)
def test_logits_are_bit_equal_for_padded_batches(name, dtype, attention, tiny):
    model = tiny.make(name, dtype, attention)
    ids = tiny.ids(3, 60)
    for first in (6, 37) if dtype == "float32" else (37,):
        chunks = [first, 1, 18, 1]
        mask = torch.ones_like(ids)
        mask[0, :5] = 0
        mask[1, :2] = 0
        theirs = tiny.steps(model, ids, DynamicCache(config=model.config), chunks, mask)
        ours = tiny.steps(model, ids, paged(model), chunks, mask, poisoned=True)
        assert differing(ours, theirs) == []


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_generation_of_200_tokens_is_the_same(name, tiny):
    model = tiny.make(name, attention="eager" if name in NO_SDPA else "sdpa")
    ids = tiny.ids(1, 23)
    ours = tiny.greedy(model, ids, 200, paged(model))
    assert ours.shape == (1, 223)
    assert torch.equal(ours, tiny.greedy(model, ids, 200))


def test_a_wrong_byte_would_be_seen(tiny):
    # the comparison can fail: a poisoned block that is still held makes NaN logits
    model = tiny.make("llama")
    cache, ids = paged(model), tiny.ids(1, 20)
    tiny.steps(model, ids[:, :10], cache, [10])
    for buffer in cache._session.engine.storage.buffers.values():
        buffer.tensor.fill_(-1)
    (logits,) = tiny.steps(model, ids[:, 10:], cache, [10])
    assert logits.isnan().any()
