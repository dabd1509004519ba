"""Views: what is written through a family's named tensors lies where the layout's formula says, and nowhere else.

The addresses here come from contract 4, the pieces of cells from contract 4.3 and 2.4, written out by hand.
"""

from __future__ import annotations

from types import ModuleType

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="views need torch: pip install 'kvframe[torch]'")

from kvframe import FullAttentionSpec, PluginHost, hookimpl, load_plugins  # noqa: E402
from kvframe.config import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, Pool  # noqa: E402
from kvframe.errors import LayoutError  # noqa: E402
from kvframe.family import full_attention_family  # noqa: E402
from kvframe.layout import LBHNC, Layouts, builtin_layouts  # noqa: E402
from kvframe.packing import packed, two_planes  # noqa: E402
from kvframe.views import create_kv_cache_views, group_kernel_blocks, make_layer_views, make_views  # noqa: E402
from tests.vectors import NotRun, params, spec_of  # noqa: E402

LAYOUTS = Layouts(builtin_layouts())
FEW = settings(max_examples=4, deadline=None)


# --- where bytes lie, by hand --------------------------------------------------------------------------------------


def cell_addresses(layout, tensor, sizes):
    """[L, B, H, N] byte addresses of cells for sizes (L, B, H, N, C), from contract 4's physical orders."""
    layers, blocks, heads, states, content = sizes
    l, b, h, n = np.ogrid[:layers, :blocks, :heads, :states]  # noqa: E741 - the contract's letter
    page = tensor.offset + l * tensor.layer_stride + b * tensor.block_stride
    inside = {
        "LBHNC": (h * states + n) * content,
        "BLHNC": (h * states + n) * content,
        "LBNHC": (n * heads + h) * content,
        "BLNHC": (n * heads + h) * content,
        "LHBNC": (h * blocks * states + n) * content,
        "BHLNC": (h * layers * states + n) * content,
    }
    return page + inside[layout.name]


def piece(offset, nbytes, slots=slice(None), form="BHNW"):
    """Addresses of one piece of a cell, the element's bytes last, in the shape of its view."""

    def find(cells, _content):
        first = cells[:, slots] + offset
        if form == "BNH":  # scales: one element a cell
            return first.transpose(0, 2, 1)[..., None] + np.arange(nbytes)
        if form == "BNW":  # the only head slot is left out
            first = first[:, 0]
        return first[..., None] + np.arange(nbytes)

    return find


def page_piece(start, row, offset, nbytes):
    """Addresses of a piece of rows that lie `row` bytes apart behind `start(states)` bytes of the page."""

    def find(cells, _content):
        states = cells.shape[2]
        rows = cells[:, 0, :1] + start(states) + np.arange(states) * row
        return rows[..., None] + offset + np.arange(nbytes)

    return find


def state_piece(offset, nbytes):
    """Addresses of one state of a block's page."""
    return lambda cells, _content: cells[:, 0, 0, None] + offset + np.arange(nbytes)


# --- families ------------------------------------------------------------------------------------------------------

DENSE = {"num_kv_heads": 3, "head_size": 8, "dtype": "bfloat16"}
KV = {"key": piece(0, 16), "value": piece(16, 16)}  # 8 elements of 2 bytes each
ROW = {"num_kv_heads": 1, "dtype": "uint8", "block_size": 8}


def quantised(name):
    spec = FullAttentionSpec(8, num_kv_heads=2, head_size=16, dtype="uint8")
    dtypes = load_plugins().cache_dtypes
    if name not in dtypes.names:
        raise NotRun(f"cache dtype {name}: its plugin is not installed")
    return packed(spec, dtypes.get(name))


def vector_words(family, **words):
    return lambda: spec_of({"family": family, "block_size": 8, **words})


