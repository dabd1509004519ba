"""kvframe against the figures of a real engine: shapes of recurrent states, and blocks and pages of hybrids.

A case tagged `floored_heads` shows a division that drops heads: kvframe refuses it, as every division with a rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from kvframe import PluginHost, load_plugins
from kvframe.errors import NotDivisibleError
from kvframe.planning.alignment import align_state_pages
from tests.vectors import params, spec_of

shapes = pytest.importorskip("kvframe_mamba.shapes", reason="not run: kvframe-mamba is not installed")

Words = Mapping[str, Any]
MAX_MODEL_LEN = 131_072

# How the files' words for a kind's sizes are called in kvframe.
KINDS = {
    "mamba1": (
        shapes.mamba1,
        {"inner": "intermediate_size", "state": "state_size", "kernel": "conv_kernel"},
    ),
    "mamba2": (
        shapes.mamba2,
        {
            "heads": "num_heads",
            "head_dim": "head_dim",
            "groups": "n_groups",
            "state": "state_size",
            "kernel": "conv_kernel",
        },
    ),
    "gdn": (
        shapes.gated_delta_net,
        {
            "key_heads": "num_k_heads",
            "value_heads": "num_v_heads",
            "key_dim": "head_k_dim",
            "value_dim": "head_v_dim",
            "kernel": "conv_kernel_size",
        },
    ),
    "kda": (
        shapes.kimi_delta,
        {"heads": "num_heads", "head_dim": "head_dim", "kernel": "conv_kernel_size"},
    ),
    "short_conv": (shapes.short_conv, {"inner": "intermediate_size", "kernel": "conv_kernel"}),
    "linear": (shapes.lightning, {"heads": "num_heads", "head_dim": "head_dim"}),
}


@pytest.fixture(scope="module")
def host() -> PluginHost:
    return load_plugins()


def states_of(words: Words, host: PluginHost) -> Any:
    """(shapes, dtypes) of a layer's words."""
    ssm = words.get("ssm_cache_dtype", "auto")
    storage = shapes.StateStorage.resolve(
        host.cache_dtypes.get(words.get("cache_dtype", "auto")),
        words["model_dtype"],
        None if ssm == "auto" else ssm,
        tp=words["tp"],
        speculative_tokens=words.get("speculative_tokens", 0),
    )
    function, names = KINDS[words["kind"]]
    return function(storage, **{name: words[word] for name, word in names.items()})


def state_spec(words: Words, host: PluginHost, **fields: Any) -> Any:
    sizes, dtypes = states_of(words, host)
    layer = {"family": "mamba", "block_size": words.get("start_block_size", 16), **fields}
    return spec_of({**layer, "shapes": sizes, "dtypes": dtypes})


@pytest.mark.parametrize("case", params("state_shapes"))
def test_state_shapes(case: Any, host: PluginHost) -> None:
    words, expect = case["input"], case["expect"]
    if "error" in expect or "floored_heads" in case.get("quirk", ()):
        with pytest.raises(NotDivisibleError) as caught:
            states_of(words, host)
        assert caught.value.divisor == words["tp"]
        assert caught.value.value in words.values()
        assert caught.value.value % words["tp"]
        return
    spec = state_spec(words, host)
    assert spec.shapes == tuple(map(tuple, expect["shapes"]))
    assert spec.dtypes == tuple(expect["dtypes"])
    assert spec.page_size_bytes == expect["page_size_bytes"]


def hybrid_of(words: Words, host: PluginHost) -> dict[str, Any]:
    """One token layer and one state layer."""
    tokens = {
        "family": "mla" if words["mla"] else "full_attention",
        "block_size": words["start_block_size"],
        "num_kv_heads": words["num_kv_heads_per_rank"],
        "head_size": words["head_size"],
        "dtype": words["model_dtype"],
    }
    saves = words["prefill_checkpoint_alignment"]
    state = state_spec(
        words,
        host,
        mamba_cache_mode=words["mamba_cache_mode"],
        prefill_checkpoint_alignment=saves,
        num_prefill_checkpoint_blocks=int(saves is not None),
    )
    return {"attention": spec_of(tokens), "state": state}


@pytest.mark.parametrize("case", params("hybrid_align"))
def test_hybrid_align(case: Any, host: PluginHost) -> None:
    words, expect = case["input"], case["expect"]
    specs = hybrid_of(words, host)
    assert specs["state"].page_size_bytes == expect["state_page"]
    kernels = [int(str(size).removeprefix("multiple")) for size in words["kernel_block_sizes"]]
    aligned = align_state_pages(
        specs,
        host=host,
        block_size=words["start_block_size"],
        kernel_block_sizes=kernels,
        max_model_len=MAX_MODEL_LEN,
    )
    assert aligned["attention"].block_size == expect["block_size"]
    assert aligned["state"].page_size_padded == expect["state_page_padded"]
    assert aligned["state"].page_size_bytes == aligned["attention"].page_size_bytes
    # An uncached state has one block for the longest request; the files say null there.
    assert aligned["state"].block_size == (expect["state_block_size"] or MAX_MODEL_LEN)
