"""HiSparse in the planner: contract 5.10 with its worked numbers [run], and what kvframe makes of it."""

import json

import attrs
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from kvframe import EngineConfig, FullAttentionSpec, load_plugins, plan
from kvframe.cli import cli
from kvframe.cli.model import load_model
from kvframe.errors import InsufficientMemoryError, LayoutError, PlanError, SpecError, UsageError
from kvframe.models import read_config
from kvframe.planning.inverse import largest_len
from kvframe.serialise import from_json, to_json
from kvframe.verify import verify
from kvframe_hisparse import (
    INDEXER_ROLE,
    SOURCE_ROLE,
    hisparse_host_block_stride,
    hisparse_host_num_blocks,
    hisparse_shared_host_pool,
)
from kvframe_mla import MLAAttentionSpec

HOST = load_plugins()
GIB = 1 << 30
PAGE = 41_984  # a latent page of DeepSeek-V3.2 in fp8: 64 tokens of 656 bytes
INDEXER = MLAAttentionSpec(64, num_kv_heads=1, head_size=132, dtype="uint8", cache_role="indexer")
LATENT = MLAAttentionSpec(
    64, num_kv_heads=1, head_size=656, dtype="uint8", topk_buffer_width=2048, is_index_group_leader=True
)
V32 = {
    "model_type": "deepseek_v32",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "max_position_embeddings": 163_840,
    "torch_dtype": "bfloat16",
}


def model(layers, every=1, latent=LATENT):
    """Latent layers of which each `every`-th has an indexer, whose choice the layers after it share."""
    specs = {}
    for index in range(layers):
        leads = index % every == 0
        specs[f"layers.{index}.attn"] = attrs.evolve(latent, is_index_group_leader=leads)
        if leads:
            specs[f"layers.{index}.indexer"] = INDEXER
    return specs


def engine(max_model_len=16_384, extras=None, **limits):
    return EngineConfig(max_model_len=max_model_len, extras={"hisparse": True, **(extras or {})}, **limits)


def made(specs, limits=None, *, memory=GIB, host=GIB, **options):
    return plan(specs, engine=limits or engine(), memory=memory, pools={"host": host}, host=HOST, **options)


def groups_of(config, suffix):
    return [group for group in config.groups if group.layer_names[0].endswith(suffix)]


# --- the engines' rule: contract 5.10 --------------------------------------------------------------------------------


def test_the_worked_numbers():
    config = made(model(8), strategy="engine").config
    source, indexer = config.groups[:2]
    assert (source.role, source.pool, source.page_size_bytes) == (SOURCE_ROLE, "host", 8 * PAGE)
    assert (indexer.role, indexer.pool, indexer.page_size_bytes) == (INDEXER_ROLE, "device", 8 * 8_448)
    residents, hots = groups_of(config, "resident"), groups_of(config, "hot")
    # 41,984 <= 67,584 < 2 * 41,984: one layer a pack
    assert [len(residents), len(hots), len(config.groups)] == [8, 8, 18]
    assert hots[0].kv_cache_spec.blocks_per_request == 64  # (1 + 1) * 2,048 tokens / 64
    assert config.kv_cache_layout == "BLHNC"
    assert config.bytes_per_block == 83_968  # 67,584 rounded up to whole pages of 41,984
    assert config.num_blocks == 12_787  # 1 GiB / 83,968
    assert (hisparse_host_num_blocks(config), hisparse_host_block_stride(config)) == (3_196, 335_872)
    assert config.pools["host"].layout == "LBNHC"
    assert not hisparse_shared_host_pool(config)
    assert [group.enable_kv_transfer for group in config.groups] == [True, True, *[False] * 16]
    verify(config, HOST.layouts)


def test_what_one_request_takes_and_how_many_run_at_once():
    limits = engine(16_384, max_in_flight_tokens=2_048)
    device, host = made(model(8), limits, strategy="engine").report.pools
    # indexer 16,384 / 64; a resident pack ceil(2,047 / 64) + 2, of which 2 stay in decode; a hot pack 64
    most, steady = 256 + 8 * 34 + 8 * 64, 256 + 8 * 2 + 8 * 64
    assert (device.slabs_per_request, device.steady_slabs_per_request) == (most, steady) == (1_040, 784)
    assert device.requests == pytest.approx(12_787 / 1_040)
    assert device.steady_requests == pytest.approx(1 + (12_787 - 1_040) / 784)
    assert host.requests == host.steady_requests == pytest.approx(3_196 / 256)


