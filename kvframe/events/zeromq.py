"""ZmqSink: batches over ZeroMQ, a PUB socket for what happens and a ROUTER socket for what a subscriber missed.

A published message has three frames: topic, sequence number (8 bytes, big-endian), payload (`wire`). To replay, a
subscriber sends from a DEALER socket an empty frame and the first sequence number that it wants; it gets (empty frame,
sequence number, payload) for each batch still kept, then the number −1 with an empty payload.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from typing import Any

from kvframe.events.records import EventBatch
from kvframe.events.wire import END, encoder, needed


def number(sequence: int) -> bytes:
    """A sequence number as a frame."""
    return sequence.to_bytes(8, "big", signed=True)


def _zmq() -> Any:
    try:
        import zmq
    except ImportError as error:
        raise needed("kvframe.events.ZmqSink", "pyzmq") from error
    return zmq


class ZmqSink:
    """Publishes batches. Needs the extra `kvframe[events]`.

    Args:
        endpoint: address of the PUB socket, such as "tcp://*:5557".
        replay: address of the ROUTER socket; None: no replay.
        topic: first frame of every message.
        kept: batches that can be replayed.
        backlog: messages that wait for a slow subscriber before it loses some; it sees that by their numbers.

    Raises:
        MissingDependencyError: pyzmq or msgspec is not installed.
        OSError: an address cannot be bound.
    """

    def __init__(
        self,
        endpoint: str = "tcp://*:5557",
        replay: str | None = None,
        *,
        topic: str = "",
        kept: int = 10_000,
        backlog: int = 100_000,
    ) -> None:
        zmq = _zmq()
        self._encode, self._topic = encoder(), topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        try:
            self._publisher = self._context.socket(zmq.PUB)
            self._publisher.set_hwm(backlog)
            self._publisher.bind(endpoint)
            self.endpoint: str = self._publisher.getsockopt_string(zmq.LAST_ENDPOINT)
            self.replay_endpoint: str | None = None
            if replay is not None:
                self._serve(zmq, replay)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(error.errno, f"{error.strerror}: {endpoint}, {replay}") from error

    def _serve(self, zmq: Any, address: str) -> None:
        router = self._context.socket(zmq.ROUTER)
        router.bind(address)
        self.replay_endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(
            target=self._answer, args=(zmq, router), name="kvframe-event-replay", daemon=True
        )
        self._thread.start()

    def __call__(self, batch: EventBatch) -> None:
        """Publish one batch."""
        payload = self._encode(batch)
        with self._lock:
            self._kept.append((batch.sequence, payload))
        self._publisher.send_multipart((self._topic, number(batch.sequence), payload))

    def _answer(self, zmq: Any, router: Any) -> None:
        # The router is this thread's alone: sockets may not be shared.
        while not self._done.is_set():
            if not router.poll(100):
                continue
            frames = router.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue  # not a request for a replay
            client, first = frames[0], int.from_bytes(frames[2], "big", signed=True)
            with self._lock:
                wanted = [kept for kept in self._kept if kept[0] >= first]
            with contextlib.suppress(zmq.ZMQError):  # the client may be gone
                for sequence, payload in wanted:
                    router.send_multipart((client, b"", number(sequence), payload))
                router.send_multipart((client, b"", number(END), b""))
        router.close(linger=0)

    def close(self) -> None:
        """Send what waits, for at most a second, and close the sockets."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        self._publisher.close(linger=1000)
        self._context.term()