FAMILIES = {
    "full": (vector_words("full_attention", **DENSE), KV),
    "full, V narrower": (
        vector_words("full_attention", **DENSE, head_size_v=4),
        {"key": piece(0, 16), "value": piece(16, 8)},
    ),
    "full, two planes": (
        # contract 2.19: all K heads in one slot of 3 * 8 * 2 = 48 bytes, all V heads in the next
        lambda: two_planes(spec_of({"family": "full_attention", "block_size": 8, **DENSE})),
        {
            "key": lambda c, _: c[:, 0, :, None].transpose(0, 2, 1)[..., None] + plane_bytes(),
            "value": lambda c, _: c[:, 1, :, None].transpose(0, 2, 1)[..., None] + plane_bytes(),
        },
    ),
    "sliding window": (vector_words("sliding_window", **DENSE, sliding_window=16), KV),
    "chunked local": (vector_words("chunked_local", **DENSE, attention_chunk_size=16), KV),
    "rswa": (vector_words("rswa", **DENSE, rswa_window=16), KV),
    "sink": (vector_words("sink", **DENSE, sink_len=8), KV),
    "cross attention, pooled": (vector_words("cross_attention", **DENSE, tokens_per_state="1/4"), KV),
    # contract 4.3: [K data, K scale, V data, V scale], scales float32
    "int8 per token and head": (
        lambda: quantised("int8_per_token_head"),
        {
            "key": piece(0, 16),
            "key_scale": piece(16, 4, form="BNH"),
            "value": piece(20, 16),
            "value_scale": piece(36, 4, form="BNH"),
        },
    ),
    "fp8 per token and head": (
        lambda: quantised("fp8_per_token_head"),
        {
            "key": piece(0, 16),
            "key_scale": piece(16, 4, form="BNH"),
            "value": piece(20, 16),
            "value_scale": piece(36, 4, form="BNH"),
        },
    ),
    "int4 per token and head": (
        lambda: quantised("int4_per_token_head"),
        {
            "key": piece(0, 8),
            "key_scale": piece(8, 4, form="BNH"),
            "value": piece(12, 8),
            "value_scale": piece(20, 4, form="BNH"),
        },
    ),
    # contract 4.3: K in the first half of the slots; 16 / 2 data bytes, then 16 / 16 scale byte
    "nvfp4": (
        lambda: quantised("nvfp4"),
        {
            "key": piece(0, 8, slice(0, 2)),
            "key_scale": piece(8, 1, slice(0, 2)),
            "value": piece(0, 8, slice(2, 4)),
            "value_scale": piece(8, 1, slice(2, 4)),
        },
    ),
    # contract 2.19: 16 * 3 / 8 + 2 = 8 bytes of key, 16 * 4 / 8 + 4 = 12 of value
    "turboquant k3v4": (
        lambda: quantised("turboquant_k3v4_nc"),
        {"key": piece(0, 8), "value": piece(8, 12)},
    ),
    "mla": (
        vector_words("mla", num_kv_heads=1, head_size=24, dtype="bfloat16"),
        {"latent": piece(0, 48, form="BNW")},
    ),
    # contract 2.4: 512 e4m3, 4 float32 scales, 64 bf16
    "mla, fp8_ds_mla": (
        vector_words("mla", **ROW | {"head_size": 576, "state_content_bytes": 656}),
        {
            "latent": piece(0, 512, form="BNW"),
            "scales": piece(512, 16, form="BNW"),
            "rope": piece(528, 128, form="BNW"),
        },
    ),
    # contract 2.4: 256 bytes of e2m1 pairs, 64 e4m3, 32 e4m3 scales
    "mla, nvfp4_ds_mla": (
        vector_words("mla", **ROW | {"head_size": 576, "state_content_bytes": 352}),
        {
            "latent": piece(0, 256, form="BNW"),
            "rope": piece(256, 64, form="BNW"),
            "scales": piece(320, 32, form="BNW"),
        },
    ),
    # contract 2.4: a V4 page holds all 576-byte data rows, then all 8-byte scale rows
    "mla, V4": (
        vector_words("mla", **ROW | {"head_size": 512, "state_content_bytes": 584}),
        {
            "latent": page_piece(lambda states: 0, 576, 0, 448),
            "rope": page_piece(lambda states: 0, 576, 448, 128),
            "scales": page_piece(lambda states: 576 * states, 8, 0, 8),
        },
    ),
    "mla, int8 per token and head": (
        lambda: packed(
            spec_of({"family": "mla", **ROW, "head_size": 24}),
            load_plugins().cache_dtypes.get("int8_per_token_head"),
        ),
        {"latent": piece(0, 24, form="BNW"), "latent_scale": piece(24, 8, form="BNW")},
    ),
    "mla indexer": (
        vector_words("mla", **ROW | {"head_size": 132, "cache_role": "indexer", "state_content_bytes": 132}),
        {"rows": piece(0, 132, form="BNW")},
    ),
    "sliding window mla": (
        vector_words("sliding_window_mla", num_kv_heads=1, head_size=24, dtype="float32", sliding_window=16),
        {"latent": piece(0, 96, form="BNW")},
    ),
    "hidden state": (
        vector_words("hidden_state", num_kv_heads=1, head_size=24, dtype="bfloat16"),
        {"latent": piece(0, 48, form="BNW")},
    ),
    "circular buffer": (
        vector_words("circular_buffer", num_kv_heads=1, head_size=24, head_size_v=0, dtype="float32"),
        {"ring": piece(0, 96, form="BNW")},
    ),
    "kpool tail": (
        vector_words("kpool_tail", **DENSE, sliding_window=8),
        {"ring": piece(0, 32)},
    ),
    "mamba": (
        # 3 * 4 * 2 = 24 bytes of conv, then 2 * 2 * 4 * 4 = 64 of ssm
        vector_words("mamba", shapes=[[3, 4], [2, 2, 4]], dtypes=["bfloat16", "float32"]),
        {"conv": state_piece(0, 24), "ssm": state_piece(24, 64)},
    ),
    "hisparse resident": (
        vector_words("hisparse_resident", page_size=40),
        {"pages": lambda cells, content: cells[:, 0, 0, None] + np.arange(content)},
    ),
}


