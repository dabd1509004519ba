"""`kvframe.plan`: specs, limits and budgets to a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from kvframe.config import KVCacheConfig, KVCacheGroupSpec
from kvframe.engine import EngineConfig
from kvframe.errors import InsufficientMemoryError, PlanError, UsageError
from kvframe.layout import KVCacheLayout
from kvframe.planning.attempt import ENGINE, OPTIMAL, Attempt, attempt
from kvframe.planning.cost import Limits
from kvframe.planning.ranks import RankBudget, project
from kvframe.planning.report import PlanReport, make_report
from kvframe.planning.sequences import check_sequences
from kvframe.planning.sizing import bytes_per_block
from kvframe.plugins import PluginHost, load_plugins

STRATEGIES = (OPTIMAL, ENGINE)


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
        SequenceLimitError: what max_num_seqs requests keep whatever their length does not fit.
        PlanError: there is nothing to plan, or the layers cannot be planned together.
        LayoutError: no such layout, or it cannot hold the layers.
        MissingPluginError: a spec is of a family that no plugin provides.
        UsageError: arguments that contradict each other.
    """
    _check(specs, strategy)
    host = host or load_plugins()
    make = partial(
        attempt,
        specs,
        memory=memory,
        pools=pools or {},
        host=host,
        layout=layout,
        strategy=strategy,
        stages=stages,
        limits=limits or Limits(),
        exact=exact,
    )
    try:
        found = make(engine)
    except InsufficientMemoryError as error:
        longest = _longest(make, engine, error.largest_fitting_len)
        raise InsufficientMemoryError(**error.fields() | {"largest_fitting_len": longest}) from None
    check_sequences(found.configs, engine, host)
    families = {layer: host.family(spec).name for layer, spec in found.specs.items()}
    report = make_report(
        found.configs,
        found.groups,
        problem=found.problem,
        strategy=strategy,
        chosen=found.chosen,
        compared=found.compared,
        kinds=families | dict(kinds or {}),
        stages=[_stage(found.groups, rank, found.chosen.layout, host) for rank in found.ranks],
    )
    return Plan(configs=found.configs, report=report)


def _longest(make: Callable[[EngineConfig], Attempt], engine: EngineConfig, known: int) -> int:
    """The largest max_model_len below the engine's for which there is a plan; 0 if there is none.

    Another plan than the one that failed may hold a longer request, and with several ranks the smallest decides.

    Args:
        known: the largest length of the plan that failed, on the rank where it did.
    """

    def fits(length: int) -> bool:
        try:
            make(engine.with_max_model_len(length))
        except InsufficientMemoryError:
            return False
        return True

    low, high = 0, engine.max_model_len - 1
    if known and fits(known):
        low = known
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _check(specs: Mapping[str, Any], strategy: str) -> None:
    if strategy not in STRATEGIES:
        raise UsageError(option="strategy", value=strategy, rule=f"must be one of {', '.join(STRATEGIES)}")
    if not specs:
        raise PlanError(
            reason="there is no layer to plan", advice="A model must have a layer that keeps a cache"
        )


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
