"""Pictures as SVG text, without outside parts: readable in light and dark mode, in print, and by screen readers."""

from __future__ import annotations

from collections.abc import Iterable
from xml.etree import ElementTree

HUES = 8  # colours for groups; more groups use them again

_LIGHT = ("#9ec5f4", "#f7c48a", "#a5dba8", "#cdb4f0", "#8fdcd8", "#f4a9bd", "#e6d68a", "#c3c8d0")
_DARK = ("#2b5d99", "#8a5312", "#2f6e3a", "#5f3f96", "#17706c", "#8c3450", "#6f6115", "#4e5663")
_INK_ON_LIGHT = "--p: #ffffff; --i: #16191d; --m: #50575f; --e: #c9ced4; --a: #1f5fbf;"
_INK_ON_DARK = "--p: #14171a; --i: #eceff2; --m: #a9b1ba; --e: #444c55; --a: #7db2ff;"


def _hues(colours: Iterable[str]) -> str:
    return " ".join(f"--h{number}: {colour};" for number, colour in enumerate(colours))


_STYLE = f"""
.kv {{ {_INK_ON_LIGHT} {_hues(_LIGHT)} font: 12px system-ui, sans-serif; max-width: 100%; height: auto; }}
@media (prefers-color-scheme: dark) {{ .kv {{ {_INK_ON_DARK} {_hues(_DARK)} }} }}
@media print {{ .kv {{ {_INK_ON_LIGHT} {_hues(_LIGHT)} }} }}
.kv text {{ fill: var(--i); }}
.kv .heading {{ font-size: 15px; font-weight: 600; }}
.kv .part {{ font-size: 13px; font-style: italic; }}
.kv .name {{ font-size: 13px; font-weight: 600; }}
.kv .note {{ fill: var(--m); }}
.kv .small {{ font-size: 10px; }}
.kv .label {{ font-size: 9px; }}
.kv .paper {{ fill: var(--p); }}
.kv .cell {{ stroke: var(--p); stroke-width: 1; }}
.kv .odd {{ fill-opacity: 0.6; }}
.kv .frame {{ fill: none; stroke: var(--m); stroke-width: 1; }}
.kv .empty {{ fill: url(#kv-empty); }}
.kv .padding {{ fill: url(#kv-padding); }}
.kv .mark {{ stroke: var(--m); stroke-width: 1; }}
.kv .grid {{ stroke: var(--e); stroke-width: 1; }}
.kv .cut {{ stroke: var(--i); stroke-width: 2; }}
.kv .given {{ stroke: var(--m); stroke-width: 1; stroke-dasharray: 4 3; }}
.kv .curve {{ fill: none; stroke: var(--a); stroke-width: 2; }}
.kv .dot {{ fill: var(--a); stroke: var(--p); stroke-width: 1; }}
.kv .none {{ fill: var(--p); stroke: var(--m); stroke-width: 1.5; }}
.kv-stripe {{ stroke: var(--m); stroke-width: 1; }}
"""
_STYLE += "\n".join(f".kv .h{number} {{ fill: var(--h{number}); }}" for number in range(HUES))


class Drawing:
    """A picture that is drawn shape by shape and then written.

    Sizes and places are pixels, y grows downwards. `kind` is one or more class names of the style above.

    Args:
        width: of the whole picture.
        label: what screen readers call the picture.
        description: what is to be seen in it, as a sentence.
    """

    def __init__(self, width: int, label: str, description: str) -> None:
        self.width = width
        self._root = ElementTree.Element(
            "svg", {"xmlns": "http://www.w3.org/2000/svg", "class": "kv", "role": "img", "aria-label": label}
        )
        self._add("title", {}, label)
        self._add("desc", {}, description)
        self._add("style", {}, _STYLE)
        patterns = ElementTree.SubElement(self._root, "defs")
        for name, path in (("kv-empty", "M0 6L6 0"), ("kv-padding", "M0 0L6 6M0 6L6 0")):
            size = {"width": "6", "height": "6", "patternUnits": "userSpaceOnUse"}
            pattern = ElementTree.SubElement(patterns, "pattern", {"id": name, **size})
            ElementTree.SubElement(pattern, "path", {"d": path, "class": "kv-stripe"})
        self._paper = self._add("rect", {"class": "paper"})

    def rect(self, x: float, y: float, width: float, height: float, kind: str, title: str = "") -> None:
        """A rectangle; `title` is shown when the pointer rests on it."""
        box = {"x": _px(x), "y": _px(y), "width": _px(width), "height": _px(height), "class": kind}
        self._titled(self._add("rect", box), title)

    def circle(self, x: float, y: float, radius: float, kind: str, title: str = "") -> None:
        """A circle around (x, y)."""
        self._titled(
            self._add("circle", {"cx": _px(x), "cy": _px(y), "r": _px(radius), "class": kind}), title
        )

    def line(self, start: tuple[float, float], end: tuple[float, float], kind: str) -> None:
        """A straight line."""
        (x1, y1), (x2, y2) = start, end
        self._add("line", {"x1": _px(x1), "y1": _px(y1), "x2": _px(x2), "y2": _px(y2), "class": kind})

    def curve(self, points: Iterable[tuple[float, float]], kind: str) -> None:
        """Straight lines from point to point."""
        self._add("polyline", {"points": " ".join(f"{_px(x)},{_px(y)}" for x, y in points), "class": kind})

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """Words on the base line y; `anchor`: whether x is their start, middle or end."""
        self._add("text", {"x": _px(x), "y": _px(y), "class": kind, "text-anchor": anchor}, words)

    def to_text(self, height: float) -> str:
        """The picture as SVG text, cut off at `height`."""
        for size, value in (("width", _px(self.width)), ("height", _px(height))):
            self._root.set(size, value)
            self._paper.set(size, value)
        self._root.set("viewBox", f"0 0 {_px(self.width)} {_px(height)}")
        return ElementTree.tostring(self._root, encoding="unicode")

    def _add(self, tag: str, attributes: dict[str, str], words: str = "") -> ElementTree.Element:
        element = ElementTree.SubElement(self._root, tag, attributes)
        element.text = words or None
        return element

    def _titled(self, element: ElementTree.Element, title: str) -> None:
        if title:
            ElementTree.SubElement(element, "title").text = title


def _px(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
