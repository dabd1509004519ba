"""Writes docs/reference/hooks.md from kvframe/hookspecs.py. Run it after a hook has changed; a test compares the two.

python tools/hooks_reference.py
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from kvframe import hookspecs

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "hooks.md"

HEAD = """\
# Hooks

<!-- Made from kvframe/hookspecs.py by tools/hooks_reference.py: change that file, then run the tool. -->

A plugin marks functions of these names with `@kvframe.hookimpl`, in the module that its entry point in the group
`kvframe.plugins` names. Hooks run when plugins load and when a plan is made, never per engine step. Implementations may
leave arguments out; default values are forbidden. [Stability](../explanation/stability.md) says what may change when.
"""

_BANNER = re.compile(r"^# --- (.+?) -+$", re.MULTILINE)


def sections() -> dict[str, list[str]]:
    """The banners of the module, and the hooks below each, in order."""
    text = inspect.getsource(hookspecs)
    starts = [(match.start(), match[1]) for match in _BANNER.finditer(text)]
    found: dict[str, list[str]] = {}
    for match in re.finditer(r"^def (kvframe_\w+)", text, re.MULTILINE):
        title = [name for start, name in starts if start < match.start()][-1]
        found.setdefault(title[0].upper() + title[1:], []).append(match[1])
    return found


def entry(name: str) -> str:
    """One hook: signature, promise, contract."""
    function = getattr(hookspecs, name)
    info = hookspecs.hook_info(name)
    lines = [f"### `{name}`", "", "```python", _signature(name, function), "```", "", f"Since {info.since}."]
    if info.deprecated:
        lines.append(f"**Deprecated:** {info.deprecated}.")
    lines += [
        f"**Argument `{arg}` deprecated:** {instead}." for arg, instead in info.deprecated_arguments.items()
    ]
    return "\n".join([*lines, "", _contract(function)])


def _signature(name: str, function: object) -> str:
    signature = inspect.signature(function)  # type: ignore[arg-type]
    arguments = ", ".join(f"{p.name}: {p.annotation}" for p in signature.parameters.values())
    return f"def {name}({arguments}) -> {signature.return_annotation}"


def _contract(function: object) -> str:
    """The docstring, its Google-style lists as Markdown lists."""
    lines = []
    for line in (inspect.getdoc(function) or "").splitlines():
        if re.fullmatch(r"(Args|Raises|Returns):", line):
            lines += [f"**{line}**", ""]
        elif re.match(r"    \S+: ", line):
            word, _, text = line.strip().partition(": ")
            lines.append(f"- `{word}`: {text}")
        else:
            lines.append(line.replace("        ", "  ", 1))
    return "\n".join(lines)


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, names in sections().items():
        parts += [f"## {title}\n", *(f"{entry(name)}\n" for name in names)]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
