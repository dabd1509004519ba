"""What checks are given: a family with its examples, or a whole plugin, and the limits and values that they try."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from fractions import Fraction
from typing import Any

import attrs

from kvframe.discovery import Filters, PluginRecord
from kvframe.engine import EngineConfig
from kvframe.errors import KVFrameError
from kvframe.family import SpecFamily
from kvframe.lifetime import Lifetime
from kvframe.plugins import PluginHost
from kvframe.spec import FullAttentionSpec

IN_FLIGHT = (1, 7, 64, 300)  # tokens: decode, drafts, and chunks of a prefill
LENGTHS = (1, 17, 100, 1000, 5000)  # tokens of the longest request
ENCODER_TOKENS = 1500


@attrs.frozen(kw_only=True, eq=False)
class Subject:
    """A family under test.

    Args:
        family: its behaviour.
        examples: specs of the family, such as models have.
        host: the plugins.
    """

    family: SpecFamily[Any]
    examples: tuple[Any, ...] = attrs.field(converter=tuple)
    host: PluginHost

    def __str__(self) -> str:
        return f"family {self.family.name}"

    def lifetime(self, spec: Any) -> Lifetime:
        """The family's rule for a spec."""
        return self.family.lifetime(spec)

    def engine(self, spec: Any, max_model_len: int, in_flight: int = 1, *, dcp: int = 1) -> EngineConfig:
        """Limits that fit a spec: states are cached exactly where its lifetime has one entry a block."""
        lifetime = self.lifetime(spec)
        return EngineConfig(
            max_model_len=max_model_len,
            max_in_flight_tokens=in_flight,
            max_encoder_tokens=ENCODER_TOKENS,
            state_cache_mode="align" if lifetime.state and lifetime.fixed is None else "none",
            dcp=dcp,
        )

    def engines(self, spec: Any, *, dcp: int = 1) -> Iterator[EngineConfig]:
        """Limits to try a spec with: short and long requests, decode and prefill."""
        block = self.lifetime(spec).block
        for length in sorted({*LENGTHS, block, 3 * block + 1}):
            for in_flight in IN_FLIGHT:
                yield self.engine(spec, length, in_flight, dcp=dcp)

    def specs_and_variants(self) -> Iterator[Any]:
        """The examples, and each with one field changed."""
        for example in self.examples:
            yield example
            for _, changed in variants(example):
                yield changed


def isolated_host(*plugins: object) -> PluginHost:
    """A host of these plugins, modules or objects with hooks, and of none that is installed."""
    return PluginHost(plugins, Filters(only=()))


def variants(spec: Any) -> Iterator[tuple[str, Any]]:
    """Specs that differ from `spec` in one field, with the field's name; changes that the spec refuses are left out."""
    for field in attrs.fields(type(spec)):
        value = getattr(spec, field.name)
        for other in _other_values(value):
            try:
                changed = attrs.evolve(spec, **{field.alias: other})
            except (KVFrameError, TypeError, ValueError):
                continue
            if getattr(changed, field.name) != value:
                yield field.alias, changed
                break


def _other_values(value: Any) -> Sequence[Any]:
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, Enum):
        return [member for member in type(value) if member is not value]
    if isinstance(value, (int, Fraction)):
        return (2 * value, value + 1, 1)
    if value is None:
        return (1 << 20, 64, 1)
    if isinstance(value, str):
        return ("float32", "float16", "align", f"{value}_other")
    if isinstance(value, tuple) and value:
        return ((*value, value[-1]), tuple(reversed(value)))
    return ()


def full_attention(block_size: int) -> FullAttentionSpec:
    """A full-attention layer to stand beside others: 8 heads of 64, bfloat16."""
    return FullAttentionSpec(block_size, num_kv_heads=8, head_size=64, dtype="bfloat16")


@attrs.frozen(kw_only=True, eq=False)
class PluginSubject:
    """A plugin under test."""

    record: PluginRecord
    host: PluginHost

    def __str__(self) -> str:
        return f"plugin {self.record.name}"