def test_the_pool_with_the_fewest_requests_limits():
    tight, ample = made(model(8), host=GIB).report, made(model(8), host=8 * GIB).report
    assert (tight.limited_by, ample.limited_by) == ("host", "device")
    assert tight.max_concurrency == pytest.approx(3_196 / 256)
    assert ample.max_concurrency == pytest.approx(float(ample.pools[0].requests))
    assert tight.tokens == 3_196 * 16_384 // 256


def test_packs_are_as_wide_as_the_indexers_and_never_split_a_unit():
    # 61 leaders: 61 * 8,448 = 515,328 hold 12 pages of 41,984; a stride is whole pages, 13 of them
    config = made(model(61), memory=8 * GIB, host=400 * GIB, strategy="engine").config
    assert [len(group.layer_specs) for group in groups_of(config, "hot")] == [12] * 5 + [1]
    assert config.bytes_per_block == 13 * PAGE
    # 2 indexers lead 4 layers each: a pack holds a whole unit, though its 4 pages are wider than 16,896 bytes, and the
    # block grows with it. The reference's block is 41,984 bytes there, too small for the pack.
    config = made(model(8, every=4), strategy="engine").config
    assert [len(group.layer_specs) for group in groups_of(config, "resident")] == [4, 4]
    assert config.bytes_per_block == 4 * PAGE
    verify(config, HOST.layouts)


def test_other_layers_are_grouped_as_ever():
    draft = FullAttentionSpec(64, num_kv_heads=8, head_size=64, dtype="bfloat16")
    config = made({**model(4), "draft": draft}, strategy="engine").config
    last = config.groups[-1]
    assert (last.layer_names, last.pool, last.kv_cache_spec) == (("draft",), "device", draft)
    assert config.bytes_per_block == 4 * PAGE  # 131,072 rounded up to whole pages


def test_the_region_grows_with_the_query_and_follows_the_setting():
    def hot_blocks(**extras):
        named = {f"hisparse_{name}": value for name, value in extras.items()}
        config = made(model(2), engine(extras=named), strategy="engine").config
        return groups_of(config, "hot")[0].kv_cache_spec.blocks_per_request

    assert hot_blocks() == 64
    assert hot_blocks(query_len=2) == 96  # (2 + 1) * 2,048 / 64
    assert hot_blocks(buffer=6_144) == 96
    assert hot_blocks(buffer=2_049) == 33  # a started page counts


# --- the default strategy --------------------------------------------------------------------------------------------


def test_slabs_lose_next_to_nothing():
    best = made(model(61), engine(131_072), memory=64 * GIB, host=400 * GIB)
    rule = made(model(61), engine(131_072), memory=64 * GIB, host=400 * GIB, strategy="engine")
    assert [len(group.layer_specs) for group in best.config.groups] == [61] * 4
    assert best.report.waste.structural_share < 0.001
    assert rule.report.waste.structural_share > 0.2
    held = {a.name: a.held_bytes for a in best.report.alternatives}
    for length, nbytes in held[rule.report.chosen].items():
        assert held[best.report.chosen][length] <= nbytes
    verify(best.config, HOST.layouts)


