"""Blocks and bytes: what windows and chunks give back, what quantised storage saves, and how far off it is."""

import pytest

torch = pytest.importorskip("torch", reason="the bridge needs torch and transformers")
pytest.importorskip("transformers", reason="the bridge needs transformers")

from transformers import DynamicCache  # noqa: E402

from kvframe.errors import InsufficientMemoryError, SequenceLimitError, UnknownCacheDTypeError, UsageError  # noqa: E402
from kvframe_transformers import PagedCache, PagedCachePool  # noqa: E402

WINDOW, BLOCK, TAKEN = (
    16,
    4,
    16,
)  # tokens: of the window or chunk, of a block, of a prompt that are taken at a time


def group(cache, word):
    return next(found for name, found in cache.statistics().groups.items() if word in name)


def test_gemma3_in_use_at_four_windows_is_what_the_plan_says_and_under_half_of_dynamic(tiny):
    model = tiny.make(
        "gemma3", num_hidden_layers=12, layer_types=None
    )  # 10 sliding layers beside 2 full ones
    cache = PagedCache.for_model(model, "1MiB", block_size=BLOCK, max_batch_size=2, max_model_len=4 * WINDOW)
    planned = cache._session.engine.planned
    tiny.greedy(model, tiny.ids(2, 2 * WINDOW), 2 * WINDOW, cache)
    assert cache.get_seq_length() == 4 * WINDOW - 1
    one = 2 * 8 * 2 * 4  # K and V of 2 heads of 8 float32 elements: bytes of a token in a layer
    # the plan's figure for two sequences: 16 blocks of the full layers, and of the sliding ones the window before the
    # next token, 16 tokens on their way, and a block that the window only starts in: ceil((15 + 16) / 4) + 1 = 9
    figure = sum(
        2
        * part.lifetime.peak(planned.engine.max_in_flight_tokens, 4 * WINDOW)
        * planned.config.block_bytes_of(spec)
        for part, spec in zip(planned.blocks.groups, planned.config.groups, strict=True)
    )
    assert figure == 2 * (16 * 2 * BLOCK * one + 9 * 10 * BLOCK * one)
    used = cache.statistics()
    assert sum(part.peak_bytes for part in used.groups.values()) <= figure
    assert used.held_bytes <= 2 * (16 * 2 + 5 * 10) * BLOCK * one
    # DynamicCache without a config keeps every token in every layer
    dynamic = DynamicCache()
    tiny.greedy(model, tiny.ids(2, 2 * WINDOW), 2 * WINDOW, dynamic)
    full = sum(layer.keys.nbytes + layer.values.nbytes for layer in dynamic.layers)
    assert full == 12 * 2 * (4 * WINDOW - 1) * one
    assert used.held_bytes < full / 2


@pytest.mark.parametrize(
    ("name", "word", "steady", "peak"),
    [
        # steady: 15 tokens before the next one, in at most ceil(15 / 4) + 1 blocks
        ("gemma3", "sliding", 5, 9),
        ("mistral", "sliding", 5, 9),
        # a chunk of 16 tokens is 4 blocks; while a prompt is taken, 4 more are on their way
        ("llama4", "chunked", 4, 8),
    ],
)
def test_windows_and_chunks_hold_no_more_than_their_lifetime_says(name, word, steady, peak, tiny):
    model = tiny.make(name)
    cache = PagedCache.for_model(model, "1MiB", block_size=BLOCK)
    held = []
    ids = tiny.ids(1, 7 * WINDOW)
    tiny.steps(model, ids[:, : 5 * WINDOW], cache, [5 * WINDOW])
    assert group(cache, word).peak_blocks <= peak
    for column in range(5 * WINDOW, 7 * WINDOW):
        tiny.steps(model, ids[:, column : column + 1], cache, [1])
        held.append(group(cache, word).held_blocks)
    assert max(held) <= steady
    assert held[-WINDOW:] == held[:WINDOW]  # it repeats, however long the sequence is


# --- quantised storage ---


def bounds(stored, name):
    """The largest error of each element that a cache dtype allows (see the plugin's README)."""
    if name == "fp8":  # 3 bits of mantissa: half of 1/8 of the power of two below; 2^-10 near zero
        return torch.maximum(stored.abs() / 16, torch.tensor(2.0**-10))
    if name == "int8_per_token_head":  # half a step of 1/127 of the largest element of its head
        return (stored.abs().amax(-1, keepdim=True) / 254).expand_as(stored)
    low, high = stored.amin(-1, keepdim=True).clamp(max=0), stored.amax(-1, keepdim=True).clamp(min=0)
    return ((high - low) / 15).expand_as(stored)  # one step: half for the element, half for the zero point


