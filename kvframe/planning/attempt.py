"""One try at a plan: what plugins change, the problem, the plan chosen, and a config for each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvframe.config import DEVICE, KVCacheConfig, KVCacheGroupSpec, LayerGroup
from kvframe.engine import EngineConfig
from kvframe.errors import PlanError, UsageError
from kvframe.planning.block_sizes import BlockSizes, block_sizes
from kvframe.planning.cost import Limits
from kvframe.planning.given import choose_given, given_layers, on_device
from kvframe.planning.grouping import with_draft_flags, with_lookahead
from kvframe.planning.optimal import Candidate, choose, engine_candidate
from kvframe.planning.problem import Problem, natural_order
from kvframe.planning.ranks import RankBudget, configs_for_ranks
from kvframe.planning.sizing import exact_bound
from kvframe.plugins import PluginHost
from kvframe.verify import verify

OPTIMAL, ENGINE = "optimal", "engine"
LAYER_OUTERMOST, BLOCK_OUTERMOST = "LBHNC", "BLHNC"


@attrs.frozen(kw_only=True, eq=False)
class Attempt:
    """A plan before its report: the specs as plugins changed them, what was compared, and a config for each rank."""

    specs: Mapping[str, Any]
    ranks: Sequence[RankBudget]
    problem: Problem
    chosen: Candidate
    compared: Sequence[Candidate]
    groups: tuple[KVCacheGroupSpec, ...]
    configs: tuple[KVCacheConfig, ...]


def attempt(
    specs: Mapping[str, Any],
    engine: EngineConfig,
    *,
    memory: int | Sequence[int],
    pools: Mapping[str, int],
    host: PluginHost,
    layout: str | None,
    strategy: str,
    stages: Sequence[Sequence[str]],
    limits: Limits,
    exact: bool,
) -> Attempt:
    """A plan for requests of the engine's maximum length; arguments and errors as of `kvframe.plan`."""
    adjusted = host.fold("kvframe_adjust_specs", "specs", specs, engine=engine)
    stages = _with_added(stages, specs, adjusted)
    adjusted = with_lookahead(adjusted, host, engine)
    adjusted = natural_order(adjusted) if strategy == OPTIMAL else adjusted
    given = given_layers(adjusted, host=host, engine=engine, even=True)
    ranks = _ranks(adjusted, stages, memory, _used_pools(pools, given))
    problem = _problem(on_device(given, adjusted), ranks, host, engine, limits, exact)
    chosen, compared = _chosen(problem, adjusted, given, strategy, layout)
    groups = with_draft_flags(chosen.build(), engine.draft_drop)
    configs = configs_for_ranks(
        groups, ranks, host=host, layout=chosen.layout, engine=engine, bound=exact_bound(host)
    )
    return Attempt(
        specs=adjusted,
        ranks=ranks,
        problem=problem,
        chosen=chosen,
        compared=compared,
        groups=groups,
        configs=_finished(configs, block_sizes(groups, engine, host), host),
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
