"""Errors of simulations."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvframe.errors import KVFrameError


@attrs.define(auto_exc=True, eq=False, kw_only=True, str=False)
class StreamError(KVFrameError, ValueError):
    """A request stream cannot be what it says."""

    kind: ClassVar[str] = "stream"
    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}."