def plane_bytes():
    return (np.arange(3)[:, None] * 16 + np.arange(16)).reshape(1, 3, 1, 16)


def made(case):
    try:
        return FAMILIES[case][0]()
    except NotRun as reason:
        pytest.skip(f"not run: {reason}")


def geometry(spec):
    if not spec.has_layer_views:
        return 1, 1, spec.page_size_bytes
    return spec.num_heads, spec.num_states, spec.state_content_size_bytes


# --- placements ----------------------------------------------------------------------------------------------------


def placement(layout, spec, layers, blocks, *, block_bytes=None, offset=0):
    """The strides of a placement, from contract 4's table; `block_bytes` between blocks where L lies inside B."""
    heads, states, content = geometry(spec)
    page = spec.page_size_bytes
    by_layout = {
        "LBHNC": (blocks * page, page),
        "LBNHC": (blocks * page, page),
        "LHBNC": (heads * blocks * states * content, states * content),
        "BLHNC": (page, block_bytes or layers * page),
        "BLNHC": (page, block_bytes or layers * page),
        "BHLNC": (states * content, block_bytes or layers * page),
    }
    layer_stride, block_stride = by_layout[layout.name]
    if not spec.has_layer_views:
        layer_stride, block_stride = page, block_bytes or layers * page
    elif layout.name in ("LHBNC", "BHLNC") and page != spec.unpadded_page_size_bytes:
        # contract 3.5: one head slot, so that the page is one piece
        layer_stride, block_stride = by_layout["LBHNC" if layout.layer_compact else "BLHNC"]
    names = tuple(f"layer.{index}" for index in range(layers))
    return KVCacheTensor(
        size=0, layers=names, layer_stride=layer_stride, block_stride=block_stride, offset=offset
    )


