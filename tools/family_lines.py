"""Writes docs/explanation/families.md: how many lines of code each family of plugins/ costs. A test compares the two.

python tools/family_lines.py

A line of code is one that has anything but a comment or a docstring on it.
"""

from __future__ import annotations

import ast
import importlib
import io
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "explanation" / "families.md"
TARGET = 120  # lines a distribution

# What modules are for, by name; all others are the kind itself: specs, lifetimes, families, views.
PURPOSES: Mapping[str, str] = {
    "readers": "reading",
    "shapes": "reading",
    "codecs": "formats",
    "rows": "formats",
    "planning": "planning",
    "checkpoint": "planning",
}
COLUMNS = ("kind", "reading", "formats", "planning")

# Why a distribution is above the target.
REASONS: Mapping[str, str] = {
    "kvframe-hisparse": (
        "more than a kind of cache: three sorts of layers in two memories. Its planning adds layers, groups them,\n"
        "  places host pages, and brings options of the command line, all by public hooks."
    ),
    "kvframe-mamba": (
        "five sorts of recurrent layers, which some fifteen model types spell in ways of their own. The kind itself\n"
        "  has ten fields, states of any number and shape, draft states, and states saved inside a prefill."
    ),
    "kvframe-mla": (
        "two families, the sparse indexer's cache, and packed rows in six formats, each with its views and a codec."
    ),
    "kvframe-sliding-window": (
        "the kind is within the target; the rest reads model types that spell windows in ways of their own."
    ),
}
_LAYOUT = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
)

HEAD = f"""\
# What a family costs

<!-- Made by tools/family_lines.py: run it after a plugin has changed. -->

In today's engines a new kind of cache means edits in a dozen core files. Here it is a distribution of its own, and this
is how long each of them is. Counted are lines of code: those with anything but a comment or a docstring on them. Tests
and documents are not counted, nor is `pyproject.toml`, of which a plugin writes two lines itself: its dependency and
its entry point.

*Kind* is the specs, lifetimes, families and views: what the core must be told. *Reading* turns the spellings of public
models' `config.json` into layers; a family whose models use the common spellings needs little of it. *Formats* packs
quantised rows. *Planning* answers planning hooks, and helps schedulers. The target is {TARGET} lines in all.
"""


@attrs.frozen(kw_only=True)
class Cost:
    """Lines of code of one distribution.

    Args:
        distribution: its name.
        families: names of its families.
        lines: by purpose.
    """

    distribution: str
    families: tuple[str, ...]
    lines: Mapping[str, int]

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.lines.values())


def code_lines(source: str) -> int:
    """Lines of a module that have code on them."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            and ast.get_docstring(node) is not None
        ):
            text = node.body[0]
            lines.difference_update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return len(lines)


def costs() -> Iterator[Cost]:
    """The cost of every distribution of plugins/ that brings families."""
    for folder in sorted((ROOT / "plugins").iterdir()):
        for package in sorted((folder / "src").glob("kvframe_*")):
            sources = {path.stem: path.read_text(encoding="utf-8") for path in package.rglob("*.py")}
            if "def kvframe_spec_families(" not in sources["__init__"]:
                continue  # a bridge to an engine, or cache dtypes alone
            lines = dict.fromkeys(COLUMNS, 0)
            for stem, source in sources.items():
                lines[PURPOSES.get(stem, "kind")] += code_lines(source)
            module = importlib.import_module(package.name)
            families = tuple(family.name for family in module.kvframe_spec_families())
            yield Cost(distribution=folder.name, families=families, lines=lines)


def page() -> str:
    """The page.

    Raises:
        KeyError: a distribution is above the target, and nobody says why.
    """
    found = sorted(costs(), key=lambda cost: cost.total)
    head = ["plugin", "families", *COLUMNS, "all"]
    rows = [head, ["---", "---", *["---:"] * (len(COLUMNS) + 1)]]
    for cost in found:
        numbers = [cost.lines[column] for column in COLUMNS]
        cells = [
            cost.distribution,
            ", ".join(cost.families),
            *(str(n or "") for n in numbers),
            f"**{cost.total}**",
        ]
        rows.append(cells)
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    above = [cost for cost in found if cost.total > TARGET]
    reasons = "\n".join(f"- {cost.distribution}: {REASONS[cost.distribution]}" for cost in above)
    families = sum(len(cost.families) for cost in found)
    below, kinds = len(found) - len(above), sum(cost.lines["kind"] <= TARGET for cost in found)
    return f"""{HEAD}
{table}

{len(found)} plugins bring {families} families. {below} plugins are within {TARGET} lines, and {kinds} kinds alone.
Above the target:

{reasons}

## Lines in the core: none

No module of `kvframe` names a plugin's class, family or distribution, and `tests/test_house.py` holds that. The one
exception is for messages: `kvframe/models/providers.py` lists which distribution brings a layer kind, so that a model
that needs it can say `pip install`. A kind that is not in that table works all the same.
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
