"""A pool serves beginnings that it has seen, and only the rest is computed; a forward hook counts."""

import copy
import gc

import pytest

torch = pytest.importorskip("torch", reason="the bridge needs torch and transformers")
pytest.importorskip("transformers", reason="the bridge needs transformers")

from transformers import DynamicCache  # noqa: E402

from kvframe.errors import UsageError  # noqa: E402
from kvframe_transformers import CacheStateError, PagedCache, PagedCachePool, PoolFullError  # noqa: E402

KINDS = ["llama", "gemma3", "llama4", "deepseek_v3"]


def pool_of(model, memory="2MiB", **given):
    return PagedCachePool.for_model(model, memory, **{"block_size": 4, "max_batch_size": 4, **given})


@pytest.fixture
def counted():
    """Counts the columns that a model is called for."""
    handles = []

    def count(model):
        calls = []

        def hook(module, args, kwargs):
            calls.append(kwargs["input_ids"].numel())

        handles.append(model.register_forward_pre_hook(hook, with_kwargs=True))
        return calls

    yield count
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("name", [*KINDS, "bamba"])
def test_a_chat_of_five_turns_computes_only_the_new_tokens(name, tiny, counted):
    model = tiny.make(name)
    pool, ids = pool_of(model), tiny.ids(1, 37)
    for turn in range(5):
        plain = tiny.greedy(model, ids, 10)
        calls = counted(model)
        cache = pool.cache(ids)
        answer = tiny.greedy(model, ids, 10, cache)
        tiny.poison(cache)
        cache.close()
        assert torch.equal(answer, plain)
        # the last token of an answer was never computed; every later turn computes it, 6 of the user, and 9 of 10 new
        assert sum(calls) == (37 if turn == 0 else 1 + 6) + 9
        ids = torch.cat([answer, tiny.ids(1, 6, seed=turn)], 1)
    found = pool.statistics()
    assert (found.hit_tokens, found.resumed_tokens) == (0, 46 + 62 + 78 + 94)
    assert found.computed_tokens == 46 + 4 * 16


def test_a_chat_with_states_is_that_of_one_dynamic_cache(tiny):
    # recurrent states summed in other chunks round otherwise, so the reference keeps its cache as well
    model = tiny.make("qwen3_next")
    pool, ids, theirs = pool_of(model), tiny.ids(1, 37), DynamicCache(config=model.config)
    for turn in range(3):
        with pool.cache(ids) as cache:
            answer = tiny.greedy(model, ids, 10, cache)
            tiny.poison(cache)
        assert torch.equal(answer, tiny.greedy(model, ids, 10, theirs))
        ids = torch.cat([answer, tiny.ids(1, 6, seed=turn)], 1)


@pytest.mark.parametrize("name", [*KINDS, "bamba", "qwen3_next"])
def test_a_system_prompt_is_served_from_blocks(name, tiny, counted):
    model = tiny.make(name)
    pool, system = pool_of(model), tiny.ids(1, 43)
    assert pool.prefill(system) == 40
    for user in range(3):
        ids = torch.cat([system, tiny.ids(1, 9, seed=user)], 1)
        calls = counted(model)
        with pool.cache(ids) as cache:
            answer = tiny.greedy(model, ids, 6, cache)
            tiny.poison(cache)
        assert sum(calls) == 52 - 40 + 5  # 5 of 6 new tokens are computed
        assert torch.equal(answer, tiny.greedy(model, ids, 6))
    assert pool.statistics().hit_tokens == 3 * 40


@pytest.mark.parametrize("name", KINDS)
def test_a_prompt_finds_what_another_call_left_by_itself(name, tiny):
    model = tiny.make(name)
    pool, system = pool_of(model), tiny.ids(1, 48)
    for user in range(2):
        ids = torch.cat([system, tiny.ids(1, 30, seed=10 + user)], 1)
        with pool.cache(ids) as cache:
            assert cache._session.length == (48 if user else 0)
            answer = tiny.greedy(model, ids, 4, cache)
        assert torch.equal(answer, tiny.greedy(model, ids, 4))


def test_a_padded_batch_shares_and_is_right(tiny, counted):
    model = tiny.make("llama")
    pool, system = pool_of(model), tiny.ids(1, 40)
    pool.prefill(system)
    long, short = tiny.ids(1, 12, seed=1), tiny.ids(1, 8, seed=2)
    ids = torch.cat([torch.cat([system, long], 1), torch.cat([torch.zeros(1, 4).long(), system, short], 1)])
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    calls = counted(model)
    with pool.cache(ids, mask) as cache:
        answer = tiny.greedy(model, ids, 5, cache, attention_mask=mask)
        tiny.poison(cache)
    assert calls[0] == 2 * 12  # up to column 40 both are served: 40 tokens of one, 36 of the other
    assert torch.equal(answer, tiny.greedy(model, ids, 5, attention_mask=mask))


