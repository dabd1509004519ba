"""Bringing pages of different kinds to one size (contract 5.5a), and layers that are groups of their own (5.5c)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvframe.checks import cdiv
from kvframe.merge import Refusal, refuse
from kvframe.plugins import PluginHost


def unify_pages(specs: Mapping[str, Any], host: PluginHost) -> dict[str, Any] | Refusal:
    """The specs with every page as large as the largest: larger blocks where they fit exactly, else padding.

    Returns:
        layer name to spec, or a Refusal naming the layers whose page can be neither scaled nor padded.
    """
    target = max(spec.page_size_bytes for spec in specs.values())
    unified = {layer: _resized(spec, target, host) for layer, spec in specs.items()}
    stuck = {layer: specs[layer].page_size_bytes for layer, spec in unified.items() if spec is None}
    if stuck:
        rule = f"its page must divide {target} bytes, the largest, or be of a kind that can be padded"
        return refuse("page_size_bytes", rule, stuck)
    return unified


def _resized(spec: Any, target: int, host: PluginHost) -> Any | None:
    """`spec` with a page of `target` bytes, or None where it cannot have one."""
    paging = host.family(spec).paging
    page = spec.page_size_bytes
    if page == target:
        return spec
    if paging.scales and target % page == 0:
        grown = spec.copy_with_new_block_size(spec.block_size * (target // page))
        if grown.page_size_bytes == target:
            return grown
    if not paging.pads or not any(field.name == "page_size_padded" for field in attrs.fields(type(spec))):
        return None
    padded = attrs.evolve(spec, page_size_padded=target)
    return padded if padded.page_size_bytes == target else None


def place_own_groups(
    groups: Sequence[Mapping[str, Any]], own: Mapping[str, Any], host: PluginHost
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Layers that are groups of their own, fitted to the common page of the other groups (contract 5.5c).

    Where one token of such a layer is larger than the common page, all other blocks grow by a whole factor first. The
    layer's block is then the largest divisor of the groups' common block that fits a page, padded to it.

    Returns:
        the other groups (grown), and one group for each own layer.
    """
    page = next(iter(groups[0].values())).page_size_bytes
    factor = max(1, *(cdiv(_token_bytes(spec), page) for spec in own.values()))
    grown = [{layer: _grown(spec, factor) for layer, spec in group.items()} for group in groups]
    page *= factor
    common = math.gcd(*(spec.block_size for group in grown for spec in group.values()))
    placed = []
    for layer, spec in own.items():
        fits = max(page // _token_bytes(spec), 1)
        block = max(size for size in range(1, common + 1) if common % size == 0 and size <= fits)
        bare = attrs.evolve(spec, block_size=block, page_size_padded=None)
        placed.append({layer: attrs.evolve(bare, page_size_padded=page)})
    return grown, placed


def _token_bytes(spec: Any) -> int:
    """Bytes of one token of an own-group layer: one state of every head slot."""
    return int(spec.num_heads * spec.state_content_size_bytes)


def _grown(spec: Any, factor: int) -> Any:
    if factor == 1:
        return spec
    padded = getattr(spec, "page_size_padded", None)
    bigger = spec.copy_with_new_block_size(spec.block_size * factor)
    return attrs.evolve(bigger, page_size_padded=padded * factor) if padded else bigger
