"""Promotion: local kinds kept as full attention, where nothing else works (contract 5.3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvframe.errors import PlanError
from kvframe.merge import Refusal, refuse
from kvframe.plugins import PluginHost


def promote_all(specs: Mapping[str, Any], host: PluginHost) -> dict[str, Any] | Refusal:
    """Every layer's full-attention stand-in, at the block size of the layers that keep everything already.

    Returns:
        layer name to spec, or the first Refusal of a family that nothing can stand in for.
    """
    full = {layer: spec for layer, spec in specs.items() if not _is_local(spec, host)}
    if not full or len(full) == len(specs):
        kinds = {layer: host.family(spec).name for layer, spec in specs.items()}
        return refuse("family", "promotion needs layers that keep everything and layers that do not", kinds)
    blocks = {spec.block_size for spec in full.values()}
    block = blocks.pop() if len(blocks) == 1 else None
    promoted: dict[str, Any] = {}
    for layer, spec in specs.items():
        stand_in = spec if layer in full else host.family(spec).promote(spec, block)
        if isinstance(stand_in, Refusal):
            return stand_in
        promoted[layer] = stand_in
    return promoted


def promote_local(specs: Mapping[str, Any], host: PluginHost) -> Mapping[str, Any]:
    """The specs for an engine that keeps one kind only; unchanged where they already share a table.

    Layers that context parallelism shards, and layers it does not, are promoted apart.

    Raises:
        PlanError: some kinds cannot be kept as full attention, or still differ afterwards.
    """
    result = dict(specs)
    if specs and _one_table(specs, host):
        return result
    apart = {layer: spec for layer, spec in specs.items() if not _stores_tokens(spec, host)}
    if apart:
        raise PlanError(
            reason="states, rings and encoder caches cannot be kept as full attention",
            layers=list(apart),
            advice="Let the engine keep several kinds of groups",
        )
    for sharded in (True, False):
        part = {layer: spec for layer, spec in specs.items() if bool(spec.dcp_sharded) is sharded}
        if not part or _one_table(part, host):
            continue
        promoted = promote_all(part, host)
        if isinstance(promoted, Refusal) or not _one_table(promoted, host):
            why = promoted if isinstance(promoted, Refusal) else None
            raise PlanError(
                reason="the layers cannot all be kept as full attention",
                layers=list(part),
                values={why.field: dict(why.layers), "rule": why.rule} if why else {},
                advice="Let the engine keep several kinds of groups",
            )
        result.update(promoted)
    return result


def _is_local(spec: Any, host: PluginHost) -> bool:
    return host.family(spec).lifetime(spec).recycles or not _stores_tokens(spec, host)


def _stores_tokens(spec: Any, host: PluginHost) -> bool:
    lifetime = host.family(spec).lifetime(spec)
    return lifetime.per_token and lifetime.source == "decoder"


def _one_table(specs: Mapping[str, Any], host: PluginHost) -> bool:
    return len({host.family(spec).table_key(spec) for spec in specs.values()}) == 1
