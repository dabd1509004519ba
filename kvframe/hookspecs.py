"""Every hook of kvframe: what it returns, when it runs, how results combine. This module is the reference.

Plugins mark functions of these names with `@kvframe.hookimpl` and name their module in the entry-point group
`kvframe.plugins`. Hooks run when plugins load and when a plan is made, never per engine step. Arguments may be left
out of an implementation; default values are forbidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

from kvframe.dtypes import CacheDType
from kvframe.engine import EngineConfig
from kvframe.family import SpecFamily
from kvframe.layout import KVCacheLayout
from kvframe.spec import KVCacheSpec

if TYPE_CHECKING:
    import click
    import torch

    from kvframe.readers import LayerReader, ModelReader

PROJECT = "kvframe"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


# --- at load: what a plugin brings -----------------------------------------------------------------------------------


@hookspec
def kvframe_spec_families() -> Sequence[SpecFamily[Any]]:
    """The families that the plugin brings.

    Runs once, at load; all are collected. Two plugins with one family name or spec type are a conflict: neither loads,
    unless one family says `replaces="name"`.
    """
    raise NotImplementedError


@hookspec
def kvframe_cache_dtypes() -> Sequence[CacheDType]:
    """The cache data types that the plugin brings. Runs once, at load; all are collected, one owner a name."""
    raise NotImplementedError


@hookspec
def kvframe_layer_readers() -> Sequence[LayerReader]:
    """The layer kinds that the plugin turns into specs. Runs once, at load; all are collected, one owner a kind."""
    raise NotImplementedError


@hookspec
def kvframe_model_readers() -> Sequence[ModelReader]:
    """Readers of model types whose config spells its layers in a way of its own; the core reads common spellings.

    Runs once, at load; all are collected, one owner a model type.
    """
    raise NotImplementedError


@hookspec
def kvframe_layouts() -> Sequence[KVCacheLayout]:
    """The memory layouts that the plugin brings. Runs once, at load; all are collected, one owner a name."""
    raise NotImplementedError


# --- at planning -----------------------------------------------------------------------------------------------------


@hookspec
def kvframe_adjust_specs(
    specs: Mapping[str, KVCacheSpec], engine: EngineConfig
) -> Mapping[str, KVCacheSpec] | None:
    """Specs by layer to changed specs by layer, or None for no change.

    Runs at the start of every plan; answers chain in the order of plugin names, each sees what the one before made.
    """


@hookspec
def kvframe_group_layers(
    specs: Mapping[str, KVCacheSpec], engine: EngineConfig
) -> Sequence[Sequence[str]] | None:
    """A grouping of the layers, a list of layer names per group, or None to leave it to the next plugin.

    Runs once a plan; the first answer in the order of plugin names wins, else the core groups. The answer must name
    every layer exactly once.
    """


# --- when buffers are allocated --------------------------------------------------------------------------------------


@hookspec
def kvframe_allocate_buffer(pool: str, nbytes: int, device: str) -> torch.Tensor | None:
    """A flat int8 tensor of `nbytes` zero bytes on `device` for the pool of that name, or None to leave it to the next.

    Runs once a pool; the first answer in the order of plugin names wins, else the core allocates.
    """


# --- at the start of the command line --------------------------------------------------------------------------------


@hookspec
def kvframe_commands() -> Sequence[click.Command]:
    """Commands for `kvframe …`. Runs when the command line starts; all are collected, one owner a name."""
    raise NotImplementedError
