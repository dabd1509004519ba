"""How config files spell recurrent state: the layer kinds, and the model types that own them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from kvframe import Layer, LayerContext, LayerReader, ModelConfig, ModelReader, hookimpl
from kvframe.spelling import FULL, NO_CACHE, Kinds, Pattern, common_layers, every_nth, indices, listed
from kvframe_mamba import shapes
from kvframe_mamba.shapes import States, StateStorage
from kvframe_mamba.spec import MambaSpec

MAMBA1: Kinds = ("mamba1",)
MAMBA2: Kinds = ("mamba2",)
LINEAR: Kinds = ("linear_attention",)
SHORT_CONV: Kinds = ("short_conv",)

# Names of the sizes in `shapes.mamba2`, by model type.
_MAMBA2_FIELDS = {
    "heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "groups": "mamba_n_groups",
    "state": "mamba_d_state",
    "kernel": "mamba_d_conv",
}
_MAMBA2_FIELDS_OF: Mapping[str, Mapping[str, str]] = {
    "mamba2": {
        "heads": "num_heads",
        "head_dim": "head_dim",
        "groups": "n_groups",
        "state": "state_size",
        "kernel": "conv_kernel",
    },
    "nemotron_h": {
        "heads": "mamba_num_heads",
        "head_dim": "mamba_head_dim",
        "groups": "n_groups",
        "state": "ssm_state_size",
        "kernel": "conv_kernel",
    },
}
_DELTA_NET_FIELDS = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "kernel": "linear_conv_kernel_dim",
}
_KIMI_FIELDS = {"heads": "num_heads", "head_dim": "head_dim", "kernel": "short_conv_kernel_size"}


# --- layer kinds -----------------------------------------------------------------------------------------------------


@hookimpl
def kvframe_layer_readers() -> list[LayerReader]:
    """The readers of the kinds of state."""
    return [
        LayerReader(kind="mamba1", read=_mamba1),
        LayerReader(kind="mamba2", read=_mamba2),
        LayerReader(kind="linear_attention", read=_linear_attention),
        LayerReader(kind="short_conv", read=_short_conv),
    ]


def _mamba1(layer: LayerContext) -> dict[str, MambaSpec]:
    config = layer.config
    states = shapes.mamba1(
        _storage(layer),
        inner=config.integer("mamba_expand") * config.integer("hidden_size"),
        state=config.integer("mamba_d_state"),
        kernel=config.integer("mamba_d_conv"),
    )
    return _spec(layer, "mamba1", states)


def _mamba2(layer: LayerContext) -> dict[str, MambaSpec]:
    fields = _MAMBA2_FIELDS_OF.get(layer.config.model_type, _MAMBA2_FIELDS)
    return _spec(layer, "mamba2", shapes.mamba2(_storage(layer), **_sizes(layer.config, fields)))


def _linear_attention(layer: LayerContext) -> dict[str, MambaSpec]:
    """Three kinds of layers go by this name; which one it is follows from the fields."""
    config, storage = layer.config, _storage(layer)
    if config.get("linear_attn_config") is not None:
        sizes = _sizes(config.section("linear_attn_config"), _KIMI_FIELDS)
        return _spec(layer, "kimi_delta", shapes.kimi_delta(storage, **sizes))
    if config.model_type == "minimax_m1":
        heads = config.integer("num_attention_heads")
        return _spec(layer, "lightning", shapes.lightning(storage, heads=heads, head_dim=layer.head_dim()))
    sizes = _sizes(config, _DELTA_NET_FIELDS)
    return _spec(layer, "gated_delta_net", shapes.gated_delta_net(storage, **sizes))


def _short_conv(layer: LayerContext) -> dict[str, MambaSpec]:
    config = layer.config
    inner, kernel = config.integer("hidden_size"), config.integer("conv_L_cache")
    return _spec(layer, "short_conv", shapes.short_conv(_storage(layer), inner=inner, kernel=kernel))


def _sizes(config: ModelConfig, fields: Mapping[str, str]) -> dict[str, int]:
    return {size: config.integer(field) for size, field in fields.items()}


def _storage(layer: LayerContext) -> StateStorage:
    options = layer.options
    state_dtype = options.state_dtype or layer.config.dtype("mamba_ssm_dtype", "mamba_ssm_cache_dtype")
    return StateStorage.resolve(
        options.cache_dtype,
        options.model_dtype,
        state_dtype,
        tp=options.tp,
        speculative_tokens=options.speculative_tokens,
        file=layer.config.file,
    )


def _spec(layer: LayerContext, mamba_type: str, states: States) -> dict[str, MambaSpec]:
    """One state a block: of the longest request where states are not cached, so that a request has one."""
    options = layer.options
    spec = MambaSpec(
        options.block_size if options.caching else options.max_model_len,
        shapes=states[0],
        dtypes=states[1],
        mamba_type=mamba_type,
        mamba_cache_mode="align" if options.caching else "none",
        num_speculative_blocks=options.speculative_tokens,
    )
    return {"state": spec}


# --- model types -----------------------------------------------------------------------------------------------------


@hookimpl
def kvframe_model_readers() -> list[ModelReader]:
    """The readers of model types with states beside, or instead of, attention."""
    readers: dict[str, Callable[[ModelConfig], Sequence[Layer]]] = {
        "bamba": partial(common_layers, pattern=lambda c: _full_at(c, "attn_layer_indices", MAMBA2)),
        "falcon_h1": partial(common_layers, pattern=lambda _: lambda index: FULL + MAMBA2),
        "jamba": partial(common_layers, words={"mamba": MAMBA1}, pattern=_jamba),
        "kimi_linear": partial(common_layers, pattern=_kimi_linear),
        "lfm2": partial(
            common_layers,
            words={"conv": SHORT_CONV},
            pattern=lambda c: _full_at(c, "full_attn_idxs", SHORT_CONV),
        ),
        "mamba2": partial(common_layers, pattern=lambda _: lambda index: MAMBA2),
        "minimax_m1": partial(
            common_layers, pattern=lambda c: listed(c, "attn_type_list", {1: FULL, 0: LINEAR})
        ),
        "qwen3_next": partial(common_layers, pattern=_interval),
        "qwen3_5_text": partial(common_layers, pattern=_interval),
        "granitemoehybrid": _granite,
        "nemotron_h": _nemotron,
    }
    return [ModelReader(model_types=(model_type,), read=read) for model_type, read in readers.items()]


def _full_at(config: ModelConfig, field: str, others: Kinds) -> Pattern:
    full = indices(config, field, config.need(field))
    return lambda index: FULL if index in full else others


def _jamba(config: ModelConfig) -> Pattern:
    period = config.integer("attn_layer_period", default=8)
    offset = config.integer("attn_layer_offset", default=4, low=0)
    return lambda index: FULL if index % period == offset else MAMBA1


def _interval(config: ModelConfig) -> Pattern:
    return every_nth(config.integer("full_attention_interval", default=4), others=LINEAR)


def _kimi_linear(config: ModelConfig) -> Pattern:
    """Full attention, latent here, and Kimi delta attention: two lists of layers, counted from 1."""
    section = config.section("linear_attn_config")
    full, states = (
        indices(config, f"linear_attn_config.{name}", section.need(name), first=1)
        for name in ("full_attn_layers", "kda_layers")
    )
    if full & states or len(full | states) != config.num_layers:
        rule = f"that many layers, and with {len(full)} in full_attn_layers must name each of {config.num_layers} once"
        raise section.invalid("kda_layers", len(states), rule)
    return lambda index: FULL if index in full else LINEAR


def _granite(config: ModelConfig) -> Sequence[Layer]:
    """Both words for a state mean Mamba 2; there is no pattern to fall back on."""
    return common_layers(
        config,
        words={"mamba": MAMBA2, "linear_attention": MAMBA2},
        pattern=lambda config: config.need("layer_types"),
    )


def _nemotron(config: ModelConfig) -> Sequence[Layer]:
    letters = {"M": MAMBA2, "*": FULL, "-": NO_CACHE, "E": NO_CACHE}
    head_dim = config.get("head_dim", "attention_head_dim")
    return common_layers(
        config,
        words={"mamba": MAMBA2, "mlp": NO_CACHE, "moe": NO_CACHE},
        pattern=lambda config: listed(config, "hybrid_override_pattern", letters),
        facts={"full_attention": {"head_dim": head_dim}},
    )
