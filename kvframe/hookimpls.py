"""A plugin's hook implementations: which it has, and what makes one unusable. pluggy accepts most of these silently."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pluggy

from kvframe import hookspecs
from kvframe.errors import KVFrameDeprecationWarning, nearest


@attrs.frozen
class HookImplementation:
    """A plugin's function for a hook, and whether it is marked as a wrapper of others."""

    hook: str
    function: Callable[..., Any]
    wraps: bool


def hook_implementations(manager: pluggy.PluginManager, plugin: object) -> list[HookImplementation]:
    """What `manager` would register of a plugin, a module or an object."""
    found = []
    for name in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, name)
        if options is not None:
            wraps = bool(options.get("wrapper") or options.get("hookwrapper"))
            found.append(HookImplementation(options.get("specname") or name, getattr(plugin, name), wraps))
    return found


def plugin_problem(
    plugin: object, implementations: Sequence[HookImplementation], *, loaded_as: str | None
) -> str | None:
    """Why a plugin cannot be used, or None.

    Args:
        plugin: the module or object.
        implementations: its hooks.
        loaded_as: the name under which this very object is loaded already, None if it is not.
    """
    if loaded_as is not None:
        return f"it is the same object as plugin {loaded_as!r}, which is loaded already"
    try:
        hash(plugin)
    except TypeError as error:
        return f"{error}: give a module, or an object of a class without __eq__"
    if not implementations:
        return "it has no hook: mark its functions with @kvframe.hookimpl"
    names = [one.hook for one in implementations]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        return f"hook {twice[0]!r} has more than one implementation"
    return next((problem for one in implementations if (problem := _problem(one))), None)


def _problem(one: HookImplementation) -> str | None:
    known = {name for name in dir(hookspecs) if name.startswith("kvframe_")}
    if one.hook not in known:
        near = nearest(one.hook, known)
        return f"unknown hook {one.hook!r}" + (f": did you mean {near!r}?" if near else "")
    if one.wraps:
        return f"hook {one.hook!r} is a wrapper: plugins are called one by one, so it has nothing to wrap"
    offered = list(inspect.signature(getattr(hookspecs, one.hook)).parameters)
    for parameter in inspect.signature(one.function).parameters.values():
        if parameter.name not in offered:
            arguments = ", ".join(offered) or "none"
            return (
                f"hook {one.hook!r} takes {parameter.name!r}, which is not one of its arguments: {arguments}"
            )
        if parameter.default is not inspect.Parameter.empty:
            return f"hook {one.hook!r} gives {parameter.name!r} a default value, which hooks may not"
    return None


def warn_of_deprecations(plugin: str, implementations: Sequence[HookImplementation]) -> None:
    """Warn of every hook and argument that a plugin uses and that a later kvframe drops.

    Args:
        plugin: how messages name it.
        implementations: its hooks.
    """
    for one in implementations:
        info = hookspecs.hook_info(one.hook)
        taken = inspect.signature(one.function).parameters
        said = [f"hook {one.hook!r} is deprecated: {info.deprecated}"] if info.deprecated else []
        said += [
            f"argument {name!r} of hook {one.hook!r} is deprecated: {instead}"
            for name, instead in info.deprecated_arguments.items()
            if name in taken
        ]
        for text in said:
            warnings.warn(f"plugin {plugin}: {text}", KVFrameDeprecationWarning, stacklevel=2)
