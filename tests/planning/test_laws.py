"""What holds for every plan: nothing lies outside the pool or twice; order, splits and memory change what they may."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvframe import EngineConfig
from kvframe.errors import InsufficientMemoryError, KVFrameError
from kvframe.planning import plan
from kvframe_mamba import MambaSpec
from kvframe_mla import MLAAttentionSpec
from tests.planning.models import (
    GIB,
    HOST,
    LENGTHS,
    MIB,
    MIXED,
    MIXES,
    MODELS,
    alive,
    engine,
    full,
    held_bytes,
    mix,
    peak,
    sliding,
    specs_of,
)
from tests.vectors import NotRun, engine_of, params, setup_of, spec_of

STRATEGIES = ("optimal", "engine")


# --- where pages lie -------------------------------------------------------------------------------------------------


def expect_sound(specs, config):
    """Every layer placed once; tensors inside the pool; pages of one group apart, in every block."""
    placed = [layer for tensor in config.tensors for layer in tensor.layers]
    assert Counter(placed) == Counter(list(specs))
    assert Counter(layer for group in config.groups for layer in group.layer_names) == Counter(list(specs))
    pool = config.pools["device"]
    assert pool.size_bytes <= pool.budget_bytes
    for group in config.groups:
        blocks = pool.num_slabs * group.blocks_per_slab
        assert (pool.slab_bytes / group.blocks_per_slab).is_integer()
        starts, ends = page_ranges(config, group, blocks)
        assert starts[0] >= 0
        assert ends.max() <= pool.size_bytes
        assert (starts[1:] >= ends[:-1]).all()


def page_ranges(config, group, blocks):
    """First and last byte of each page of a group, ascending: all blocks, or in large pools those around each end."""
    chosen = np.arange(blocks) if blocks <= 600 else np.r_[0:300, blocks - 300 : blocks]
    starts, sizes = [], []
    for tensor in config.tensors:
        if tensor.layers[0] not in group.layer_specs:
            continue
        assert set(tensor.layers) <= set(group.layer_names)
        assert tensor.size == config.pools["device"].size_bytes
        for index, layer in enumerate(tensor.layers):
            starts.append(tensor.offset + index * tensor.layer_stride + chosen * tensor.block_stride)
            sizes.append(np.full(chosen.size, group.page_of(layer)))
    starts, sizes = np.concatenate(starts), np.concatenate(sizes)
    order = np.argsort(starts, kind="stable")
    return starts[order], (starts + sizes)[order]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", [*MODELS, *MIXES])
def test_a_models_pages_lie_apart_and_inside_the_pool(name, strategy):
    layout = "BLHNC" if name == "DeepSeek-V4-Flash" else None
    made = plan(
        specs_of(name, 2048),
        engine=engine(name, 2048),
        memory=6 * GIB,
        host=HOST,
        strategy=strategy,
        layout=layout,
    )
    expect_sound(specs_of(name, 2048), made.config)


def latent(**changed):
    values = {"block_size": 16, "num_kv_heads": 1, "head_size": 576, "dtype": "bfloat16", **changed}
    return MLAAttentionSpec(**values)


def state(elements):
    return MambaSpec(block_size=64, shapes=((elements,),), dtypes=("bfloat16",), mamba_cache_mode="align")


heads = st.sampled_from([1, 2, 3, 5, 8])
kinds = st.one_of(
    st.builds(full, num_kv_heads=heads, head_size=st.sampled_from([64, 80, 128])),
    st.builds(sliding, st.sampled_from([16, 100, 1024]), num_kv_heads=heads),
    st.builds(latent, head_size=st.sampled_from([576, 132])),
    st.builds(state, st.integers(1, 40).map(lambda n: n * 3000)),
)
parts = st.lists(st.tuples(st.integers(1, 12), kinds), min_size=1, max_size=3)
models = parts.map(lambda chosen: mix(*chosen))
memories = st.integers(16 * MIB, 4 * GIB)
lengths = st.sampled_from([1, 100, 1024, 5000])


def attempt(specs, **options):
    """The plan, or the error: both must follow from what is planned alone."""
    try:
        return plan(specs, host=HOST, **options)
    except KVFrameError as error:
        return error


@given(
    models, lengths, memories, st.sampled_from([1, 512]), st.sampled_from([None, "LBHNC", "BLHNC", "BLNHC"])
)
@settings(max_examples=60)
def test_pages_lie_apart_and_inside_the_pool(specs, length, memory, in_flight, layout):
    limits = EngineConfig(max_model_len=length, max_in_flight_tokens=in_flight, state_cache_mode="align")
    for strategy in STRATEGIES:
        made = attempt(specs, engine=limits, memory=memory, layout=layout, strategy=strategy)
        if isinstance(made, KVFrameError):
            continue
        expect_sound(specs, made.config)
        assert made.config.num_blocks >= 2  # the null block and another


# --- what does not matter --------------------------------------------------------------------------------------------


def expect_same(one, other):
    if isinstance(one, KVFrameError):
        assert type(other) is type(one)
        assert str(other) == str(one)
        return
    assert other.configs == one.configs
    assert [list(c.groups) for c in other.configs] == [list(c.groups) for c in one.configs]
    assert other.report == one.report


@given(models, st.randoms(use_true_random=False), memories)
@settings(max_examples=40)
def test_the_order_of_layers_decides_nothing(specs, random, memory):
    shuffled = list(specs.items())
    random.shuffle(shuffled)
    limits = EngineConfig(max_model_len=1024, state_cache_mode="align")
    one, other = (attempt(s, engine=limits, memory=memory) for s in (specs, dict(shuffled)))
    expect_same(one, other)


@pytest.mark.parametrize("name", MIXED)
def test_the_order_of_a_models_layers_decides_nothing(name):
    specs = specs_of(name)
    backwards = dict(reversed(specs.items()))
    options = {"engine": engine(name), "memory": 64 * GIB, "host": HOST}
    expect_same(plan(specs, **options), plan(backwards, **options))


def bytes_per_request(config, limits):
    return held_bytes(config, limits, limits.max_model_len, peak)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("full_layers", "sliding_layers", "stages"), [(12, 12, 2), (8, 40, 2), (12, 36, 3), (4, 20, 4)]
)
def test_another_split_with_equal_mixes_needs_the_same_bytes(full_layers, sliding_layers, stages, strategy):
    specs = mix((full_layers, full()), (sliding_layers, sliding()))
    names = list(specs)
    kinds_in_order = {
        kind: [n for n in names if type(specs[n]) is kind] for kind in {type(s) for s in specs.values()}
    }

    def split(pick):
        """Stages with equal shares of every kind; `pick` says which layers of a kind a stage holds."""
        return [
            [n for layers in kinds_in_order.values() for n in pick(layers, stage)] for stage in range(stages)
        ]

    def run(layers, stage):
        size = len(layers) // stages
        return layers[stage * size : (stage + 1) * size]

    splits = [split(run), split(lambda layers, stage: run(layers, stages - 1 - stage))]
    if (
        strategy == "optimal"
    ):  # engines deal every n-th layer to a group, so this split gives each stage one group
        splits.append(split(lambda layers, stage: layers[stage::stages]))
    limits = EngineConfig(max_model_len=32768)
    needs = set()
    for parts_of_model in splits:
        made = plan(
            specs,
            engine=limits,
            memory=10 * GIB,
            host=HOST,
            stages=parts_of_model,
            strategy=strategy,
            layout="BLHNC" if strategy == "optimal" else None,
        )
        needs |= {bytes_per_request(config, limits) for config in made.configs}
        assert len({config.num_blocks for config in made.configs}) == 1
    assert len(needs) == 1


def test_uneven_stages_hold_no_more_than_the_engines_plan():
    specs = specs_of("gemma-3-27b")
    names = list(specs)
    limits = engine("gemma-3-27b")
    for cut in (20, 27, 31, 40):
        options = {"engine": limits, "memory": 40 * GIB, "host": HOST, "stages": [names[:cut], names[cut:]]}
        ours, theirs = plan(specs, **options), plan(specs, strategy="engine", **options)
        for one, other in zip(ours.configs, theirs.configs, strict=True):
            for length in LENGTHS:
                assert held_bytes(one, limits, length) <= held_bytes(other, limits, length)


# --- more memory -----------------------------------------------------------------------------------------------------


def concurrency(name, memory, length, strategy):
    layout = "BLHNC" if name == "DeepSeek-V4-Flash" and strategy == "engine" else None
    try:
        made = plan(
            specs_of(name, length),
            engine=engine(name, length),
            memory=memory,
            host=HOST,
            strategy=strategy,
            layout=layout,
        )
    except InsufficientMemoryError:
        return 0.0
    return made.report.max_concurrency


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", MIXED)
def test_more_memory_never_gives_fewer_requests(name, strategy):
    # About 1 to 130 GiB, each a few percent above the one before or much more.
    budgets = [int(GIB * 1.03**step) for step in (0, 1, 2, 20, 21, 47, 48, 80, 81, 123, 124, 125, 164, 165)]
    found = [concurrency(name, memory, 8192, strategy) for memory in budgets]
    assert found == sorted(found)
    assert found[-1] > 0


@given(models, st.lists(memories, min_size=3, max_size=3), lengths)
@settings(max_examples=30)
def test_more_memory_never_gives_fewer_requests_of_a_mix(specs, budgets, length):
    limits = EngineConfig(max_model_len=length, state_cache_mode="align")
    for strategy in STRATEGIES:
        found = []
        for memory in sorted(budgets):
            made = attempt(specs, engine=limits, memory=memory, strategy=strategy)
            found.append(0.0 if isinstance(made, KVFrameError) else made.report.max_concurrency)
        assert found == sorted(found)


# --- never more than the engines' plan -------------------------------------------------------------------------------


def expect_no_more(ours, theirs, limits):
    for one, other in zip(ours.configs, theirs.configs, strict=True):
        for length, count in itertools.product(LENGTHS, (alive, peak)):
            assert held_bytes(one, limits, length, count) <= held_bytes(other, limits, length, count)


@pytest.mark.parametrize("in_flight", [1, 8192])
@pytest.mark.parametrize("name", [*MODELS, *MIXES])
def test_no_model_holds_more_than_the_engines_plan(name, in_flight):
    limits = engine(name, max_in_flight_tokens=in_flight)
    layouts = ["BLHNC"] if name == "DeepSeek-V4-Flash" else [None, "BLHNC"]
    for layout in layouts:
        options = {"engine": limits, "memory": 80 * GIB, "host": HOST, "layout": layout}
        specs = specs_of(name)
        expect_no_more(plan(specs, **options), plan(specs, strategy="engine", **options), limits)


@pytest.mark.parametrize("name", ["gemma-3-27b", "qwen3-next-80b", "20 full + 30 sliding"])
def test_nor_at_any_other_length(name):
    limits = engine(name)
    options = {"engine": limits, "memory": 40 * GIB, "host": HOST}
    ours, theirs = plan(specs_of(name), **options), plan(specs_of(name), strategy="engine", **options)
    for length in [*range(1, 1200), *range(1200, 16385, 97)]:
        assert held_bytes(ours.config, limits, length) <= held_bytes(theirs.config, limits, length)


def of_the_core(case):
    """HiSparse has one plan, made by its plugin."""
    return not setup_of(case["input"]["setup"])["hisparse"]


@pytest.mark.parametrize("case", params("planning", of_the_core))
def test_no_case_holds_more_than_the_engines_plan(case):
    words = case["input"]
    setup = setup_of(words["setup"])
    try:
        specs = {name: spec_of(spec) for name, spec in words["specs"].items()}
    except NotRun as reason:
        pytest.skip(f"not run: {reason}")
    except KVFrameError:
        pytest.skip("not run: kvframe refuses one of the specs")
    stages = [[layer for layer, _ in worker] for worker in words["workers"]]
    layers = {layer: specs[key] for worker in words["workers"] for layer, key in worker}
    memory = words["memory"]
    if sum(map(len, stages)) > len(
        layers
    ):  # tensor-parallel ranks hold the same layers: the smallest decides
        stages, memory = [], min(memory)
    elif len(stages) == 1:
        stages, memory = [], memory[0]
    limits = engine_of(words["setup"])
    options = {"engine": limits, "memory": memory, "stages": stages, "layout": setup["layout"]}
    theirs = attempt(layers, strategy="engine", **options)
    ours = attempt(layers, **options)
    if isinstance(theirs, KVFrameError):
        return  # what engines cannot plan is no measure
    assert not isinstance(ours, KVFrameError), ours
    expect_no_more(ours, theirs, limits)
