"""Opaque latent rows: where their bytes lie and what their formats miss by."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="codecs need torch: pip install 'kvframe[torch]'")

from kvframe import load_plugins  # noqa: E402
from kvframe.config import KVCacheTensor  # noqa: E402
from kvframe.errors import LayoutError  # noqa: E402
from kvframe.layout import LBNHC  # noqa: E402
from kvframe.ops import cell_codec, gather_kv, layer_cache, write_kv  # noqa: E402
from kvframe.packing import packed  # noqa: E402
from kvframe.views import create_kv_cache_views  # noqa: E402
from kvframe_mla import MLAAttentionSpec  # noqa: E402

SLOTS = torch.tensor([5, 17, 30])


def written(name, latent):
    dtypes = load_plugins().cache_dtypes
    spec = packed(
        MLAAttentionSpec(8, num_kv_heads=1, head_size=latent.shape[-1], dtype="uint8"), dtypes.get(name)
    )
    raw = torch.zeros(4 * spec.page_size_bytes, dtype=torch.int8)
    tensor = KVCacheTensor(size=0, layers=("a",), layer_stride=raw.numel(), block_stride=spec.page_size_bytes)
    (cells,) = create_kv_cache_views(raw, spec, 4, LBNHC, tensor)
    cache = layer_cache(cells, cell_codec(spec, dtypes, cache_dtype=dtypes.get(name)))
    write_kv(cache, SLOTS, latent, None)
    key, value = gather_kv(cache, SLOTS)
    assert torch.equal(key, value)
    return key, cells.view(32, -1)[SLOTS]


def drawn(width=576):
    return torch.randn(3, 1, width, generator=torch.Generator().manual_seed(0))


def test_fp8_rows_miss_by_e4m3_and_keep_the_rotary_part_in_bfloat16():
    latent = 7 * drawn()
    found, _ = written("fp8_ds_mla", latent)
    nope, scales = latent[..., :512], latent[..., :512].unflatten(-1, (4, 128)).abs().amax(-1) / 448
    # 3 mantissa bits: half of 2^-3 of a value, or half the smallest step, 2^-10 scales
    bound = torch.maximum(nope.abs() / 16, scales.repeat_interleave(128, -1) * 2**-10)
    assert ((found[..., :512] - nope).abs() <= bound * (1 + 1e-5)).all()
    assert torch.equal(found[..., 512:], latent[..., 512:].bfloat16().float())


def test_nvfp4_rows_lay_their_scales_out_as_kernels_read_them():
    latent = torch.zeros(3, 1, 576)
    latent[..., 16 * 6 : 16 * 7] = 6.0  # group 6 alone: a scale of 1 (0x38), codes of 6 (0x7), two in a byte
    found, rows = written("nvfp4_ds_mla", latent)
    assert torch.equal(found, latent)
    rows = rows.view(torch.uint8)
    assert rows.shape == (3, 352)
    # contract 2.4: the scale of group s at byte 8 * (s & 3) + (s >> 2) of the last 32; s = 6: 8 * 2 + 1
    assert rows[0, 320 + 17] == 0x38
    assert (rows[0, 8 * 6 : 8 * 7] == 0x77).all()
    assert rows[0].count_nonzero() == 1 + 8


@pytest.mark.parametrize("width", [576, 512])
def test_nvfp4_rows_miss_by_their_format(width):
    latent = drawn(width)
    found, _ = written("nvfp4_ds_mla", latent)
    largest = latent[..., :512].unflatten(-1, (32, 16)).abs().amax(-1).repeat_interleave(16, -1)
    # steps of 1/6 of the largest, at most 1 of them; the e4m3 scale is off by 1/16
    assert ((found[..., :512] - latent[..., :512]).abs() <= largest / 6 * (1 + 1 / 16)).all()
    rotary = latent[..., 512:]
    assert ((found[..., 512:] - rotary).abs() <= torch.maximum(rotary.abs() / 16, torch.tensor(2**-10))).all()


def test_pages_that_keep_scales_behind_all_rows_have_no_row_codec():
    with pytest.raises(LayoutError, match="rows of 584 bytes"):
        written("fp8_ds_mla", drawn(512))