def test_beams_of_a_found_prompt_are_the_same(tiny):
    model = tiny.make("gemma3")
    pool, system = pool_of(model), tiny.ids(1, 40)
    pool.prefill(system)
    ids = torch.cat([system, tiny.ids(1, 7)], 1)
    given = {"max_new_tokens": 12, "num_beams": 3, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    with pool.cache(ids) as cache:
        assert torch.equal(model.generate(ids, cache=cache, **given), model.generate(ids, **given))


def test_conversations_are_parked_until_room_is_needed(tiny):
    model = tiny.make("llama")
    pool = pool_of(model, "32KiB", max_model_len=64)  # a token has 2 * 2 * 16 * 4 = 256 bytes
    fits = pool.statistics().pool_bytes // (256 * 4) - 1
    for seed in range(6):
        with pool.cache(ids := tiny.ids(1, 40, seed=seed)) as cache:
            tiny.greedy(model, ids, 4, cache)
        held = sum(group.held_blocks for group in pool.statistics().groups.values())
        assert held <= fits
    assert 1 <= pool.statistics().parked < 6


def test_a_full_pool_says_what_would_fit_and_goes_on(tiny):
    model = tiny.make("llama")
    pool = pool_of(model, "32KiB", max_model_len=64)
    held = pool.cache(ids := tiny.ids(1, 40))
    first = tiny.greedy(model, ids, 2, held)
    wide = tiny.ids(3, 60, seed=1)
    with pytest.raises(
        PoolFullError, match=r"no room for 3 sequences of 60 tokens.*3 sequences of up to"
    ) as caught:
        tiny.greedy(model, wide, 2, pool.cache(wide))
    fits = caught.value.largest_fitting_len
    assert 0 < fits < 60
    fitting = tiny.ids(3, fits - 1, seed=2)
    with pool.cache(fitting) as cache:
        assert torch.equal(tiny.greedy(model, fitting, 2, cache), tiny.greedy(model, fitting, 2))
    # the batch that was there before is unharmed
    longer = torch.cat([first, tiny.ids(1, 3)], 1)
    assert torch.equal(tiny.greedy(model, longer, 5, held), tiny.greedy(model, longer, 5))
    held.close()


def test_beams_and_copies_for_which_there_is_no_room_give_everything_back(tiny):
    model = tiny.make("llama")
    pool = pool_of(model, "16KiB", max_model_len=60, prefix_caching=False)  # 15 blocks of 4 tokens
    cache = pool.cache()
    tiny.steps(model, tiny.ids(1, 58), cache, [58])  # 15 blocks, the last of them partly used
    with pytest.raises(PoolFullError, match="1 of group"):
        copy.deepcopy(cache)
    tiny.steps(model, tiny.ids(1, 1), cache, [1])  # the original goes on
    with pytest.raises(PoolFullError):
        cache.batch_repeat_interleave(2)
    assert pool.statistics().held_bytes == 0
    fresh = pool.cache()
    tiny.steps(model, tiny.ids(1, 60), fresh, [60])


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_a_pass_that_failed_leaves_nothing_to_find(name, tiny):
    model = tiny.make(name)
    pool, ids = pool_of(model), tiny.ids(1, 40)

    def fail(*_):
        raise RuntimeError("a kernel failed")

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    cache = pool.cache(ids)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        tiny.greedy(model, ids, 2, cache)
    handle.remove()
    with pool.cache(ids) as again:
        assert again._session.length == 0
        tiny.poison(again)
        assert torch.equal(tiny.greedy(model, ids, 4, again), tiny.greedy(model, ids, 4))
    with pytest.raises(CacheStateError, match="closed"):
        tiny.greedy(model, ids, 2, cache)


def test_a_cache_that_is_garbage_gives_its_blocks_back(tiny):
    model, ids = tiny.make("llama"), tiny.ids(2, 20)
    pool = pool_of(model)
    tiny.greedy(model, ids, 3, pool.cache())  # without ids nothing is kept
    gc.collect()
    assert pool.statistics().held_bytes == 0
    tiny.greedy(model, ids, 3, pool.cache(ids))
    gc.collect()
    assert pool.statistics().parked == 2


def test_two_caches_of_a_pool_take_turns(tiny):
    model, ids = tiny.make("bamba"), tiny.ids(2, 24)
    pool = pool_of(model)
    ours = [pool.cache(), pool.cache()]
    theirs = [DynamicCache(config=model.config) for _ in ours]
    for start, stop in ((0, 17), (17, 18), (18, 24)):
        for mine, reference, row in zip(ours, theirs, ids, strict=True):
            part = row[None, start:stop]
            (a,) = tiny.steps(model, part, mine, [stop - start], poisoned=True)
            (b,) = tiny.steps(model, part, reference, [stop - start])
            assert torch.equal(a, b)


# --- what is refused ---


def test_other_ids_than_the_cache_was_made_for_are_refused(tiny):
    model = tiny.make("llama")
    pool, ids = pool_of(model), tiny.ids(1, 20)
    with pytest.raises(UsageError, match="from token 0 on"):
        tiny.greedy(model, tiny.ids(1, 20, seed=9), 2, pool.cache(ids))


def test_a_mask_with_holes_is_refused(tiny):
    pool, ids = pool_of(tiny.make("llama")), tiny.ids(1, 6)
    with pytest.raises(UsageError, match="padded on the left"):
        pool.cache(ids, torch.tensor([[1, 1, 0, 1, 1, 1]]))


def test_another_mask_than_the_pool_was_told_is_refused(tiny):
    model = tiny.make("llama")
    pool, ids = pool_of(model), tiny.ids(1, 12)
    mask = torch.ones_like(ids)
    mask[0, 5] = 0
    with pytest.raises(UsageError, match="give it to both"):
        tiny.greedy(model, ids, 2, pool.cache(ids), attention_mask=mask)


def test_a_pool_of_an_encoder_decoder_model_looks_no_prefix_up(tiny):
    pool = pool_of(tiny.make("t5"))
    with pytest.raises(UsageError, match="has an encoder"):
        pool.cache(tiny.ids(1, 6))


def test_running_a_part_of_the_model_on_a_pools_cache_is_refused(tiny):
    model = tiny.make("llama")
    pool, ids = pool_of(model), tiny.ids(1, 6)
    with pytest.raises(UsageError, match="run the model that the pool was made for"):
        model.model(input_ids=ids, cache=pool.cache(ids), use_cache=True)


def test_a_model_is_watched_once(tiny):
    model = tiny.make("llama")
    for _ in range(3):
        pool_of(model)
        PagedCache.for_model(model, "1MiB")
    assert len(model._forward_pre_hooks) == 1
