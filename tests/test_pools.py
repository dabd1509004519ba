"""Named pools, and the hooks with which a plugin fills them, groups layers, and adds options."""

import json

import attrs
import click
import pytest
from click.testing import CliRunner

import kvframe.cli.plugin_options
from kvframe import EngineConfig, FullAttentionSpec, LayerGroup, PluginHost, hookimpl, plan
from kvframe.cli import cli
from kvframe.cli.plugin_options import PlanCommand
from kvframe.errors import HookError, InsufficientMemoryError, LayoutError, PlanError, SpecError, UsageError
from kvframe.verify import verify
from kvframe_sliding_window import SlidingWindowSpec

MIB = 1 << 20
FULL = FullAttentionSpec(16, num_kv_heads=8, head_size=64, dtype="bfloat16")  # pages of 32,768 bytes
SPECS = {f"layers.{index}.attn": FULL for index in range(6)}
ENGINE = EngineConfig(max_model_len=1_024)  # 64 blocks


class Tier:
    """A plugin that keeps some layers in a pool "cold"."""

    cold = ("layers.0.attn", "layers.1.attn")

    @hookimpl
    def kvframe_group_layers(self, specs):
        warm = [layer for layer in specs if layer not in self.cold]
        return [LayerGroup(layers=self.cold, pool="cold", role="archive"), LayerGroup(layers=warm)]


def made(plugin, specs=SPECS, *, engine=ENGINE, memory=64 * MIB, cold=16 * MIB, **options):
    pools = {} if cold is None else {"cold": cold}
    return plan(specs, engine=engine, memory=memory, pools=pools, host=PluginHost([plugin]), **options)


@pytest.mark.parametrize("strategy", ["engine", "optimal"])
def test_a_group_lies_in_the_pool_that_its_plugin_names(strategy):
    result = made(Tier(), strategy=strategy)
    config = result.config
    assert [(group.pool, group.role) for group in config.groups] == [
        ("cold", "archive"),
        ("device", "default"),
    ]
    device, cold = config.pools["device"], config.pools["cold"]
    assert (device.slab_bytes, device.num_slabs) == (4 * 32_768, 512)  # 64 MiB / 128 KiB
    assert (cold.slab_bytes, cold.num_slabs, cold.layout) == (2 * 32_768, 256, "LBNHC")
    assert [(t.pool, t.size) for t in config.tensors] == [("cold", 16 * MIB), ("device", 64 * MIB)]
    verify(config, PluginHost([]).layouts)
    # 64 blocks a request in each: 256 / 64 requests in the cold pool, 512 / 64 on the device
    assert (result.report.limited_by, result.report.max_concurrency) == ("cold", 4.0)
    ample = made(Tier(), cold=64 * MIB, strategy=strategy).report
    assert (ample.limited_by, [pool.requests for pool in ample.pools]) == ("device", [8, 16])


def test_every_pool_must_hold_a_request():
    assert made(Tier(), cold=65 * 65_536).config.pools["cold"].num_slabs == 65
    with pytest.raises(InsufficientMemoryError) as caught:
        made(Tier(), cold=65 * 65_536 - 1)
    error = caught.value
    assert (error.pool, error.largest_fitting_len, error.needed_bytes) == ("cold", 1_008, 64 * 65_536)
    assert "raise the budget of pool 'cold'" in str(error)


def test_budgets_and_pools_must_match():
    with pytest.raises(PlanError, match="no budget for pool 'cold'"):
        made(Tier(), cold=None)
    for pools in ({"host": MIB}, {"device": MIB}):
        with pytest.raises(UsageError, match="no layer of this plan is kept there"):
            plan(SPECS, engine=ENGINE, memory=MIB, pools=pools, host=PluginHost([]))


def test_a_plugin_may_change_a_pool():
    class Aligned(Tier):
        @hookimpl
        def kvframe_place_groups(self, groups, pools, engine):
            assert {group.pool for group in groups} == set(pools) == {"cold", "device"}
            changed = attrs.evolve(
                pools["cold"],
                slab_bytes=100_000,
                layout="BLHNC",
                reserved_slabs=3,
                shared_by_ranks=2,
                budget_bytes=1,
            )
            return {"cold": changed}

    config = made(Aligned()).config
    pool = config.pools["cold"]
    assert (pool.slab_bytes, pool.num_slabs, pool.usable_slabs) == (100_000, 167, 164)  # 16 MiB / 100,000
    assert (pool.layout, pool.shared_by_ranks, pool.budget_bytes) == ("BLHNC", 2, 16 * MIB)
    assert config.tensors[0].block_stride == 100_000
    verify(config, PluginHost([]).layouts)


