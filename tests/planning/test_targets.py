"""What a plan may waste: structural shares, slabs and tables, against the bars and against the engines' figures."""

import statistics

import pytest

from kvframe.errors import InsufficientMemoryError
from kvframe.planning import Limits, plan
from tests.planning.models import (
    GIB,
    HOST,
    LENGTHS,
    MIB,
    MIXED,
    MIXES,
    MODELS,
    deepseek_v4_flash,
    engine,
    full,
    kinds_of,
    mix,
    model,
    natural_bytes,
    sliding,
    specs_of,
    structural_share,
)

POOLS = (40 * GIB, 160 * GIB, 640 * GIB)
V4_PAGES = [1_002_240, 823_680, 786_240, 870_912, 656_640]


def planned(name, memory, length=131072, **options):
    return plan(specs_of(name), engine=engine(name, length), memory=memory, host=HOST, **options)


def shares(name, made, *, length=131072, padding=True):
    """Structural share at each of the five lengths up to `length`, counted without the planner."""
    limits = engine(name, length)
    specs = specs_of(name)
    wanted = [n for n in LENGTHS if n <= length]
    return {n: structural_share(specs, made.config, limits, n, padding=padding) for n in wanted}


def length_for(name, memory):
    """The longest of the five lengths of which one request fits, with a tenth to spare: slabs are whole."""
    limits = engine(name)
    needs = {n: natural_bytes(specs_of(name), 1024, limits, n, padding=True) for n in LENGTHS}
    return max(n for n, needed in needs.items() if 1.1 * needed <= memory)


def expect_within_limits(made):
    assert made.report.pool_block_bytes <= 256 * MIB
    assert len(made.config.groups) <= 16


@pytest.mark.parametrize("name", [*MODELS, *MIXES])
def test_large_pools_lose_at_most_one_percent_beyond_the_kernels_alignment(name):
    for memory in POOLS:
        try:
            made = planned(name, memory)
        except InsufficientMemoryError:
            assert memory == POOLS[0]  # 48 GiB and more for one request of 131,072 tokens
            continue
        expect_within_limits(made)
        beyond = shares(name, made)
        assert max(beyond.values()) <= 0.01
        assert max(shares(name, made, padding=False).values()) <= 0.02  # with that alignment counted as lost
        reported = made.report.waste.structural_share_by_length
        assert reported == pytest.approx(beyond, abs=1e-9)


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("gib", [1, 2, 4, 16])
def test_small_pools_lose_at_most_two_percent(name, gib):
    length = length_for(name, gib * GIB)
    made = planned(name, gib * GIB, length)
    expect_within_limits(made)
    assert max(shares(name, made, length=length, padding=False).values()) <= 0.02


def test_models_of_several_kinds_lose_nearly_nothing_in_the_median():
    worst = [
        max(shares(name, planned(name, 40 * GIB)).values())
        for name in MODELS
        if len(kinds_of(model(name))) > 1
    ]
    assert len(worst) >= 15
    assert statistics.median(worst) <= 0.001


# Engines' figures at 256 tokens (slabs.md). Pages of a block are equal unless said.
ENGINES = {
    # 52 sliding and 10 full layers in 7 groups of 10: 62 of 70 slots hold a layer.
    "gemma-3-27b": 1 - 62 / 70,  # 11.4 %
    # 30 sliding layers in 2 groups of 15, beside 20 full ones: 50 of 60.
    "20 full + 30 sliding": 1 - 50 / 60,  # 16.7 %
    # A 544-token block of attention for 256 tokens, and four groups of states padded to its page.
    "falcon-h1-7b": 0.422,
    # 39 window layers in 5 groups of 8, all with 8 blocks alive (window 128, block 16), 9 full ones with 16.
    "mimo-v2-flash": 0.111,
    "DeepSeek-V4-Flash": 0.286,
}


@pytest.mark.parametrize("name", ENGINES)
def test_the_engines_rule_loses_what_was_measured(name):
    layout = "BLHNC" if name == "DeepSeek-V4-Flash" else None
    made = planned(name, 40 * GIB, strategy="engine", layout=layout)
    assert shares(name, made)[256] == pytest.approx(ENGINES[name], abs=1e-3)


