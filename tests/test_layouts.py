"""Layouts: the figures of contract 3.4, 3.5 and 4, and the vectors' shapes, strides and views."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from kvframe import FullAttentionSpec, PluginHost, hookimpl
from kvframe.address import Addresses, addresses
from kvframe.config import KVCacheTensor
from kvframe.errors import LayoutError, SpecError
from kvframe.layout import (
    BHLNC,
    BLHNC,
    LBHNC,
    LBNHC,
    LHBNC,
    KVCacheLayout,
    Layouts,
    builtin_layouts,
    compute_layer_kv_cache_shape_bytes,
    compute_layout_strides,
)
from tests.vectors import NotRun, params, spec_of

LAYOUTS = Layouts(builtin_layouts())
PAGED = FullAttentionSpec(16, num_kv_heads=8, head_size=128, dtype="bfloat16")  # contract 3.4: page 65 536


def spec_or_skip(words):
    try:
        return spec_of(words)
    except NotRun as reason:
        pytest.skip(f"not run: {reason}")


def floors_states(words):
    """The vectors' source drops the tokens that fill no state; kvframe refuses (contract 8, Q16)."""
    per_state = words.get("tokens_per_state", 1)
    return isinstance(per_state, int) and words["block_size"] % per_state != 0


def case_kind(case):
    if "layer" not in case["input"]:
        return "properties"
    return "floors" if floors_states(case["input"]["layer"]) else "exact"


def selected(kind):
    cases = params("layouts")
    return [p for p in cases if p.values[0] is None or case_kind(p.values[0]) == kind]


@pytest.mark.parametrize("case", selected("properties"))
def test_properties_are_those_of_the_vectors(case):
    layout, expect = LAYOUTS.get(case["input"]["layout"]), case["expect"]
    assert list(layout.physical_order) == expect["physical_order"]
    assert list(layout.layer_order) == expect["layer_view_order"]
    assert layout.layer_compact is expect["is_layer_compact"]
    assert layout.block_outermost is expect["is_block_outermost"]
    assert layout.block_compact is expect["is_block_compact"]
    assert layout.block_contiguous is expect["is_block_contiguous"]


@pytest.mark.parametrize("case", selected("exact"))
def test_shapes_strides_and_addresses_are_those_of_the_vectors(case):
    given, expect = case["input"], case["expect"]
    spec, layout = spec_or_skip(given["layer"]), LAYOUTS.get(given["layout"])
    kernel, blocks, layers = given["kernel_block_size"], given["num_blocks"], given["num_layers"]

    def shape():
        return list(compute_layer_kv_cache_shape_bytes(spec, blocks, kernel))

    def strides():
        fixed = given.get("fixed_strides", (None,) * 5)
        return list(compute_layout_strides(spec, blocks, layers, layout, kernel, fixed=fixed))

    for key, figure in (("shape_bytes", shape), ("strides_lbhnc", strides)):
        if key in expect:
            same_or_refused(figure, expect[key])
    for placement, view in zip(given.get("placements", ()), expect.get("views", ()), strict=True):
        tensor = KVCacheTensor(size=1 << 40, layers=tuple(map(str, range(layers))), **placement)

        def in_bytes(tensor=tensor):
            found = addresses(spec, blocks, layout, tensor, buffer_bytes=1 << 40, kernel_block_size=kernel)
            return [list(found.shape), list(found.strides[1:]), found.end]

        same_or_refused(in_bytes, viewed_bytes(view, split=kernel is not None))


def viewed_bytes(view, split):
    """[shape, strides, end] in bytes of the vectors' view; a refusal where two of its elements share a byte."""
    if "error" in view:
        return view
    size = {"float32": 4, "bfloat16": 2, "float16": 2}.get(view["dtype"], 1)
    starts = np.array(view["storage_offset_elements"] if split else [0])
    for count, step in zip(view["shape"], view["stride_elements"], strict=True):
        starts = np.add.outer(starts, np.arange(count) * step)
    if np.unique(starts).size < starts.size:
        return {"error": "elements overlap: kvframe refuses (contract 8, Q32)"}
    *outer, width = view["shape"]
    steps = [step * size for step in view["stride_elements"][:3]]
    return [[*outer, width * size], [*steps, 1], view["last_element_byte"][-1] + size]


def same_or_refused(figure, expected):
    if isinstance(expected, dict):
        with pytest.raises((LayoutError, SpecError)):
            figure()
    else:
        assert figure() == expected


@pytest.mark.parametrize("case", selected("floors"))
def test_a_block_that_holds_no_whole_states_is_refused(case):
    given = case["input"]

    def shape():
        spec = spec_or_skip(given["layer"])
        return compute_layer_kv_cache_shape_bytes(spec, given["num_blocks"], given["kernel_block_size"])

    with pytest.raises((SpecError, LayoutError), match="must divide"):
        shape()


@pytest.mark.parametrize(
    ("layout", "strides"),
    [  # contract 3.5: 10 blocks, 3 layers, pages of 65 536 bytes
        ("LBHNC", (655_360, 65_536, 8_192, 512, 1)),
        ("LBNHC", (655_360, 65_536, 512, 4_096, 1)),
        ("LHBNC", (655_360, 8_192, 81_920, 512, 1)),
        ("BLHNC", (65_536, 196_608, 8_192, 512, 1)),
        ("BLNHC", (65_536, 196_608, 512, 4_096, 1)),
        ("BHLNC", (8_192, 196_608, 24_576, 512, 1)),
    ],
)
def test_strides_of_the_contract(layout, strides):
    assert compute_layout_strides(PAGED, 10, 3, LAYOUTS.get(layout)) == strides


