"""Operations on paged caches, against torch on contiguous keys and values and against plain loops."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="ops need torch: pip install 'kvframe[torch]'")

from torch.nn.functional import scaled_dot_product_attention  # noqa: E402

from kvframe import FullAttentionSpec, load_plugins  # noqa: E402
from kvframe.config import KVCacheTensor  # noqa: E402
from kvframe.errors import LayoutError, SpecError  # noqa: E402
from kvframe.layout import BHLNC, BLNHC, LBHNC, LBNHC, Layouts, builtin_layouts  # noqa: E402
from kvframe.ops import (  # noqa: E402
    PAD_SLOT,
    Mask,
    TokenMap,
    cell_codec,
    copy_blocks,
    gather_kv,
    kernel_block_table,
    layer_cache,
    paged_attention,
    slot_mapping,
    token_map,
    write_kv,
    zero_blocks,
)
from kvframe.packing import packed, two_planes  # noqa: E402
from kvframe.views import create_kv_cache_views  # noqa: E402
from tests.vectors import NotRun, spec_of  # noqa: E402

LAYOUTS = Layouts(builtin_layouts())
every_layout = pytest.mark.parametrize("layout", builtin_layouts(), ids=lambda layout: layout.name)
DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
    ),
]


def full(block=4, heads=2, width=8, dtype="float32", **words):
    return FullAttentionSpec(block, num_kv_heads=heads, head_size=width, dtype=dtype, **words)


def cached(spec, layout=LBNHC, blocks=8, layers=1, *, kernel=None, slack=0, device="cpu"):
    """Layers' views of a fresh buffer of random bytes: what nobody has written must not matter."""
    heads, states, content = spec.num_heads, spec.num_states, spec.state_content_size_bytes
    page = spec.page_size_bytes
    strides = {
        "L": {"LHBNC": (heads * blocks * states * content, states * content)}.get(
            layout.name, (blocks * page, page)
        ),
        "B": (states * content if layout is BHLNC else page, layers * page + slack),
    }[layout.order[0]]
    names = tuple(map(str, range(layers)))
    tensor = KVCacheTensor(size=0, layers=names, layer_stride=strides[0], block_stride=strides[1])
    generator = torch.Generator().manual_seed(7)
    raw = torch.randint(-128, 128, (blocks * (layers * page + slack),), dtype=torch.int8, generator=generator)
    return create_kv_cache_views(raw.to(device), spec, blocks, layout, tensor, kernel)


def ready(views, codec=None):
    return [layer_cache(view, codec) for view in views]


def codec_of(spec, name=None, **scales):
    dtypes = load_plugins().cache_dtypes
    return cell_codec(spec, dtypes, cache_dtype=dtypes.get(name) if name else None, **scales)


