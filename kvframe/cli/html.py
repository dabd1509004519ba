"""The report of a plan as one HTML file: no network access, light and dark, good on paper and for screen readers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvframe.cli.answers import Answers, answers
from kvframe.cli.memory_map import plan_map_svg
from kvframe.cli.options import size_text
from kvframe.cli.plot import sweep_svg
from kvframe.cli.request import PlanRequest
from kvframe.cli.show import limit_text, summary, waste_by_cause
from kvframe.config import DEVICE
from kvframe.errors import MissingDependencyError
from kvframe.planning import Plan
from kvframe.version import VERSION

try:
    import jinja2
    import markupsafe
except ModuleNotFoundError as error:
    raise MissingDependencyError(module="--html", needs="jinja2", extra="report") from error


def report_html(config: Path, asked: PlanRequest, made: Plan, result: dict[str, Any]) -> str:
    """The report as HTML text.

    Args:
        config: the model's file, as the user named it.
        asked: what was asked for; answers further questions.
        made: the plan.
        result: what `--json` prints of it.
    """
    found = answers(asked, made)
    values = {
        "model": str(config),
        "version": VERSION,
        "result": result,
        "groups": _groups(result),
        "summary": summary(result),
        "limit": limit_text(result),
        "causes": _causes(result),
        "alternatives": sorted(result["alternatives"], key=lambda other: other["cost"]),
        "lengths": list(result["waste"]["structural_share_by_length"]),
        "answers": found,
        "plot": markupsafe.Markup(_plot(found, result)),
        "map": markupsafe.Markup(plan_map_svg(made, asked.model.kinds, asked.host.layouts)),
    }
    return environment().get_template("report.html").render(values)


def environment() -> jinja2.Environment:
    """The templates of reports, and how they write numbers."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kvframe.cli"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "size": size_text,
        "number": lambda value: f"{value:,}" if isinstance(value, int) else f"{value:,.2f}",
        "share": lambda value: f"{value:.2%}",
    }
    return environment


def _plot(found: Answers, result: dict[str, Any]) -> str:
    return sweep_svg(found.sweep, result["memory_bytes"], result["max_model_len"])


def _groups(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The groups with a name for people and their bytes of one request."""
    return [
        {
            **group,
            "name": ", ".join(f"{count:,} × {kind}" for kind, count in group["kinds"].items()),
            "held_bytes": group["blocks_per_request"] * group["stride_bytes"],
        }
        for group in result["groups"]
    ]


def _causes(result: dict[str, Any]) -> list[tuple[str, int, float]]:
    """Name, bytes, and share of what one request of max_model_len holds on the device."""
    causes = waste_by_cause(result["waste"])
    held = sum(group["held_bytes"] for group in _groups(result) if group["pool"] == DEVICE)
    rest = held - sum(value for _, value in causes)
    if rest:
        causes.append(("blocks larger than the model's own", rest))
    return [(name, value, value / held if held else 0.0) for name, value in causes]
