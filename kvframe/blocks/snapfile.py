"""The file of a snapshot: magic, version, lengths, a JSON header, arrays, and a SHA-256 over all of it."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvframe.blocks.pins import Pin
from kvframe.blocks.prefix import CacheImage

MAGIC = b"KVFRSNAP"
VERSION = 1
_HEAD = struct.Struct("<8sIIQ")  # magic, version, bytes of the header, bytes of the arrays
_CHECK = hashlib.sha256().digest_size
_CHUNK = 1 << 20


@attrs.frozen(kw_only=True)
class Contents:
    """What a snapshot holds.

    Args:
        fingerprint: of the configuration and the content.
        image: the keys.
        idle: (group, block) of everything cached, those that go first in front.
        pins: by name.
        owners: (id space, block) to the tenant whose it is, where there are tenants with quotas.
    """

    fingerprint: str
    image: CacheImage
    idle: tuple[tuple[int, int], ...]
    pins: Mapping[str, Pin]
    owners: Mapping[tuple[int, int], str | None]


@attrs.frozen(kw_only=True)
class Unreadable:
    """Why a file is no snapshot, in one word and in words."""

    reason: str
    detail: str


def fingerprint(*parts: str) -> str:
    """A hash of some texts."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


# --- to a file and back ---


def write(path: Path, contents: Contents) -> None:
    """Write a snapshot beside `path`, make sure that it is on the disk, and put it in place.

    Args:
        path: the file.
        contents: what to write.

    Raises:
        OSError: it cannot be written; what was at `path` is still there.
    """
    aside = path.with_name(f".{path.name}.writing")  # one name, so that what a crash left is written over
    data = _encode(contents)
    try:
        with aside.open("wb", buffering=0) as file:
            for start in range(0, len(data), _CHUNK):
                file.write(data[start : start + _CHUNK])
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    if hasattr(os, "O_DIRECTORY"):  # elsewhere folders cannot be synced
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read(path: Path) -> Contents | Unreadable:
    """A snapshot, or why the file is none."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Unreadable(reason="missing", detail=f"there is no file {path}")
    except OSError as error:
        return Unreadable(reason="missing", detail=f"{path} cannot be read: {error}")
    if len(data) < _HEAD.size:
        return Unreadable(reason="truncated", detail=f"{len(data)} bytes, fewer than the first fields take")
    magic, version, header_bytes, array_bytes = _HEAD.unpack_from(data)
    if magic != MAGIC:
        return Unreadable(reason="altered", detail="it does not begin as a snapshot does")
    if version != VERSION:
        return Unreadable(reason="version", detail=f"it has version {version}, this kvframe reads {VERSION}")
    expected = _HEAD.size + header_bytes + array_bytes + _CHECK
    if len(data) < expected:
        return Unreadable(reason="truncated", detail=f"{len(data)} bytes of {expected}")
    if len(data) > expected or hashlib.sha256(data[:-_CHECK]).digest() != data[-_CHECK:]:
        return Unreadable(reason="altered", detail="its checksum is another")
    return _decode(data, header_bytes)


# --- the form ---


def _encode(contents: Contents) -> bytes:
    tenants = list(dict.fromkeys(contents.owners.values()))
    numbers = {tenant: number for number, tenant in enumerate(tenants)}
    owners = [(space, block, numbers[owner]) for (space, block), owner in contents.owners.items()]
    arrays = {**_arrays(contents), "owners": np.array(owners, "<i4").reshape(-1)}
    header = {
        "fingerprint": contents.fingerprint,
        "arrays": [[name, str(array.dtype), len(array)] for name, array in arrays.items()],
        "tenants": tenants,
        "pins": [[name, pin.tokens, pin.blocks] for name, pin in contents.pins.items()],
    }
    head = json.dumps(header).encode()
    body = b"".join(array.tobytes() for array in arrays.values())
    data = _HEAD.pack(MAGIC, VERSION, len(head), len(body)) + head + body
    return data + hashlib.sha256(data).digest()


def _arrays(contents: Contents) -> dict[str, npt.NDArray[Any]]:
    """Flat arrays of fixed byte order."""
    image = contents.image
    whole, further = image.whole, image.further
    held = [block for _, _, blocks in further for block in blocks]
    return {
        "runs": np.array([number for g, blocks, _ in whole for number in (g, len(blocks))], "<i4"),
        "blocks": np.concatenate([np.zeros(0, "<i4"), *(blocks for _, blocks, _ in whole)]).astype("<i4"),
        "hashes": np.concatenate(
            [
                np.zeros(0, np.uint8),
                *(np.ascontiguousarray(d).view(np.uint8).reshape(-1) for _, _, d in whole),
            ]
        ),
        "covers": np.array(image.covers, "<i4").reshape(-1),
        "further": np.array([number for g, _, blocks in further for number in (g, len(blocks))], "<i4"),
        "further_hashes": np.frombuffer(b"".join(digest for _, digest, _ in further), np.uint8),
        "further_blocks": np.array(held, "<i4"),
        "idle": np.array(contents.idle, "<i4").reshape(-1),
    }


def _decode(data: bytes, header_bytes: int) -> Contents:
    header = json.loads(data[_HEAD.size : _HEAD.size + header_bytes])
    arrays: dict[str, npt.NDArray[Any]] = {}
    at = _HEAD.size + header_bytes
    for name, dtype, length in header["arrays"]:
        arrays[name] = np.frombuffer(data, dtype, length, at)
        at += arrays[name].nbytes
    words = arrays["hashes"].view(np.uint64).reshape(-1, 4)
    blocks = arrays["blocks"].astype(np.intp)
    whole, start = [], 0
    for group, count in arrays["runs"].reshape(-1, 2).tolist():
        whole.append((group, blocks[start : start + count], words[start : start + count]))
        start += count
    further, place, held = [], 0, arrays["further_blocks"].tolist()
    for number, (group, count) in enumerate(arrays["further"].reshape(-1, 2).tolist()):
        digest = arrays["further_hashes"][number * 32 : number * 32 + 32].tobytes()
        further.append((group, digest, tuple(held[place : place + count])))
        place += count
    covers = tuple(
        (space, block, tokens) for space, block, tokens in arrays["covers"].reshape(-1, 3).tolist()
    )
    return Contents(
        fingerprint=header["fingerprint"],
        image=CacheImage(whole=tuple(whole), covers=covers, further=tuple(further)),
        idle=tuple((group, block) for group, block in arrays["idle"].reshape(-1, 2).tolist()),
        pins={
            name: Pin(tokens=tokens, blocks=tuple(tuple(row) for row in rows))
            for name, tokens, rows in header["pins"]
        },
        owners={
            (space, block): header["tenants"][number]
            for space, block, number in arrays["owners"].reshape(-1, 3).tolist()
        },
    )