@pytest.mark.parametrize(("length", "ratio"), [(8_192, 1.71), (40_960, 3.99), (131_072, 5.17)])
def test_device_bytes_against_keeping_all_on_the_device(length, ratio):
    """fp8 rows of 656 bytes and 132 of indexer in 61 layers, 4,096 hot rows: as published for DeepSeek-V3.2.

    8,192 tokens: all on the device 61 * 8,192 * (656 + 132) = 393,773,056 bytes; with HiSparse 61 * 8,192 * 132 of
    indexer and 61 * 4,096 * 656 of hot rows, 229,867,520 bytes: 1.713 times fewer. Pages of 64 tokens divide all of
    these lengths, so the plan's blocks hold just that.
    """
    on_device = plan(model(61), engine=EngineConfig(max_model_len=length), memory=64 * GIB, host=HOST)
    tiered = made(model(61), engine(length), memory=64 * GIB, host=400 * GIB)
    whole = sum(group.blocks_per_request * group.stride_bytes for group in on_device.report.groups)
    by_role = {
        next(iter(group.kinds)) if group.role == "default" else group.role: group.blocks_per_request
        * group.stride_bytes
        for group in tiered.report.groups
    }
    assert whole == 61 * length * 788
    assert (by_role[INDEXER_ROLE], by_role["hisparse_hot"]) == (61 * length * 132, 61 * 4_096 * 656)
    kept = by_role[INDEXER_ROLE] + by_role["hisparse_hot"]
    assert round(whole / kept, 2) == ratio
    # The two pages at a request's end, which the published figure leaves out: 61 * 2 * 41,984 = 5 MB
    assert by_role["hisparse_resident"] == 61 * 2 * PAGE
    assert whole / (kept + by_role["hisparse_resident"]) > 0.975 * ratio


@settings(max_examples=25)
@given(
    layers=st.integers(1, 20),
    every=st.integers(1, 5),
    hosts=st.integers(1, 8),
    strategy=st.sampled_from(["engine", "optimal"]),
)
def test_every_layer_is_placed_once_and_no_byte_is_shared(layers, every, hosts, strategy):
    specs = model(layers, every)
    result = made(specs, engine(4_096), memory=4 * GIB, host=hosts * GIB, strategy=strategy)
    config = result.config
    placed = sorted(layer for tensor in config.tensors for layer in tensor.layers)
    latent = [layer for layer in specs if layer.endswith("attn")]
    added = [layer + suffix for layer in latent for suffix in (".hisparse_resident", ".hisparse_hot")]
    assert placed == sorted([*specs, *added])
    verify(config, HOST.layouts)
    for pool in config.pools.values():
        assert pool.size_bytes <= pool.budget_bytes
    assert result.report.max_concurrency == min(float(pool.requests) for pool in result.report.pools)


# --- the host pool ---------------------------------------------------------------------------------------------------


def test_the_host_holds_a_request_the_null_block_and_a_copy():
    blocks = 16_384 // 64 + 2
    assert made(model(8), host=blocks * 8 * PAGE).config.pools["host"].num_slabs == blocks
    with pytest.raises(InsufficientMemoryError) as caught:
        made(model(8), host=blocks * 8 * PAGE - 1)
    error = caught.value
    assert (error.pool, error.largest_fitting_len) == ("host", 16_384 - 64)
    assert (error.needed_bytes, error.available_bytes) == (256 * 8 * PAGE, 255 * 8 * PAGE + 8 * PAGE - 1)
    assert "pool 'host'" in str(error)


def test_a_host_pool_without_a_block():
    with pytest.raises(InsufficientMemoryError) as caught:
        made(model(8), host=PAGE)
    assert (caught.value.pool, caught.value.largest_fitting_len) == ("host", 0)


