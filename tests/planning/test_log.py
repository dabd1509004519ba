"""Rows of the log of public reports that concern planning, by their numbers: what must not happen here.

Covered elsewhere: 12 and 18's mode (`memory_source`, tests/test_cli.py); 14 to 17, 20 to 24 and 30 (figures of real
models, tests/test_model_facts.py and tests/test_models.py); 19 and 21 also there; 27 and 28 (tensor parallelism,
tests/test_models.py); 39 (hooks, tests/test_plugins.py); 41 (plans are frozen, tests/test_config.py); 42 (kernel
blocks, tests/test_layouts.py); 44 and 45 (plans as JSON, tests/test_serialise.py).
"""

import pytest

from kvframe.errors import InsufficientMemoryError, PlanError, SequenceLimitError
from kvframe.planning import plan
from kvframe.planning.inverse import largest_len
from kvframe_chunked_local import ChunkedLocalAttentionSpec
from kvframe_mamba import MambaSpec
from kvframe_mla import MLAAttentionSpec
from tests.planning.models import GIB, HOST, MIB, MODELS, engine, full, kinds_of, mix, model, sliding


def made(specs, limits, memory=GIB, **options):
    return plan(specs, engine=limits, memory=memory, host=HOST, **options)


def state(elements, **changed):
    values = {"block_size": 64, "mamba_cache_mode": "align", "dtypes": ("bfloat16",), **changed}
    return MambaSpec(shapes=((elements,),), **values)


@pytest.mark.parametrize("strategy", ["optimal", "engine"])
@pytest.mark.parametrize("name", MODELS)
def test_log_01_02_tokens_and_concurrency_are_one_number(name, strategy):
    report = made(model(name), engine(name), 200 * GIB, strategy=strategy).report
    blocks = sum(group.blocks_per_request / group.blocks_per_slab for group in report.groups)
    assert report.max_concurrency == pytest.approx(report.num_blocks / blocks, rel=1e-12)
    assert report.tokens == int(report.requests * report.max_model_len)


def test_log_03_a_model_of_windows_alone_holds_more_than_its_tokens_say():
    # Window 4,096, block 16: 257 blocks a request of 131,072 tokens, not 8,192.
    report = made(model("mistral-7b-v0.1"), engine()).report
    assert report.blocks_per_request == {"sliding_window": 257}
    assert report.max_concurrency == report.num_blocks / 257


def test_log_04_05_bytes_are_accounted_for_group_by_group():
    report = made(model("qwen3-next-80b"), engine(), 10 * GIB, strategy="engine").report
    assert report.num_blocks * report.pool_block_bytes + report.unused_bytes == 10 * GIB
    waste = report.waste
    lost = sum(
        group.blocks_per_request * (group.stride_bytes - group.natural_page_bytes) for group in report.groups
    )
    assert lost == report.wasted_bytes_per_request
    assert lost == waste.layer_padding_bytes + waste.page_padding_bytes + waste.slab_remainder_bytes
    padded = [group for group in report.groups if group.page_bytes > group.natural_page_bytes]
    assert {kind for group in padded for kind in group.kinds} == {"mamba"}  # the groups that are inflated


def test_log_06_the_suggested_length_follows_the_cache_dtype():
    lengths = []
    for dtype in ("bfloat16", "uint8"):
        with pytest.raises(InsufficientMemoryError) as caught:
            made({"layers.0.attn": full(dtype=dtype)}, engine(), 16 * MIB)
        lengths.append(caught.value.largest_fitting_len)
    # Blocks of 65,536 and 32,768 bytes in 16 MiB, one of them the null block's: 255 and 511 of 16 tokens.
    assert lengths == [255 * 16, 511 * 16]


