"""What one request is charged: reserves for tokens in flight, rings; inverse questions; errors."""

import attrs
import pytest

import kvframe
from kvframe.errors import InsufficientMemoryError, LayoutError, PlanError, UsageError
from kvframe.planning.inverse import largest_len, memory_for_requests
from kvframe.planning.pools import requests_at
from kvframe_circular_buffer import CircularBufferSpec
from kvframe_mla import MLAAttentionSpec
from tests.planning.models import GIB, HOST, MIB, engine, full, mix, sliding


def plan(specs, limits, memory=GIB, **changed):
    return kvframe.plan(specs, engine=limits, memory=memory, host=HOST, **changed)


def test_the_reserve_for_a_prefill_chunk_is_shown_apart():
    # ceil((128 - 1 + 8,192) / 16) + 1 = 521 blocks in prefill; ceil((128 - 1) / 16) + 1 = 9 stay in decode
    made = plan({"layers.0.attn": sliding(128)}, engine(max_in_flight_tokens=8192))
    (group,) = made.report.groups
    assert (group.blocks_per_request, group.steady_blocks_per_request) == (521, 9)
    assert group.as_dict()["reserve_blocks_per_request"] == 512


def test_a_compressed_state_held_as_a_ring_costs_one_block_a_request():
    # paged: one state of 1,024 fp32 numbers for 128 tokens, so 131,072 / 128 = 1,024 blocks of 4,096 bytes
    paged = MLAAttentionSpec(128, num_kv_heads=1, head_size=1024, dtype="float32", tokens_per_state=128)
    # ring: 8 rows of the same width, once a request: 32,768 bytes
    ring = CircularBufferSpec(8, num_kv_heads=1, head_size=1024, head_size_v=0, dtype="float32")
    rest = {f"layers.{index}.attn": full() for index in range(4)}
    held = {}
    for name, spec in (("paged", paged), ("ring", ring)):
        report = plan(rest | {"layers.4.state": spec}, engine(), memory=40 * GIB).report
        group = next(g for g in report.groups if set(g.kinds) & {"mla", "circular_buffer"})
        held[name] = (group.blocks_per_request, group.blocks_per_request * group.natural_page_bytes)
    assert held == {"paged": (1024, 1024 * 4096), "ring": (1, 8 * 4096)}


def test_the_largest_length_fits_and_one_token_more_does_not():
    specs = mix((10, full()), (20, sliding()))
    limits = engine()

    def make(length):
        return plan(specs, limits.with_max_model_len(length), memory=2 * GIB)

    longest = largest_len(make, limits.max_model_len)
    assert make(longest).report.max_model_len == longest
    with pytest.raises(InsufficientMemoryError):
        make(longest + 1)


def test_the_memory_for_requests_is_the_least_in_whole_mib():
    specs, limits = {"layers.0.attn": full()}, engine(length=8192)

    def make(memory):
        return plan(specs, limits, memory=memory)

    def measure(made):
        return requests_at(made.config, engine=limits, host=HOST, length=8192)

    memory = memory_for_requests(make, 16, measure)
    # 16 * 512 blocks and the null block of 65,536 bytes: 512.0625 MiB, so 513
    assert memory == 513 * MIB
    assert measure(make(memory))["device"] >= 16 > measure(make(memory - MIB))["device"]


def test_too_small_a_budget_names_needed_available_and_the_largest_length():
    with pytest.raises(InsufficientMemoryError) as caught:
        plan({"layers.0.attn": full()}, engine(length=8192), memory=16 * MIB)
    # 512 blocks of 65,536 bytes; 256 fit, one is the null block: 255 * 16 tokens
    assert caught.value.needed_bytes == 512 * 65536
    assert caught.value.available_bytes == 255 * 65536
    assert caught.value.largest_fitting_len == 255 * 16


def test_a_layout_that_cannot_hold_mixed_pages_says_which_would():
    specs = {"layers.0.attn": full(), "layers.1.attn": full(num_kv_heads=3)}
    with pytest.raises((LayoutError, PlanError)) as caught:
        plan(specs, engine(length=8192), layout="LHBNC", strategy="engine")
    assert "LBHNC" in str(caught.value) or "BLHNC" in str(caught.value)


def test_stages_must_hold_every_layer_once_and_budgets_match_them():
    specs = {f"layers.{index}.attn": full() for index in range(4)}
    with pytest.raises(PlanError, match="exactly once"):
        plan(specs, engine(length=8192), stages=[["layers.0.attn"], ["layers.0.attn"]])
    with pytest.raises(UsageError, match="2 pipeline stages"):
        plan(specs, engine(length=8192), memory=[GIB], stages=[list(specs)[:2], list(specs)[2:]])


def test_tokens_and_concurrency_agree_by_construction():  # log.md rows 1, 2
    for specs in ({"layers.0.attn": full()}, {"layers.0.attn": sliding()}, mix((3, full()), (7, sliding()))):
        report = plan(specs, engine(length=32768)).report
        assert report.tokens == int(report.num_blocks * 32768 / report.slabs_per_request)
        assert report.max_concurrency == float(report.num_blocks / report.slabs_per_request)


def test_a_window_only_model_holds_more_requests_than_tokens_by_length():  # log.md row 3
    report = plan({"layers.0.attn": sliding(1024)}, engine(length=131072)).report
    assert report.max_concurrency > report.num_blocks * 16 / 131072


def test_equal_layers_of_another_dtype_keep_pages_of_their_own():  # log.md row 36
    specs = {"layers.0.attn": full(), "layers.1.attn": full(dtype="uint8")}
    made = plan(specs, engine(length=8192))
    assert sum(group.page_size_bytes for group in made.config.groups) == 65536 + 32768


def test_a_plan_does_not_depend_on_what_it_is_not_told():  # log.md row 12
    specs = mix((2, full()), (4, sliding()))
    assert plan(specs, engine(length=8192)).config == plan(specs, engine(length=8192)).config
    assert attrs.evolve(engine(length=8192), max_model_len=4096) == engine(length=4096)