def test_the_longest_request_that_fits_follows_the_host():
    # 53,687,091 bytes / (6 * 41,984) = 213 blocks; 211 of them hold 13,504 tokens (vector hisparse_autofit)
    def at(length):
        return made(model(6), engine(length), memory=GIB // 16, host=GIB // 20)

    assert largest_len(at, 131_072) == 13_504


def test_ranks_that_share_a_host_pool():
    extras = {"hisparse_shared_host": True}
    config = made(model(8), engine(extras=extras, tp=8)).config
    pool = config.pools["host"]
    assert (pool.shared_by_ranks, pool.slab_bytes) == (8, 335_872)  # 82 pages of 4,096
    assert hisparse_shared_host_pool(config)
    config = made(model(3), engine(extras=extras, tp=8)).config
    assert hisparse_host_block_stride(config) == 126_976  # 125,952 rounded up to 31 pages of 4,096
    verify(config, HOST.layouts)
    assert from_json(to_json(config)) == config


def test_copies_on_the_device_do_not_hide_that_ranks_hold_the_same():
    replicated = attrs.evolve(LATENT, max_tp_shards=1)
    specs = {
        layer: replicated if layer.endswith("attn") else attrs.evolve(INDEXER, max_tp_shards=1)
        for layer in model(4)
    }
    assert made(specs, engine(tp=8)).config.kv_tp_replicas == 8


def test_pipeline_stages_hold_the_companions_of_their_layers():
    specs = model(6)
    stages = [
        [layer for layer in specs if int(layer.split(".")[1]) in part] for part in (range(2), range(2, 6))
    ]
    first, second = made(specs, stages=stages).configs
    assert [len(group.layer_specs) for group in first.groups] == [2, 2, 2, 2]
    assert [len(group.layer_specs) for group in second.groups] == [4, 4, 4, 4]
    assert first.pools["host"].num_slabs == second.pools["host"].num_slabs == GIB // (4 * PAGE)
    for config in (first, second):
        verify(config, HOST.layouts)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("buffer", "field"), [(100, "at least"), (2_047, "at least"), (32_769, "at most"), (40_000, "at most")]
)
def test_a_region_out_of_range(buffer, field):
    with pytest.raises(PlanError) as caught:
        made(model(2), engine(extras={"hisparse_buffer": buffer}))
    limits = {"at least": 2_048, "at most": 32_768}
    assert caught.value.values == {"tokens of the region": buffer, **limits}
    assert (buffer > limits[field]) == (field == "at most")


def test_longer_queries_need_a_larger_region():
    with pytest.raises(PlanError) as caught:
        made(model(2), engine(extras={"hisparse_buffer": 4_096, "hisparse_query_len": 3}))
    assert caught.value.values["at least"] == 3 * 2_048


def without(specs, suffix):
    return {layer: spec for layer, spec in specs.items() if not layer.endswith(suffix)}


@pytest.mark.parametrize(
    ("specs", "reason", "values"),
    [
        (
            without(model(2), "indexer"),
            "indexers that choose their tokens",
            {"latent layers": 2, "indexers": 0},
        ),
        (without(model(2), "attn"), "needs latent layers", {"latent layers": 0, "indexers": 2}),
        (
            {"a": FullAttentionSpec(16, num_kv_heads=8, head_size=64, dtype="bfloat16")},
            "needs latent layers",
            {"latent layers": 0, "indexers": 0},
        ),
        (
            model(2, latent=attrs.evolve(LATENT, model_version="deepseek_v4")),
            "separated rows",
            {"model_version": "deepseek_v4"},
        ),
        (
            model(2, latent=attrs.evolve(LATENT, block_size=128)),
            "one block size",
            {"block sizes": [64, 128]},
        ),
        (
            {**model(2), "layers.1.attn": attrs.evolve(LATENT, head_size=352, is_index_group_leader=False)},
            "one page size",
            {"page bytes": [352 * 64, PAGE]},
        ),
        (
            model(2, latent=attrs.evolve(LATENT, topk_buffer_width=None)),
            "how many tokens",
            {"topk_buffer_width": None},
        ),
    ],
    ids=["no indexer", "no source", "no latent layer", "V4", "blocks", "pages", "no top-k"],
)
def test_layers_that_cannot_be_planned(specs, reason, values):
    with pytest.raises(PlanError, match=reason) as caught:
        made(specs)
    assert caught.value.values == values
    assert caught.value.advice


def test_a_plan_without_a_host_budget():
    with pytest.raises(PlanError, match="no budget for pool 'host'") as caught:
        plan(model(2), engine=engine(), memory=GIB, host=HOST)
    assert "layers.0.attn" in caught.value.layers


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC"])
def test_blocks_must_be_outermost(layout):
    with pytest.raises(LayoutError, match="outermost") as caught:
        made(model(2), layout=layout)
    assert caught.value.would_work == ("BLHNC", "BLNHC")


def test_settings_that_contradict_each_other():
    off = EngineConfig(max_model_len=64, extras={"hisparse_buffer": 4_096})
    with pytest.raises(UsageError, match="goes with --hisparse"):
        plan(model(2), engine=off, memory=GIB, host=HOST)
    for limits in ({}, {"tp": 8, "dcp": 2}):
        with pytest.raises(UsageError, match="several tensor-parallel ranks"):
            made(model(2), engine(extras={"hisparse_shared_host": True}, **limits))
    with pytest.raises(SpecError):
        made(model(2), engine(extras={"hisparse_query_len": -1}))


