"""Groupings that a plugin gives: checked, made into groups, and planned with even blocks or in slabs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from kvframe.config import DEVICE, KVCacheGroupSpec, LayerGroup
from kvframe.engine import EngineConfig
from kvframe.errors import HookError, KVFrameError, PlanError
from kvframe.layout import KVCacheLayout
from kvframe.merge import Refusal
from kvframe.planning.grouping import engine_groups, make_group, merged, same_table
from kvframe.planning.optimal import Candidate, whole_candidate
from kvframe.planning.placement import check_layout
from kvframe.planning.problem import Problem
from kvframe.planning.sizing import stride_alignment_of
from kvframe.planning.slabs import search_slab
from kvframe.plugins import PluginHost

HOOK = "kvframe_group_layers"
Specs = Mapping[str, Any]
Groups = tuple[KVCacheGroupSpec, ...]


def given_layers(
    specs: Specs, *, host: PluginHost, engine: EngineConfig, even: bool
) -> tuple[LayerGroup, ...] | None:
    """The grouping of the first plugin that groups by itself, None if none does.

    Args:
        even: every block takes a whole slab (`kvframe.hookspecs.kvframe_group_layers`).

    Raises:
        HookError: the answer is no list of LayerGroup.
        PlanError: it does not name every layer exactly once.
        KVFrameError: the plugin refuses the layers.
    """
    answers = host.call_all(HOOK, specs=specs, engine=engine, even=even)
    answer = next(iter(answers), None)
    if answer is None:
        return None
    listed = isinstance(answer, (list, tuple))
    if not listed or not all(isinstance(item, LayerGroup) and item.layers for item in answer):
        reason = f"must list LayerGroup objects, each with a layer, not {answer!r}"
        raise HookError(hook=HOOK, plugin="that answered first", reason=reason)
    named = [layer for group in answer for layer in group.layers]
    lost = {layer for layer in specs if named.count(layer) != 1} | {
        layer for layer in named if layer not in specs
    }
    if lost:
        raise PlanError(reason="a plugin's grouping must name every layer exactly once", layers=sorted(lost))
    return tuple(answer)


def on_device(given: Sequence[LayerGroup] | None, specs: Specs) -> Specs:
    """The specs of layers in the device pool; all of them without a plugin's grouping.

    Raises:
        PlanError: there are none.
    """
    if given is None:
        return specs
    layers = {layer for group in given if group.pool == DEVICE for layer in group.layers}
    if not layers:
        raise PlanError(reason="a plugin's grouping leaves no layer in the device pool", layers=list(specs))
    return {layer: spec for layer, spec in specs.items() if layer in layers}


def given_groups(
    given: Sequence[LayerGroup], specs: Specs, aligned: Specs, *, host: PluginHost, layout: KVCacheLayout
) -> Groups:
    """A plugin's grouping as groups; those that it leaves to the core by the engines' rule.

    Args:
        given: the grouping.
        specs: layer name to spec, all layers.
        aligned: the device's layers with one page for tokens and states, as the engines' rule takes them.
        layout: of the device pool.

    Raises:
        PlanError: layers of one group need different blocks, or the core cannot group what is left to it.
        MergeError: a group that must not be uniform does not merge.
    """
    groups: list[KVCacheGroupSpec] = []
    for item in given:
        if item.by_core:
            members = {layer: aligned.get(layer, specs[layer]) for layer in item.layers}
            made = engine_groups(members, host=host, layout=layout)
        else:
            made = (_given_group(item, {layer: specs[layer] for layer in item.layers}, host),)
        groups += [attrs.evolve(group, pool=item.pool, role=item.role) for group in made]
    return tuple(groups)


def _given_group(item: LayerGroup, members: Specs, host: PluginHost) -> KVCacheGroupSpec:
    if not same_table(members, host):
        raise PlanError(
            reason="a plugin's group holds layers that need different blocks for the same request",
            layers=item.layers,
            advice="Give such layers groups of their own",
        )
    uniform = isinstance(merged(members, host), Refusal) if item.uniform is None else item.uniform
    return make_group(members, host, uniform=uniform)


def choose_given(
    problem: Problem,
    specs: Specs,
    given: Sequence[LayerGroup],
    layouts: Sequence[KVCacheLayout],
    *,
    engine_rule: bool,
) -> tuple[Candidate, list[Candidate]]:
    """The best plan of a plugin's grouping, by the rule of `choose`, and all that it was compared with.

    Args:
        problem: the layers on the device.
        specs: all layers.
        given: the grouping for even blocks.
        layouts: layouts of the device pool, the preferred one first.
        engine_rule: one block a slab, in the first layout that holds the groups.

    Raises:
        LayoutError: no layout holds the groups.
        PlanError: they cannot be made.
    """
    found: list[Candidate] = []
    refusal: KVFrameError | None = None
    for layout in layouts:
        try:
            groups = given_groups(given, specs, problem.aligned, host=problem.host, layout=layout)
            check_layout(groups, layout)
        except KVFrameError as error:
            refusal = error
            continue
        found.append(_candidate(problem, f"a plugin's groups, {layout.name}", groups, layout))
        if engine_rule:
            break
        slabs = _slab_candidate(problem, specs, layout, ceiling=found[0])
        found += [slabs] if slabs is not None else []
    if not found and refusal is not None:
        raise refusal
    return min(found, key=lambda made: (not made.fits, problem.tier(made.held), made.cost)), found


def _candidate(problem: Problem, name: str, groups: Groups, layout: KVCacheLayout) -> Candidate:
    device = [group for group in groups if group.pool == DEVICE]
    return attrs.evolve(whole_candidate(problem, name, device, layout), build=lambda: groups)


def _slab_candidate(
    problem: Problem, specs: Specs, layout: KVCacheLayout, ceiling: Candidate
) -> Candidate | None:
    """The grouping for slabs that are cut to each group's width; None if it would hold more than `ceiling` anywhere."""
    if not (layout.block_outermost and layout.block_compact):
        return None
    given = given_layers(specs, host=problem.host, engine=problem.engine, even=False) or ()
    groups = given_groups(given, specs, problem.aligned, host=problem.host, layout=layout)
    device = [number for number, group in enumerate(groups) if group.pool == DEVICE]
    kinds = [problem.kinds(groups[number].layer_specs)[0] for number in device]
    choice = search_slab(
        problem.demand(kinds, [[groups[number].layer_names] for number in device]),
        [stride_alignment_of(groups[number].layer_specs.values()) for number in device],
        largest=problem.limits.slab_bytes,
        ceiling=np.minimum(problem.ceilings[-1], ceiling.held),
    )
    if choice is None:
        return None
    per_slab = dict(zip(device, choice.blocks_per_slab, strict=True))
    cut = tuple(
        attrs.evolve(group, blocks_per_slab=per_slab.get(number, 1)) for number, group in enumerate(groups)
    )
    return _candidate(problem, f"a plugin's groups in slabs, {layout.name}", cut, layout)
