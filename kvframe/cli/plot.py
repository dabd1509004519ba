"""The budget sweep as a plot: how many requests, and so tokens, fit into how much memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs

from kvframe.cli.options import size_text
from kvframe.cli.svg import Drawing

WIDTH, HEIGHT = 720, 340
LEFT, RIGHT, TOP, BOTTOM = 70, 90, 40, 50
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


@attrs.frozen(kw_only=True)
class SweepPoint:
    """What a budget gives. Bytes on one rank, requests of max_model_len at once, tokens in them; 0: none fits."""

    memory_bytes: int
    requests: float
    tokens: int


def sweep_svg(points: Sequence[SweepPoint], given: int, max_model_len: int) -> str:
    """The plot as SVG text. One curve has two scales, since tokens are requests times their length.

    Args:
        points: what each budget gives, from the smallest to the largest budget.
        given: the budget of the plan, bytes; marked.
        max_model_len: tokens of each request.
    """
    words = f"from {points[0].requests:,.2f} requests with {size_text(points[0].memory_bytes)}"
    drawing = Drawing(
        WIDTH,
        "Requests and tokens by memory",
        f"A curve {words} to {points[-1].requests:,.2f} with {size_text(points[-1].memory_bytes)}. "
        f"The numbers are in the table below the plot.",
    )
    widest, highest = points[-1].memory_bytes, max(p.requests for p in points) or 1.0

    def at(memory: float, requests: float) -> tuple[float, float]:
        x = LEFT + memory / widest * (WIDTH - LEFT - RIGHT)
        return x, HEIGHT - BOTTOM - requests / highest * (HEIGHT - TOP - BOTTOM)

    left, bottom = at(0, 0)
    right, top = at(widest, highest)
    drawing.text(8, 20, f"Requests of {max_model_len:,} tokens at once", "note")
    drawing.text(WIDTH - 8, 20, "Tokens", "note", "end")
    for value in nice_steps(highest):
        y = at(0, value)[1]
        drawing.line((left, y), (right, y), "grid")
        drawing.text(left - 8, y + 4, f"{value:,.10g}", "", "end")
    for value in nice_steps(highest * max_model_len):
        y = at(0, value / max_model_len)[1]
        drawing.line((right, y), (right + 4, y), "mark")
        drawing.text(right + 8, y + 4, _short(value), "")
    unit, factor = next((u for u in _UNITS if u[1] <= widest), ("B", 1))
    for value in nice_steps(widest / factor):
        x = at(value * factor, 0)[0]
        drawing.line((x, bottom), (x, bottom + 4), "mark")
        drawing.text(x, bottom + 18, f"{value:,.10g}", "", "middle")
    drawing.text(
        (left + right) / 2, bottom + 38, f"Memory for the cache on one rank, {unit}", "note", "middle"
    )
    drawing.line((left, bottom), (right, bottom), "mark")
    x = at(given, 0)[0]
    drawing.line((x, top), (x, bottom), "given")
    drawing.text(x + 5, top - 4, f"this plan: {size_text(given)}", "", "middle")
    drawing.curve([at(p.memory_bytes, p.requests) for p in points if p.requests], "curve")
    for p in points:
        title = f"{size_text(p.memory_bytes)}: {p.requests:,.2f} requests, {p.tokens:,} tokens"
        drawing.circle(*at(p.memory_bytes, p.requests), 4, "dot" if p.requests else "none", title)
    return drawing.to_text(HEIGHT)


def nice_steps(highest: float) -> list[float]:
    """Round numbers from 0 to `highest`, up to eight of them: 1, 2 or 5 times a power of ten apart."""
    rough = highest / 7
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    return [step * index for index in range(int(highest / step + 1e-9) + 1)]


def _short(value: float) -> str:
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:,.4g} {unit}"
    return f"{value:,.4g}"