def test_the_plugin_does_nothing_unless_asked():
    plain = plan(model(2), engine=EngineConfig(max_model_len=64), memory=GIB, host=HOST)
    asked_off = EngineConfig(max_model_len=64, extras={"hisparse": False, "hisparse_buffer": None})
    assert plan(model(2), engine=asked_off, memory=GIB, host=HOST).config == plain.config
    assert list(plain.config.pools) == ["device"]


# --- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(V32))

    def run(*options):
        words = ["plan", str(path), "--memory", "64GiB", "--cache-dtype", "fp8_ds_mla", "--block-size", "64"]
        return CliRunner().invoke(cli, [*words, *options])

    return run


def test_the_command_prints_both_tiers_and_which_one_limits(command):
    asked = ("--hisparse", "--host-memory", "400GiB", "--max-model-len", "131072")
    result = json.loads(command(*asked, "--json").stdout)
    pools = {pool["name"]: pool for pool in result["pools"]}
    assert pools["host"]["num_slabs"] == 400 * GIB // (61 * PAGE) == 167_705
    assert pools["host"]["max_concurrency"] == pytest.approx(167_705 / 2_048)
    assert result["limited_by"] == "device"
    assert result["max_concurrency"] == pools["device"]["max_concurrency"]
    assert [group["pool"] for group in result["groups"]] == ["host", "device", "device", "device"]
    assert result["engine"]["extras"]["hisparse"] is True
    table = command(*asked, "--explain").stdout
    for words in (
        "pool host:",
        "pool device:",
        "limited by the device",
        "hisparse_hot (device)",
        "mla (host)",
    ):
        assert words in table


def test_the_command_asks_for_the_host_when_it_is_the_limit(command):
    result = command("--hisparse", "--host-memory", "40GiB", "--max-model-len", "131072", "--explain")
    assert "limited by the host" in result.stdout
    assert "The budget of 40.00 GiB of pool 'host' is what limits" in result.stdout


def test_the_command_refuses_with_the_reason(command):
    for options, error, words in (
        (("--hisparse",), PlanError, "no budget for pool 'host'"),
        (("--hisparse", "--host-memory", "1GiB"), InsufficientMemoryError, "pool 'host'"),
        (("--host-memory", "1GiB"), UsageError, "no layer of this plan is kept there"),
        (("--hisparse-buffer", "4096"), UsageError, "goes with --hisparse"),
    ):
        answer = command(*options).exception
        assert type(answer) is error
        assert words in str(answer)


def test_requests_that_the_host_cannot_hold(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**V32, "max_position_embeddings": 8_192}))
    words = ["plan", str(path), "--cache-dtype", "fp8_ds_mla", "--block-size", "64", "--hisparse"]
    # 8,192 / 64 = 128 blocks a request; 4 GiB hold 1,677, of which 2 are reserved
    fits = CliRunner().invoke(cli, [*words, "--host-memory", "4GiB", "--requests", str(1_675 // 128)])
    assert fits.exit_code == 0, fits.output
    more = CliRunner().invoke(cli, [*words, "--host-memory", "4GiB", "--requests", "14"])
    assert isinstance(more.exception, UsageError)
    assert "pool 'host' holds 13 at once" in str(more.exception)


def test_a_config_says_who_leads_and_how_many_tokens_are_chosen(tmp_path):
    path = tmp_path / "config.json"
    shared = {"model_type": "glm_moe_dsa", "num_hidden_layers": 4, "indexer_types": ["full", "shared"] * 2}
    path.write_text(json.dumps({**V32, **shared}))
    read = load_model(read_config(path), HOST, cache_dtype="auto", state_dtype=None, tensor_parallel_size=1)
    latent = [spec for layer, spec in read.specs.items() if layer.endswith("attn")]
    assert [spec.is_index_group_leader for spec in latent] == [True, False, True, False]
    assert {spec.topk_buffer_width for spec in latent} == {2_048}
