"""A running vLLM plans and manages its KV cache with kvframe.

Off unless asked for: `KVFRAME_VLLM=manager`, `planner` or `manager,planner`, or
`scheduler_cls="kvframe_vllm.Scheduler"`. Nothing here imports vLLM before it is used.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import Any

from kvframe_vllm.settings import check_version, wanted

__all__ = [
    "AsyncScheduler",
    "KVCacheManager",
    "Scheduler",
    "engine_spec",
    "register",
    "to_kvframe",
    "to_vllm",
]

_SPECS = MappingProxyType({"engine_spec": "families", "to_kvframe": "specs", "to_vllm": "specs"})


def register() -> None:
    """vLLM's plugin entry point (`vllm.general_plugins`): it is called once in every process of an engine.

    Raises:
        SettingError: `KVFRAME_VLLM` names something that does not exist.
        VersionError: kvframe was asked for, and this vLLM is not one it was tested with.
    """
    parts = wanted()
    if not parts:
        return
    from kvframe_vllm.activation import activate

    activate(parts)


def __getattr__(name: str) -> Any:
    """The classes that vLLM is given by name, imported with vLLM when they are asked for."""
    if name in _SPECS:
        return getattr(import_module(f"kvframe_vllm.{_SPECS[name]}"), name)
    if name not in ("AsyncScheduler", "KVCacheManager", "Scheduler"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.version import __version__

    check_version(__version__)
    if name == "KVCacheManager":
        from kvframe_vllm.making import make_manager

        return make_manager
    from kvframe_vllm import scheduler

    return getattr(scheduler, name)
