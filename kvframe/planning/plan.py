"""`kvframe.plan`: specs, limits and budgets to a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvframe.config import DEVICE, KVCacheConfig, KVCacheGroupSpec, LayerGroup
from kvframe.engine import EngineConfig
from kvframe.errors import PlanError, UsageError
from kvframe.layout import KVCacheLayout
from kvframe.planning.block_sizes import BlockSizes, block_sizes
from kvframe.planning.cost import Limits
from kvframe.planning.given import choose_given, given_layers, on_device
from kvframe.planning.grouping import with_draft_flags, with_lookahead
from kvframe.planning.optimal import Candidate, choose, engine_candidate
from kvframe.planning.problem import Problem, natural_order
from kvframe.planning.ranks import RankBudget, configs_for_ranks, project
from kvframe.planning.report import PlanReport, make_report
from kvframe.planning.sizing import bytes_per_block, exact_bound
from kvframe.plugins import PluginHost, load_plugins
from kvframe.verify import verify

OPTIMAL, ENGINE = "optimal", "engine"
STRATEGIES = (OPTIMAL, ENGINE)
LAYER_OUTERMOST, BLOCK_OUTERMOST = "LBHNC", "BLHNC"


@attrs.frozen(kw_only=True)
class Plan:
    """A finished plan: a config for each pipeline stage, and the report for people."""

    configs: tuple[KVCacheConfig, ...]
    report: PlanReport

    @property
    def config(self) -> KVCacheConfig:
        """The config of the only, or the first, pipeline stage."""
        return self.configs[0]


def plan(
    specs: Mapping[str, Any],
    *,
    engine: EngineConfig,
    memory: int | Sequence[int],
    pools: Mapping[str, int] | None = None,
    host: PluginHost | None = None,
    layout: str | None = None,
    strategy: str = OPTIMAL,
    stages: Sequence[Sequence[str]] = (),
    kinds: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    exact: bool = False,
) -> Plan:
    """Plan the KV cache of a model.

    Args:
        specs: layer name to spec.
        engine: the engine's limits.
        memory: bytes for the cache on one rank, or a number for each pipeline stage.
        pools: bytes on one rank of the pools beside the device's, by name, where a plugin puts layers there.
        host: the plugins; None: the installed ones.
        layout: name of the device pool's layout; None: the strategy chooses.
        strategy: "optimal" minimises the cost of kvframe.planning.cost, and never holds more than the engines' plan;
            "engine" is the engines' own rule (contract 5).
        stages: the layers of each pipeline stage; empty: one stage with all.
        kinds: layer name to the word it is reported under; others have their family's name.
        limits: what an optimal plan may not exceed.
        exact: search for the optimum exhaustively.

    Raises:
        InsufficientMemoryError: one request of max_model_len does not fit; names the largest length that does.
        PlanError: there is nothing to plan, or the layers cannot be planned together.
        LayoutError: no such layout, or it cannot hold the layers.
        MissingPluginError: a spec is of a family that no plugin provides.
        UsageError: arguments that contradict each other.
    """
    _check(specs, strategy)
    host = host or load_plugins()
    adjusted = host.fold("kvframe_adjust_specs", "specs", specs, engine=engine)
    stages = _with_added(stages, specs, adjusted)
    adjusted = with_lookahead(adjusted, host, engine)
    adjusted = natural_order(adjusted) if strategy == OPTIMAL else adjusted
    given = given_layers(adjusted, host=host, engine=engine, even=True)
    ranks = _ranks(adjusted, stages, memory, _used_pools(pools or {}, given))
    problem = _problem(on_device(given, adjusted), ranks, host, engine, limits or Limits(), exact)
    chosen, compared = _chosen(problem, adjusted, given, strategy, layout)
    groups = with_draft_flags(chosen.build(), engine.draft_drop)
    configs = _finished(
        configs_for_ranks(
            groups, ranks, host=host, layout=chosen.layout, engine=engine, bound=exact_bound(host)
        ),
        block_sizes(groups, engine, host),
        host,
    )
    report = make_report(
        configs,
        problem=problem,
        strategy=strategy,
        chosen=chosen,
        compared=compared,
        kinds={layer: host.family(spec).name for layer, spec in adjusted.items()} | dict(kinds or {}),
        stages=[_stage(groups, rank, chosen.layout, host) for rank in ranks],
    )
    return Plan(configs=configs, report=report)


def _check(specs: Mapping[str, Any], strategy: str) -> None:
    if strategy not in STRATEGIES:
        raise UsageError(option="strategy", value=strategy, rule=f"must be one of {', '.join(STRATEGIES)}")
    if not specs:
        raise PlanError(
            reason="there is no layer to plan", advice="A model must have a layer that keeps a cache"
        )


def _finished(
    configs: Sequence[KVCacheConfig], sizes: BlockSizes | None, host: PluginHost
) -> tuple[KVCacheConfig, ...]:
    """The configs with what prefix caching needs, each looked at byte by byte."""
    finished = tuple(
        attrs.evolve(
            config,
            hash_block_size=sizes.hash if sizes else None,
            cache_hit_alignment_tokens=sizes.hit_alignment if sizes else None,
        )
        for config in configs
    )
    for config in finished:
        verify(config, host.layouts)
    return finished


def _with_added(
    stages: Sequence[Sequence[str]], before: Mapping[str, Any], specs: Mapping[str, Any]
) -> list[list[str]]:
    """The stages after plugins changed the layers: one that was added lies with the layer that its name begins with."""
    parts = [[layer for layer in stage if layer in specs or layer not in before] for stage in stages]
    stage_of = {layer: number for number, stage in enumerate(stages) for layer in stage}
    for layer in specs:
        owner = layer
        while owner not in stage_of and "." in owner:
            owner = owner.rpartition(".")[0]
        if layer not in before and owner in stage_of and owner != layer:
            parts[stage_of[owner]].append(layer)
    return parts


def _used_pools(pools: Mapping[str, int], given: Sequence[LayerGroup] | None) -> Mapping[str, int]:
    """The budgets, each of a pool that some group is in.

    Raises:
        UsageError: a budget that nothing would use, or the device's a second time.
    """
    used = {group.pool for group in given or ()} - {DEVICE}
    idle = sorted(set(pools) - used)
    if idle:
        rule = (
            "no layer of this plan is kept there: leave it out, or turn on the plugin that puts layers there"
        )
        raise UsageError(option="budget of pool", value=", ".join(idle), rule=rule)
    return pools


def _ranks(
    specs: Mapping[str, Any],
    stages: Sequence[Sequence[str]],
    memory: int | Sequence[int],
    pools: Mapping[str, int],
) -> list[RankBudget]:
    parts = [list(stage) for stage in stages] or [list(specs)]
    named = [layer for part in parts for layer in part]
    wrong = sorted(
        {layer for layer in named if named.count(layer) > 1 or layer not in specs} | set(specs) - set(named)
    )
    if wrong:
        raise PlanError(reason="pipeline stages must hold every layer exactly once", layers=wrong)
    budgets = [memory] * len(parts) if isinstance(memory, int) else list(memory)
    if len(budgets) != len(parts):
        rule = f"must be one number, or one for each of {len(parts)} pipeline stages"
        raise UsageError(option="memory", value=budgets, rule=rule)
    return [
        RankBudget(specs={layer: specs[layer] for layer in part}, memory=budget, pools=pools)
        for part, budget in zip(parts, budgets, strict=True)
    ]


def _problem(
    specs: Mapping[str, Any],
    ranks: Sequence[RankBudget],
    host: PluginHost,
    engine: EngineConfig,
    limits: Limits,
    exact: bool,
) -> Problem:
    """What is to be planned in the device pool, on the rank whose layers need most of its memory."""
    needs = [
        sum(spec.page_size_bytes for layer, spec in rank.specs.items() if layer in specs)
        / max(rank.memory, 1)
        for rank in ranks
    ]
    deciding = needs.index(max(needs))
    return Problem(
        specs=specs,
        host=host,
        engine=engine,
        memory=ranks[deciding].memory,
        limits=limits,
        exact=exact,
        stages=tuple(tuple(rank.specs) for rank in ranks),
        stage=deciding,
    )


def _chosen(
    problem: Problem,
    specs: Mapping[str, Any],
    given: Sequence[LayerGroup] | None,
    strategy: str,
    layout: str | None,
) -> tuple[Candidate, list[Candidate]]:
    raw = any(not spec.has_layer_views for spec in problem.specs.values())
    names = [layout] if layout else [BLOCK_OUTERMOST] if raw else [LAYER_OUTERMOST, BLOCK_OUTERMOST]
    layouts = [problem.host.layouts.get(name) for name in names]
    if given is not None:
        return choose_given(problem, specs, given, layouts, engine_rule=strategy == ENGINE)
    if strategy == OPTIMAL:
        return choose(problem, layouts)
    chosen, refusal = engine_candidate(problem, layouts)
    if chosen is None:
        raise refusal or PlanError(reason="there is no layout to plan in")
    return chosen, [chosen]


def _stage(
    groups: Sequence[KVCacheGroupSpec], rank: RankBudget, layout: KVCacheLayout, host: PluginHost
) -> dict[str, Any]:
    """One stage's numbers before the stage with the fewest blocks decides for all."""
    part = project(groups, rank.specs, host)
    slab = bytes_per_block(part, layout)
    return {
        "layers": len(rank.specs),
        "layers_per_group": [len(group.layer_specs) for group in part],
        "memory_bytes": rank.memory,
        "pool_block_bytes": slab,
        "num_blocks": rank.memory // slab if slab else 0,
    }
