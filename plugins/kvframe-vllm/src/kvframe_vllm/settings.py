"""What the user asked for, from the environment, and whether this vLLM can have it."""

from __future__ import annotations

import os
from collections.abc import Mapping

from kvframe_vllm.errors import SettingError, VersionError

PARTS = ("manager", "planner")
STRATEGIES = ("engine", "optimal")
SUPPORTED = ("0.32",)

ASK = "KVFRAME_VLLM"
STRATEGY = "KVFRAME_VLLM_STRATEGY"
ANY_VERSION = "KVFRAME_VLLM_ANY_VERSION"


def wanted(environment: Mapping[str, str] = os.environ) -> frozenset[str]:
    """The parts that `KVFRAME_VLLM` asks for; none where it is unset or empty.

    Raises:
        SettingError: it names something else.
    """
    text = environment.get(ASK, "")
    parts = frozenset(part.strip() for part in text.split(",") if part.strip())
    if not parts <= frozenset(PARTS):
        raise SettingError(variable=ASK, value=text, rule="must be manager, planner, or manager,planner")
    return parts


def strategy(environment: Mapping[str, str] = os.environ) -> str:
    """The planner's strategy: `engine`, vLLM's own rule, unless `KVFRAME_VLLM_STRATEGY` says otherwise.

    Raises:
        SettingError: it names something else.
    """
    text = environment.get(STRATEGY, "") or STRATEGIES[0]
    if text not in STRATEGIES:
        raise SettingError(variable=STRATEGY, value=text, rule=f"must be one of {', '.join(STRATEGIES)}")
    return text


def check_version(version: str, environment: Mapping[str, str] = os.environ) -> None:
    """Refuse a vLLM that this plugin was not tested with.

    Args:
        version: vLLM's, such as "0.32.0" or "0.32.1.dev3+cpu".
        environment: where the variable that forces it is looked up.

    Raises:
        VersionError: the minor version is not supported, and nothing forces it.
    """
    minor = ".".join(version.split(".")[:2])
    if minor not in SUPPORTED and environment.get(ANY_VERSION, "") in ("", "0"):
        raise VersionError(version=version, supported=SUPPORTED, variable=ANY_VERSION)