@pytest.mark.parametrize(
    "answer",
    [
        lambda cold: {"other": cold},
        lambda cold: {"cold": "large"},
        lambda cold: {"cold": attrs.evolve(cold, slab_bytes=1)},
        lambda cold: {"device": cold},
        lambda cold: [cold],
    ],
    ids=["no such pool", "no pool", "smaller slabs", "another's name", "a list"],
)
def test_an_answer_that_is_no_pool_is_refused(answer):
    class Wrong(Tier):
        @hookimpl
        def kvframe_place_groups(self, pools):
            return answer(pools["cold"])

    with pytest.raises(HookError, match="kvframe_place_groups"):
        made(Wrong())


def grouping(answer):
    class Grouping:
        @hookimpl
        def kvframe_group_layers(self, specs):
            return answer(list(specs))

    return Grouping()


def test_a_grouping_must_be_a_partition():
    for answer in (
        lambda layers: [LayerGroup(layers=layers[:-1])],
        lambda layers: [LayerGroup(layers=[*layers, layers[0]])],
        lambda layers: [LayerGroup(layers=[*layers, "layers.9.attn"])],
    ):
        with pytest.raises(PlanError, match="every layer exactly once") as caught:
            made(grouping(answer), cold=None)
        assert len(caught.value.layers) == 1


def test_a_grouping_must_list_groups_with_layers():
    for answer in (
        lambda layers: [layers],
        set,
        lambda layers: [LayerGroup(layers=[]), LayerGroup(layers=layers)],
    ):
        with pytest.raises(HookError, match="must list LayerGroup objects"):
            made(grouping(answer), cold=None)


def test_layers_of_one_group_need_the_same_blocks():
    window = SlidingWindowSpec(16, num_kv_heads=8, head_size=64, dtype="bfloat16", sliding_window=64)
    with pytest.raises(PlanError, match="different blocks"):
        made(grouping(lambda layers: [LayerGroup(layers=layers)]), {**SPECS, "window": window}, cold=None)


def test_some_layer_must_stay_on_the_device():
    with pytest.raises(PlanError, match="no layer in the device pool"):
        made(grouping(lambda layers: [LayerGroup(layers=layers, pool="cold")]))


def test_layers_may_be_left_to_the_core():
    window = SlidingWindowSpec(16, num_kv_heads=8, head_size=64, dtype="bfloat16", sliding_window=64)
    specs = {**SPECS, **{f"window.{index}": window for index in range(3)}}
    plugin = grouping(
        lambda layers: [LayerGroup(layers=layers[:2]), LayerGroup(layers=layers[2:], by_core=True)]
    )
    config = made(plugin, specs, cold=None, strategy="engine").config
    # the core splits 4 full and 3 window layers into groups of 4 (4 < 1.5 * 3)
    assert [len(group.layer_specs) for group in config.groups] == [2, 4, 3]


def test_a_plugin_learns_whether_blocks_are_even_and_the_cheaper_plan_is_taken():
    window = SlidingWindowSpec(16, num_kv_heads=8, head_size=64, dtype="bfloat16", sliding_window=64)
    specs = {**SPECS, "window": window}
    asked = []

    class Both:
        @hookimpl
        def kvframe_group_layers(self, specs, even):
            asked.append(even)
            full = list(SPECS)
            packs = [full[:3], full[3:]] if even else [full]
            return [*(LayerGroup(layers=pack) for pack in packs), LayerGroup(layers=["window"])]

    config = made(Both(), specs, cold=None, memory=1 << 30).config
    assert asked == [True, False]
    assert [len(group.layer_specs) for group in config.groups] == [6, 1]
    assert config.groups[1].blocks_per_slab == 6 * config.groups[0].blocks_per_slab
    asked.clear()
    config = made(Both(), specs, cold=None, strategy="engine").config
    assert asked == [True]
    assert [len(group.layer_specs) for group in config.groups] == [3, 3, 1]


def test_layers_that_a_plugin_adds_lie_on_the_stage_of_their_layer():
    class Adds:
        @hookimpl
        def kvframe_adjust_specs(self, specs):
            kept = {layer: spec for layer, spec in specs.items() if layer != "layers.5.attn"}
            return {**kept, **{f"{layer}.copy": spec for layer, spec in kept.items()}}

    stages = [list(SPECS)[:2], list(SPECS)[2:]]
    first, second = made(Adds(), cold=None, stages=stages).configs
    assert sorted(first.groups[0].layer_names) == [
        "layers.0.attn",
        "layers.0.attn.copy",
        "layers.1.attn",
        "layers.1.attn.copy",
    ]
    assert len(second.groups[0].layer_names) == 6


