"""The memory map: one slab, and one block of every group, drawn to scale from nothing but a plan's data."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvframe.cli.block_pieces import Block, Piece, block_of
from kvframe.cli.options import size_text
from kvframe.cli.svg import HUES, Drawing
from kvframe.config import KVCacheConfig, Pool
from kvframe.layout import Layouts, builtin_layouts
from kvframe.planning import Plan

WIDTH, MARGIN = 960, 16
BAR = WIDTH - 2 * MARGIN
LETTER = 5.8  # pixels of a letter of a layer's label
NARROWEST = 3.0  # pixels; blocks narrower than this are not drawn one by one


def plan_map_svg(made: Plan, kinds: Mapping[str, str], layouts: Layouts | None = None) -> str:
    """The memory map of a plan's only pipeline stage, or of the one with the fewest blocks, which decides for all.

    Args:
        made: the plan.
        kinds: layer name to the word it is reported under; layers that a plugin added go by their family's name.
        layouts: as for `memory_map_svg`.
    """
    stages = made.report.stages
    decides = min(range(len(stages)), key=lambda index: int(stages[index]["num_blocks"]), default=0)
    names = []
    for group in made.configs[decides].groups:
        families = zip(
            group.layer_names, group.family, strict=False
        )  # a group without layers keeps its families
        words = Counter(kinds.get(layer, family) for layer, family in families)
        names.append(", ".join(f"{count:,} × {word}" for word, count in words.items()) or "no layers")
    stage = f"Pipeline stage {decides} of {len(stages)}, which decides. " if len(stages) > 1 else ""
    return memory_map_svg(made.configs[decides], names, layouts, stage)


def memory_map_svg(
    config: KVCacheConfig, group_names: Sequence[str], layouts: Layouts | None = None, note: str = ""
) -> str:
    """The memory map of a plan as SVG text: pools, slabs, blocks, layers, padding and strides, each bar to scale.

    Groups overlay each other, so each has a row of its own. Where layers lie outermost, a block is one page in each
    layer's region; the picture shows these pages side by side, and says so.

    Args:
        config: the plan of one rank.
        group_names: what to call each group, in the order of `config.groups`.
        layouts: the layouts of the plugin host; None: the built-in ones.
        note: words to put before those about each pool's layout.

    Raises:
        LayoutError: the plan names a layout that is not known, or places a layer where it cannot lie.
    """
    known = layouts or Layouts(builtin_layouts())
    drawing = Drawing(WIDTH, "Memory map", _description(config, group_names))
    y = float(MARGIN)
    for pool in config.pools.values():
        blocks = [
            block_of(config, pool, number, name, known)
            for number, (group, name) in enumerate(zip(config.groups, group_names, strict=True))
            if group.pool == pool.name
        ]
        if blocks:
            y = _draw_pool(drawing, y, pool, blocks, note)
    return drawing.to_text(_draw_legend(drawing, y) + MARGIN)


def _description(config: KVCacheConfig, names: Sequence[str]) -> str:
    parts = [
        f"group {number}: {name}, {group.blocks_per_slab} blocks a slab of pool {group.pool}"
        for number, (group, name) in enumerate(zip(config.groups, names, strict=True))
    ]
    return f"One block of each group, drawn to scale. {'; '.join(parts)}."


def _draw_pool(drawing: Drawing, y: float, pool: Pool, blocks: Sequence[Block], note: str) -> float:
    slabs = any(block.group.blocks_per_slab > 1 for block in blocks)
    unit = "slab" if slabs else "block"
    size = f"{size_text(pool.slab_bytes)} ({pool.slab_bytes:,} bytes)"
    drawing.text(MARGIN, y + 12, f"Pool {pool.name}: {pool.num_slabs:,} {unit}s of {size}", "heading")
    y += 14
    overlay = f" Groups overlay each other: a {unit} belongs to one group at a time." if blocks[1:] else ""
    for words in (f"{note}Layout {pool.layout}.{overlay}", *_notes(pool, blocks)):
        drawing.text(MARGIN, y + 16, words, "note")
        y += 16
    if slabs:
        y = _draw_slab(drawing, y + 12, pool, blocks)
        drawing.text(MARGIN, y + 26, "One block of each group", "part")
        y += 26
    for block in blocks:
        y = _draw_block(drawing, y + 14, block)
    return y + 20


def _notes(pool: Pool, blocks: Sequence[Block]) -> Iterable[str]:
    """What the layout makes hard to see."""
    if any(block.regions for block in blocks):
        yield (
            f"Layers lie outermost: each has a region of {pool.num_slabs:,} pages. Drawn is one block: "
            f"one page of each region; ticks at the bar stand where a region ends."
        )
    split = max(Counter(piece.layer for block in blocks for piece in block.pieces).values(), default=1)
    if split > 1:
        yield f"A layer's page is not one piece in this layout, but {split:,}: one for each head slot."


def _draw_slab(drawing: Drawing, y: float, pool: Pool, blocks: Sequence[Block]) -> float:
    drawing.text(MARGIN, y + 12, "One slab, cut into each group's blocks", "part")
    y += 16
    for block in blocks:
        count, hue = block.group.blocks_per_slab, f"h{block.number % HUES}"
        width = block.stride / pool.slab_bytes * BAR
        words = f"{count:,} {'block' if count == 1 else 'blocks'} of {size_text(block.stride)}"
        drawing.text(MARGIN, y + 12, f"Group {block.number}: {words} ({block.name})", "note")
        y += 17
        if width < NARROWEST:
            drawing.rect(MARGIN, y, width * count, 16, f"cell {hue}", words)
        for index in range(count if width >= NARROWEST else 0):
            drawing.rect(MARGIN + index * width, y, width, 16, f"cell {hue}", f"block {index} of {words}")
        _draw_unused(drawing, y, 16, (MARGIN + width * count, MARGIN + BAR), pool.slab_bytes % count, "rest")
        drawing.rect(MARGIN, y, BAR, 16, "frame")
        y += 19
    return _draw_axis(drawing, y - 3, pool.slab_bytes)


def _draw_block(drawing: Drawing, y: float, block: Block) -> float:
    drawing.text(MARGIN, y + 10, f"Group {block.number}: {block.name}", "name")
    drawing.text(MARGIN, y + 26, _facts(block), "note")
    y, height, scale = y + 34, 36, BAR / block.stride
    end = 0
    for piece in block.pieces:
        _draw_unused(drawing, y, height, _span(end, piece.start, scale), piece.start - end, "not used")
        _draw_piece(drawing, y, height, scale, piece, f"h{block.number % HUES}")
        end = piece.page_end
    _draw_unused(drawing, y, height, _span(end, block.stride, scale), block.stride - end, "not used")
    drawing.rect(MARGIN, y, BAR, height, "frame")
    for before, start in itertools.pairwise(block.regions):
        if (start - before) * scale >= 2 * NARROWEST:
            x = MARGIN + start * scale
            drawing.line((x, y - 5), (x, y), "cut")
            drawing.line((x, y + height), (x, y + height + 5), "cut")
    for start, stop, label in _labels(block.pieces, scale):
        left, right = _span(start, stop, scale)
        drawing.text((left + right) / 2, y + height / 2 + 4, label, "label", "middle")
    return _draw_axis(drawing, y + height, block.stride)


def _labels(pieces: Sequence[Piece], scale: float) -> Iterable[tuple[int, int, str]]:
    """Labels that fit, and the bytes they stand in: a layer's own, or first to last of neighbours too narrow for it."""

    def fits(start: int, end: int, label: str) -> bool:
        return LETTER * len(label) + 1 <= (end - start) * scale

    narrow: list[tuple[int, int, Piece]] = []
    for _, same in itertools.groupby(pieces, key=lambda piece: piece.layer):
        members = list(same)
        first, last = members[0], members[-1]
        start, end, label = first.start, last.end, _short(first.layer)
        if fits(start, end, label):
            yield start, end, label
            continue
        if narrow and (narrow[-1][2].run, narrow[-1][2].position + 1) != (first.run, first.position):
            yield from _stretch(narrow, fits)
            narrow = []
        narrow.append((start, end, first))
    yield from _stretch(narrow, fits)


