"""Adapter from the words of the vectors' files to kvframe's objects.

The folder is `KVFRAME_VECTORS` when set, else the compressed copies beside the tests. It holds `*.json` or
`*.json.gz`; files match by stem. A stem that is absent is named as not run; a folder without any file is an error.
"""

from __future__ import annotations

import gzip
import importlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from kvframe import EngineConfig, KVQuantMode, MultipleOf

FOLDER = Path(os.environ.get("KVFRAME_VECTORS") or Path(__file__).parent / "data" / "vectors")

# The vectors' family words, and where kvframe's class is.
CLASSES = {
    "full_attention": ("kvframe", "FullAttentionSpec"),
    "sliding_window": ("kvframe_sliding_window", "SlidingWindowSpec"),
    "chunked_local": ("kvframe_chunked_local", "ChunkedLocalAttentionSpec"),
    "mla": ("kvframe_mla", "MLAAttentionSpec"),
    "sliding_window_mla": ("kvframe_mla", "SlidingWindowMLASpec"),
    "rswa": ("kvframe_rswa", "RSWASpec"),
    "sink": ("kvframe_sink", "SinkFullAttentionSpec"),
    "cross_attention": ("kvframe_cross_attention", "CrossAttentionSpec"),
    "encoder_only": ("kvframe_cross_attention", "EncoderOnlyAttentionSpec"),
    "mamba": ("kvframe_mamba", "MambaSpec"),
    "circular_buffer": ("kvframe_circular_buffer", "CircularBufferSpec"),
    "kpool_tail": ("kvframe_circular_buffer", "KpoolTailSpec"),
    "hidden_state": ("kvframe_hidden_state", "HiddenStateCacheSpec"),
    "hisparse_hot": ("kvframe_hisparse", "HiSparseHotSpec"),
    "hisparse_resident": ("kvframe_hisparse", "HiSparseResidentSpec"),
}
SETUP_DEFAULTS = {
    "max_model_len": 4096,
    "max_num_batched_tokens": 2048,
    "tp": 1,
    "pp": 1,
    "dcp": 1,
    "pcp": 1,
    "async_scheduling": False,
    "mamba_cache_mode": "none",
    "max_encoder_tokens": 0,
    "layout": "LBHNC",
    "num_blocks_override": None,
    "disable_hybrid": False,
    "auto_fit": False,
    "block_size": 16,
    "prefix_match_unit": None,
    "prefix_caching": True,
    "retention_interval": None,
    "draft": None,
    "hisparse": None,
}
_OUTSIDE_THE_SEED = ("octave", "ultraquant", "custom")


# A case that cannot be run here: pytest counts and names it as skipped, with the reason (`-rs` lists them).
NotRun = pytest.skip.Exception


def _files() -> dict[str, Path]:
    found = {path.name.split(".")[0]: path for path in (*FOLDER.glob("*.json.gz"), *FOLDER.glob("*.json"))}
    if not found:
        raise FileNotFoundError(f"no *.json or *.json.gz in {FOLDER}")
    return found


def load(stem: str) -> list[dict[str, Any]]:
    """The cases of a file, [] where the folder has no such file.

    Raises:
        FileNotFoundError: the folder holds no vectors at all.
    """
    path = _files().get(stem)
    if path is None:
        return []
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    cases: list[dict[str, Any]] = json.loads(text)
    return cases


def params(stem: str, where: Callable[[dict[str, Any]], bool] = lambda case: True) -> list[Any]:
    """A file's cases for `pytest.mark.parametrize("case", ...)`, named by id; an absent file is one skipped case.

    Args:
        stem: the file's name without endings.
        where: which of its cases.
    """
    cases = [case for case in load(stem) if where(case)]
    if not cases:
        skip = pytest.mark.skip(reason=f"not run: the vectors' folder has no such case of {stem!r}")
        return [pytest.param(None, id=f"{stem}-absent", marks=skip)]
    return [pytest.param(case, id=case["id"]) for case in cases]


def quant_mode_of(word: str) -> KVQuantMode:
    """The mode of a vectors' word.

    Raises:
        NotRun: a mode that the seed does not have.
    """
    if word.startswith(_OUTSIDE_THE_SEED):
        raise NotRun(f"not run: quantisation mode {word} is outside the seed")
    return KVQuantMode[word.upper()]


def _alignment(value: Any) -> Any:
    return MultipleOf(value["multiple_of_kernel_block"]) if isinstance(value, dict) else value


_VALUES: Mapping[str, Callable[[Any], Any]] = {
    "quant": quant_mode_of,
    "tokens_per_state": lambda value: Fraction(value) if isinstance(value, str) else value,
    "block_stride_alignment": _alignment,
    "shapes": lambda shapes: tuple(tuple(shape) for shape in shapes),
    "dtypes": tuple,
}


def spec_class(family: str) -> Any:
    """The class of a family word.

    Raises:
        NotRun: its plugin is not installed.
    """
    module, name = CLASSES[family]
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise NotRun(f"not run: family {family} needs {module}, which is not installed") from None


def spec_of(words: Mapping[str, Any]) -> Any:
    """The spec of a layer's words. `page_size_bytes` among them is a result, not a field.

    Raises:
        NotRun: its plugin is not installed, or its mode is outside the seed.
        SpecError: kvframe refuses the values.
    """
    cls = spec_class(words["family"])
    fields = {
        {"quant": "kv_quant_mode"}.get(word, word): _VALUES.get(word, lambda value: value)(value)
        for word, value in words.items()
        if word not in ("family", "page_size_bytes")
    }
    return cls(**fields)


def specs_of(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Specs of a list of layers, by a name that says their place."""
    return {f"layer.{index}": spec_of(words) for index, words in enumerate(layers)}


def setup_of(words: Mapping[str, Any]) -> dict[str, Any]:
    """A setup with its defaults filled in."""
    return {**SETUP_DEFAULTS, **words}


def engine_of(words: Mapping[str, Any]) -> EngineConfig:
    """The engine of a setup: tokens of all concurrent batches may be in flight."""
    setup = setup_of(words)
    batches = setup["pp"] + (1 if setup["async_scheduling"] else 0)
    return EngineConfig(
        max_model_len=setup["max_model_len"],
        max_in_flight_tokens=batches * setup["max_num_batched_tokens"],
        max_encoder_tokens=setup["max_encoder_tokens"],
        tp=setup["tp"],
        dcp=setup["dcp"],
        pcp=setup["pcp"],
        state_cache_mode=setup["mamba_cache_mode"],
        prefix_caching=setup["prefix_caching"],
    )
