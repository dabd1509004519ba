"""Events: what a KV-aware router is told of an engine's prefix cache."""

from kvframe.events.errors import EventSinkError
from kvframe.events.index import PrefixIndex
from kvframe.events.jsonl import JsonLinesSink
from kvframe.events.recorder import EventSink, Recorder
from kvframe.events.records import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from kvframe.events.starting import EventConfig, ZmqConfig, start
from kvframe.events.wire import decode
from kvframe.events.zeromq import ZmqSink

__all__ = [
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "Event",
    "EventBatch",
    "EventConfig",
    "EventSink",
    "EventSinkError",
    "JsonLinesSink",
    "PrefixIndex",
    "Recorder",
    "ZmqConfig",
    "ZmqSink",
    "decode",
    "start",
]