def test_deepseek_v4_flash_has_the_pages_that_are_known():
    made = planned("DeepSeek-V4-Flash", 40 * GIB, strategy="engine", layout="BLHNC")
    assert sorted(group.page_size_bytes for group in made.config.groups) == sorted(V4_PAGES)
    # 28.8 %: kernels' alignment counted as lost, as in the figure of slabs.md. At 256 tokens the five groups hold
    # 1, 2, 2, 2 and 16 blocks of 1,002,240 bytes: 23,051,520. Contents: 985,664 + 2 x 43 x 37,376 + 2 x 21 x 40,960
    # + 16 x 20 x 32,768 = 16,406,080. 1 - 16,406,080 / 23,051,520 = 0.2883.
    share = shares("DeepSeek-V4-Flash", made, padding=False)[256]
    assert share == pytest.approx(1 - 16_406_080 / 23_051_520, abs=1e-12)


def test_deepseek_v4_flash_where_strides_are_whole_kernel_rows():
    specs = {layer: _in_rows(spec) for layer, spec in deepseek_v4_flash().items()}
    for memory in (GIB, 40 * GIB):
        made = plan(specs, engine=engine(), memory=memory, host=HOST)
        limit = 0.02 if memory < 40 * GIB else 0.01
        assert all(
            made.report.pool_block_bytes // group.blocks_per_slab % 576 == 0 for group in made.config.groups
        )
        assert max(structural_share(specs, made.config, engine(), n) for n in LENGTHS) <= limit


def _in_rows(spec):
    values = {f.alias: getattr(spec, f.name) for f in spec.__attrs_attrs__}
    return type(spec)(**{**values, "block_stride_alignment": 576})


# Layouts whose layers are outermost keep equal pages: there the group size is searched.
LAYER_OUTERMOST = {
    "gemma-3-27b": 0.05,
    "20 full + 30 sliding": 0.0,  # 5 groups of 10
    "mimo-v2-flash": 0.0,
}


@pytest.mark.parametrize("name", LAYER_OUTERMOST)
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_layer_outermost_layouts_search_the_group_size(name, layout):
    made = planned(name, 40 * GIB, layout=layout)
    assert made.config.kv_cache_layout == layout
    assert max(shares(name, made).values()) <= LAYER_OUTERMOST[name] + 1e-12
    assert len(made.config.groups) <= 16


def test_gemma_3_27b_layer_outermost_has_groups_of_13():
    # 52 = 4 x 13 and 10 in one group: 5 groups of 13 slots, 62 of 65 with a layer: 4.6 %.
    made = planned("gemma-3-27b", 40 * GIB, layout="LBHNC")
    assert max(shares("gemma-3-27b", made).values()) == pytest.approx(1 - 62 / 65, abs=1e-3)


def test_hybrids_with_states_keep_16_token_blocks():
    made = planned("qwen3-next-80b", 40 * GIB)
    assert made.report.block_tokens["full_attention"] == 16
    engines = planned("qwen3-next-80b", 40 * GIB, strategy="engine")
    assert engines.report.block_tokens["full_attention"] > 256  # a block as large as a state


def test_a_model_of_one_kind_uses_one_group_layer_outermost():
    for name in MODELS:
        if len(kinds_of(model(name))) == 1:
            made = planned(name, 640 * GIB)
            assert len(made.config.groups) == 1
            assert made.config.kv_cache_layout == "LBHNC"


def test_a_user_sets_the_limits():
    specs, memory = mix((20, full()), (30, sliding())), 40 * GIB

    def made(**limits):
        return plan(specs, engine=engine(), memory=memory, host=HOST, limits=Limits(**limits))

    free = made()
    small = made(slab_bytes=2 * MIB)
    assert small.report.pool_block_bytes <= 2 * MIB < free.report.pool_block_bytes
    assert len(made(groups=2).config.groups) <= 2
    exact_fit = made(structural_share=0.0)
    assert exact_fit.report.waste.structural_share == 0


@pytest.mark.parametrize(
    ("field", "value"), [("structural_share", 1.5), ("slab_bytes", 0), ("groups", 0), ("groups", 2.5)]
)
def test_a_limit_out_of_its_range_is_refused(field, value):
    with pytest.raises(ValueError, match=field) as caught:
        Limits(**{field: value})
    assert caught.value.fields()["value"] == value
