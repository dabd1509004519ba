"""Checks of a plugin as a whole: how it is installed, imported and marked."""

from __future__ import annotations

import importlib.metadata
import inspect
import subprocess
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from kvframe import hookspecs
from kvframe.discovery import ACTIVE, core_requirements
from kvframe.dtypes import CellGeometry, element_size
from kvframe.errors import SpecError
from kvframe.testing.outcome import NotApplicable, expect
from kvframe.testing.subject import PluginSubject, isolated_host

_NO_DISTRIBUTION = NotApplicable("the plugin was given in code and has no distribution")
_HEAVY = ("torch", "tensorflow", "jax", "transformers")


def _module(plugin: PluginSubject) -> ModuleType:
    return import_module(plugin.record.module.partition(":")[0])


def the_plugin_is_in_use(plugin: PluginSubject) -> None:
    """The plugin loads, and nothing set it aside.

    Why: all else says nothing about a plugin that planning does not use.
    What to do: the reason says it; `kvframe plugins --why NAME` says who else claims its names.
    """
    record = plugin.record
    expect(record.status == ACTIVE, record.label, f"is {record.status}: {record.reason}")
    expect(bool(record.hooks), record.label, "has no hook")


def it_imports_no_heavy_library(plugin: PluginSubject) -> None:
    """Importing the plugin imports no torch, nor another framework.

    Why: plugins load at every start of every process, also on schedulers and routers that have no torch.
    What to do: import torch inside the function that makes views; under `if TYPE_CHECKING:` for annotations.
    """
    module = plugin.record.module.partition(":")[0]
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & set({_HEAVY!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1:] or ["no message"]
    expect(done.returncode == 0, plugin.record.label, f"cannot be imported in a new process: {last[0]}")
    found = done.stdout.split()
    expect(not found, plugin.record.label, f"importing it imports {', '.join(found)}")


def it_bounds_its_kvframe(plugin: PluginSubject) -> NotApplicable | None:
    """The distribution requires kvframe with a lower and an upper bound.

    Why: the requirement is tested before the plugin is imported; without an upper bound a plugin made for this kvframe
    is loaded into the next one, whose hooks may differ.
    What to do: `dependencies = ["kvframe>=0.1,<0.2"]` in pyproject.toml.
    """
    if plugin.record.distribution is None:
        return _NO_DISTRIBUTION
    needed = core_requirements(importlib.metadata.distribution(plugin.record.distribution))
    expect(needed, plugin.record.label, "does not require kvframe")
    for requirement in needed:
        operators = {spec.operator for spec in requirement.specifier}
        text = f"requires {requirement}, which any later kvframe meets"
        expect(operators & {"<", "<=", "==", "~=", "==="}, plugin.record.label, text)
        text = f"requires {requirement}, which any earlier kvframe meets"
        expect(operators & {">", ">=", "==", "~=", "==="}, plugin.record.label, text)
    return None


def its_hooks_are_marked(plugin: PluginSubject) -> None:
    """Every function named like a hook is marked with `@kvframe.hookimpl`, has a known name and known arguments.

    Why: a function without the mark is never called, and nothing says so.
    What to do: mark it, or give helpers another name. Arguments may be left out; defaults are forbidden.
    """
    module = _module(plugin)
    known = {name for name in dir(hookspecs) if name.startswith("kvframe_")}
    for name, function in vars(module).items():
        if not (name.startswith("kvframe_") and inspect.isfunction(function)):
            continue
        expect(
            hasattr(function, f"{hookspecs.PROJECT}_impl"),
            plugin.record.label,
            f"{name} is not marked as a hook",
        )
        expect(name in known, plugin.record.label, f"{name} is no hook of kvframe")
        offered = set(inspect.signature(getattr(hookspecs, name)).parameters)
        for parameter in inspect.signature(function).parameters.values():
            expect(
                parameter.name in offered,
                plugin.record.label,
                f"{name} takes {parameter.name!r}, which is not offered",
            )
            plain = parameter.default is inspect.Parameter.empty
            expect(plain, plugin.record.label, f"{name} gives {parameter.name!r} a default value")


def it_loads_the_same_twice(plugin: PluginSubject) -> None:
    """A second host of plugins gets the same families, dtypes, kinds and layouts from it.

    Why: tests, and engines with workers in one process, make several hosts; a plugin that registers by changing its own
    module works once.
    What to do: build the lists inside the hooks, from constants.
    """
    found = isolated_host(_module(plugin)).records[-1]  # installed plugins, all left out, come first
    for field in ("families", "cache_dtypes", "layouts", "layer_kinds", "model_types", "commands"):
        first, second = getattr(plugin.record, field), getattr(found, field)
        expect(
            first == second, plugin.record.label, f"brings {field} {first} at first, {second} the second time"
        )


def its_families_are_the_ones_in_use(plugin: PluginSubject) -> None:
    """Every family that the plugin brings is the one that the host uses for its spec type.

    Why: a family that another replaces, without anybody noticing, is not the one that was tested.
    What to do: `kvframe plugins --why NAME` says who replaced it.
    """
    for name in plugin.record.families:
        expect(
            name in plugin.host.families,
            plugin.record.label,
            f"family {name!r} is replaced by another plugin's",
        )


def its_dtypes_pack_their_cells(plugin: PluginSubject) -> NotApplicable | None:
    """A cache dtype packs cells of common sizes into whole bytes and slots, its pieces lie inside them, and what it
    cannot pack it refuses with a SpecError.

    Why: pages are sized by the packing; a piece that ends behind its cell is another token's.
    What to do: round up where bits do not fill a byte, and raise SpecError for sizes that cannot be packed.
    """
    if not plugin.record.cache_dtypes:
        return NotApplicable("the plugin brings no cache dtypes")
    for name in plugin.record.cache_dtypes:
        dtype = plugin.host.cache_dtypes.get(name)
        for heads, size, size_v in (
            (1, 64, 64),
            (8, 128, 128),
            (4, 128, 64),
            (2, 96, 192),
            (1, 576, 0),
            (3, 80, 80),
        ):
            cell = CellGeometry(num_kv_heads=heads, head_size=size, head_size_v=size_v, element_bytes=1)
            _packs(plugin, dtype, cell)
    return None


def _packs(plugin: PluginSubject, dtype: Any, cell: CellGeometry) -> None:
    where = f"cache dtype {dtype.name!r} of {plugin.record.label}"
    try:
        packed = dtype.pack(cell) if dtype.pack is not None else None
        parts = dtype.parts(cell) if dtype.parts is not None else ()
    except SpecError:
        return
    if packed is None:
        return
    whole = type(packed.content_bytes) is int and type(packed.head_slots) is int
    expect(whole and packed.content_bytes >= 1 and packed.head_slots >= 1, where, f"packs {cell} as {packed}")
    for part in parts:
        end = part.offset + part.width * element_size(part.dtype)
        expect(
            end <= packed.content_bytes,
            where,
            f"piece {part.name!r} ends at byte {end} of {packed} for {cell}",
        )
