"""What goes wrong between vLLM and kvframe, as typed errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import attrs

from kvframe.errors import KVFrameError


@attrs.define(auto_exc=True, eq=False, kw_only=True, str=False)
class UnknownSpecError(KVFrameError, TypeError):
    """A spec that the other side has no class for."""

    kind: ClassVar[str] = "vllm_spec"
    spec: str
    layer: str
    side: str
    advice: str

    def __str__(self) -> str:
        return f"layer {self.layer}: {self.side} has no counterpart of {self.spec}. {self.advice}."


@attrs.define(auto_exc=True, eq=False, kw_only=True, str=False)
class UntranslatableError(KVFrameError, ValueError):
    """A spec whose counterpart would not mean the same."""

    kind: ClassVar[str] = "vllm_spec"
    spec: str
    layer: str
    reason: str

    def __str__(self) -> str:
        return f"layer {self.layer}: {self.spec} cannot be translated: {self.reason}."


@attrs.define(auto_exc=True, eq=False, kw_only=True, str=False)
class VersionError(KVFrameError, RuntimeError):
    """This vLLM was not tested with kvframe."""

    kind: ClassVar[str] = "vllm_version"
    version: str
    supported: Sequence[str]
    variable: str

    def __str__(self) -> str:
        return (
            f"kvframe-vllm was tested with vLLM {', '.join(self.supported)}, and this is {self.version}. "
            f"Nothing of vLLM was changed. Unset KVFRAME_VLLM to run without kvframe, "
            f"or set {self.variable}=1 to try it all the same."
        )


@attrs.define(auto_exc=True, eq=False, kw_only=True, str=False)
class SettingError(KVFrameError, ValueError):
    """An environment variable of this plugin says what it does not know."""

    kind: ClassVar[str] = "vllm_setting"
    variable: str
    value: str
    rule: str

    def __str__(self) -> str:
        return f"{self.variable}={self.value!r}: {self.rule}."
