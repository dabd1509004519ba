"""What a model keeps, in bytes on one rank for one sequence, without a budget: `kvframe inspect`."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import attrs

from kvframe.models.specs import ModelSpecs
from kvframe.plugins import PluginHost

Number = int | float


@attrs.frozen(kw_only=True)
class ModelBytes:
    """Bytes on one rank, without padding, derived from the specs' pages and lifetimes. Where layers of a kind differ,
    the figure a layer is the largest; the sums are exact.

    Args:
        per_token: kind to bytes a token (of the encoder where it stores those) in one layer.
        per_state: kind to bytes of one layer's state.
        before: bytes that one more token costs while every layer still grows.
        growth: bytes that one more token costs where every layer that recycles blocks is full.
        constant: bytes of all states of a sequence.
        encoder: bytes that one more encoder position costs.
    """

    per_token: dict[str, Number]
    per_state: dict[str, int]
    before: Number
    growth: Number
    constant: int
    encoder: Number


def model_bytes(model: ModelSpecs, host: PluginHost) -> ModelBytes:
    """The bytes that a model's specs stand for."""
    per_token: dict[str, Number] = {}
    per_state: dict[str, int] = {}
    before = growth = encoder = Fraction(0)
    constant = 0
    for name, spec in model.specs.items():
        kind, page = model.kinds[name], spec.unpadded_page_size_bytes
        lifetime = host.family(spec).lifetime(spec)
        if not lifetime.per_token:
            per_state[kind] = max(page, per_state.get(kind, 0))
            constant += page
            continue
        token = Fraction(page, spec.block_size)
        per_token[kind] = max(_number(token), per_token.get(kind, 0))
        if lifetime.source == "encoder":
            encoder += token
        else:
            before += token
            growth += 0 if lifetime.recycles else token
    return ModelBytes(
        per_token=per_token,
        per_state=per_state,
        before=_number(before),
        growth=_number(growth),
        constant=constant,
        encoder=_number(encoder),
    )


def _number(value: Fraction) -> Number:
    # several tokens may share a state, and then no token has a whole number of bytes
    return value.numerator if value.denominator == 1 else float(value)


def inspect_model(model: ModelSpecs, host: PluginHost) -> dict[str, Any]:
    """What `kvframe inspect --json` prints: `layers` and `bytes`, plain values throughout."""
    sizes = model_bytes(model, host)
    figures: dict[str, Any] = {
        "bytes_per_token_per_layer": sizes.per_token,
        "bytes_per_token_before_any_window_is_full": sizes.before,
        "bytes_per_token_growth_after_all_windows_are_full": sizes.growth,
        "constant_bytes_per_sequence_per_layer": sizes.per_state,
        "constant_bytes_per_sequence": sizes.constant,
    }
    if sizes.encoder:
        figures["cross_bytes_per_encoder_position"] = sizes.encoder
    return {"layers": dict(model.layers), "bytes": figures}
