"""A right family, and wrong ones: each has one fault of a kind that people really make."""

from __future__ import annotations

import attrs
import numpy as np

from kvframe import (
    AttentionSpec,
    CacheDType,
    FullAttentionSpec,
    KVQuantMode,
    SpecFamily,
    Traits,
    hookimpl,
    kv_field,
    replace_as,
)
from kvframe.checks import at_least, cdiv, one_of
from kvframe.dtypes import CellPart
from kvframe.lifetime import Lifetime
from kvframe.merge import ANY, MAX, Refusal, merge_fields, refuse
from kvframe.testing import Subject, isolated_host

# --- the right one: a sliding window, written from the contract -------------------------------------------------------


@attrs.frozen(kw_only=True, repr=False)
class Right(AttentionSpec):
    window: int = kv_field(validator=at_least(1))
    kept: int = kv_field(default=0, validator=at_least(0))
    hint: bool = kv_field(merge=ANY, default=False)

    def max_memory_usage_bytes(self, engine):
        held = min(self.window - 1 + self.kept + engine.max_in_flight_tokens, engine.max_model_len)
        return (cdiv(held, self.block_size) + 1) * self.page_size_bytes


@attrs.frozen(kw_only=True)
class Window(Lifetime):
    window: int

    @property
    def steady_from(self):
        return self.window + self.slack + self.block

    def dead(self, n, prompt):
        return np.zeros_like(n), np.maximum(0, n - self.window + 1 - self.slack) // self.block


def window_of(spec, rule=Window, **fields):
    return rule(block=spec.block_size, window=spec.window, slack=spec.kept, **fields)


def promoted(spec, block_size):
    resized = spec.copy_with_new_block_size(block_size or spec.block_size)
    return replace_as(resized, FullAttentionSpec, drop={"window", "kept", "hint"})


def examples(spec_type=Right, **fields):
    return (
        spec_type(16, num_kv_heads=2, head_size=8, dtype="bfloat16", window=50, **fields),
        spec_type(8, num_kv_heads=1, head_size=16, dtype="float16", window=3, **fields),
    )


def family(spec_type=Right, **changes):
    fields = {
        "name": "tested",
        "spec_type": spec_type,
        "lifetime": window_of,
        "promote": promoted,
        "retain": lambda spec, tokens: attrs.evolve(spec, kept=tokens),
        "window": lambda spec: spec.window,
        "traits": Traits(event_kind="sliding_window", dcp="unsupported"),
    }
    return SpecFamily(**{**fields, **changes})


def subject(tested, specs=None, hooks=None):
    """A family with the plugins of nobody else.

    Args:
        tested: the family.
        specs: its examples; None: those of its spec type.
        hooks: further hooks of its plugin, by name.
    """

    class Plugin:
        @hookimpl
        def kvframe_spec_families(self):
            return [tested]

    for name, function in (hooks or {}).items():
        setattr(Plugin, name, staticmethod(hookimpl(function)))
    specs = examples(tested.spec_type) if specs is None else specs
    return Subject(family=tested, examples=specs, host=isolated_host(Plugin()))


# --- wrong specs ------------------------------------------------------------------------------------------------------


@attrs.define(kw_only=True, repr=False, eq=False)
class Mutable:
    """No frozen class: its window can be set."""

    block_size: int = 16
    window: int = 50


@attrs.frozen(kw_only=True, repr=False)
class HoldsAList(Right):
    marks: list = attrs.field(factory=lambda: [1, 2], hash=False)


@attrs.frozen(kw_only=True, repr=False)
class FloatPage(Right):
    @property
    def page_size_bytes(self):
        return self.unpadded_page_size_bytes / 1


class ByIdentity(Right):
    __eq__ = object.__eq__
    __hash__ = object.__hash__


@attrs.frozen(kw_only=True, repr=False)
class Nameless(Right):
    def __repr__(self):
        return "Nameless(...)"


@attrs.frozen(kw_only=True, repr=False)
class NegativeWindow(Right):
    window: int = kv_field()


@attrs.frozen(kw_only=True, repr=False)
class AnyDtype(Right):
    dtype: str = kv_field(converter=lambda name: name if name in ("bfloat16", "float16") else "float16")


@attrs.frozen(kw_only=True, repr=False)
class TextWindow(Right):
    window: int = kv_field(converter=lambda value: 64 if value == "many" else value, validator=at_least(1))


