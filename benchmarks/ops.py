"""Reference operations against plain torch on the same bytes of one contiguous tensor.

Run by `make bench`. `write_kv` and `gather_kv` stand against `index_copy_` and `index_select`, `copy_blocks` against
one after the other. The plain side has its rows and indices ready; ours turns slots into addresses, and keys and values
into cells. Plain rows are as long as the layout's (all heads of a token in …NHC, one head in the others) and lie in the
layout's order.

Both sides run in turn in one process on one thread; a figure is the median over repeats of ours / plain. The bar is for
2,048 tokens. With 64 tokens the fixed cost of a few more torch calls shows; those figures are printed without a bar.
The exit code is 1 when the bar is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

from kvframe import FullAttentionSpec, load_plugins
from kvframe.config import KVCacheTensor
from kvframe.layout import KVCacheLayout, builtin_layouts
from kvframe.ops import LayerCache, cell_codec, copy_blocks, gather_kv, layer_cache, write_kv
from kvframe.views import create_kv_cache_views

BAR = 1.3
BARRED_TOKENS = 2048
TOKENS = (64, BARRED_TOKENS)
LAYERS, BLOCKS, BLOCK, HEADS, WIDTH = 2, 2048, 16, 8, 128
CELL = 2 * WIDTH * 2  # bytes of one head's K and V in bfloat16
PAGE = BLOCK * HEADS * CELL  # 64 KiB; a layer's 2,048 pages are far beyond any cache
SPEC = FullAttentionSpec(BLOCK, num_kv_heads=HEADS, head_size=WIDTH, dtype="bfloat16")
WARM_UP = 5

Work = Callable[[], object]


def first_layer(layout: KVCacheLayout) -> LayerCache:
    layer_stride, block_stride = {
        "LBHNC": (BLOCKS * PAGE, PAGE),
        "LBNHC": (BLOCKS * PAGE, PAGE),
        "LHBNC": (BLOCKS * PAGE, BLOCK * CELL),
        "BLHNC": (PAGE, LAYERS * PAGE),
        "BLNHC": (PAGE, LAYERS * PAGE),
        "BHLNC": (BLOCK * CELL, LAYERS * PAGE),
    }[layout.name]
    raw = torch.zeros(LAYERS * BLOCKS * PAGE, dtype=torch.int8)
    tensor = KVCacheTensor(
        size=raw.numel(), layers=("a", "b"), layer_stride=layer_stride, block_stride=block_stride
    )
    cells = create_kv_cache_views(raw, SPEC, BLOCKS, layout, tensor)[0]
    return layer_cache(cells, cell_codec(SPEC, load_plugins().cache_dtypes))


def cases(tokens: int, layout: KVCacheLayout) -> dict[str, tuple[Work, Work]]:
    layer = first_layer(layout)
    slots = torch.randperm(BLOCKS * BLOCK)[:tokens]
    key, value = (torch.randn(tokens, HEADS, WIDTH).bfloat16() for _ in range(2))
    both = torch.cat([key, value], -1)
    flat = torch.zeros(BLOCKS * BLOCK, HEADS * 2 * WIDTH, dtype=torch.bfloat16)
    if layout.order.endswith("NHC"):
        rows, index, values = flat, slots, both.view(tokens, -1)
    else:
        rows, values = flat.view(-1, 2 * WIDTH), both.view(-1, 2 * WIDTH)
        block, head, state = (slots // BLOCK)[:, None], torch.arange(HEADS), (slots % BLOCK)[:, None]
        run = head * BLOCKS + block if layout.name == "LHBNC" else block * HEADS + head
        index = (run * BLOCK + state).view(-1)
    pages = flat.view(BLOCKS, -1)
    source, target = torch.randperm(BLOCKS)[: 2 * max(4, tokens // BLOCK)].chunk(2)
    pairs = torch.stack([source, target], 1)
    return {
        "write_kv": (
            lambda: write_kv(layer, slots, key, value),
            lambda: rows.index_copy_(0, index, values),
        ),
        "gather_kv": (lambda: gather_kv(layer, slots), lambda: rows.index_select(0, index)),
        "copy_blocks": (
            lambda: copy_blocks([layer], [layer], pairs),
            lambda: pages.index_copy_(0, target, pages.index_select(0, source)),
        ),
    }


def measure(ours: Work, plain: Work, repeats: int) -> dict[str, float]:
    def seconds(work: Work) -> float:
        started = time.thread_time()
        work()
        return time.thread_time() - started

    pairs = [(seconds(ours), seconds(plain)) for _ in range(WARM_UP + repeats)][WARM_UP:]
    return {
        "ratio": statistics.median(a / b for a, b in pairs),
        "ours_us": statistics.median(a for a, _ in pairs) * 1e6,
        "plain_us": statistics.median(b for _, b in pairs) * 1e6,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--repeats", type=int, default=60, help="timed runs of each side")
    options = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = []
    for layout in builtin_layouts():
        for tokens in TOKENS:
            for name, (ours, plain) in cases(tokens, layout).items():
                figures = measure(ours, plain, options.repeats)
                bar = BAR if tokens == BARRED_TOKENS else None
                rows.append({"op": name, "layout": layout.name, "tokens": tokens, "bar": bar, **figures})
    passed = all(row["bar"] is None or row["ratio"] <= row["bar"] for row in rows)

    if options.json:
        print(json.dumps({"rows": rows, "bar": BAR, "passed": passed}))
    else:
        for row in rows:
            verdict = "" if row["bar"] is None else "met" if row["ratio"] <= row["bar"] else "MISSED"
            print(
                f"{row['op']:12} {row['layout']} {row['tokens']:5} tokens {row['ratio']:6.2f}  {verdict:6}"
                f" ({row['ours_us']:6.0f} us against {row['plain_us']:6.0f})"
            )
        print(f"bar: at most {BAR:g} at {BARRED_TOKENS:,} tokens: {'met' if passed else 'MISSED'}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
