"""Every hook of kvframe: what it returns, when it runs, how results combine. This module is the reference.

Plugins mark functions of these names with `@kvframe.hookimpl` and name their module in the entry-point group
`kvframe.plugins`. Hooks run when plugins load and when a plan is made, never per engine step. Arguments may be left
out of an implementation; default values are forbidden.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import pluggy

from kvframe.config import KVCacheGroupSpec, LayerGroup, Pool
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
hookimpl = pluggy.HookimplMarker(PROJECT)
_mark = pluggy.HookspecMarker(PROJECT)

F = TypeVar("F", bound=Callable[..., Any])


@attrs.frozen(kw_only=True)
class HookInfo:
    """A hook's promise of stability (docs/explanation/stability.md). Versions are those of kvframe.

    Args:
        since: the version that brought it.
        deprecated: the version that will drop it, and what to use instead; None: it stays.
        deprecated_arguments: likewise for arguments, by name.
    """

    since: str
    deprecated: str | None = None
    deprecated_arguments: Mapping[str, str] = attrs.field(factory=dict)


def hookspec(info: HookInfo) -> Callable[[F], F]:
    """Mark a function as a hook with that promise."""

    def mark(function: F) -> F:
        function.kvframe_info = info  # type: ignore[attr-defined]
        return _mark(function)

    return mark


def hook_info(hook: str) -> HookInfo:
    """The promise of the hook of that name."""
    info: HookInfo = globals()[hook].kvframe_info
    return info


_SINCE_0_1 = HookInfo(since="0.1")


# --- at load: what a plugin brings -----------------------------------------------------------------------------------


@hookspec(_SINCE_0_1)
def kvframe_spec_families() -> Sequence[SpecFamily[Any]]:
    """The families that the plugin brings.

    Runs once, at load; all are collected. Two plugins with one family name or spec type are a conflict: neither loads,
    unless one family says `replaces="name"`.
    """
    raise NotImplementedError


@hookspec(_SINCE_0_1)
def kvframe_cache_dtypes() -> Sequence[CacheDType]:
    """The cache data types that the plugin brings. Runs once, at load; all are collected, one owner a name."""
    raise NotImplementedError


@hookspec(_SINCE_0_1)
def kvframe_layer_readers() -> Sequence[LayerReader]:
    """The layer kinds that the plugin turns into specs. Runs once, at load; all are collected, one owner a kind."""
    raise NotImplementedError


@hookspec(_SINCE_0_1)
def kvframe_model_readers() -> Sequence[ModelReader]:
    """Readers of model types whose config spells its layers in a way of its own; the core reads common spellings.

    Runs once, at load; all are collected, one owner a model type.
    """
    raise NotImplementedError


@hookspec(_SINCE_0_1)
def kvframe_layouts() -> Sequence[KVCacheLayout]:
    """The memory layouts that the plugin brings. Runs once, at load; all are collected, one owner a name."""
    raise NotImplementedError


@hookspec(_SINCE_0_1)
def kvframe_eviction_policies() -> Sequence[Any]:
    """Ways to choose which cached block goes first: `kvframe.blocks.EvictionPolicy` objects.

    Runs once, at load; all are collected, one owner a name. "lru" and "frequency" are kvframe's own.
    """
    raise NotImplementedError


# --- at planning -----------------------------------------------------------------------------------------------------


@hookspec(_SINCE_0_1)
def kvframe_adjust_specs(
    specs: Mapping[str, KVCacheSpec], engine: EngineConfig
) -> Mapping[str, KVCacheSpec] | None:
    """Specs by layer to changed specs by layer, or None for no change. Layers may be added and left out.

    Runs at the start of every plan; answers chain in the order of plugin names, each sees what the one before made. A
    layer that is added lies on the pipeline stage of the layer whose name its own begins with, up to a dot.

    Raises:
        KVFrameError: the plugin refuses the layers; the caller gets this very error.
    """


@hookspec(_SINCE_0_1)
def kvframe_group_layers(
    specs: Mapping[str, KVCacheSpec], engine: EngineConfig, even: bool
) -> Sequence[LayerGroup] | None:
    """A grouping of the layers, or None to leave it to the next plugin.

    Runs when a plan is made; the first answer in the order of plugin names wins, else the core groups. The answer must
    name every layer exactly once, and layers of one group must need the same blocks for every request.

    Args:
        specs: layer name to spec, as `kvframe_adjust_specs` left them.
        engine: the engine's limits; settings of plugins are in its `extras`.
        even: each block takes a whole slab, so device groups waste what the widest of them has more. False: the core
            cuts slabs into blocks of each group's own width, so fewer and wider groups cost less. A plan may ask for
            both and keep the cheaper.

    Raises:
        KVFrameError: the plugin refuses the layers; the caller gets this very error.
    """


@hookspec(_SINCE_0_1)
def kvframe_place_groups(
    groups: Sequence[KVCacheGroupSpec], pools: Mapping[str, Pool], engine: EngineConfig
) -> Mapping[str, Pool] | None:
    """The pools that are to be otherwise than the core has them, by name, or None to leave it to the next plugin.

    Runs once for each rank of a plan; the first answer in the order of plugin names wins. A plugin may change a pool's
    slab size (at least as large, in bytes), layout, reserve and sharing, not its budget. The core fills the pools with
    as many slabs as their budgets hold on every rank, and places the layers in them.

    Args:
        groups: the rank's groups; each names its pool.
        pools: the pools that these groups use, by name.
        engine: the engine's limits.
    """


# --- when buffers are allocated --------------------------------------------------------------------------------------


@hookspec(_SINCE_0_1)
def kvframe_allocate_buffer(pool: str, nbytes: int, device: str) -> torch.Tensor | None:
    """A flat int8 tensor of `nbytes` zero bytes on `device` for the pool of that name, or None to leave it to the next.

    Runs once a pool; the first answer in the order of plugin names wins, else the core allocates.
    """


# --- when a block manager starts -------------------------------------------------------------------------------------


@hookspec(_SINCE_0_1)
def kvframe_block_event_sinks(config: Any) -> Sequence[Callable[[Any], Any]]:
    """Functions that get every `kvframe.events.EventBatch`; one with a `close` method is closed at the end.

    Runs when a manager with events starts; all are collected, in the order of plugin names, and called in that order
    once a step at most. A sink that raises makes `Recorder.publish` raise after the others have got the batch.

    Args:
        config: the `kvframe.events.EventConfig` that the engine asked for; a plugin finds its own settings in
            `config.extras`, and answers with nothing where it is not wanted.
    """
    raise NotImplementedError


# --- at the start of the command line --------------------------------------------------------------------------------


@hookspec(_SINCE_0_1)
def kvframe_commands() -> Sequence[click.Command]:
    """Commands for `kvframe …`. Runs when the command line starts; all are collected, one owner a name."""
    raise NotImplementedError


@hookspec(_SINCE_0_1)
def kvframe_plan_options() -> Sequence[click.Option]:
    """Options for `kvframe plan`. What a person gives is in `EngineConfig.extras`, under the option's name.

    Runs when `kvframe plan` starts; all are collected. An option that is spelled like one of kvframe's own, or like one
    of a plugin before it in the order of names, is left out with a warning.
    """
    raise NotImplementedError
