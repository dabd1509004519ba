"""`kvframe.plan`: specs, limits and a budget to a plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvframe.config import KVCacheConfig
from kvframe.engine import EngineConfig
from kvframe.errors import PlanError, UsageError
from kvframe.planning.alignment import align_state_pages
from kvframe.planning.grouping import engine_groups, with_draft_flags
from kvframe.planning.ranks import RankBudget, configs_for_ranks
from kvframe.planning.report import PlanReport, make_report
from kvframe.planning.sizing import exact_bound
from kvframe.plugins import PluginHost, load_plugins

STRATEGIES = ("engine",)
DEFAULT_LAYOUT = "LBHNC"


@attrs.frozen(kw_only=True)
class Plan:
    """A finished plan: the config that workers and schedulers are given, and the report for people."""

    config: KVCacheConfig
    report: PlanReport


def plan(
    specs: Mapping[str, Any],
    *,
    engine: EngineConfig,
    memory: int,
    host: PluginHost | None = None,
    layout: str = DEFAULT_LAYOUT,
    strategy: str = "engine",
    kinds: Mapping[str, str] | None = None,
) -> Plan:
    """Plan the KV cache of one rank.

    Args:
        specs: layer name to spec, in layer order.
        engine: the engine's limits.
        memory: bytes for the cache on this rank.
        host: the plugins; None: the installed ones.
        layout: name of the memory layout.
        strategy: how layers are grouped; "engine" is the engines' rule (contract 5).
        kinds: layer name to the word it is reported under; None: its family's name.

    Raises:
        InsufficientMemoryError: one request of max_model_len does not fit; names the largest length that does.
        PlanError: there is nothing to plan, or the layers cannot be planned together.
        LayoutError: no such layout, or it cannot hold the layers.
        MissingPluginError: a spec is of a family that no plugin provides.
    """
    if strategy not in STRATEGIES:
        raise UsageError(option="strategy", value=strategy, rule=f"must be one of {', '.join(STRATEGIES)}")
    if not specs:
        raise PlanError(reason="there is no layer to plan", advice="A model must have a layer that keeps a cache")
    host = host or load_plugins()
    specs = host.fold("kvframe_adjust_specs", "specs", specs, engine=engine)
    specs = align_state_pages(
        specs,
        host=host,
        block_size=max(spec.block_size for spec in _token_layers(specs, host).values() or specs.values()),
        max_model_len=engine.max_model_len,
    )
    chosen = host.layouts.get(layout)
    groups = with_draft_flags(engine_groups(specs, host=host, layout=chosen, engine=engine), engine.draft_drop)
    bound = exact_bound(host)
    (config,) = configs_for_ranks(
        groups,
        [RankBudget(specs=specs, memory=memory)],
        host=host,
        layout=chosen,
        engine=engine,
        bound=bound,
    )
    names = kinds or {layer: host.family(spec).name for layer, spec in specs.items()}
    report = make_report(config, host=host, engine=engine, bound=bound, strategy=strategy, kinds=names)
    return Plan(config=config, report=report)


def _token_layers(specs: Mapping[str, Any], host: PluginHost) -> dict[str, Any]:
    return {layer: spec for layer, spec in specs.items() if host.family(spec).paging.scales}
