"""Making of a recorder: kvframe's own sinks and those of plugins."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from kvframe.checks import at_least
from kvframe.errors import HookError
from kvframe.events.jsonl import JsonLinesSink
from kvframe.events.recorder import EventSink, Recorder
from kvframe.events.zeromq import ZmqSink
from kvframe.plugins import PluginHost, load_plugins


@attrs.frozen(kw_only=True)
class ZmqConfig:
    """Where batches are published; the arguments of `ZmqSink`."""

    endpoint: str = "tcp://*:5557"
    replay: str | None = None
    topic: str = ""
    kept: int = attrs.field(default=10_000, validator=at_least(0))
    backlog: int = attrs.field(default=100_000, validator=at_least(1))


@attrs.frozen(kw_only=True)
class EventConfig:
    """Which sinks get events, and what batches say of their origin.

    Args:
        medium: where the blocks are, such as "GPU".
        data_parallel_rank: this engine's rank, where several serve one model.
        jsonl: a file that batches are appended to, as JSON lines.
        zmq: where to publish over ZeroMQ.
        background: records are made, and sinks called, in a thread: `publish` then costs the scheduler little.
        extras: settings of plugins' sinks, by name.
    """

    medium: str = "GPU"
    data_parallel_rank: int | None = None
    jsonl: str | Path | None = None
    zmq: ZmqConfig | None = None
    background: bool = False
    extras: Mapping[str, Any] = attrs.field(factory=dict)


def start(config: EventConfig, host: PluginHost | None = None) -> Recorder:
    """A recorder with the sinks that the configuration asks for: pass it to `KVCacheManager` as `watcher`.

    Args:
        config: what is wanted.
        host: whose plugins are asked; None: the installed ones.

    Raises:
        MissingDependencyError: a sink needs the extra `kvframe[events]`.
        HookError: a plugin's sink cannot be called.
        OSError: a file or an address cannot be opened.
    """
    sinks: list[EventSink] = []
    for brought in (host or load_plugins()).call_all("kvframe_block_event_sinks", config=config):
        for sink in brought:
            if not callable(sink):
                reason = f"{sink!r} is no sink: it cannot be called"
                raise HookError(hook="kvframe_block_event_sinks", plugin=type(sink).__module__, reason=reason)
            sinks.append(sink)
    if config.jsonl is not None:
        sinks.append(JsonLinesSink(config.jsonl))
    if config.zmq is not None:
        sinks.append(ZmqSink(**attrs.asdict(config.zmq)))
    return Recorder(
        sinks,
        medium=config.medium,
        data_parallel_rank=config.data_parallel_rank,
        background=config.background,
    )
