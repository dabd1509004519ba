"""Option types of the command line: sizes in bytes and their units."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import click

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
    "TIB": 1 << 40,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(value: Any) -> int:
    """Text to bytes, exactly: `10737418240`, `10GiB`, `10.5 GB`; a fraction of a byte is dropped."""
    if isinstance(value, int):
        return value
    match = _SIZE.fullmatch(value)
    if match is None or match[2].upper() not in _UNITS:
        raise click.BadParameter(
            f"{value!r} is no size: write bytes, or a number with KB, MB, GB, KiB, MiB or GiB"
        )
    return int(Fraction(match[1]) * _UNITS[match[2].upper()])


def parse_numbers(value: Any) -> tuple[int, ...]:
    """Text to whole numbers above 0, with commas between: `20,22`."""
    if isinstance(value, tuple):
        return value
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{value!r} is no list of whole numbers above 0, such as 20,22")
    return tuple(map(int, parts))


def new_file(value: str) -> Path:
    """Text to a file that can be written; checked before any work is done for it."""
    path = Path(value)
    if path.is_dir():
        raise click.BadParameter(f"{value} is a folder")
    if not path.parent.is_dir():
        raise click.BadParameter(f"{value}: there is no folder {path.parent}")
    return path


def size_text(nbytes: int) -> str:
    """Bytes as people read them."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(nbytes) >= factor:
            return f"{nbytes / factor:,.2f} {unit}"
    return f"{nbytes:,} B"