@attrs.frozen(kw_only=True, repr=False)
class SilentRounding(Right):
    tokens_per_state: int = kv_field(default=3)

    def kernel_states(self, kernel_block_size):
        return kernel_block_size // self.tokens_per_state


@attrs.frozen(kw_only=True, repr=False)
class CutPage(Right):
    def __attrs_post_init__(self):
        pass  # forgets the padding's rule

    @property
    def page_size_bytes(self):
        return self.unpadded_page_size_bytes if self.page_size_padded is None else self.page_size_padded


@attrs.frozen(kw_only=True, repr=False)
class SmallPage(Right):
    @property
    def page_size_bytes(self):
        return self.unpadded_page_size_bytes // 2


@attrs.frozen(kw_only=True, repr=False)
class HeaderInPage(Right):
    @property
    def unpadded_page_size_bytes(self):
        return super().unpadded_page_size_bytes + 64


@attrs.frozen(kw_only=True, repr=False)
class KeepsItsBlock(Right):
    def copy_with_new_block_size(self, block_size):
        return self if block_size >= 1 else super().copy_with_new_block_size(block_size)


@attrs.frozen(kw_only=True, repr=False)
class AnyBlock(Right):
    def copy_with_new_block_size(self, block_size):
        return super().copy_with_new_block_size(max(1, int(block_size)))


@attrs.frozen(kw_only=True, repr=False)
class BoundTooSmall(Right):
    def max_memory_usage_bytes(self, engine):
        return (
            super().max_memory_usage_bytes(engine) - self.page_size_bytes
        )  # forgets that windows start in blocks


@attrs.frozen(kw_only=True, repr=False)
class BoundTooLarge(Right):
    def max_memory_usage_bytes(self, engine):
        return cdiv(engine.max_model_len, self.block_size) * self.page_size_bytes


@attrs.frozen(kw_only=True, repr=False)
class HalfPages(Right):
    def max_memory_usage_bytes(self, engine):
        return super().max_memory_usage_bytes(engine) + self.page_size_bytes // 2


@attrs.frozen(kw_only=True, repr=False)
class Falls(Right):
    def max_memory_usage_bytes(self, engine):
        length = engine.max_model_len
        rest = length % self.block_size == 0  # "whole blocks need no spare one"
        return (cdiv(length, self.block_size) + 2 - 2 * rest) * self.page_size_bytes


@attrs.frozen(kw_only=True, repr=False)
class ShortRows(Right):
    def max_num_blocks_per_req(self, engine, max_len):
        return cdiv(min(self.window, max_len), self.block_size) + 1


@attrs.frozen(kw_only=True, repr=False)
class NotCacheable(Right):
    @property
    def prefix_cacheable(self):
        return False


@attrs.frozen(kw_only=True, repr=False)
class BadAlignment(Right):
    @property
    def block_table_token_alignment(self):
        return 0


@attrs.frozen(kw_only=True, repr=False)
class RawWithGeometry(Right):
    @property
    def has_layer_views(self):
        return False


@attrs.frozen(kw_only=True, repr=False)
class WidestWindow(Right):
    window: int = kv_field(merge=MAX, validator=at_least(1))


@attrs.frozen(kw_only=True, repr=False)
class TwoBlockSizes(Right):
    def copy_with_new_block_size(self, block_size):
        one_of(8, 16)(self, attrs.fields(type(self)).block_size, block_size)
        return super().copy_with_new_block_size(block_size)


@attrs.frozen(kw_only=True, repr=False)
class NoJson(Right):
    note: object = attrs.field(default=object, eq=False)


def local_class():
    @attrs.frozen(kw_only=True, repr=False)
    class Local(Right):
        pass

    return Local


# --- wrong lifetimes --------------------------------------------------------------------------------------------------


class RuleByIdentity(Window):
    __eq__ = object.__eq__
    __hash__ = object.__hash__


@attrs.frozen(kw_only=True)
class HiddenWindow(Window):
    window: int = attrs.field(eq=False)


@attrs.frozen(kw_only=True)
class OneTooMany(Window):
    def dead(self, n, prompt):
        return np.zeros_like(n), np.maximum(0, n - self.window + 2 - self.slack) // self.block


