"""One page size for token caches and states: a larger token block, and padded states (contract 5.9, last paragraph)."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from fractions import Fraction
from typing import Any

import attrs

from kvframe.errors import UsageError
from kvframe.plugins import PluginHost


def aligned_block(
    state_bytes: int,
    token_bytes: int | Fraction,
    *,
    block_size: int,
    kernel_block: int,
    exports: Sequence[int] = (),
) -> int:
    """The smallest block whose page holds a state: a multiple of everything that blocks must be a multiple of.

    Args:
        state_bytes: the largest state page without padding.
        token_bytes: bytes of one token in one layer's page, the most of any layer.
        block_size: tokens; the block asked for.
        kernel_block: tokens; the smallest block that kernels index.
        exports: tokens; state kernels can save a state at multiples of these, and a block must end at one.

    Returns:
        tokens of the block, at least `block_size`.
    """
    step = math.lcm(max(block_size, kernel_block), *exports)
    return step * math.ceil(Fraction(state_bytes) / (step * token_bytes))


def align_state_pages(
    specs: Mapping[str, Any],
    *,
    host: PluginHost,
    block_size: int,
    kernel_block_sizes: Sequence[int] = (16,),
    max_model_len: int,
) -> dict[str, Any]:
    """The specs of a hybrid with token blocks as large as a state, and states padded to that page.

    Token layers take the aligned block. States that are cached at block borders take it too; those that are not get one
    block for the longest request. Layers that are groups of their own, rings and raw pages stay as they are, and so
    does a model without states or without token layers.

    Args:
        specs: layer name to spec, in layer order.
        host: who knows the families.
        block_size: tokens; the block asked for.
        kernel_block_sizes: tokens; the blocks that the attention backends can index.
        max_model_len: tokens of the longest request.

    Raises:
        UsageError: no kernel block size is given.
        SpecError: the aligned block does not hold a whole number of a compressed layer's states.
    """
    if not kernel_block_sizes:
        rule = "must name at least one block size that the attention backends can index"
        raise UsageError(option="kernel_block_sizes", value=list(kernel_block_sizes), rule=rule)
    states = {spec for spec in set(specs.values()) if _is_state(spec, host)}
    tokens = {spec for spec in set(specs.values()) if _stores_tokens(spec, host)}
    lifetimes = {spec: host.family(spec).lifetime(spec) for spec in states}
    if not states or not tokens:
        uncached = {spec for spec in states if not lifetimes[spec].state}
        return changed(specs, uncached, lambda spec: spec.copy_with_new_block_size(max_model_len))
    block = aligned_block(
        max(spec.unpadded_page_size_bytes for spec in states),
        max(Fraction(spec.unpadded_page_size_bytes, spec.block_size) for spec in tokens),
        block_size=block_size,
        kernel_block=max(
            min(kernel_block_sizes), *(host.family(spec).paging.kernel_block for spec in tokens)
        ),
        exports=[lifetime.export for lifetime in lifetimes.values() if lifetime.export],
    )
    page = max(spec.copy_with_new_block_size(block).page_size_bytes for spec in tokens)

    def aligned(spec: Any) -> Any:
        if spec in tokens:
            return spec.copy_with_new_block_size(block)
        wider = spec.copy_with_new_block_size(block if lifetimes[spec].state else max_model_len)
        return attrs.evolve(wider, page_size_padded=None if spec.unpadded_page_size_bytes == page else page)

    return changed(specs, states | tokens, aligned)


def changed(specs: Mapping[str, Any], which: Container[Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """Specs by layer with `change` applied to some, once a spec: a model has many layers and few specs."""
    made: dict[Any, Any] = {}
    result = {}
    for layer, spec in specs.items():
        key = (spec, getattr(spec, "is_draft", False))  # what equality leaves out
        if key not in made:
            made[key] = change(spec) if spec in which else spec
        result[layer] = made[key]
    return result


def _is_state(spec: Any, host: PluginHost) -> bool:
    """Whether the page has a size of its own that padding may raise."""
    family = host.family(spec)
    paging = family.paging
    can_pad = paging.pads and not paging.scales and hasattr(spec, "page_size_padded")
    return can_pad and not paging.own_group and not family.lifetime(spec).per_token


def _stores_tokens(spec: Any, host: PluginHost) -> bool:
    """Whether a larger block makes a larger page of a request's tokens."""
    family = host.family(spec)
    return family.paging.scales and not family.paging.own_group and family.lifetime(spec).per_token