def _stretch(
    narrow: Sequence[tuple[int, int, Piece]], fits: Callable[[int, int, str], bool]
) -> Iterable[tuple[int, int, str]]:
    if len(narrow) > 1:
        (start, _, first), (_, end, last) = narrow[0], narrow[-1]
        label = f"{_short(first.layer)}–{_short(last.layer)}"
        if fits(start, end, label):
            yield start, end, label


def _facts(block: Block) -> str:
    group = block.group
    if not block.pieces:
        return f"block of {group.block_size:,} tokens, no layers on this rank; stride {block.stride:,} bytes"
    pages = [(len(t.layers), group.page_of(t.layers[0]), t.layer_stride) for t in block.tensors]
    layers = " + ".join(f"{count} × {page:,}" for count, page, _ in pages[:3]) + (" + …" if pages[3:] else "")
    steps = sorted({step for count, _, step in pages if count > 1})
    layer_stride = f"; layer stride {', '.join(f'{step:,}' for step in steps[:3])}" if steps else ""
    block_stride = block.tensors[0].block_stride
    return (
        f"block of {group.block_size:,} tokens: {layers} = {group.page_size_bytes:,} bytes; "
        f"block stride {block_stride:,}{layer_stride}"
    )


def _draw_piece(drawing: Drawing, y: float, height: float, scale: float, piece: Piece, hue: str) -> None:
    left, right = _span(piece.start, piece.end, scale)
    kind = f"{hue}{' odd' if piece.run % 2 else ''}{' cell' if right - left > NARROWEST else ''}"
    size = f"bytes {piece.start:,} to {piece.end:,} ({piece.end - piece.start:,})"
    drawing.rect(left, y, right - left, height, kind, f"{piece.layer}: {size}")
    if piece.page_end > piece.end:
        left, right = _span(piece.end, piece.page_end, scale)
        padded = piece.page_end - piece.end
        drawing.rect(left, y, right - left, height, "padding", f"{piece.layer}: {padded:,} bytes of padding")