@pytest.mark.parametrize("strategy", ["optimal", "engine"])
@pytest.mark.parametrize("name", ["gemma-3-27b", "qwen3-next-80b", "nemotron-h-56b"])
def test_log_07_the_largest_length_fits_and_one_more_does_not(name, strategy):
    def at(length):
        return made(model(name), engine(length=length), 2 * GIB, strategy=strategy)

    longest = largest_len(at, 131072)
    assert 0 < longest < 131072
    assert at(longest).report.max_model_len == longest
    with pytest.raises(InsufficientMemoryError) as caught:
        at(longest + 1)
    assert caught.value.largest_fitting_len == longest
    for shorter in (1, longest // 3, longest - 1):
        at(shorter)


def test_log_08_the_error_has_fields_and_its_text_is_made_from_them():
    with pytest.raises(InsufficientMemoryError) as caught:
        made(model("llama-3.1-8b"), engine(), GIB)
    fields = caught.value.fields()
    # 32 layers x 16 x 4,096 bytes: blocks of 2 MiB; 8,192 of them wanted, 511 there.
    assert fields == {
        "needed_bytes": 8192 * 2 * MIB,
        "available_bytes": 511 * 2 * MIB,
        "max_model_len": 131072,
        "largest_fitting_len": 511 * 16,
        "pool": "device",
    }
    assert "8,176 tokens" in str(caught.value)


@pytest.mark.parametrize("strategy", ["optimal", "engine"])
def test_log_09_the_smallest_stage_decides_the_length(strategy):
    specs = {f"layers.{index}.attn": full() for index in range(4)}
    stages = [list(specs)[:2], list(specs)[2:]]

    def longest(memory):
        with pytest.raises(InsufficientMemoryError) as caught:
            made(specs, engine(), memory, stages=stages, strategy=strategy)
        return caught.value.largest_fitting_len

    # Blocks of 2 x 65,536 bytes: 32 MiB hold 256, 16 MiB 128, less the null block.
    assert longest([32 * MIB, 16 * MIB]) == longest([16 * MIB, 32 * MIB]) == 127 * 16


def test_log_10_block_sizes_are_those_of_the_plan():
    engines = made(model("qwen3-next-80b"), engine(), 10 * GIB, strategy="engine")
    blocks = {kind: engines.report.block_tokens[kind] for kind in ("full_attention", "mamba")}
    assert blocks["full_attention"] == blocks["mamba"] > 16
    assert {group.block_size for group in engines.config.groups} == set(blocks.values())


@pytest.mark.parametrize("strategy", ["optimal", "engine"])
def test_log_11_38_groups_and_pages_come_from_the_whole_model(strategy):
    specs = mix((4, full()), (12, state(300_000)))
    names = list(specs)
    attention = [name for name in names if specs[name] == full()]
    states = [name for name in names if name not in attention]
    splits = [[names], [names[:8], names[8:]], [names[:5], names[5:]], [attention, states]]
    found = [
        made(specs, engine(), 8 * GIB, stages=stages, strategy=strategy, layout="BLHNC") for stages in splits
    ]
    for split in found:
        assert len({config.kv_cache_layout for config in split.configs}) == 1
        blocks = [[group.block_size for group in config.groups] for config in split.configs]
        assert all(sizes == blocks[0] for sizes in blocks)  # a stage without attention has the same
    # Where a stage has states alone, slabs hold more than the engines' plan there, so that plan is taken.
    alike = found[:3] if strategy == "optimal" else found
    pages = {
        frozenset(
            spec.page_size_bytes
            for config in split.configs
            for group in config.groups
            for spec in group.layer_specs.values()
        )
        for split in alike
    }
    assert len(pages) == 1


def test_log_13_states_limit_the_number_of_sequences():
    # A state of 2,000,000 bytes, two of them a sequence; 64 MiB hold 33 slabs of one, and one is the null slab's.
    specs = {"layers.0.state": state(1_000_000)}
    report = made(specs, engine(), 64 * MIB, layout="LBHNC").report
    assert report.groups[0].max_sequences == 16
    assert made(specs, engine(max_num_seqs=16), 64 * MIB, layout="LBHNC")
    with pytest.raises(SequenceLimitError) as caught:
        made(specs, engine(max_num_seqs=1024), 64 * MIB, layout="LBHNC")
    assert caught.value.fields() == {
        "max_num_seqs": 1024,
        "max_sequences": 16,
        "layers": ["layers.0.state"],
        "pool": "device",
    }
    assert caught.value.kind == "insufficient_memory"
    assert "Lower --max-num-seqs to 16" in str(caught.value)


def test_log_13_attention_alone_has_no_such_limit():
    report = made({"layers.0.attn": full()}, engine(length=16, max_num_seqs=10**6), 64 * MIB).report
    assert report.groups[0].max_sequences is None


def test_log_18_needed_and_reserved_are_two_numbers():
    # gpt-oss-20b, one request of 8,192 tokens: 12 full layers keep 8,192 tokens, 12 of window 128 up to 9 blocks of 16;
    # 2,048 bytes a token and layer. Promoted to full attention, all 24 keep everything.
    limits = engine(length=8192)
    report = made(model("gpt-oss-20b", 8192), limits, 10 * GIB).report
    needed = 12 * 2048 * 8192 + 12 * 2048 * 9 * 16
    assert report.waste.floor_bytes == needed
    held = sum(group.blocks_per_request * group.stride_bytes for group in report.groups)
    assert held == needed  # this plan reserves what the model needs
    promoted = {layer: full(num_kv_heads=8, head_size=64) for layer in model("gpt-oss-20b", 8192)}
    assert made(promoted, limits, 10 * GIB).report.waste.floor_bytes == 24 * 2048 * 8192


@pytest.mark.parametrize("name", ["falcon-h1-7b", "jamba-v0.1", "qwen3-next-80b"])
def test_log_19_21_25_layers_of_constant_size_do_not_grow_with_length(name):
    constant = set()
    for length in (8192, 131072):
        for group in made(model(name, length), engine(length=length), 80 * GIB).report.groups:
            if group.max_sequences is not None:
                constant.add(group.blocks_per_request)
    assert constant == {2}  # the state before, and the running one


def test_log_26_a_window_is_never_charged_beyond_the_longest_request():
    # Window 4,096 but requests of 128 tokens: 8 blocks of 16.
    report = made({"layers.0.attn": sliding(4096)}, engine(length=128)).report
    assert report.groups[0].blocks_per_request == 8


def test_log_29_memory_is_shared_by_bytes_not_by_blocks():
    # 8 and 3 heads: a block of each kind takes its own bytes, at most 2 % more.
    specs = mix((8, full()), (8, sliding(num_kv_heads=3)))
    groups = made(specs, engine(), 40 * GIB).report.groups
    assert sorted(group.page_bytes for group in groups) == [8 * 24576, 8 * 65536]
    assert all(group.stride_bytes <= 1.02 * group.page_bytes for group in groups)


def test_log_31_a_page_that_does_not_divide_pads_the_state():
    # Pages of 2 heads x 16 x 388 = 12,416 bytes; a state of 12,648,448: 1,019 pages are 12,651,904, 3,456 more.
    specs = {
        "layers.0.attn": full(num_kv_heads=2, head_size=256, state_content_bytes=388),
        "layers.1.state": state(12_648_448 // 2),
    }
    engines = made(specs, engine(), 8 * GIB, strategy="engine").report
    (padded,) = [group for group in engines.groups if "mamba" in group.kinds]
    assert padded.page_bytes - padded.natural_page_bytes == 3456
    assert engines.block_tokens["full_attention"] == 1019 * 16
    assert engines.waste.page_padding_bytes == padded.blocks_per_request * 3456
    ours = made(specs, engine(), 8 * GIB).report
    assert ours.waste.page_padding_bytes == 0  # pages of their own
    assert ours.block_tokens["full_attention"] == 16


def test_log_32_both_ways_are_compared_and_the_report_says_so():
    report = made(model("qwen3-next-80b"), engine(), 40 * GIB).report
    cost = {other.name: other.cost for other in report.alternatives}
    assert report.chosen == "slabs, BLHNC"
    assert cost[report.chosen] == min(cost.values()) < cost["engine rule, LBHNC"]


def test_log_33_pages_that_cannot_be_brought_together_are_named():
    # A latent page of 64 x 1,152 = 73,728 bytes is never padded, and one of 64 x 1,200 = 76,800 is no multiple of it.
    specs = {
        "layers.0.latent": MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype="bfloat16"),
        "layers.1.attn": ChunkedLocalAttentionSpec(
            block_size=64, num_kv_heads=1, head_size=300, dtype="bfloat16", attention_chunk_size=8192
        ),
    }
    for strategy in ("optimal", "engine"):
        with pytest.raises(PlanError) as caught:
            made(specs, engine(), 8 * GIB, strategy=strategy, layout="LBHNC")
        assert sorted(caught.value.layers) == sorted(specs)
        assert "73728" in str(caught.value)
        assert "--layout BLHNC" in caught.value.advice
    assert made(specs, engine(), 8 * GIB, layout="BLHNC")


def test_log_34_36_pages_are_looked_up_by_layer():
    # A target in one byte an element and a draft in two: one table, pages of their own.
    specs = {f"layers.{index}.attn": full(dtype="uint8") for index in range(3)}
    specs["draft.0.attn"] = full(is_draft=True)
    report = made(specs, engine(), 4 * GIB).report
    assert report.pool_block_bytes == 3 * 32768 + 65536
    assert report.num_blocks == 4 * GIB // report.pool_block_bytes


def test_log_35_pages_that_are_nearly_one_to_two_cost_nearly_nothing():
    # 256 + 4 and 512 + 4 bytes a token: 260 : 516. Twice 260 is 520, 0.8 % more, and nothing else is padded.
    specs = mix(
        (4, full(num_kv_heads=1, head_size=512, state_content_bytes=516)),
        (8, sliding(num_kv_heads=1, head_size=256, state_content_bytes=260)),
    )
    # Engines pad 260 to 516. Slabs need neither: no stride is even 0.8 % above its page.
    report = made(specs, engine(), 40 * GIB).report
    assert max(group.stride_bytes / group.page_bytes for group in report.groups) < 520 / 516
    engines = made(specs, engine(), 40 * GIB, strategy="engine").report
    assert report.waste.structural_share < 0.008 < engines.waste.structural_share


def test_log_37_every_stage_has_a_share_of_every_group():
    specs = mix((10, full()), (50, sliding()))
    names = list(specs)
    for stages in ([names[:30], names[30:]], [names[:20], names[20:40], names[40:]]):
        for strategy in ("optimal", "engine"):
            for config in made(specs, engine(), 20 * GIB, stages=stages, strategy=strategy).configs:
                assert all(group.layer_specs for group in config.groups)


def test_log_40_equal_groups_share_what_kernels_prepare():
    specs = mix((12, full()), (36, sliding()))
    groups = made(specs, engine(), 40 * GIB, strategy="engine").config.groups
    assert len(groups) == 4
    assert len({group.metadata_key for group in groups}) == 2


def test_log_43_only_a_group_knows_the_index_of_a_position():
    config = made(
        {"layers.0.attn": full(block_size=128), "layers.1.attn": sliding(block_size=2176)}, engine(), 8 * GIB
    ).config
    index = {group.block_size: group.block_index(100_096 - 1) for group in config.groups}
    assert index == {128: 781, 2176: 45}


def test_log_46_tensors_are_found_by_layer_names():
    config = made(model("gemma-3-27b"), engine(), 40 * GIB).config
    for tensor in config.tensors:
        for layer in tensor.layers:
            assert set(tensor.layers) <= set(config.group_of(layer).layer_names)


def test_models_of_several_kinds_are_among_the_tested():
    assert sum(len(kinds_of(model(name))) > 1 for name in MODELS) >= 15
