"""The report of a simulation as one HTML file: no network access, light and dark, for screen readers too."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvframe.cli.html import environment
from kvframe.cli.simulate_show import HEADINGS, cells, group_cells, notes, title
from kvframe.simulate import Result
from kvframe.version import VERSION

_BAR = 8.0  # rem: a hit rate of 100 %


def report_html(config: Path, results: Sequence[Result]) -> str:
    """The report as HTML text.

    Args:
        config: the model's file, as the user named it.
        results: the cases, in order.
    """
    cases = [
        {
            "title": title(result).rstrip(":"),
            "result": result,
            "groups": group_cells(result),
            "notes": notes(result),
            "bars": [round(_BAR * (group.hit_rate or 0.0), 2) for group in result.groups],
        }
        for result in results
    ]
    values = {
        "model": str(config),
        "version": VERSION,
        "results": results,
        "headings": HEADINGS,
        "rows": [cells(result) for result in results],
        "cases": cases,
    }
    return environment().get_template("simulation.html").render(values)
