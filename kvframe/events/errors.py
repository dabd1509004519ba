"""Errors of event sinks."""

from __future__ import annotations

from typing import ClassVar

import attrs

from kvframe.errors import KVFrameError


@attrs.define(auto_exc=True, eq=False, kw_only=True, str=False)
class EventSinkError(KVFrameError, RuntimeError):
    """A sink did not take a batch; the others have got it, and the manager is as it should be."""

    kind: ClassVar[str] = "event_sink"
    sink: str
    sequence: int
    reason: str

    def __str__(self) -> str:
        return f"Event sink {self.sink} failed at batch {self.sequence}: {self.reason}."
