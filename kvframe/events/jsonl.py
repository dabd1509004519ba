"""JsonLinesSink: a batch a line, for logs and for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvframe.events.records import EventBatch, as_map


def as_line(batch: EventBatch) -> str:
    """A batch as one line of JSON; hashes and digests are hexadecimal."""
    body = {
        "seq": batch.sequence,
        "ts": batch.time,
        "data_parallel_rank": batch.data_parallel_rank,
        "events": [as_map(event) for event in batch.events],
    }
    return json.dumps(body, default=_hexadecimal, separators=(",", ":"))


def _hexadecimal(value: Any) -> str:
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(f"events hold no {type(value).__name__}")


class JsonLinesSink:
    """Appends batches to a file. Each line is handed to the operating system before the next batch.

    Args:
        path: the file; made if it is not there.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: str | Path) -> None:
        self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115, closed by close()

    def __call__(self, batch: EventBatch) -> None:
        """Write one batch."""
        self._file.write(as_line(batch) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()