def test_a_refusal_of_a_plugin_is_what_the_caller_gets():
    error = PlanError(reason="these layers never", layers=["layers.0.attn"])

    class Refuses:
        @hookimpl
        def kvframe_adjust_specs(self):
            raise error

    with pytest.raises(PlanError) as caught:
        made(Refuses(), cold=None)
    assert caught.value is error


def test_a_refusal_at_load_sets_the_plugin_aside():
    class Broken:
        @hookimpl
        def kvframe_spec_families(self):
            raise SpecError(spec="X", field="y", value=0, rule="must not be")

    record = PluginHost([Broken()]).records[-1]
    assert record.status == "broken"
    assert "kvframe_spec_families" in record.reason


def test_extras_reach_the_plugin_and_do_not_hinder_hashing():
    seen = []

    class Reads:
        @hookimpl
        def kvframe_adjust_specs(self, engine):
            seen.append(dict(engine.extras))

    engine = attrs.evolve(ENGINE, extras={"depth": 3})
    made(Reads(), engine=engine, cold=None)
    assert seen == [{"depth": 3}]
    assert hash(engine) == hash(ENGINE)
    assert engine != ENGINE


@pytest.mark.parametrize("layout", ["LBHNC", "LHBNC"])
def test_a_layout_that_is_named_is_not_replaced(layout):
    window = SlidingWindowSpec(16, num_kv_heads=4, head_size=64, dtype="bfloat16", sliding_window=64)
    plugin = grouping(lambda layers: [LayerGroup(layers=layers[:-1]), LayerGroup(layers=layers[-1:])])
    with pytest.raises(LayoutError, match="pages of several sizes"):
        made(plugin, {**SPECS, "window": window}, cold=None, layout=layout)
    assert made(plugin, {**SPECS, "window": window}, cold=None).config.kv_cache_layout == "BLHNC"


# --- options ---------------------------------------------------------------------------------------------------------


def offering(*options):
    class Offers:
        @hookimpl
        def kvframe_plan_options(self):
            return options

        @hookimpl
        def kvframe_adjust_specs(self, engine):
            if engine.extras.get("depth"):
                raise PlanError(reason=f"depth {engine.extras['depth']} is too deep")

    return Offers()


def plan_command(monkeypatch, *plugins):
    host = PluginHost(plugins)
    monkeypatch.setattr(kvframe.cli.plugin_options, "load_plugins", lambda: host)
    command = PlanCommand("plan", params=[click.Option(["--memory"])], callback=lambda **options: options)
    return command


def test_a_plugins_options_are_parsed_and_handed_over(monkeypatch):
    command = plan_command(monkeypatch, offering(click.Option(["--depth"], type=int, default=2)))
    options = command.main(["--depth", "5", "--memory", "1"], standalone_mode=False)
    assert options["depth"] == 5
    assert command.extras(options)["depth"] == 5
    assert "memory" not in command.extras(options)
    assert command.extras(command.main([], standalone_mode=False))["depth"] == 2


def test_an_option_that_is_taken_is_left_out_with_a_warning(monkeypatch, capsys):
    first = offering(click.Option(["--depth"], type=int), click.Option(["--memory"]))
    command = plan_command(monkeypatch, first, offering(click.Option(["--depth"])))
    assert [option.name for option in command.plugin_options].count("depth") == 1
    assert "memory" not in [option.name for option in command.plugin_options]
    warnings = capsys.readouterr().err
    assert "option --memory of plugin extra-0 is taken" in warnings
    assert "option --depth of plugin extra-1 is taken" in warnings


def test_a_plugin_that_cannot_say_its_options_stops_nothing(monkeypatch, capsys):
    class Raises:
        @hookimpl
        def kvframe_plan_options(self):
            raise ValueError("no options today")

    command = plan_command(monkeypatch, Raises(), offering("--depth"), offering(click.Option(["--width"])))
    assert "width" in [option.name for option in command.plugin_options]
    warnings = capsys.readouterr().err
    assert "raised ValueError: no options today" in warnings
    assert "must list click.Option, not '--depth'" in warnings


def test_host_memory_without_a_plugin_that_uses_it(tmp_path):
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "hidden_size": 512,
        "max_position_embeddings": 64,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    words = ["plan", str(path), "--memory", "1GiB", "--host-memory", "1GiB"]
    assert "no layer of this plan is kept there" in str(CliRunner().invoke(cli, words).exception)
