"""Request streams: random ones from distributions of lengths, and recorded ones from JSON lines. Lengths are tokens.

A recorded stream is a file of JSON lines, in kvframe's own form

    {"arrival": 0.25, "prompt": 1200, "output": 180, "prefix": [["manual", 1024]], "output_id": "turn-1"}

(arrival in seconds; `prefix`, the parts that the prompt begins with, by id and length, and `output_id`, under which
later prompts can repeat the answer, may be left out), or in that of the public Mooncake traces

    {"timestamp": 250, "input_length": 1200, "output_length": 180, "hash_ids": [7, 8, 31]}

(timestamp in milliseconds; each hash id is a block of 512 tokens of the prompt, the last one perhaps shorter).
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.checks import at_least
from kvframe.simulate.errors import StreamError
from kvframe.simulate.lengths import Lengths

MOONCAKE_BLOCK = 512  # tokens of a hash id

# Ids become distinct first tokens: an odd factor keeps different numbers apart modulo a power of two.
_SPREAD = 0x9E3779B1
_TOKENS = 1 << 31

Part = tuple[Hashable, int]


@attrs.frozen(kw_only=True)
class Arrival:
    """One request of a stream.

    Args:
        arrival: seconds after the stream's start.
        prompt: tokens of the prompt, shared parts included.
        output: tokens that it generates.
        prefix: what the prompt begins with: (id, tokens) of each part. Equal ids are equal tokens.
        output_id: id under which later prompts can repeat the output; None: nobody does.
    """

    arrival: float = 0.0
    prompt: int = attrs.field(validator=at_least(1))
    output: int = attrs.field(validator=at_least(1))
    prefix: tuple[Part, ...] = ()
    output_id: Hashable | None = None

    @property
    def tokens(self) -> int:
        """Prompt and output."""
        return self.prompt + self.output


class Tokens:
    """Makes token ids: parts with one id are equal wherever they come, all else is different."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._next = 0

    def of(self, arrival: Arrival) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """The ids of a request's prompt and output."""
        parts = [self._part(name, count) for name, count in arrival.prefix]
        rest = arrival.prompt - sum(count for _, count in arrival.prefix)
        if rest:
            parts.append(self._fresh(rest))
        output = (
            self._fresh(arrival.output)
            if arrival.output_id is None
            else self._part(arrival.output_id, arrival.output)
        )
        return (parts[0] if len(parts) == 1 else np.concatenate(parts)), output

    def _part(self, name: Hashable, count: int) -> npt.NDArray[np.int32]:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = self._next
            self._next += 1
        return _run(number, count)

    def _fresh(self, count: int) -> npt.NDArray[np.int32]:
        self._next += 1
        return _run(self._next - 1, count)


def _run(number: int, count: int) -> npt.NDArray[np.int32]:
    start = number * _SPREAD % _TOKENS
    return (np.arange(start, start + count) % _TOKENS).astype(np.int32)


@attrs.frozen(kw_only=True)
class RandomStream:
    """Requests drawn at random; the same seed gives the same requests.

    Args:
        requests: how many.
        prompt: tokens of the prompt's own part.
        output: tokens generated.
        rate: requests a second, Poisson; None: all wait from the start.
        documents: number of shared documents, one of which each prompt begins with; 0: none.
        document: tokens of a document.
        skew: popularity: document i (from 1) is drawn with weight i ** -skew; 0: all alike.
        seed: of the random numbers.
    """

    requests: int = attrs.field(validator=at_least(1))
    prompt: Lengths
    output: Lengths
    rate: float | None = None
    documents: int = attrs.field(default=0, validator=at_least(0))
    document: Lengths | None = None
    skew: float = 0.0
    seed: int = 0

    def __attrs_post_init__(self) -> None:
        if bool(self.documents) != (self.document is not None):
            raise StreamError(
                where="random stream", reason="documents need a length, and a length needs their number"
            )
        if self.rate is not None and not self.rate > 0:
            raise StreamError(
                where="random stream", reason=f"a rate of {self.rate} requests a second is none"
            )

    def arrivals(self) -> list[Arrival]:
        """The requests, in order of arrival."""
        rng = np.random.default_rng(self.seed)
        count = self.requests
        prompts, outputs = self.prompt.draw(rng, count).tolist(), self.output.draw(rng, count).tolist()
        times = np.zeros(count) if self.rate is None else np.cumsum(rng.exponential(1 / self.rate, count))
        prefixes: Sequence[tuple[Part, ...]] = [()] * count
        if self.document is not None:
            sizes = self.document.draw(rng, self.documents).tolist()
            weights = np.arange(1, self.documents + 1) ** -float(self.skew)
            chosen = rng.choice(self.documents, count, p=weights / weights.sum()).tolist()
            prefixes = [((f"document {number}", sizes[number]),) for number in chosen]
        return [
            Arrival(arrival=time, prompt=prompt + sum(n for _, n in prefix), output=output, prefix=prefix)
            for time, prompt, output, prefix in zip(times.tolist(), prompts, outputs, prefixes, strict=True)
        ]