def _draw_unused(
    drawing: Drawing, y: float, height: float, span: tuple[float, float], nbytes: int, what: str
) -> None:
    left, right = span
    if nbytes > 0:
        drawing.rect(left, y, right - left, height, "empty", f"{nbytes:,} bytes {what}")


def _draw_axis(drawing: Drawing, y: float, nbytes: int) -> float:
    for quarter in range(5):
        x = MARGIN + BAR * quarter / 4
        drawing.line((x, y), (x, y + 4), "mark")
        anchor = {0: "start", 4: "end"}.get(quarter, "middle")
        drawing.text(x, y + 15, size_text(nbytes * quarter // 4) if quarter else "0", "small note", anchor)
    return y + 18


def _draw_legend(drawing: Drawing, y: float) -> float:
    x = float(MARGIN)
    for kind, words in (
        ("h0", "a layer's page (number: its layer)"),
        ("padding", "padding of a page"),
        ("empty", "not used by the group"),
    ):
        drawing.rect(x, y, 24, 12, kind)
        drawing.rect(x, y, 24, 12, "frame")
        drawing.text(x + 30, y + 10, words, "note")
        x += 60 + 6.5 * len(words)
    return y + 14


def _span(start: int, end: int, scale: float) -> tuple[float, float]:
    return MARGIN + start * scale, MARGIN + end * scale


def _short(layer: str) -> str:
    number = re.search(r"\d+", layer)
    return number[0] if number else layer
