"""Tables for people. rich is imported here alone, when something is printed; it respects NO_COLOR."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPED_WIDTH = 200  # columns where there is no terminal to ask: as wide as the table is


def console() -> Console:
    """The standard output: colours on a terminal only."""
    from rich.console import Console  # start-up of --json must not pay for it

    made = Console()
    return made if made.is_terminal else Console(width=max(made.width, PIPED_WIDTH))


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, numbers: Sequence[str] = ()) -> Table:
    """A plain table; columns named in `numbers` are flush right."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        made.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    for row in rows:
        made.add_row(*(f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row))
    return made