def random(*shape, dtype=torch.float32, seed=0, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


# --- slots ---------------------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    block=st.sampled_from([1, 2, 4, 8]),
    per_state=st.sampled_from([0.25, 0.5, 1, 2, 4]),
    requests=st.integers(1, 4),
    data=st.data(),
)
def test_slots_are_those_of_a_plain_loop(block, per_state, requests, data):
    if block % per_state:
        block *= 4
    states = int(block / per_state)
    table = torch.tensor(
        data.draw(
            st.lists(
                st.lists(st.integers(1, 99), min_size=6, max_size=6), min_size=requests, max_size=requests
            )
        )
    )
    tokens = data.draw(
        st.lists(
            st.tuples(st.integers(0, requests - 1), st.integers(-1, 6 * block - 1)), min_size=1, max_size=20
        )
    )
    expected = []
    for row, position in tokens:
        state = int(position % block // per_state)
        expected.append(PAD_SLOT if position < 0 else int(table[row][position // block]) * states + state)
    rows, positions = (torch.tensor(column) for column in zip(*tokens, strict=True))
    found = slot_mapping(TokenMap(block=block, states=states), table.to(torch.int32), rows, positions)
    assert found.tolist() == expected


def test_the_token_map_is_the_group_s_own():
    host = load_plugins()
    # two groups of one model: 16 tokens a block beside 64 tokens in 16 states
    assert token_map(host, full(16)) == TokenMap(block=16, states=16)
    assert token_map(host, full(64, tokens_per_state=4)) == TokenMap(block=64, states=16)


def test_a_ring_uses_its_block_over_and_over():
    try:
        ring = spec_of(
            {
                "family": "circular_buffer",
                "block_size": 4,
                "num_kv_heads": 1,
                "head_size": 8,
                "dtype": "float32",
            }
        )
        state = spec_of({"family": "mamba", "block_size": 4, "shapes": [[4]], "dtypes": ["float32"]})
    except NotRun as reason:
        pytest.skip(f"not run: {reason}")
    tokens = token_map(load_plugins(), ring)
    slots = slot_mapping(tokens, torch.tensor([[5]]), torch.zeros(6, dtype=torch.int64), torch.arange(3, 9))
    # block 5 holds slots 20 to 23; position 3 is the last of them, position 4 the first again
    assert slots.tolist() == [23, 20, 21, 22, 23, 20]
    with pytest.raises(SpecError, match="one state a block"):
        token_map(load_plugins(), state)


def test_a_slot_is_the_same_whatever_the_kernel_block():
    spec, slots = full(block=8), torch.tensor([3, 9, 25, 31])
    value = random(4, 2, 8)
    whole, split = (cached(spec, LBHNC, kernel=kernel)[0] for kernel in (None, 2))
    for cells in (whole, split):
        cache = layer_cache(cells, codec_of(spec))
        write_kv(cache, slots, value, value + 1)
        key, _ = gather_kv(cache, slots)
        assert torch.equal(key, value)
    # slot 25 is token 1 of block 3, in kernel blocks of 2 tokens: token 1 of kernel block 12
    assert torch.equal(split[12, :, 1, :8], value[2])


def test_kernel_block_tables():
    table = torch.tensor([[2, 0, 5]], dtype=torch.int32)
    assert kernel_block_table(table, 2).tolist() == [[4, 5, 0, 1, 10, 11]]
    # contract 4.1: packed blocks lie 6 kernel pages apart
    assert kernel_block_table(table, 2, 6).tolist() == [[12, 13, 0, 1, 30, 31]]
    assert kernel_block_table(table, 2).dtype is torch.int32


# --- writing, reading ----------------------------------------------------------------------------------------------


@every_layout
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("heads", "width", "width_v", "slack"),
    [(1, 8, 8, 0), (3, 8, 4, 0), (2, 5, 3, 4), (2, 16, 16, 48)],
    ids=["one head", "V narrower", "odd widths", "slack"],
)
def test_what_is_written_is_gathered_and_nothing_else_changes(layout, device, heads, width, width_v, slack):
    spec = full(4, heads, width, head_size_v=width_v)
    layers = cached(
        spec, layout, blocks=6, layers=3, slack=slack if layout.block_outermost else 0, device=device
    )
    before = [layer.clone() for layer in layers]
    slots = torch.tensor([7, 4, 22, 13, 9], device=device)
    key, value = random(5, heads, width, device=device), random(5, heads, width_v, seed=1, device=device)
    cache = layer_cache(layers[1], codec_of(spec))
    write_kv(cache, slots, key, value)
    found_key, found_value = gather_kv(cache, slots.view(5, 1))
    assert torch.equal(found_key.squeeze(1), key)
    assert torch.equal(found_value.squeeze(1), value)
    expected = before[1].clone()
    for index, slot in enumerate(slots.tolist()):
        expected[slot // 4, :, slot % 4] = torch.cat([key[index], value[index]], -1)
    # as bytes: what nobody wrote may be NaN
    assert torch.equal(layers[1].contiguous().view(torch.int32), expected.contiguous().view(torch.int32))
    for layer in (0, 2):
        assert torch.equal(
            layers[layer].contiguous().view(torch.int32), before[layer].contiguous().view(torch.int32)
        )


def test_padding_tokens_go_to_the_null_block():
    spec = full()
    (cells,) = cached(spec)
    before = cells.clone()
    cache = layer_cache(cells, codec_of(spec))
    write_kv(cache, torch.tensor([PAD_SLOT, 9]), random(2, 2, 8), random(2, 2, 8))
    changed = (cells.contiguous().view(torch.int32) != before.contiguous().view(torch.int32)).nonzero()
    assert {tuple(where) for where in changed[:, [0, 2]].tolist()} == {(0, 0), (2, 1)}


def test_two_planes_keep_all_heads_of_a_side_together():
    spec = two_planes(full(4, heads=3, width=8))
    (cells,) = cached(spec)
    key, value = random(2, 3, 8), random(2, 3, 8, seed=1)
    cache = layer_cache(cells, codec_of(spec))
    write_kv(cache, torch.tensor([5, 10]), key, value)
    assert torch.equal(cells[1, 0, 1], key[0].flatten())
    assert torch.equal(cells[2, 1, 2], value[1].flatten())
    found_key, found_value = gather_kv(cache, torch.tensor([5, 10]))
    assert torch.equal(found_key, key)
    assert torch.equal(found_value, value)


def test_cells_that_only_a_kernel_knows_have_no_codec():
    spec = full(dtype="uint8", state_content_bytes=10)
    with pytest.raises(LayoutError, match="known to their kernel alone"):
        codec_of(spec)


# --- quantised cells -----------------------------------------------------------------------------------------------


def largest(vectors):
    return vectors.abs().amax(-1, keepdim=True)


def in_groups(vectors, find):
    groups = vectors.unflatten(-1, (-1, 16))
    return find(groups).expand_as(groups).flatten(-2)


def span(vectors):
    high, low = vectors.amax(-1, keepdim=True).clamp(min=0), vectors.amin(-1, keepdim=True).clamp(max=0)
    return high - low


# The most that a format may miss a value by. A rounding to the nearest misses by half a step at most.
ERROR_BOUNDS = {
    # 127 steps up to the largest: half a step is 1 / 254 of it
    "int8_per_token_head": lambda x: largest(x) / 254,
    # 3 mantissa bits: half of 2^-3 of a value; below 2^-6 of the scale (448 steps) half of 2^-9
    "fp8_per_token_head": lambda x: torch.maximum(x.abs() / 16, largest(x) / 448 * 2**-10),
    # 15 steps between the smallest and the largest, and a zero point that is off by up to half of one
    "int4_per_token_head": lambda x: span(x) / 15,
    # magnitudes 0 0.5 1 1.5 2 3 4 6 in steps of 1/6 of the largest: at most 1 step; the e4m3 scale is off by 1/16
    "nvfp4": lambda x: in_groups(x, largest) / 6 * (1 + 1 / 16),
    # the better of 6 and 4 for the largest: a step is at most 1/4 of it
    "nvfp4_4over6": lambda x: in_groups(x, largest) / 4 * (1 + 1 / 16),
    # 3 or 2 mantissa bits, and half the smallest step near 0
    "fp8_e4m3": lambda x: torch.maximum(x.abs() / 16, torch.tensor(0.5 * 2**-10)),
    "fp8_e5m2": lambda x: torch.maximum(x.abs() / 8, torch.tensor(0.5 * 2**-17)),
}


@pytest.mark.parametrize("layout", [LBNHC, LBHNC, BLNHC], ids=lambda layout: layout.name)
@pytest.mark.parametrize("name", ERROR_BOUNDS)
def test_quantised_cells_stay_within_their_format_s_error(name, layout):
    dtypes = load_plugins().cache_dtypes
    spec = packed(full(4, 2, 32, dtype=dtypes.get(name).element_dtype("float32")), dtypes.get(name))
    (cells,) = cached(spec, layout)
    codec = codec_of(spec, name, key_scale=0.5, value_scale=0.5)
    slots = torch.arange(4, 28)
    key, value = random(24, 2, 32), 3 * random(24, 2, 32, seed=1)
    value[3] = 0.0  # a vector without a largest value
    cache = layer_cache(cells, codec)
    write_kv(cache, slots, key, value)
    for stored, given_ in zip(gather_kv(cache, slots), (key, value), strict=True):
        bound = ERROR_BOUNDS[name](given_)
        assert ((stored.float() - given_).abs() <= bound * (1 + 1e-5) + 1e-12).all()


def test_the_second_choice_of_nvfp4_scales_is_never_worse():
    key, misses = random(64, 2, 32), {}
    for name in ("nvfp4", "nvfp4_4over6"):
        dtypes = load_plugins().cache_dtypes
        spec = packed(full(4, 2, 32, dtype="uint8"), dtypes.get(name))
        codec = codec_of(spec, name)
        stored, _ = codec.decode(codec.encode(key, key))
        misses[name] = (stored - key).unflatten(-1, (-1, 16)).square().sum(-1)
    assert (misses["nvfp4_4over6"] <= misses["nvfp4"]).all()
    assert misses["nvfp4_4over6"].sum() < misses["nvfp4"].sum()


def test_a_joint_vector_keeps_its_scale_twice():
    try:
        spec = spec_of(
            {"family": "mla", "block_size": 4, "num_kv_heads": 1, "head_size": 16, "dtype": "int8"}
        )
    except NotRun as reason:
        pytest.skip(f"not run: {reason}")
    spec = packed(spec, load_plugins().cache_dtypes.get("int8_per_token_head"))
    (cells,) = cached(spec)
    latent = random(2, 1, 16)
    cache = layer_cache(cells, codec_of(spec))
    write_kv(cache, torch.tensor([4, 9]), latent, None)
    key, value = gather_kv(cache, torch.tensor([4, 9]))
    assert torch.equal(key, value)
    assert ((key - latent).abs() <= largest(latent) / 254 * (1 + 1e-5)).all()


def test_int4_zero_points_leave_the_scale_readable():
    spec = packed(full(4, 1, 16, dtype="uint8"), load_plugins().cache_dtypes.get("int4_per_token_head"))
    parts = codec_of(spec).encode(torch.linspace(-1, 2, 16).view(1, 1, 16), torch.zeros(1, 1, 16))
    # 3 / 15 = 0.2 a step, and zero lies 5 steps above -1: the lowest four bits of 0.2 say 5
    assert parts["key_scale"].item() == pytest.approx(0.2, rel=2e-6)
    assert parts["key_scale"].view(torch.int32).item() & 15 == 5


# --- whole blocks --------------------------------------------------------------------------------------------------


@every_layout
@pytest.mark.parametrize("slack", [0, 12])
def test_blocks_are_copied_at_once_and_whole(layout, slack):
    spec = full(4, 3, 5)
    layers = cached(spec, layout, layers=2, slack=slack if layout.block_outermost else 0)
    before = [layer.clone() for layer in layers]
    # 1 -> 2 and 2 -> 3: what 3 gets is the old block 2
    copy_blocks(ready(layers), ready(layers), torch.tensor([[1, 2], [2, 3], [5, 1]], dtype=torch.int32))
    for layer, old in zip(layers, before, strict=True):
        new = old[[0, 5, 1, 2, 4, 5, 6, 7]]
        assert torch.equal(layer.contiguous().view(torch.int32), new.contiguous().view(torch.int32))


def test_blocks_go_to_another_pool_of_another_layout():
    spec = full(4, 3, 5)
    device, host = cached(spec, LBNHC, layers=2), cached(spec, BLNHC, blocks=3, layers=2, slack=8)
    before = [layer.clone() for layer in host]
    copy_blocks(ready(device), ready(host), torch.tensor([[7, 1], [4, 2]]))
    for source, target, old in zip(device, host, before, strict=True):
        assert torch.equal(target[1].view(torch.int32), source[7].view(torch.int32))
        assert torch.equal(target[2].view(torch.int32), source[4].view(torch.int32))
        assert torch.equal(target[0].view(torch.int32), old[0].view(torch.int32))


def test_blocks_that_do_not_fit_are_refused():
    small, large = ready(cached(full(4))), ready(cached(full(8)))
    with pytest.raises(
        LayoutError, match=r"blocks of \(2, 4, 64\) bytes cannot go into blocks of \(2, 8, 64\)"
    ):
        copy_blocks(small, large, torch.tensor([[1, 2]]))
    with pytest.raises(LayoutError, match="1 source layers and 2 target layers"):
        copy_blocks(small, small * 2, torch.tensor([[1, 2]]))


@every_layout
def test_zeroed_blocks_are_zero_and_others_stay(layout):
    layers = cached(full(4, 3, 5), layout, layers=2)
    before = [layer.clone() for layer in layers]
    zero_blocks(ready(layers), torch.tensor([6, 2], dtype=torch.int32))
    for layer, old in zip(layers, before, strict=True):
        old[[6, 2]] = 0
        assert torch.equal(layer.contiguous().view(torch.int32), old.contiguous().view(torch.int32))


def test_no_blocks_and_no_tokens_are_fine():
    spec = full()
    layers = ready(cached(spec), codec_of(spec))
    copy_blocks(layers, layers, torch.empty(0, 2, dtype=torch.int64))
    zero_blocks(layers, torch.empty(0, dtype=torch.int64))
    none = torch.empty(0, dtype=torch.int64)
    write_kv(layers[0], none, torch.empty(0, 2, 8), torch.empty(0, 2, 8))
    assert gather_kv(layers[0], none)[0].shape == (0, 2, 8)


def test_operations_have_shapes_without_bytes():
    spec = full(4, 2, 8, dtype="bfloat16")
    layers = ready(cached(spec, layers=2, device="meta"), codec_of(spec))
    slots = torch.empty(3, dtype=torch.int64, device="meta")
    key = torch.empty(3, 2, 8, dtype=torch.bfloat16, device="meta")
    write_kv(layers[0], slots, key, key)
    copy_blocks(layers, layers, torch.empty(2, 2, dtype=torch.int64, device="meta"))
    zero_blocks(layers, slots)
    out = paged_attention(
        torch.empty(3, 4, 8, dtype=torch.bfloat16, device="meta"),
        layers[0],
        TokenMap(block=4, states=4),
        torch.empty(2, 3, dtype=torch.int32, device="meta"),
        query_starts=torch.empty(3, dtype=torch.int64, device="meta"),
        lengths=torch.empty(2, dtype=torch.int64, device="meta"),
        max_query_len=2,
        scale=1.0,
    )
    assert (out.shape, out.dtype, out.device.type) == ((3, 4, 8), torch.bfloat16, "meta")


# --- attention -----------------------------------------------------------------------------------------------------

LENGTHS, QUERIES = (13, 5, 1, 30), (13, 1, 1, 4)  # a whole prompt, two decodes, a chunk of a prompt


def batch(spec, layout, *, heads, width, width_v, dtype, device="cpu", codec=None, joint=False, kernel=None):
    """A cache that holds requests of LENGTHS, and the same keys and values as contiguous tensors."""
    (cells,) = cached(spec, layout, blocks=32, device=device, kernel=kernel)
    cache = layer_cache(cells, codec or codec_of(spec))
    entries = math.ceil(max(LENGTHS) / spec.block_size)
    order = torch.randperm(31, generator=torch.Generator().manual_seed(3)) + 1
    table = torch.zeros(len(LENGTHS), entries, dtype=torch.int32)
    contiguous, used = [], 0
    tokens = TokenMap(block=spec.block_size, states=spec.block_size)
    for row, length in enumerate(LENGTHS):
        blocks = math.ceil(length / spec.block_size)
        table[row, :blocks] = order[used : used + blocks]
        used += blocks
        key = random(length, heads, width, dtype=dtype, seed=row, device=device)
        value = None if joint else random(length, heads, width_v, dtype=dtype, seed=100 + row, device=device)
        slots = slot_mapping(tokens, table.to(device), torch.tensor(row), torch.arange(length, device=device))
        write_kv(cache, slots, key, value)
        contiguous.append((key, key[..., :width_v] if joint else value))
    return cache, tokens, table.to(device), contiguous


def seen(mask, prefix, query, key):
    """Whether a query position sees a key position: the rule, one pair at a time."""
    if mask.causal and key > query:
        return False
    in_window = mask.window is None or query - key < mask.window
    in_chunk = mask.chunk is None or query // mask.chunk == key // mask.chunk
    return (in_window and in_chunk) or key < prefix


def expected_attention(query, contiguous, mask, prefixes, scale, softcap, group):
    """torch's own attention over contiguous keys and values, request by request."""
    outs, start = [], 0
    for (key, value), length, count, prefix in zip(contiguous, LENGTHS, QUERIES, prefixes, strict=True):
        allowed = torch.tensor(
            [[seen(mask, prefix, length - count + i, j) for j in range(length)] for i in range(count)],
            device=query.device,
        )
        q, k, v = (x.transpose(0, 1).float() for x in (query[start : start + count], key, value))
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        if softcap is None:
            out = scaled_dot_product_attention(q, k, v, attn_mask=allowed, scale=scale)
        else:
            # the capped scores are what the mask adds to scores that are all zero
            scores = softcap * torch.tanh(q @ k.transpose(1, 2) * scale / softcap)
            bias = scores.masked_fill(~allowed, -torch.inf)
            out = scaled_dot_product_attention(torch.zeros_like(q), k, v, attn_mask=bias)
        outs.append(out.transpose(0, 1))
        start += count
    return torch.cat(outs)


MASKS = {
    "causal": Mask(),
    "both directions": Mask(causal=False),
    "window": Mask(window=6),
    "chunk": Mask(chunk=8),
    "window with sinks": Mask(window=6, prefix=4),
    "rswa: the prompt stays": Mask(window=3, prefix=torch.tensor([9, 2, 1, 11])),
}
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}  # bfloat16: the result itself is rounded to 8 bits


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("kind", MASKS)
def test_paged_attention_is_torch_s_attention(kind, softcap, dtype, device):
    mask, name = MASKS[kind], str(dtype).removeprefix("torch.")
    prefixes = mask.prefix.tolist() if isinstance(mask.prefix, torch.Tensor) else [mask.prefix] * 4
    spec = full(4, heads=2, width=16, head_size_v=8, dtype=name)
    cache, tokens, table, contiguous = batch(
        spec, LBHNC, heads=2, width=16, width_v=8, dtype=dtype, device=device
    )
    query = random(sum(QUERIES), 6, 16, dtype=dtype, seed=9, device=device)
    if isinstance(mask.prefix, torch.Tensor):
        mask = Mask(window=mask.window, prefix=mask.prefix.to(device))
    found = attention(query, cache, tokens, table, mask=mask, softcap=softcap)
    expected = expected_attention(query, contiguous, MASKS[kind], prefixes, 0.25, softcap, group=3)
    torch.testing.assert_close(found.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def attention(query, cache, tokens, table, **options):
    counts = torch.tensor([0, *QUERIES], device=query.device)
    return paged_attention(
        query,
        cache,
        tokens,
        table,
        query_starts=counts.cumsum(0),
        lengths=torch.tensor(LENGTHS, device=query.device),
        max_query_len=max(QUERIES),
        scale=0.25,
        **options,
    )


@pytest.mark.parametrize(
    ("layout", "kernel"),
    [*((layout, None) for layout in builtin_layouts()), (LBHNC, 2), (LBNHC, 2)],
    ids=lambda value: getattr(value, "name", f"kernel {value}"),
)
def test_paged_attention_through_every_layout(layout, kernel):
    spec = full(4, heads=2, width=16)
    cache, tokens, table, contiguous = batch(
        spec, layout, heads=2, width=16, width_v=16, dtype=torch.float32, kernel=kernel
    )
    query = random(sum(QUERIES), 2, 16, seed=9)
    found = attention(query, cache, tokens, table)
    expected = expected_attention(query, contiguous, Mask(), [0] * 4, 0.25, None, group=1)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_latent_attention_reads_values_from_the_latent(dtype):
    """MLA: one latent of 12 + 4 elements for all query heads; the first 12 are the value."""
    try:
        spec = spec_of(
            {
                "family": "mla",
                "block_size": 4,
                "num_kv_heads": 1,
                "head_size": 16,
                "dtype": str(dtype).removeprefix("torch."),
            }
        )
    except NotRun as reason:
        pytest.skip(f"not run: {reason}")
    cache, tokens, table, contiguous = batch(
        spec, LBNHC, heads=1, width=16, width_v=12, dtype=dtype, joint=True
    )
    query = random(sum(QUERIES), 5, 16, dtype=dtype, seed=9)
    found = attention(query, cache, tokens, table, value_width=12)
    expected = expected_attention(query, contiguous, Mask(), [0] * 4, 0.25, None, group=5)
    torch.testing.assert_close(found.float(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", ERROR_BOUNDS)
def test_attention_over_quantised_cells_misses_by_their_format_s_error(name):
    """Weights sum to 1, so values alone would miss by their bound e_v; scores are off by |q| e_k sqrt(d) scale, which
    moves weights by a factor of at most exp(2 delta)."""
    dtypes = load_plugins().cache_dtypes
    spec = packed(full(4, 2, 16, dtype=dtypes.get(name).element_dtype("float32")), dtypes.get(name))
    codec = codec_of(spec, name)
    cache, tokens, table, contiguous = batch(
        spec, LBNHC, heads=2, width=16, width_v=16, dtype=torch.float32, codec=codec
    )
    query = random(sum(QUERIES), 2, 16, seed=9)
    found = attention(query, cache, tokens, table)
    expected = expected_attention(query, contiguous, Mask(), [0] * 4, 0.25, None, group=1)
    keys, values = (torch.cat([pair[side] for pair in contiguous]) for side in (0, 1))
    miss_k, miss_v = (ERROR_BOUNDS[name](x).expand_as(x) for x in (keys, values))
    delta = 0.25 * query.norm(dim=-1).max() * miss_k.norm(dim=-1).max()
    bound = miss_v.max() + (torch.exp(2 * delta) - 1) * (values.abs() + miss_v).max()
    assert (found - expected).abs().max() <= bound


def test_entries_that_the_window_has_left_may_be_null():
    spec = full(4, heads=2, width=16)
    cache, tokens, table, contiguous = batch(spec, LBNHC, heads=2, width=16, width_v=16, dtype=torch.float32)
    cache.cells[0] = -1  # float32 NaN: nobody reads the null block
    # the request of 30 tokens has queries from 26 on, which see from 21 on: entries 0 to 4 are dead
    table[3, :5] = 0
    query = random(sum(QUERIES), 2, 16, seed=9)
    found = attention(query, cache, tokens, table, mask=Mask(window=6))
    expected = expected_attention(query, contiguous, Mask(window=6), [0] * 4, 0.25, None, group=1)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=2e-6)


def test_cells_without_a_codec_can_be_moved_and_not_read():
    (cache,) = ready(cached(full()))
    copy_blocks([cache], [cache], torch.tensor([[1, 2]]))
    with pytest.raises(LayoutError, match="prepared without a codec"):
        gather_kv(cache, torch.tensor([4]))


def test_query_heads_share_kv_heads_evenly():
    spec = full(4, heads=2, width=16)
    cache, tokens, table, _ = batch(spec, LBNHC, heads=2, width=16, width_v=16, dtype=torch.float32)
    with pytest.raises(SpecError, match="multiple of the cache's 2 heads"):
        attention(random(sum(QUERIES), 3, 16), cache, tokens, table)
