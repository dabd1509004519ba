"""What the planner's tests plan: real models, mixes of kinds, and what a request of them holds, counted anew."""

import json
from functools import cache
from pathlib import Path

from kvframe import EngineConfig, FullAttentionSpec, load_plugins
from kvframe.models import encoder_positions, model_dtype, model_specs, read_config
from kvframe.readers import ReadOptions
from kvframe.spec import iter_layer_specs
from kvframe_mla import MLAAttentionSpec, SlidingWindowMLASpec
from kvframe_sliding_window import SlidingWindowSpec

HOST = load_plugins()
MIB, GIB = 1 << 20, 1 << 30
LENGTHS = (256, 2048, 8192, 32768, 131072)
FOLDER = Path(__file__).parent.parent / "data" / "models"
MODELS = tuple(path.stem for path in sorted(FOLDER.glob("*.json")))


@cache
def _config(name):
    return read_config(json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))["hf_config"])


@cache
def model(name, length=131072, caching=True):
    """A real model's specs in bfloat16, its own state dtype, blocks of 16 tokens."""
    config = _config(name)
    options = ReadOptions(
        block_size=16,
        cache_dtype=HOST.cache_dtypes.get("bfloat16"),
        model_dtype=model_dtype(config),
        max_model_len=length,
        caching=caching,
    )
    return model_specs(config, HOST, options).specs


def engine(name=None, length=131072, caching=True, **limits):
    """Limits for a model; encoder positions are its own."""
    positions = encoder_positions(_config(name)) if name in MODELS else None
    return EngineConfig(
        max_model_len=length,
        max_encoder_tokens=positions or 0,
        state_cache_mode="align" if caching else "none",
        prefix_caching=caching,
        **limits,
    )


def full(**changed):
    return FullAttentionSpec(
        **{"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16", **changed}
    )


def sliding(window=1024, **changed):
    values = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16", **changed}
    return SlidingWindowSpec(sliding_window=window, **values)


def mix(*parts):
    """Layers of several specs, spread evenly over the model: `mix((20, full()), (30, sliding()))`."""
    places = sorted(
        ((2 * index + 1) / (2 * count), number)
        for number, (count, _) in enumerate(parts)
        for index in range(count)
    )
    return {f"layers.{index}.attn": parts[number][1] for index, (_, number) in enumerate(places)}


def deepseek_v4_flash():
    """43 layers (contract 2.4): two with a window alone, then 21 compressed by 4 and 20 by 128, in turns.

    Pages, rounded up to 576 bytes: window 64 x 584 -> 37,440; compressed 37,440 and 1,728; indexer 8,640.
    The compressors' states are windows of fp32 rows: by 4, 4 x 8,192 -> 32,832 and for the indexer 4 x 2,048 -> 8,640;
    by 128, 8 x 4,096 -> 32,832.
    """
    row = {
        "num_kv_heads": 1,
        "head_size": 512,
        "dtype": "uint8",
        "state_content_bytes": 584,
        "alignment": 576,
    }
    row |= {"model_version": "deepseek_v4", "cache_dtype_str": "fp8_ds_mla"}

    def state(values, block, window):
        shape = {"num_kv_heads": 1, "head_size": values, "dtype": "float32", "alignment": 576}
        return SlidingWindowMLASpec(block_size=block, sliding_window=window, **shape)

    specs = {}
    for index in range(43):
        layer = f"layers.{index}"
        specs[f"{layer}.window"] = SlidingWindowMLASpec(block_size=64, sliding_window=128, **row)
        if index < 2:
            continue
        ratio = 4 if index % 2 == 0 else 128
        specs[f"{layer}.latent"] = MLAAttentionSpec(block_size=256, tokens_per_state=ratio, **row)
        if ratio == 128:
            specs[f"{layer}.state"] = state(1024, 8, 128)
            continue
        keys = {"num_kv_heads": 1, "head_size": 132, "dtype": "uint8", "alignment": 576}
        specs[f"{layer}.indexer"] = MLAAttentionSpec(block_size=256, tokens_per_state=4, **keys)
        specs[f"{layer}.state"] = state(2048, 4, 8)
        specs[f"{layer}.indexer_state"] = state(512, 4, 8)
    return specs


MIXES = {
    "20 full + 30 sliding": mix((20, full()), (30, sliding())),
    "19 full + 18 sliding": mix((19, full()), (18, sliding())),
    "DeepSeek-V4-Flash": deepseek_v4_flash(),
}


def specs_of(name, length=131072):
    return MIXES[name] if name in MIXES else model(name, length)


def kinds_of(specs):
    """Layers by what they keep alive: the kinds that cannot share a block table."""
    found = {}
    for layer, spec in specs.items():
        found.setdefault(HOST.family(spec).table_key(spec), []).append(layer)
    return found


MIXED = tuple(name for name in (*MODELS, *MIXES) if len(kinds_of(specs_of(name))) > 1)


def alive(spec, limits, length):
    """Blocks of a request that decodes its token number `length` (states and constant kinds: what it holds at most)."""
    lifetime = HOST.family(spec).engine_lifetime(spec, limits)
    if lifetime.state or lifetime.fixed is not None or lifetime.source != "decoder":
        return lifetime.peak(1, length, max_encoder_tokens=limits.max_encoder_tokens)
    return int(lifetime.alive(length - 1, length, length))


def peak(spec, limits, length):
    """The most blocks that a request of `length` tokens ever holds, chunks in flight included."""
    lifetime = HOST.family(spec).engine_lifetime(spec, limits)
    return lifetime.peak(limits.max_in_flight_tokens, length, max_encoder_tokens=limits.max_encoder_tokens)


def held_bytes(config, limits, length, count=alive):
    """Bytes of one request in all pools: its blocks at their strides, not its slabs."""
    total = 0
    for group in config.groups:
        spec = iter_layer_specs(group.kv_cache_spec)[0]
        stride, rest = divmod(config.pools[group.pool].slab_bytes, group.blocks_per_slab)
        assert rest == 0
        total += count(spec, limits, length) * stride
    return total


def natural_bytes(specs, state_blocks, limits, length, *, padding):
    """Bytes that the layers' own pages need; `padding`: with what the kernels' alignment adds.

    Args:
        state_blocks: tokens between two cached states.
    """
    total = 0
    for spec in specs.values():
        if HOST.family(spec).lifetime(spec).state:
            spec = spec.copy_with_new_block_size(state_blocks)
        page = spec.page_size_bytes if padding else spec.unpadded_page_size_bytes
        total += alive(spec, limits, length) * page
    return total


def structural_share(specs, config, limits, length, *, padding=True):
    """1 - natural / held bytes of one request (slabs.md): natural counts each block at its page, held at its stride."""
    firsts = [iter_layer_specs(group.kv_cache_spec)[0] for group in config.groups]
    states = [spec.block_size for spec in firsts if HOST.family(spec).lifetime(spec).state]
    needed = natural_bytes(specs, states[0] if states else 1, limits, length, padding=padding)
    return 1 - needed / held_bytes(config, limits, length)
