"""What generate() does with a cache beside greedy steps: beams, samples, drafts, chats, encoders."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="the bridge needs torch and transformers")
pytest.importorskip("transformers", reason="the bridge needs transformers")

from transformers import DynamicCache, EncoderDecoderCache  # noqa: E402

from kvframe_transformers import CacheStateError, PagedCache, PagedEncoderDecoderCache  # noqa: E402

KINDS = ["llama", "gemma3", "llama4", "deepseek_v3", "qwen3_next"]  # full, window, chunks, latent, states


def paged(model, **given):
    return PagedCache.for_model(model, "1MiB", block_size=4, max_batch_size=8, **given)


def sampled(model, ids, cache=None, **given):
    torch.manual_seed(1)
    return model.generate(ids, max_new_tokens=25, cache=cache, **given)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "how",
    [
        {"num_beams": 3, "do_sample": False},
        {"do_sample": True, "num_return_sequences": 2, "top_k": 20},
        {"do_sample": True, "num_beams": 2, "top_k": 20},
    ],
    ids=["beams", "samples", "sampled-beams"],
)
def test_beams_and_samples_are_the_same(name, how, tiny):
    model, ids = tiny.make(name), tiny.ids(2, 21)
    assert torch.equal(sampled(model, ids, paged(model), **how), sampled(model, ids, **how))


@pytest.mark.parametrize("name", ["llama", "gemma3", "llama4", "deepseek_v3"])
def test_assisted_decoding_is_the_same(name, tiny):
    model, ids = tiny.make(name), tiny.ids(1, 30)
    plain = tiny.greedy(model, ids, 40)
    looked_up = tiny.greedy(model, ids, 40, paged(model), prompt_lookup_num_tokens=4)
    drafted = tiny.greedy(model, ids, 40, paged(model), assistant_model=tiny.make("qwen3"))
    assert torch.equal(looked_up, plain)
    assert torch.equal(drafted, plain)


def test_padded_prompts_are_generated_from_as_with_dynamic_cache(tiny):
    model, ids = tiny.make("llama4"), tiny.ids(3, 30)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    mask[1, :3] = 0
    ours = tiny.greedy(model, ids, 40, paged(model), attention_mask=mask)
    assert torch.equal(ours, tiny.greedy(model, ids, 40, attention_mask=mask))


@pytest.mark.parametrize("name", KINDS)
def test_one_cache_goes_on_through_a_chat(name, tiny):
    model = tiny.make(name)
    ids, ours, theirs = tiny.ids(1, 19), paged(model), DynamicCache(config=model.config)
    for turn in range(3):
        answer = tiny.greedy(model, ids, 12, ours)
        assert torch.equal(answer, tiny.greedy(model, ids, 12, theirs))
        ids = torch.cat([answer, tiny.ids(1, 9, seed=turn)], 1)


def test_the_name_that_generate_has_for_it_works(tiny):
    model, ids = tiny.make("llama"), tiny.ids(1, 9)
    with pytest.warns(FutureWarning, match="past_key_values"):
        ours = model.generate(ids, max_new_tokens=5, do_sample=False, past_key_values=paged(model))
    assert torch.equal(ours, tiny.greedy(model, ids, 5))


# --- crop and the like, on the cache itself ---


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_crop_after_recording_the_past_takes_tokens_back(name, tiny):
    model, ids = tiny.make(name), tiny.ids(1, 60)
    caches = [paged(model), DynamicCache(config=model.config)]
    logits = []
    for cache in caches:
        cache.activate_past_recording()
        tiny.steps(model, ids[:, :40], cache, [33, 7])
        cache.crop(-7)
        tiny.poison(cache) if cache is caches[0] else None
        logits.append(tiny.steps(model, ids[:, 40:], cache, [5, 1]))
        assert cache.get_seq_length() == 39
    assert all(torch.equal(a, b) for a, b in zip(*logits, strict=True))


def test_crop_of_what_has_died_is_refused(tiny):
    model = tiny.make("gemma3")
    cache = paged(model)
    tiny.steps(model, tiny.ids(1, 40), cache, [38, 1, 1])
    with pytest.raises(CacheStateError, match="activate_past_recording"):
        cache.crop(-20)


def test_crop_of_states_and_positive_crops_are_refused(tiny):
    model = tiny.make("qwen3_next")
    cache = paged(model)
    tiny.steps(model, tiny.ids(1, 8), cache, [8])
    with pytest.raises(CacheStateError, match="states cannot go back"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="negative"):
        cache.crop(1)


@pytest.mark.parametrize("name", KINDS)
def test_sequences_can_be_reordered_repeated_and_chosen(name, tiny):
    model, ids = tiny.make(name), tiny.ids(3, 50)
    ours = paged(model)
    tiny.steps(model, ids[:, :21], ours, [21])
    ours.reorder_cache(torch.tensor([2, 0, 2]))
    ours.batch_repeat_interleave(2)
    ours.batch_select_indices(torch.tensor([0, 3, 4]))
    tiny.poison(ours)
    theirs = DynamicCache(config=model.config)
    tiny.steps(model, ids[:, :21], theirs, [21])
    theirs.reorder_cache(torch.tensor([2, 0, 2]))  # what the three changes come to
    rest = ids[:, 21:]
    pairs = zip(
        tiny.steps(model, rest, ours, [1, 17, 1], poisoned=True),
        tiny.steps(model, rest, theirs, [1, 17, 1]),
        strict=True,
    )
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", KINDS)
def test_a_copy_goes_on_by_itself_and_shares_whole_blocks(name, tiny):
    model, ids = tiny.make(name), tiny.ids(1, 60)
    ours, theirs = paged(model), DynamicCache(config=model.config)
    tiny.steps(model, ids[:, :30], ours, [30])
    held = ours.statistics().held_bytes
    twin = copy.deepcopy(ours)
    assert twin.statistics().held_bytes < 2 * held
    tiny.steps(model, ids[:, :30], theirs, [30])
    for cache in (twin, ours):
        reference = copy.deepcopy(theirs)
        rest = tiny.ids(1, 25, seed=4 if cache is twin else 5)
        pairs = zip(
            tiny.steps(model, rest, cache, [1, 20, 1, 1], poisoned=True),
            tiny.steps(model, rest, reference, [1, 20, 1, 1]),
            strict=True,
        )
        assert all(torch.equal(a, b) for a, b in pairs)


def test_reset_gives_all_blocks_back_and_starts_anew(tiny):
    model, ids = tiny.make("gemma3"), tiny.ids(2, 30)
    cache = paged(model)
    first = tiny.steps(model, ids, cache, [29, 1])
    cache.reset()
    assert cache.statistics().held_bytes == 0
    assert cache.get_seq_length() == 0
    again = tiny.steps(model, ids, cache, [29, 1])
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


# --- encoder and decoder ---


def encoder_inputs(name, rows=2):
    generator = torch.Generator().manual_seed(5)
    if name == "t5":
        return {"input_ids": torch.randint(2, 90, (rows, 11), generator=generator)}
    return {"input_features": torch.randn(rows, 8, 60, generator=generator)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["t5", "whisper"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_logits_of_encoder_decoder_models_are_bit_equal(name, dtype, attention, tiny):
    if (name, attention) == ("t5", "sdpa"):
        pytest.skip("transformers has no sdpa for T5")
    model, ids, chunks = tiny.make(name, dtype, attention), tiny.ids(2, 40), [3, 1, 1, 1, 20, 1]
    inputs = {
        key: value.to(model.dtype) if value.is_floating_point() else value
        for key, value in encoder_inputs(name).items()
    }
    with torch.no_grad():
        encoded = model.get_encoder()(**inputs)
    ours = PagedCache.for_model(model, "1MiB", block_size=4)
    assert isinstance(ours, PagedEncoderDecoderCache)
    theirs = EncoderDecoderCache(DynamicCache(), DynamicCache())
    pairs = zip(
        tiny.steps(model, ids, ours, chunks, poisoned=True, encoder_outputs=encoded),
        tiny.steps(model, ids, theirs, chunks, encoder_outputs=encoded),
        strict=True,
    )
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("how", [{"num_beams": 1}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_an_encoder_decoder_model_generates_the_same(how, tiny):
    model = tiny.make("t5")
    inputs = encoder_inputs("t5")
    given = {"max_new_tokens": 40, "do_sample": False, **how}
    cache = PagedCache.for_model(model, "2MiB", block_size=4, max_batch_size=6)
    ours = model.generate(**inputs, **given, cache=cache)
    assert torch.equal(ours, model.generate(**inputs, **given))


def test_a_decoder_without_encoder_output_keeps_its_own_tokens(tiny):
    model, ids = tiny.make("whisper"), tiny.ids(1, 9)
    ours = PagedCache.for_model(model, "1MiB", block_size=4)
    decoder = model.get_decoder()
    with torch.no_grad():
        for part in (ids[:, :4], ids[:, 4:]):
            seen = decoder(input_ids=part, cache=ours, use_cache=True).last_hidden_state
        whole = decoder(input_ids=ids, use_cache=False).last_hidden_state
    assert torch.allclose(seen, whole[:, 4:], atol=1e-5)
