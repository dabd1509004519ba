"""What one request is charged: reserves for tokens in flight, rings; inverse questions; errors."""

import attrs
import numpy as np
import pytest

import kvframe
from kvframe.errors import InsufficientMemoryError, LayoutError, PlanError, UsageError
from kvframe.planning.cost import Demand
from kvframe.planning.inverse import largest_len, memory_for_requests
from kvframe.planning.pools import requests_at
from kvframe.planning.slabs import Effort, search_slab
from kvframe_circular_buffer import CircularBufferSpec
from kvframe_mla import MLAAttentionSpec
from tests.planning.models import (
    GIB,
    HOST,
    MIB,
    deepseek_v4_flash,
    engine,
    full,
    mix,
    model,
    peak,
    sliding,
)


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


def test_the_ring_shows_its_gain_in_the_whole_plan():
    # Beside 4 full layers of 65,536 bytes a block, 8,192 blocks: 61 paged states of 4,096 bytes and 1,024 blocks each
    # are 11.9 % of 2,147,483,648 + 255,852,544 bytes; as rings 61 x 32,768 bytes a request are 0.1 %.
    paged = MLAAttentionSpec(128, num_kv_heads=1, head_size=1024, dtype="float32", tokens_per_state=128)
    ring = CircularBufferSpec(8, num_kv_heads=1, head_size=1024, head_size_v=0, dtype="float32")
    rest = {f"layers.{index}.attn": full() for index in range(4)}
    floors, requests = [], []
    for spec in (paged, ring):
        states = {f"layers.{index}.state": spec for index in range(4, 65)}
        report = plan(rest | states, engine(), memory=400 * GIB).report
        floors.append(report.waste.floor_bytes)
        requests.append(report.max_concurrency)
    full_bytes = 4 * 8192 * 65536
    assert floors == [full_bytes + 61 * 1024 * 4096, full_bytes + 61 * 8 * 4096]
    assert requests[1] / requests[0] == pytest.approx(floors[0] / floors[1], rel=0.01)  # 1.119 times as many


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


@pytest.mark.parametrize("name", ["gemma-3-27b", "falcon-h1-7b"])
@pytest.mark.parametrize("wanted", [1, 7])
def test_the_memory_for_requests_of_a_mix_is_the_least_too(name, wanted):
    limits = engine(length=8192)

    def make(memory):
        return plan(model(name, 8192), limits, memory=memory)

    def held(memory):
        return requests_at(make(memory).config, engine=limits, host=HOST, length=8192)["device"]

    memory = memory_for_requests(
        make, wanted, lambda made: requests_at(made.config, engine=limits, host=HOST, length=8192)
    )
    assert held(memory) >= wanted
    if wanted == 1:
        with pytest.raises(InsufficientMemoryError):
            make(memory - MIB)
    else:
        assert held(memory - MIB) < wanted


@pytest.mark.parametrize("length", [300, 8192])
def test_requests_at_once_are_counted_in_whole_slabs(length):
    # A slab serves one group: n requests take ceil(n * blocks / k) slabs of each group.
    limits = engine(length=8192)
    made = plan(model("gemma-3-27b", 8192), limits, memory=40 * GIB)
    assert max(group.blocks_per_slab for group in made.config.groups) > 1
    count = requests_at(made.config, engine=limits, host=HOST, length=length)["device"]
    bounds = [
        (peak(group.kv_cache_spec, limits, length), group.blocks_per_slab) for group in made.config.groups
    ]
    slabs = [sum(-(-n * blocks // k) for blocks, k in bounds) for n in (count, count + 1)]
    assert slabs[0] <= made.config.pools["device"].usable_slabs < slabs[1]


def test_the_work_of_a_search_is_bounded_by_counting():
    effort = Effort(left=1000)
    demand, alignments, ceiling = _two_groups()
    search_slab(demand, alignments, largest=256 * MIB, ceiling=ceiling, effort=effort)
    assert effort.left <= 0  # spent, and then it stopped
    free, quick = Effort.unlimited(), Effort()
    options = {"largest": 256 * MIB, "ceiling": ceiling}
    exact = search_slab(demand, alignments, **options, effort=free)
    found = search_slab(demand, alignments, **options, effort=quick)
    assert exact is not None
    assert found == exact
    assert 0 < quick.left < Effort().left
    assert search_slab(demand, alignments, **options, effort=Effort(left=0)) is None


def _two_groups():
    """Two groups with pages of 1,002,240 and 823,680 bytes, and rows that may hold 2 % more than they need."""
    pages, blocks = np.array([1_002_240.0, 823_680.0]), np.array([[1.0, 2.0], [8.0, 2.0], [512.0, 2.0]])
    demand = Demand(
        pages=pages,
        blocks=blocks,
        compared=3,
        longest=blocks[-1],
        table_entries=np.array([512.0, 2048.0]),
        natural=blocks @ pages,
        pool_bytes=40 * GIB,
    )
    return demand, [256, 256], demand.natural / 0.98


def test_four_kinds_stay_far_below_the_bound(monkeypatch):
    spent = []

    class Counted(Effort):
        def spend(self, tries):
            spent.append(tries)
            return super().spend(tries)

    monkeypatch.setattr("kvframe.planning.optimal.Effort", Counted)
    plan(deepseek_v4_flash(), engine(), memory=40 * GIB)
    assert 0 < sum(spent) < Effort().left / 10


def test_too_small_a_budget_names_needed_available_and_the_largest_length():
    with pytest.raises(InsufficientMemoryError) as caught:
        plan({"layers.0.attn": full()}, engine(length=8192), memory=16 * MIB)
    # 512 blocks of 65,536 bytes; 256 fit, one is the null block: 255 * 16 tokens
    assert caught.value.needed_bytes == 512 * 65536
    assert caught.value.available_bytes == 255 * 65536
    assert caught.value.largest_fitting_len == 255 * 16


@pytest.mark.parametrize("strategy", ["optimal", "engine"])
def test_a_layout_that_cannot_hold_mixed_pages_says_which_would(strategy):
    # One table, but pages of 8 and 3 heads: LHBNC cuts pages by heads.
    specs = {"layers.0.attn": full(), "layers.1.attn": full(num_kv_heads=3)}
    with pytest.raises(LayoutError) as caught:
        plan(specs, engine(length=8192), layout="LHBNC", strategy=strategy)
    assert caught.value.layout == "LHBNC"
    assert list(caught.value.layers) == list(specs)
    assert "LBHNC" in caught.value.would_work
    assert "layers.1.attn" in str(caught.value)


def test_a_window_whose_least_exceeds_the_pool_is_an_error_at_once():  # log.md row 59
    # Window 2,048: 1 + ceil(2,047 / 16) = 129 blocks of 65,536 bytes stay in decode, and the pool holds 100.
    with pytest.raises(InsufficientMemoryError) as caught:
        plan({"layers.0.attn": sliding(2048)}, engine(length=131072), memory=100 * 65536)
    error = caught.value
    assert error.needed_bytes == 129 * 65536
    assert error.available_bytes == 99 * 65536
    assert error.largest_fitting_len == 99 * 16


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
