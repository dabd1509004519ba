"""TurboQuant slots: bytes, bits and the errors of the formats."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="codecs need torch: pip install 'kvframe[torch]'")

from kvframe import FullAttentionSpec, load_plugins  # noqa: E402
from kvframe.config import KVCacheTensor  # noqa: E402
from kvframe.layout import BLNHC, LBHNC, LBNHC  # noqa: E402
from kvframe.ops import cell_codec, gather_kv, layer_cache, write_kv  # noqa: E402
from kvframe.packing import packed  # noqa: E402
from kvframe.views import create_kv_cache_views, make_layer_views  # noqa: E402

# Mean squared error of the best quantiser for a normal distribution (J. Max, 1960): 3 bits 0.03454, 4 bits 0.009497.
KEY_ERROR = {"turboquant_4bit_nc": 0.0095, "turboquant_k3v4_nc": 0.0345, "turboquant_3bit_nc": 0.0345}
NAMES = ["turboquant_k8v4", *KEY_ERROR]
VALUE_BITS = {name: 3 if name == "turboquant_3bit_nc" else 4 for name in NAMES}


def spec_of(name, **words):
    dtypes = load_plugins().cache_dtypes
    return packed(
        FullAttentionSpec(4, num_kv_heads=2, head_size=96, dtype="uint8", **words), dtypes.get(name)
    )


def stored(name, key, value, layout=LBNHC, **words):
    spec = spec_of(name, **words)
    raw = torch.zeros(8 * spec.page_size_bytes, dtype=torch.int8)
    tensor = KVCacheTensor(size=0, layers=("a",), layer_stride=raw.numel(), block_stride=spec.page_size_bytes)
    if layout is BLNHC:
        tensor = KVCacheTensor(
            size=0, layers=("a",), layer_stride=spec.page_size_bytes, block_stride=spec.page_size_bytes
        )
    (cells,) = create_kv_cache_views(raw, spec, 8, layout, tensor)
    cache = layer_cache(cells, cell_codec(spec, load_plugins().cache_dtypes))
    slots = torch.randperm(32, generator=torch.Generator().manual_seed(1))[: len(key)]
    write_kv(cache, slots, key, value)
    return gather_kv(cache, slots)


def drawn(width=96, seed=0):
    return torch.randn(24, 2, width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("layout", [LBNHC, LBHNC, BLNHC], ids=lambda layout: layout.name)
@pytest.mark.parametrize("name", NAMES)
def test_values_are_even_steps_between_smallest_and_largest(name, layout):
    value = 3 * drawn(seed=1) + 1
    _, found = stored(name, drawn(), value, layout)
    low, high = value.amin(-1, keepdim=True), value.amax(-1, keepdim=True)
    step = (high - low) / (2 ** VALUE_BITS[name] - 1)
    # half a step, and float16's rounding (2^-11) of the zero point and of up to 15 steps
    bound = step / 2 + 2**-11 * (low.abs() + high.abs() + 2 * (high - low))
    assert ((found - value).abs() <= bound).all()


@pytest.mark.parametrize("name", KEY_ERROR)
def test_keys_miss_by_the_quantiser_s_error_and_keep_their_length(name):
    key = drawn() * torch.linspace(0.1, 10, 24).view(24, 1, 1)
    key[:, :, 0] += 5  # an outlier channel: the rotation spreads it
    found, _ = stored(name, key, drawn(seed=1))
    missed = (found - key).square().sum(-1) / key.square().sum(-1)
    # one vector has 96 elements: the mean over 48 of them is near the law, single ones within three times
    assert missed.mean() == pytest.approx(KEY_ERROR[name], rel=0.15)
    assert missed.max() < 3 * KEY_ERROR[name]
    # float16 holds the norm to 2^-11
    assert torch.allclose(found.norm(dim=-1), key.norm(dim=-1), rtol=2**-10)


def test_eight_bit_keys_are_plain_e4m3():
    key = drawn()
    found, _ = stored("turboquant_k8v4", key, drawn(seed=1))
    assert torch.equal(found, key.to(torch.float8_e4m3fn).float())


def test_zero_vectors_stay_zero():
    zero = torch.zeros(3, 2, 96)
    for name in NAMES:
        for found in stored(name, zero, zero):
            assert torch.equal(found, zero)


def test_values_may_be_narrower_than_keys():
    value = drawn(40, seed=1)
    _, found = stored("turboquant_4bit_nc", drawn(), value, head_size_v=40)
    assert found.shape == value.shape
    assert (found - value).abs().max() < (value.max() - value.min()) / 15


def test_three_bit_codes_fill_whole_bytes():
    """96 elements of 3 bits are 36 bytes, then 2 of the norm: contract 2.19's slot of 90 with 48 + 4 for the value."""
    spec = spec_of("turboquant_k3v4_nc")
    raw = torch.zeros(8 * spec.page_size_bytes, dtype=torch.int8)
    tensor = KVCacheTensor(size=0, layers=("a",), layer_stride=raw.numel(), block_stride=spec.page_size_bytes)
    views = make_layer_views(load_plugins(), raw, spec, num_blocks=8, layout=LBNHC, tensor=tensor)["a"]
    assert {name: tuple(view.shape) for name, view in views.items()} == {
        "key": (8, 2, 4, 38),
        "value": (8, 2, 4, 52),
    }
    assert views["value"].storage_offset() == 38
