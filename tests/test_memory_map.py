"""The memory map: every layer where the plan puts it, to scale, and readable."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import attrs
import pytest

from kvframe import EngineConfig, FullAttentionSpec, load_plugins
from kvframe.cli.memory_map import BAR, MARGIN, WIDTH, memory_map_svg, plan_map_svg
from kvframe.config import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, Pool
from kvframe.errors import LayoutError
from kvframe.planning import Plan, plan
from kvframe_sliding_window import SlidingWindowSpec
from tests.command_line import kvframe
from tests.plans import group_of, plan_of

GEMMA = Path(__file__).parent.parent / "examples" / "models" / "gemma-3-27b.json"
SHAPE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 8, "head_size": 64, "dtype": "bfloat16"}
PAGE = 2 * 16 * 8 * 64 * 2  # K and V, 16 tokens, 8 heads of 64 elements of 2 bytes
FULL = FullAttentionSpec(**SHAPE)
SLIDING = SlidingWindowSpec(**SHAPE, sliding_window=128)
TOLERANCE = 0.011  # pixels are written with two digits


@attrs.frozen
class Box:
    """A rectangle of the picture, with what it says when the pointer rests on it."""

    x: float
    width: float
    y: float
    kind: str
    title: str


def boxes(svg: str) -> list[Box]:
    found = []
    for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect"):
        title = element.find("{http://www.w3.org/2000/svg}title")
        numbers = (float(element.get(name) or 0) for name in ("x", "width", "y"))
        words = "" if title is None else str(title.text)
        found.append(Box(*numbers, str(element.get("class")), words))
    return found


def layers_of(svg: str) -> dict[str, list[Box]]:
    """Layer name to its rectangles."""
    found: dict[str, list[Box]] = {}
    for box in boxes(svg):
        named = re.fullmatch(r"(.+): bytes [\d,]+ to [\d,]+ \([\d,]+\)", box.title)
        if named:
            found.setdefault(named[1], []).append(box)
    return found


def words_of(svg: str) -> str:
    return "\n".join(
        str(e.text) for e in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    )


def planned(full: int, sliding: int, **options: Any) -> Plan:
    specs = {f"layers.{n}.attn": FULL if n < full else SLIDING for n in range(full + sliding)}
    return plan(specs, engine=EngineConfig(max_model_len=1024), memory=256 << 20, **options)


def drawn(config: KVCacheConfig) -> str:
    return memory_map_svg(config, [f"group {n}" for n in range(len(config.groups))])


def test_each_layer_lies_where_the_plan_puts_it() -> None:
    config = planned(3, 10, layout="BLHNC").config
    found = layers_of(drawn(config))
    assert sorted(found) == sorted(f"layers.{n}.attn" for n in range(13))
    for tensor in config.tensors:
        for index, layer in enumerate(tensor.layers):
            (box,) = found[layer]
            first = tensor.address(index, 0)
            assert box.title == f"{layer}: bytes {first:,} to {first + PAGE:,} ({PAGE:,})"
            assert box.x == pytest.approx(MARGIN + BAR * first / tensor.block_stride, abs=TOLERANCE)
            assert box.width == pytest.approx(BAR * PAGE / tensor.block_stride, abs=TOLERANCE)


def test_groups_that_overlay_each_other_have_rows_of_their_own() -> None:
    config = planned(3, 10, layout="BLHNC").config
    found = layers_of(drawn(config))
    rows = [{found[layer][0].y for layer in group.layer_names} for group in config.groups]
    assert all(len(row) == 1 for row in rows)
    assert len(set.union(*rows)) == len(config.groups) > 1


def test_a_slab_is_cut_into_each_groups_blocks() -> None:
    wide = group_of({f"layers.{n}.attn": SLIDING for n in range(10)}, blocks_per_slab=1)
    narrow = group_of({f"layers.{n}.attn": FULL for n in range(10, 13)}, blocks_per_slab=3)
    config = plan_of(wide, narrow)
    slab = config.pools["device"].slab_bytes
    cuts = [box for box in boxes(drawn(config)) if re.match(r"block \d+ of ", box.title)]
    expected = [(MARGIN, BAR), *((MARGIN + BAR * index / 3, BAR / 3) for index in range(3))]
    assert [(box.x, box.width) for box in cuts] == [
        (pytest.approx(x, abs=TOLERANCE), pytest.approx(width, abs=TOLERANCE)) for x, width in expected
    ]
    words = words_of(drawn(config))
    assert f"10 slabs of {slab / (1 << 10):.2f} KiB ({slab:,} bytes)" in words
    assert f"Group 1: 3 blocks of {slab / 3 / (1 << 10):.2f} KiB (group 1)" in words


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC"])
def test_where_layers_lie_outermost_it_draws_one_page_of_each_region_and_says_so(layout: str) -> None:
    config = planned(4, 4, layout=layout).config
    svg = drawn(config)
    assert f"each has a region of {config.num_blocks:,} pages" in words_of(svg)
    found = layers_of(svg)
    slab = config.pools["device"].slab_bytes
    for group in config.groups:
        for position, layer in enumerate(group.layer_names):
            # a layer's pieces fill one page, and pages follow each other as the regions do
            assert min(box.x for box in found[layer]) == pytest.approx(
                MARGIN + BAR * position * PAGE / slab, abs=TOLERANCE
            )
            assert sum(box.width for box in found[layer]) == pytest.approx(BAR * PAGE / slab, abs=0.1)


@pytest.mark.parametrize(("layout", "pieces"), [("BLHNC", 1), ("BHLNC", 8), ("LHBNC", 8), ("LBHNC", 1)])
def test_a_page_is_as_many_pieces_as_the_layout_makes_of_it(layout: str, pieces: int) -> None:
    svg = drawn(planned(4, 0, layout=layout).config)
    assert {len(found) for found in layers_of(svg).values()} == {pieces}  # 8 head slots
    assert ("one for each head slot" in words_of(svg)) == (pieces > 1)


def test_padding_and_what_a_group_does_not_use_are_drawn_to_scale() -> None:
    padded = FullAttentionSpec(**SHAPE, page_size_padded=PAGE + 4096)
    page, slab = PAGE + 4096, 4 * (PAGE + 4096)
    group = KVCacheGroupSpec(
        layer_specs={"a.0": padded, "a.1": padded}, kv_cache_spec=padded, family=("full_attention",) * 2
    )
    pool = Pool(budget_bytes=8 * slab, slab_bytes=slab, num_slabs=8, layout="BLHNC")
    tensor = KVCacheTensor(size=8 * slab, layers=("a.0", "a.1"), layer_stride=page, block_stride=slab)
    config = KVCacheConfig(pools={"device": pool}, groups=(group,), tensors=(tensor,), max_model_len=64)
    svg = drawn(config)
    padding = [box for box in boxes(svg) if box.title.endswith("4,096 bytes of padding")]
    assert [box.width for box in padding] == [pytest.approx(BAR * 4096 / slab, abs=TOLERANCE)] * 2
    (rest,) = [box for box in boxes(svg) if box.title.endswith("bytes not used")]
    assert rest.title == f"{slab - 2 * page:,} bytes not used"
    assert rest.width == pytest.approx(BAR / 2, abs=TOLERANCE)
    assert f"2 × {page:,} = {2 * page:,} bytes; block stride {slab:,}; layer stride {page:,}" in words_of(svg)


def test_every_pool_is_drawn_with_its_own_groups() -> None:
    config = planned(2, 0, layout="BLHNC").config
    device = config.pools["device"]
    host = attrs.evolve(device, name="host", num_slabs=3, budget_bytes=3 * device.slab_bytes)
    layers = {"b.0": FULL, "b.1": FULL}
    group = attrs.evolve(config.groups[0], layer_specs=layers, pool="host")
    tensor = attrs.evolve(config.tensors[0], layers=tuple(layers), pool="host", size=host.size_bytes)
    both = attrs.evolve(
        config,
        pools=dict(config.pools) | {"host": host},
        groups=(*config.groups, group),
        tensors=(*config.tensors, tensor),
    )
    words = words_of(drawn(both))
    assert words.index("Pool device") < words.index("Group 0") < words.index("Pool host: 3 blocks")
    assert words.index("Pool host") < words.index("Group 1")


def test_a_group_without_layers_on_this_rank_has_an_empty_row() -> None:
    specs = {f"layers.{n}.attn": FULL if n < 2 else SLIDING for n in range(6)}
    stages = [[f"layers.{n}.attn" for n in part] for part in (range(2), range(2, 6))]
    made = plan(
        specs, engine=EngineConfig(max_model_len=1024), memory=256 << 20, stages=stages, layout="BLHNC"
    )
    svg = drawn(made.configs[0])
    assert "no layers on this rank" in words_of(svg)
    assert sorted(layers_of(svg)) == stages[0]
    assert re.search(r"Pipeline stage [01] of 2, which decides\.", words_of(plan_map_svg(made, {})))


def test_words_stay_inside_the_picture_and_names_are_escaped() -> None:
    config = planned(3, 10).config
    svg = memory_map_svg(config, ["<script>&\"'" for _ in config.groups])
    assert "<script>" not in svg
    assert "<script>&\"'" in words_of(svg)
    for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"):
        anchor, length = element.get("text-anchor"), 6.0 * len(element.text or "")
        start = float(element.get("x") or 0) - length * {"start": 0.0, "middle": 0.5, "end": 1.0}[str(anchor)]
        assert start >= 0, element.text
        assert start + length <= WIDTH, element.text


def test_the_picture_has_a_name_and_a_description_for_screen_readers() -> None:
    root = ElementTree.fromstring(drawn(planned(3, 10, layout="BLHNC").config))
    assert (root.get("role"), root.get("aria-label")) == ("img", "Memory map")
    description = root.find("{http://www.w3.org/2000/svg}desc")
    assert description is not None
    assert "group 0" in str(description.text)
    assert "blocks a slab of pool device" in str(description.text)


def test_a_layout_that_nobody_knows_is_an_error() -> None:
    config = planned(2, 0).config
    pool = attrs.evolve(config.pools["device"], layout="BLNCH")
    with pytest.raises(LayoutError, match="BLNCH"):
        drawn(attrs.evolve(config, pools={"device": pool}))


def test_the_command_writes_the_map(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "memory.svg"
    words = ("plan", GEMMA, "--memory", "64GiB", "--max-model-len", "8192", "--json")
    answer = kvframe(capsys, *words, "--map", target)
    assert answer.code == 0
    assert answer.err.endswith(f"wrote {target}\n")
    assert json.loads(answer.out)["num_blocks"] > 0
    found = layers_of(target.read_text(encoding="utf-8"))
    assert len(found) == 62
    assert "sliding_attention" in words_of(target.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("name", "why"), [("absent/map.svg", "there is no folder"), (".", "is a folder")])
def test_a_file_that_cannot_be_written_is_told_before_the_work(
    name: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = kvframe(
        capsys, "plan", tmp_path / "no-config.json", "--memory", "1GiB", "--map", tmp_path / name
    )
    assert answer.code == 2
    assert why in answer.err


def test_layouts_of_plugins_can_be_drawn() -> None:
    config = planned(2, 0, layout="BLHNC").config
    assert memory_map_svg(config, ["a"], load_plugins().layouts) == memory_map_svg(config, ["a"])