def test_padding_widens_the_inner_one_of_layer_and_block():
    padded = FullAttentionSpec(16, num_kv_heads=8, head_size=128, dtype="bfloat16", page_size_padded=81_920)
    assert compute_layout_strides(padded, 10, 3, LBHNC) == (819_200, 81_920, 8_192, 512, 1)
    assert compute_layout_strides(padded, 10, 3, BLHNC) == (81_920, 245_760, 8_192, 512, 1)


@pytest.mark.parametrize("layout", [LHBNC, BHLNC])
def test_padding_that_a_layout_cannot_express_names_those_that_can(layout):
    padded = FullAttentionSpec(16, num_kv_heads=8, head_size=128, dtype="bfloat16", page_size_padded=81_920)
    with pytest.raises(LayoutError, match=r"axis H \(size 8\)") as refused:
        compute_layout_strides(padded, 10, 3, layout)
    assert set(refused.value.would_work) == {"LBHNC", "LBNHC", "BLHNC", "BLNHC"}


@pytest.mark.parametrize("layout", builtin_layouts(), ids=lambda layout: layout.name)
def test_every_layout_can_pad_pages_of_one_head(layout):
    padded = FullAttentionSpec(16, num_kv_heads=1, head_size=64, dtype="bfloat16", page_size_padded=5_120)
    compute_layout_strides(padded, 4, 2, layout)


@pytest.mark.parametrize(
    ("blocks", "kernel", "message"),
    [
        (0, None, "num_blocks = 0"),
        (10, 12, "kernel_block_size = 12"),
        (10, 0, "kernel_block_size = 0"),
    ],
)
def test_numbers_that_cannot_be_are_refused(blocks, kernel, message):
    with pytest.raises(LayoutError, match=message):
        compute_layer_kv_cache_shape_bytes(PAGED, blocks, kernel)


@pytest.mark.parametrize("fixed", [(None,) * 4, (None, 0, None, None, None)])
def test_fixed_strides_are_five_and_above_zero(fixed):
    with pytest.raises(LayoutError, match="fixed"):
        compute_layout_strides(PAGED, 10, 3, LBHNC, fixed=fixed)


def test_kernel_blocks_of_a_packed_group_name_layouts_that_can():
    tensor = KVCacheTensor(size=0, layers=("a", "b", "c"), layer_stride=65_536, block_stride=196_608)
    with pytest.raises(LayoutError, match="pages of 65536 bytes lie 196608 bytes apart") as refused:
        addresses(PAGED, 10, BLHNC, tensor, buffer_bytes=1_966_080, kernel_block_size=8)
    assert set(refused.value.would_work) == {"LBHNC", "LBNHC"}


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (
            {"layer_stride": 655_360, "block_stride": 65_536},
            "ends at byte 1,966,080 of a buffer of 1,966,079",
        ),
        ({"layer_stride": 655_360, "block_stride": 65_000}, "axis B steps over less"),
        ({"layer_stride": 65_535, "block_stride": 65_536}, "axis L steps over less|axis B steps over less"),
        ({"layer_stride": 655_361, "block_stride": 65_536}, "not aligned to the 2 bytes of bfloat16"),
    ],
)
def test_placements_are_checked_before_memory_exists(placement, message):
    tensor = KVCacheTensor(size=0, layers=("a", "b", "c"), **placement)
    room = 1_966_079 if "ends" in message else 1 << 30
    with pytest.raises(LayoutError, match=message) as refused:
        addresses(PAGED, 10, LBHNC, tensor, buffer_bytes=room)
    for named in ("FullAttentionSpec", "(10, 8, 16, 512)", "strides"):
        assert named in str(refused.value)


def test_addresses_know_where_they_end_and_whether_they_overlap():
    apart = Addresses(shape=(2, 1, 1, 4), strides=(8, 4, 4, 4, 1), offset=3, num_layers=2)
    assert (apart.end, apart.overlap) == (3 + 8 + 4 + 3 + 1, "")
    assert Addresses(shape=(2, 1, 1, 4), strides=(4, 4, 4, 4, 1), offset=0, num_layers=2).overlap


def test_lookup_takes_aliases_and_names_the_nearest():
    assert (LAYOUTS.get("NHD"), LAYOUTS.get("HND")) == (LBNHC, LBHNC)
    with pytest.raises(LayoutError, match="nearest is 'BLHNC'") as unknown:
        LAYOUTS.get("BLHN")
    assert set(unknown.value.would_work) == set(LAYOUTS.names)


@pytest.mark.parametrize("order", ["LBHN", "LBHCN", "LLBHN", "LBHNCX"])
def test_an_order_that_is_none_is_refused(order):
    with pytest.raises(LayoutError, match="each axis"):
        KVCacheLayout("mine", order)


def module(name, hook):
    made = ModuleType(name)
    made.kvframe_layouts = hook
    return made


def test_a_plugin_brings_a_layout():
    mine = KVCacheLayout("npu", "HBLNC")

    @hookimpl
    def kvframe_layouts():
        return [mine]

    host = PluginHost([module("npu", kvframe_layouts)])
    assert host.layouts.get("npu") is mine
    assert host.layouts.names == (*LAYOUTS.names, "npu")
    # H outermost, then B, then L: a page of one head is 16 * 512 = 8 192 bytes
    assert compute_layout_strides(PAGED, 10, 3, mine) == (8_192, 24_576, 245_760, 512, 1)


@pytest.mark.parametrize("name", ["LBHNC", "NHD"])
def test_a_layout_name_has_one_owner(name):
    @hookimpl
    def kvframe_layouts():
        return [KVCacheLayout(name, "LBNHC")]

    host = PluginHost([module("thief", kvframe_layouts)])
    record = next(record for record in host.records if record.name == "thief")
    assert (record.status, name in record.reason) == ("conflict", True)