@attrs.frozen(kw_only=True)
class RoundedUp(Window):
    def dead(self, n, prompt):
        return np.zeros_like(n), -(-np.maximum(0, n - self.window + 1 - self.slack) // self.block)


@attrs.frozen(kw_only=True)
class ComesBack(Window):
    def dead(self, n, prompt):
        low, high = super().dead(n, prompt)
        return low, np.where(np.asarray(n) % 100 == 99, 0, high)


@attrs.frozen(kw_only=True)
class NumbersOnly(Window):
    def dead(self, n, prompt):
        first = int(np.max(n))
        return 0, max(0, first - self.window + 1 - self.slack) // self.block


@attrs.frozen(kw_only=True)
class SteadyTooSoon(Window):
    @property
    def steady_from(self):
        return self.window // 2


@attrs.frozen(kw_only=True)
class PeakTooSmall(Window):
    def peak(self, in_flight, max_len, *, max_encoder_tokens=0):
        return cdiv(min(self.window, max_len), self.block)


@attrs.frozen(kw_only=True)
class WakesLate(Window):
    def next_death(self, n, prompt, limit):
        found = super().next_death(n, prompt, limit)
        return None if found is None else min(found + 5, limit)


@attrs.frozen(kw_only=True)
class PromptDiesFirst(Window):
    """Frees the prompt as soon as it is read, but keeps what was generated."""

    def dead(self, n, prompt):
        low, high = super().dead(n, prompt)
        return low, np.minimum(high, prompt // self.block)


@attrs.frozen(kw_only=True)
class PromptStays(Window):
    """A resumed request, whose prompt is all that it has, would have nothing of the window."""

    def dead(self, n, prompt):
        low, high = super().dead(n, prompt)
        short = np.minimum(high, np.maximum(0, n - 200) // self.block)
        return low, np.where(np.asarray(n) > np.asarray(prompt), short, high)


# --- wrong merges -----------------------------------------------------------------------------------------------------


def first_wins(specs):
    return next(iter(specs.values()))


def asserts(specs):
    assert len(set(specs.values())) == 1
    return merge_fields(specs)


def counts(specs):
    """A window for every layer."""
    merged = merge_fields(specs)
    return merged if isinstance(merged, Refusal) else attrs.evolve(merged, window=merged.window * len(specs))


def three_are_too_many(specs):
    merged = merge_fields(specs)
    many = refuse(
        "window", "three layers are too many", {layer: spec.window for layer, spec in specs.items()}
    )
    return many if len(specs) > 2 else merged


def refuses_in_silence(specs):
    merged = merge_fields(specs)
    return Refusal(field="", rule="no") if isinstance(merged, Refusal) else merged


# --- wrong views ------------------------------------------------------------------------------------------------------


def halves(cells):
    from kvframe.views import typed

    width = cells.shape[-1] // 4
    return typed(cells, "float16", 0, width), typed(cells, "float16", 2 * width, width)


def overlapping_views(spec, cells):
    from kvframe.views import typed

    width = cells.shape[-1] // 4
    return {"key": typed(cells, "float16", 0, width), "value": typed(cells, "float16", width, width)}


def copied_views(spec, cells):
    key, value = halves(cells)
    return {"key": key.contiguous().clone(), "value": value}


def straying_views(spec, cells):
    """Every block of the value is block 0."""
    import torch

    key, value = halves(cells)
    same = torch.as_strided(value, value.shape, (0, *value.stride()[1:]), value.storage_offset())
    return {"key": key, "value": same}


def partial_views(spec, cells):
    return {"key": halves(cells)[0]}


def views_by_stride(spec, cells):
    key, value = halves(cells)
    return {"key": key, "value": value} if cells.stride(1) > cells.stride(2) else {"k": key, "v": value}


def padded_promotion(spec, block_size):
    return attrs.evolve(promoted(spec, block_size), head_size=2 * spec.head_size)


# --- wrong hooks ------------------------------------------------------------------------------------------------------


def pads_the_first_layer(specs):
    """The first layer, whichever that is, gets a page of twice the size."""
    first = next(iter(specs))
    padded = attrs.evolve(specs[first], page_size_padded=2 * specs[first].page_size_bytes)
    return {**specs, first: padded}


def doubling_dtype():
    """A cache dtype whose codec gives back twice what was stored."""

    def codec(cell):
        from kvframe.ops.codecs import PlainCodec

        class Doubling(PlainCodec):
            def decode(self, parts):
                key, value = super().decode(parts)
                return 2 * key, value

        key = CellPart(name="key", dtype="bfloat16", offset=0, width=cell.head_size)
        value = CellPart(name="value", dtype="bfloat16", offset=2 * cell.head_size, width=cell.head_size)
        return Doubling(parts=(key, value), heads=cell.num_kv_heads)

    return [CacheDType(name="doubling", mode=KVQuantMode.TURBOQUANT_K8V4, codec=codec)]
