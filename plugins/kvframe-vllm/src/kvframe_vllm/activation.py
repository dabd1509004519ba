"""What the plugin changes in vLLM, in one process: two names, each at most once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from kvframe_vllm.settings import check_version, strategy

_MARK = "kvframe_original"  # on our replacement: what it stands for, and that it is there already


def activate(parts: frozenset[str]) -> None:
    """Put kvframe's manager, its planner, or both into vLLM; calling it again changes nothing.

    Args:
        parts: "manager" and "planner", or one of them.

    Raises:
        VersionError: this vLLM is not one that the plugin was tested with; nothing was changed.
        SettingError: an environment variable is wrong; nothing was changed.
    """
    from vllm.version import __version__

    check_version(__version__)
    chosen = strategy()
    if "manager" in parts:
        from vllm.config.scheduler import SchedulerConfig

        _replace(SchedulerConfig, "get_scheduler_cls", _choose_scheduler)
    if "planner" in parts:
        from vllm.v1.engine import core

        _replace(core, "get_kv_cache_configs", functools.partial(_plan, chosen))


def deactivate() -> None:
    """Put vLLM's own back; for tests that need both in one process."""
    from vllm.config.scheduler import SchedulerConfig
    from vllm.v1.engine import core

    for owner, name in ((SchedulerConfig, "get_scheduler_cls"), (core, "get_kv_cache_configs")):
        original = getattr(getattr(owner, name), _MARK, None)
        if original is not None:
            setattr(owner, name, original)


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    if hasattr(original, _MARK):
        return
    replacement = functools.wraps(original)(make(original))
    setattr(replacement, _MARK, original)
    setattr(owner, name, replacement)


def _choose_scheduler(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def get_scheduler_cls(self: Any) -> Any:
        from kvframe_vllm.scheduler import on_kvframe

        return on_kvframe(original(self))

    return get_scheduler_cls


def _plan(strategy_name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def get_kv_cache_configs(vllm_config: Any, kv_cache_specs: Any, available_memory: Any) -> Any:
        from kvframe_vllm.planner import plan_for_vllm

        return plan_for_vllm(
            vllm_config, kv_cache_specs, available_memory, stock=original, strategy=strategy_name
        )

    return get_kv_cache_configs