@pytest.mark.parametrize(
    ("name", "share"),
    # of the 4 bytes of float32: 1; 1 and a scale of 4 bytes for 8 elements; 1/2 and the scale
    [("fp8", 1 / 4), ("int8_per_token_head", 12 / 32), ("int4_per_token_head", 8 / 32)],
)
@pytest.mark.parametrize("model_name", ["llama", "gemma3", "deepseek_v3"])
def test_quantised_keys_and_values_take_less_and_stay_within_the_bound(model_name, name, share, tiny):
    model, ids = tiny.make(model_name), tiny.ids(2, 60)
    ours = PagedCache.for_model(model, "1MiB", block_size=BLOCK, cache_dtype=name)
    exact = PagedCache.for_model(model, "1MiB", block_size=BLOCK)
    reference = DynamicCache(config=model.config)
    (logits,) = tiny.steps(model, ids[:, :50], ours, [50], poisoned=True)
    tiny.steps(model, ids[:, :50], exact, [50])
    (expected,) = tiny.steps(model, ids[:, :50], reference, [50])
    assert torch.equal(logits, expected)  # a prompt attends to its own keys before they are rounded
    # the first layer's keys come from the embedding alone, so they are the same in both
    stored, kept = reference.layers[0], ours.layers[0]
    if model_name == "deepseek_v3":  # one vector: the latent part and the rotary one share a scale
        want = torch.cat((stored.keys, stored.values), -1)
        have = torch.cat((kept.keys, kept.values), -1)
        assert ((have - want).abs() <= bounds(want, name) * 1.001).all()
    else:
        for want, have in ((stored.keys, kept.keys), (stored.values, kept.values)):
            assert have.shape == want.shape
            assert ((have - want).abs() <= bounds(want, name) * 1.001).all()
        assert ours.statistics().held_bytes == pytest.approx(share * exact.statistics().held_bytes, rel=0.01)
    assert ours.statistics().held_bytes < exact.statistics().held_bytes / 2
    after = tiny.steps(model, ids[:, 50:], ours, [1] * 10)
    before = tiny.steps(model, ids[:, 50:], reference, [1] * 10)
    spread = torch.cat(before, 1).std()
    error = (torch.cat(after, 1) - torch.cat(before, 1)).abs().mean()
    assert error < spread * {"fp8": 0.1, "int8_per_token_head": 0.05, "int4_per_token_head": 0.5}[name]


def test_a_plain_dtype_of_its_own_is_rounded_to_and_read_back_in_the_models(tiny):
    model, ids = tiny.make("gemma3"), tiny.ids(2, 40)
    ours = PagedCache.for_model(model, "1MiB", block_size=BLOCK, cache_dtype="bfloat16")
    reference = DynamicCache(config=model.config)
    for cache in (ours, reference):
        tiny.steps(model, ids, cache, [40])
    kept, want = ours.layers[0].keys, reference.layers[0].keys
    assert torch.equal(kept, want.to(torch.bfloat16))
    (logits,) = tiny.steps(model, ids[:, :1], ours, [1])
    (expected,) = tiny.steps(model, ids[:, :1], reference, [1])
    assert logits.dtype is torch.float32
    assert (logits - expected).abs().mean() < 0.02 * expected.std()


def test_states_stay_exact_when_tokens_are_quantised(tiny):
    model = tiny.make("bamba")
    ours = PagedCache.for_model(model, "1MiB", block_size=BLOCK, cache_dtype="int8_per_token_head")
    reference = DynamicCache(config=model.config)
    for cache in (ours, reference):
        tiny.steps(model, tiny.ids(1, 9), cache, [9])
    layer = next(at for at, one in enumerate(ours.is_linear) if one)
    assert torch.equal(ours.get_recurrent_state(layer), reference.get_recurrent_state(layer))


# --- memory that does not suffice ---


def test_a_length_that_does_not_fit_is_refused_with_the_one_that_does(tiny):
    model = tiny.make("llama")
    with pytest.raises(InsufficientMemoryError, match="The largest length that fits is") as caught:
        PagedCache.for_model(model, "64KiB", block_size=BLOCK, max_model_len=512)
    fits = caught.value.largest_fitting_len
    cache = PagedCache.for_model(model, "64KiB", block_size=BLOCK, max_model_len=fits)
    tiny.steps(model, tiny.ids(1, fits), cache, [fits - 1, 1])


def test_without_a_length_the_longest_that_fits_is_planned(tiny):
    cache = PagedCache.for_model(tiny.make("llama"), "64KiB", block_size=BLOCK)
    # 64 KiB of blocks of 4 * 256 bytes, the null block's taken off: 63 * 4 tokens
    assert cache.get_max_length() == (65536 // 1024 - 1) * 4


def test_without_memory_enough_for_the_batch_is_found(tiny):
    model = tiny.make("gemma3")
    pool = PagedCachePool.for_model(model, max_batch_size=3, max_model_len=100, prefix_caching=False)
    tiny.greedy(model, tiny.ids(3, 60), 40, pool.cache())
    assert pool.statistics().pool_bytes <= 1 << 20


def test_more_states_than_fit_are_refused_with_the_number_that_does(tiny):
    with pytest.raises(SequenceLimitError, match="sequences at once do not fit"):
        PagedCache.for_model(tiny.make("bamba"), "256KiB", max_batch_size=500)


def test_a_sequence_longer_than_planned_is_refused(tiny):
    model = tiny.make("llama")
    cache = PagedCache.for_model(model, "1MiB", max_model_len=20)
    with pytest.raises(UsageError, match="larger max_model_len"):
        tiny.greedy(model, tiny.ids(1, 15), 10, cache)


@pytest.mark.parametrize("memory", ["2 apples", "much"])
def test_memory_that_is_no_size_is_refused(memory, tiny):
    with pytest.raises(UsageError, match="is no size"):
        PagedCache.for_model(tiny.make("llama"), memory)


def test_an_unknown_cache_dtype_is_refused(tiny):
    with pytest.raises(UnknownCacheDTypeError, match="int8_per_token_head"):
        PagedCache.for_model(tiny.make("llama"), "1MiB", cache_dtype="int3")
