"""`kvframe.plan`: specs, limits and budgets to a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvframe.config import KVCacheConfig, KVCacheGroupSpec
from kvframe.engine import EngineConfig
from kvframe.errors import PlanError, UsageError
from kvframe.layout import KVCacheLayout
from kvframe.planning.cost import Limits
from kvframe.planning.grouping import engine_groups, given_groups, with_draft_flags, with_lookahead
from kvframe.planning.optimal import Candidate, choose, whole_candidate
from kvframe.planning.problem import Problem, natural_order
from kvframe.planning.ranks import RankBudget, configs_for_ranks, project
from kvframe.planning.report import PlanReport, make_report
from kvframe.planning.sizing import bytes_per_block, exact_bound
from kvframe.plugins import PluginHost, load_plugins

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
        host: the plugins; None: the installed ones.
        layout: name of the memory layout; None: the strategy chooses.
        strategy: "optimal" minimises the cost of kvframe.planning.cost, and never holds more than the engines' plan;
            "engine" is the engines' own rule (contract 5).
        stages: the layers of each pipeline stage; empty: one stage with all.
        kinds: layer name to the word it is reported under; None: its family's name.
        limits: what an optimal plan may not exceed.
        exact: search for the optimum exhaustively.

    Raises:
        InsufficientMemoryError: one request of max_model_len does not fit; names the largest length that does.
        PlanError: there is nothing to plan, or the layers cannot be planned together.
        LayoutError: no such layout, or it cannot hold the layers.
        MissingPluginError: a spec is of a family that no plugin provides.
    """
    if strategy not in STRATEGIES:
        raise UsageError(option="strategy", value=strategy, rule=f"must be one of {', '.join(STRATEGIES)}")
    if not specs:
        raise PlanError(
            reason="there is no layer to plan", advice="A model must have a layer that keeps a cache"
        )
    host = host or load_plugins()
    specs = with_lookahead(host.fold("kvframe_adjust_specs", "specs", specs, engine=engine), host, engine)
    specs = natural_order(specs) if strategy == OPTIMAL else specs
    ranks = _ranks(specs, stages, memory)
    deciding = max(ranks, key=lambda r: sum(s.page_size_bytes for s in r.specs.values()) / max(r.memory, 1))
    problem = Problem(
        specs=specs,
        host=host,
        engine=engine,
        memory=deciding.memory,
        limits=limits or Limits(),
        exact=exact,
        stage=frozenset(deciding.specs) if len(ranks) > 1 else None,
    )
    chosen, compared = _chosen(problem, strategy, layout)
    groups = with_draft_flags(chosen.build(), engine.draft_drop)
    configs = configs_for_ranks(
        groups, ranks, host=host, layout=chosen.layout, engine=engine, bound=exact_bound(host)
    )
    report = make_report(
        configs,
        problem=problem,
        strategy=strategy,
        chosen=chosen,
        compared=compared,
        kinds=kinds or {layer: host.family(spec).name for layer, spec in specs.items()},
        stages=[_stage(groups, rank, chosen.layout, host) for rank in ranks],
    )
    return Plan(configs=configs, report=report)


def _ranks(
    specs: Mapping[str, Any], stages: Sequence[Sequence[str]], memory: int | Sequence[int]
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
        RankBudget(specs={layer: specs[layer] for layer in part}, memory=budget)
        for part, budget in zip(parts, budgets, strict=True)
    ]


def _chosen(problem: Problem, strategy: str, layout: str | None) -> tuple[Candidate, list[Candidate]]:
    host = problem.host
    names = [layout] if layout else [LAYER_OUTERMOST, BLOCK_OUTERMOST]
    layouts = [host.layouts.get(name) for name in names]
    given = given_groups(problem.specs, host=host, engine=problem.engine)
    if given is not None:
        chosen = whole_candidate(problem, "a plugin's grouping", given, layouts[0])
    elif strategy == ENGINE:
        groups = engine_groups(problem.aligned, host=host, layout=layouts[0])
        chosen = whole_candidate(problem, f"engine rule, {layouts[0].name}", groups, layouts[0])
    else:
        return choose(problem, layouts)
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