def filled(views, spec, addresses, content, pieces, rng, expected):
    """Write random bytes through every named view, and into `expected` where the formulas say."""
    for layer, named in enumerate(views.values()):
        for name, view in named.items():
            if name not in pieces:
                continue
            where = pieces[name](addresses[layer], content)
            size = view.element_size()
            assert where.size == view.numel() * size
            values = rng.integers(0, 256, where.size, dtype=np.uint8).reshape(where.shape)
            elements = torch.from_numpy(values.reshape(-1)).view(view.dtype).view(view.shape)
            view.copy_(elements)
            assert expected[where].sum() == 0 or np.unique(where).size == where.size
            expected[where] = values


def check(host, spec, layout, tensors, *, blocks, buffer_bytes, pieces, kernel=None, rng=None):
    """Write through the views of all placements; the buffer then holds what the formulas say, byte by byte."""
    raw = torch.zeros(buffer_bytes, dtype=torch.int8)
    expected = np.zeros(buffer_bytes, dtype=np.uint8)
    rng = rng or np.random.default_rng(0)
    for tensor in tensors:
        views = make_layer_views(
            host, raw, spec, num_blocks=blocks, layout=layout, tensor=tensor, kernel_block_size=kernel
        )
        assert tuple(views) == tensor.layers
        heads, states, content = geometry(spec)
        ratio = spec.block_size // kernel if kernel else 1
        smaller = attrs.evolve(tensor, block_stride=tensor.block_stride // ratio)
        sizes = (len(tensor.layers), blocks * ratio, heads, states // ratio, content)
        addresses = (
            cell_addresses(layout, smaller, sizes)
            if spec.has_layer_views
            else cell_addresses(LBHNC, smaller, sizes)
        )
        for named in views.values():
            for view in named.values():
                inside = view.data_ptr() - raw.data_ptr()
                assert 0 <= inside < buffer_bytes
                assert view.untyped_storage().data_ptr() == raw.untyped_storage().data_ptr()
        filled(views, spec, addresses, content, pieces, rng, expected)
    assert np.array_equal(raw.numpy().view(np.uint8), expected)


def by_family_and_layout(cases=tuple(FAMILIES), layouts=tuple(LAYOUTS)):
    def both(test):
        test = pytest.mark.parametrize("layout", layouts, ids=lambda layout: layout.name)(test)
        return pytest.mark.parametrize("case", cases)(test)

    return both


WITH_CELLS = [
    case for case in FAMILIES if "hisparse" not in case
]  # raw pages have no padding and no kernel blocks


sizes_drawn = given(layers=st.integers(1, 3), blocks=st.integers(1, 4), seed=st.integers(0, 99))


@by_family_and_layout()
@FEW
@sizes_drawn
def test_dense_pages(case, layout, layers, blocks, seed):
    spec = made(case)
    tensor = placement(layout, spec, layers, blocks)
    check(
        load_plugins(),
        spec,
        layout,
        [tensor],
        blocks=blocks,
        buffer_bytes=layers * blocks * spec.page_size_bytes,
        pieces=FAMILIES[case][1],
        rng=np.random.default_rng(seed),
    )


@by_family_and_layout(WITH_CELLS)
@FEW
@given(layers=st.integers(1, 3), blocks=st.integers(1, 4), seed=st.integers(0, 99), rest=st.integers(1, 4))
def test_padded_pages(case, layout, layers, blocks, seed, rest):
    spec = made(case)
    spec = attrs.evolve(spec, page_size_padded=spec.page_size_bytes + 16 * rest)
    if not layout.block_compact and spec.num_heads > 1:
        tensor = placement(LAYOUTS.get("LBHNC"), spec, layers, blocks)
        raw = torch.zeros(layers * blocks * spec.page_size_bytes, dtype=torch.int8)
        with pytest.raises(LayoutError) as refused:
            create_kv_cache_views(raw, spec, blocks, layout, tensor)
        assert set(refused.value.would_work) == {"LBHNC", "LBNHC", "BLHNC", "BLNHC"}
        return
    check(
        load_plugins(),
        spec,
        layout,
        [placement(layout, spec, layers, blocks)],
        blocks=blocks,
        buffer_bytes=layers * blocks * spec.page_size_bytes,
        pieces=FAMILIES[case][1],
        rng=np.random.default_rng(seed),
    )


@by_family_and_layout(layouts=[layout for layout in builtin_layouts() if layout.block_outermost])
@FEW
@given(
    layers=st.integers(1, 3),
    slabs=st.integers(1, 3),
    per_slab=st.integers(1, 3),
    before=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_packed_groups_and_slabs(case, layout, layers, slabs, per_slab, before, seed):
    """A group beside another's pages in a block, k of its blocks in a slab: the block stride is slab / k."""
    spec = made(case)
    unit = 48  # bytes of the pages that stand before the layers, divisible by every element
    block_bytes = before * unit + layers * spec.page_size_bytes + unit
    blocks = slabs * per_slab
    tensor = placement(layout, spec, layers, blocks, block_bytes=block_bytes, offset=before * unit)
    check(
        load_plugins(),
        spec,
        layout,
        [tensor],
        blocks=blocks,
        buffer_bytes=slabs * (per_slab * block_bytes),
        pieces=FAMILIES[case][1],
        rng=np.random.default_rng(seed),
    )


@by_family_and_layout(WITH_CELLS)
@FEW
@given(
    layers=st.integers(1, 3),
    blocks=st.integers(1, 4),
    kernel=st.sampled_from([2, 4]),
    seed=st.integers(0, 99),
)
def test_kernel_blocks(case, layout, layers, blocks, kernel, seed):
    spec = made(case)
    heads, states, content = geometry(spec)
    tensor = placement(layout, spec, layers, blocks)
    buffer_bytes = layers * blocks * spec.page_size_bytes
    raw = torch.zeros(buffer_bytes, dtype=torch.int8)
    one_piece = layout.block_compact or heads == 1
    if spec.tokens_per_state < 0 or not one_piece or tensor.block_stride != heads * states * content:
        with pytest.raises(LayoutError) as refused:
            create_kv_cache_views(raw, spec, blocks, layout, tensor, kernel)
        if spec.tokens_per_state > 0:
            assert set(refused.value.would_work) == {"LBHNC", "LBNHC"}
        return
    check(
        load_plugins(),
        spec,
        layout,
        [tensor],
        blocks=blocks,
        buffer_bytes=buffer_bytes,
        pieces=FAMILIES[case][1],
        kernel=kernel,
        rng=np.random.default_rng(seed),
    )


@pytest.mark.parametrize("layout", builtin_layouts(), ids=lambda layout: layout.name)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_shapes_at_random(layout, data):
    heads, width, width_v = (data.draw(st.integers(1, 5)) for _ in range(3))
    size = {"float32": 4, "bfloat16": 2, "uint8": 1}
    dtype = data.draw(st.sampled_from(list(size)))
    block = data.draw(st.sampled_from([1, 2, 4, 8]))
    layers, blocks = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    spec = FullAttentionSpec(block, num_kv_heads=heads, head_size=width, head_size_v=width_v, dtype=dtype)
    step = size[dtype]
    check(
        load_plugins(),
        spec,
        layout,
        [placement(layout, spec, layers, blocks)],
        blocks=blocks,
        buffer_bytes=layers * blocks * spec.page_size_bytes,
        pieces={"key": piece(0, width * step), "value": piece(width * step, width_v * step)},
        rng=np.random.default_rng(data.draw(st.integers(0, 99))),
    )


@pytest.mark.parametrize("layout", ["BLHNC", "BLNHC", "LBHNC", "LBNHC"])
def test_a_group_of_several_page_sizes(layout):
    """Contract 5.7: pages of 65 536 and 16 384 bytes in one group, 10 blocks."""
    layout, blocks = LAYOUTS.get(layout), 10
    wide, narrow = (
        FullAttentionSpec(16, num_kv_heads=heads, head_size=128, dtype="bfloat16") for heads in (8, 2)
    )
    strides = (
        [(65_536, 81_920, 0), (16_384, 81_920, 65_536)]
        if layout.block_outermost
        else [(655_360, 65_536, 0), (163_840, 16_384, 655_360)]
    )
    raw = torch.zeros(819_200, dtype=torch.int8)
    seen = np.zeros(819_200, dtype=np.int64)
    for spec, (layer_stride, block_stride, offset) in zip((wide, narrow), strides, strict=True):
        tensor = KVCacheTensor(
            size=819_200, layers=("a",), layer_stride=layer_stride, block_stride=block_stride, offset=offset
        )
        named = make_layer_views(load_plugins(), raw, spec, num_blocks=blocks, layout=layout, tensor=tensor)
        for view in named["a"].values():
            view.fill_(1)
        raw_now = raw.numpy().view(np.uint8)
        seen += raw_now != 0
        raw.zero_()
    # 1.0 in bfloat16 is 0x3f80: both of its bytes differ from zero; each byte belongs to one of the two
    assert seen.min() == seen.max() == 1


def test_groups_alias_the_same_bytes_and_own_different_blocks():
    """Two groups over one buffer: what one writes into its blocks never shows in blocks of the other."""
    attention = FullAttentionSpec(
        16, num_kv_heads=2, head_size=8, dtype="bfloat16"
    )  # 16 * 2 * 32 = 1 024 bytes
    state = made("mamba")  # 88 bytes
    state = attrs.evolve(state, page_size_padded=1_024)
    raw = torch.zeros(4 * 1_024, dtype=torch.int8)
    tensor = KVCacheTensor(size=4_096, layers=("a",), layer_stride=4_096, block_stride=1_024)
    host = load_plugins()
    kv = make_layer_views(host, raw, attention, num_blocks=4, layout=LBHNC, tensor=tensor)["a"]
    states = make_layer_views(host, raw, state, num_blocks=4, layout=LBHNC, tensor=tensor)["a"]
    kv["key"][[1, 3]] = 1.0
    before = raw.clone()
    states["ssm"][2] = 7.0
    changed = (raw != before).nonzero().flatten()
    assert changed.min() >= 2 * 1_024 + 24
    assert changed.max() < 2 * 1_024 + 88
    assert (kv["key"][[1, 3]] == 1.0).all()


def view_cases():
    def has_views(param):
        case = param.values[0]
        per_state = case and case["input"].get("layer", {}).get("tokens_per_state", 1)
        return case is None or ("views" in case["expect"] and per_state != 3)

    return [param for param in params("layouts") if has_views(param)]


@pytest.mark.parametrize("case", view_cases())
def test_views_are_those_of_the_vectors(case):
    given_, layers = case["input"], case["input"]["num_layers"]
    try:
        spec = spec_of(given_["layer"])
    except NotRun as reason:
        pytest.skip(f"not run: {reason}")
    for words, expect in zip(given_["placements"], case["expect"]["views"], strict=True):
        tensor = KVCacheTensor(size=0, layers=tuple(map(str, range(layers))), **words)
        raw = torch.empty(1 << 40, dtype=torch.int8, device="meta")

        def views(tensor=tensor, raw=raw):
            return create_kv_cache_views(
                raw,
                spec,
                given_["num_blocks"],
                LAYOUTS.get(given_["layout"]),
                tensor,
                given_["kernel_block_size"],
            )

        # only kernel blocks make the vectors' own views overlap
        if "error" in expect or (given_["kernel_block_size"] and overlaps(expect)):
            with pytest.raises(LayoutError):
                views()
            continue
        found = views()
        assert [str(view.dtype) for view in found] == [f"torch.{expect['dtype']}"] * layers
        assert {tuple(view.shape) for view in found} == {tuple(expect["shape"])}
        assert {view.stride() for view in found} == {tuple(expect["stride_elements"])}
        assert [view.storage_offset() for view in found] == expect["storage_offset_elements"]


def overlaps(expect):
    """Whether two elements of the vectors' own view share an address: kvframe refuses those (contract 8, Q32)."""
    starts = np.array(expect["storage_offset_elements"])
    for count, step in zip(expect["shape"], expect["stride_elements"], strict=True):
        starts = np.add.outer(starts, np.arange(count) * step)
    return np.unique(starts).size < starts.size


def test_kernel_blocks_group_into_blocks():
    """Contract 3.7: (8, 2, 8, 16) and 4 blocks give (4, 2, 2, 8, 16)."""
    cache = torch.zeros(8, 2, 8, 16)
    grouped = group_kernel_blocks(cache, 4)
    assert grouped.shape == (4, 2, 2, 8, 16)
    assert grouped.data_ptr() == cache.data_ptr()
    assert group_kernel_blocks(cache, 8) is cache
    with pytest.raises(LayoutError, match="8 kernel blocks cannot be grouped into 3"):
        group_kernel_blocks(cache, 3)


def test_a_buffer_that_is_not_flat_int8_is_refused():
    spec = made("full")
    tensor = placement(LBHNC, spec, 1, 1)
    with pytest.raises(LayoutError, match="flat int8"):
        create_kv_cache_views(torch.zeros(4, 4), spec, 1, LBHNC, tensor)


def test_a_state_that_is_not_aligned_to_its_element_is_refused_by_name():
    """Contract 4.3: 18 bytes of conv, then float32."""
    try:
        spec = spec_of(
            {"family": "mamba", "block_size": 8, "shapes": [[9], [4]], "dtypes": ["float16", "float32"]}
        )
    except NotRun as reason:
        pytest.skip(f"not run: {reason}")
    raw = torch.zeros(34, dtype=torch.int8)
    tensor = KVCacheTensor(size=34, layers=("m",), layer_stride=34, block_stride=34)
    with pytest.raises(
        LayoutError, match="state 'ssm' of MambaSpec: float32 cannot be seen in bytes 18 to 34"
    ):
        make_layer_views(load_plugins(), raw, spec, num_blocks=1, layout=LBHNC, tensor=tensor)


def test_scales_that_are_not_aligned_are_refused():
    """Contract 4.3: data bytes of a side must be a multiple of 4; head size 6 puts a float32 at byte 6."""
    spec = packed(
        FullAttentionSpec(8, num_kv_heads=1, head_size=6, dtype="int8"),
        load_plugins().cache_dtypes.get("int8_per_token_head"),
    )
    tensor = placement(LBHNC, spec, 1, 1)
    raw = torch.zeros(spec.page_size_bytes, dtype=torch.int8)
    with pytest.raises(LayoutError, match="float32 cannot be seen in bytes 6 to 10"):
        make_layer_views(load_plugins(), raw, spec, num_blocks=1, layout=LBHNC, tensor=tensor)


def test_packed_cells_that_only_a_kernel_knows_are_one_opaque_tensor():
    spec = FullAttentionSpec(8, num_kv_heads=2, head_size=16, dtype="uint8", state_content_bytes=40)
    raw = torch.zeros(spec.page_size_bytes, dtype=torch.int8)
    views = make_layer_views(
        load_plugins(), raw, spec, num_blocks=1, layout=LBHNC, tensor=placement(LBHNC, spec, 1, 1)
    )
    assert {name: tuple(view.shape) for name, view in views["layer.0"].items()} == {"kv": (1, 2, 8, 40)}


# --- plans, plugins, devices ---------------------------------------------------------------------------------------


def plan(layout="BLHNC"):
    """Two pools, one group each; the host's group cuts two blocks from a slab."""
    device = FullAttentionSpec(16, num_kv_heads=2, head_size=8, dtype="bfloat16")  # 1 024 bytes
    host = FullAttentionSpec(8, num_kv_heads=2, head_size=8, dtype="bfloat16")  # 512 bytes

    def group(names, spec, pool, per_slab):
        return KVCacheGroupSpec(
            layer_specs=dict.fromkeys(names, spec),
            kv_cache_spec=spec,
            family=("full_attention",) * len(names),
            pool=pool,
            blocks_per_slab=per_slab,
        )

    return KVCacheConfig(
        pools={
            name: Pool(name=name, budget_bytes=8_192, slab_bytes=2_048, num_slabs=4, layout=layout)
            for name in ("device", "host")
        },
        groups=(group(("a", "b"), device, "device", 1), group(("c", "d"), host, "host", 2)),
        tensors=(
            KVCacheTensor(size=8_192, layers=("a", "b"), layer_stride=1_024, block_stride=2_048),
            KVCacheTensor(size=8_192, layers=("c", "d"), layer_stride=512, block_stride=1_024, pool="host"),
        ),
        max_model_len=64,
    )


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        "meta",
        pytest.param(
            "cuda",
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
        ),
    ],
)
def test_a_plan_s_layers_all_get_views(device):
    config = plan()
    buffers = {name: torch.zeros(8_192, dtype=torch.int8, device=device) for name in config.pools}
    views = make_views(load_plugins(), config, buffers)
    assert list(views) == ["a", "b", "c", "d"]
    # 4 slabs of one block on the device, 4 * 2 blocks on the host
    assert views["b"]["value"].shape == (4, 2, 16, 8)
    assert views["d"]["value"].shape == (8, 2, 8, 8)
    # in elements: the second layer's page of 512 bytes, then V after 8 elements of K
    assert views["d"]["value"].storage_offset() == 256 + 8
    assert views["a"]["key"].untyped_storage() is not views["c"]["key"].untyped_storage()
    assert views["a"]["key"].device.type == device


def test_kernel_blocks_are_chosen_per_group():
    config = plan()
    buffers = {name: torch.zeros(8_192, dtype=torch.int8) for name in config.pools}
    with pytest.raises(LayoutError, match="kernel blocks") as refused:
        make_views(load_plugins(), config, buffers, {1: 4})
    assert refused.value.would_work == ["LBNHC", "LBHNC"]


def test_a_hardware_plugin_replaces_the_views_of_an_existing_family():
    """An accelerator that wants K and V as one [2, B, H, N, D] tensor: the spec and its planning stay as they are."""

    def npu_views(spec, cells):
        both = cells.view(torch.bfloat16).unflatten(-1, (2, spec.head_size))
        return {"kv_cache": both.permute(3, 0, 1, 2, 4)}

    @hookimpl
    def kvframe_spec_families():
        family = full_attention_family()
        return [attrs.evolve(family, name="npu_full_attention", make_views=npu_views, replaces=family.name)]

    plugin = ModuleType("npu")
    plugin.kvframe_spec_families = kvframe_spec_families
    host = PluginHost([plugin])
    spec = FullAttentionSpec(16, num_kv_heads=2, head_size=8, dtype="bfloat16")
    raw = torch.zeros(4 * 1_024, dtype=torch.int8)
    tensor = placement(LBHNC, spec, 1, 4)
    views = make_layer_views(host, raw, spec, num_blocks=4, layout=LBHNC, tensor=tensor)["layer.0"]
    plain = make_layer_views(load_plugins(), raw, spec, num_blocks=4, layout=LBHNC, tensor=tensor)["layer.0"]
    assert views["kv_cache"].shape == (2, 4, 2, 16, 8)
    plain["value"][2, 1, 5] = torch.arange(8, dtype=torch.bfloat16)
    assert torch.equal(views["kv_cache"][1, 2, 1, 5], torch.arange(8, dtype=torch.bfloat16))
    assert host.family(spec).lifetime(spec) == load_plugins().family(spec).lifetime(spec)