@attrs.frozen(kw_only=True)
class RecordedStream:
    """Requests that were recorded, in order of arrival."""

    requests: tuple[Arrival, ...]

    def arrivals(self) -> list[Arrival]:
        """The requests, in order of arrival."""
        return sorted(self.requests, key=lambda arrival: arrival.arrival)


def read_stream(path: Path, limit: int | None = None) -> RecordedStream:
    """A recorded stream; the first line says which form the file has.

    Args:
        path: the file of JSON lines.
        limit: take no more requests than so many; None: all.

    Raises:
        StreamError: the file cannot be read, or a line is no request; names the line.
    """
    found: list[Arrival] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if limit is not None and len(found) == limit:
                    break
                if line.strip():
                    found.append(_arrival(line, f"{path}, line {number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise StreamError(where=str(path), reason=f"cannot be read: {error}") from error
    if not found:
        raise StreamError(where=str(path), reason="holds no request")
    return RecordedStream(requests=tuple(found))


def _arrival(line: str, where: str) -> Arrival:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise StreamError(where=where, reason=f"is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise StreamError(where=where, reason="must be an object")
    mooncake = "input_length" in values
    known: tuple[str, ...] = ("timestamp", "input_length", "output_length", "hash_ids")
    if not mooncake:
        known = ("arrival", "prompt", "output", "prefix", "output_id")
    unknown = sorted(values.keys() - set(known))
    if unknown:
        raise StreamError(
            where=where, reason=f"has keys that are not among {', '.join(known)}: {', '.join(unknown)}"
        )
    prompt, output = (_count(values, key, where) for key in known[1:3])
    time = values.get(known[0], 0)
    if isinstance(time, bool) or not isinstance(time, (int, float)) or not 0 <= time < float("inf"):
        raise StreamError(where=where, reason=f"{known[0]} = {time!r}: must be a number from 0 on")
    prefix = (
        _blocks(values.get("hash_ids", []), prompt, where)
        if mooncake
        else _parts(values.get("prefix", []), prompt, where)
    )
    name = values.get("output_id")
    return Arrival(
        arrival=time / 1000 if mooncake else float(time),
        prompt=prompt,
        output=output,
        prefix=prefix,
        output_id=None if name is None else str(name),
    )


def _count(values: dict[str, Any], key: str, where: str) -> int:
    count = values.get(key)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise StreamError(where=where, reason=f"{key} = {count!r}: must be a whole number of at least 1")
    return count


def _blocks(ids: Any, prompt: int, where: str) -> tuple[Part, ...]:
    """Mooncake's ids as parts of 512 tokens; what the ids do not cover is nobody else's."""
    whole = -(-prompt // MOONCAKE_BLOCK)
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids) or len(ids) > whole:
        raise StreamError(
            where=where,
            reason=f"hash_ids must be at most {whole} whole numbers, one a {MOONCAKE_BLOCK} tokens",
        )
    ends = range(MOONCAKE_BLOCK, len(ids) * MOONCAKE_BLOCK + 1, MOONCAKE_BLOCK)
    return tuple((i, MOONCAKE_BLOCK - max(0, end - prompt)) for i, end in zip(ids, ends, strict=True))


def _parts(parts: Any, prompt: int, where: str) -> tuple[Part, ...]:
    good = isinstance(parts, list) and all(
        isinstance(part, list)
        and len(part) == 2
        and isinstance(part[0], (str, int))
        and isinstance(part[1], int)
        and part[1] > 0
        for part in parts
    )
    if not good or sum(part[1] for part in parts) > prompt:
        raise StreamError(
            where=where, reason=f"prefix must list [id, tokens] pairs of at most {prompt} tokens together"
        )
    return tuple((str(name), count) for name, count in parts)


def mooncake_lines(arrivals: Iterable[Arrival]) -> Iterator[str]:
    """Requests in the Mooncake traces' form. Blocks get equal ids where a prompt's tokens are equal up to their ends.

    Their outputs are nobody's prefix in that form, and blocks that differ only after 512 · i tokens share i ids.
    """
    made, ids = Tokens(), dict[bytes, int]()
    for arrival in arrivals:
        prompt, _ = made.of(arrival)
        hashes = []
        for end in range(MOONCAKE_BLOCK, len(prompt) + MOONCAKE_BLOCK, MOONCAKE_BLOCK):
            hashes.append(ids.setdefault(prompt[:end].tobytes(), len(ids)))
        yield json.dumps(
            {
                "timestamp": round(arrival.arrival * 1000),
                "input_length": arrival.prompt,
                "output_length": arrival.output,
                "hash_ids": hashes,
            }
        )
