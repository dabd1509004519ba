"""Specs: frozen values that say how one layer stores its cache. Behaviour lives in the family (`kvframe.family`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Protocol, TypeVar

import attrs

from kvframe.checks import at_least, cdiv, one_of, optional_at_least
from kvframe.dtypes import KVQuantMode, dtype_name, element_size
from kvframe.engine import EngineConfig
from kvframe.errors import SpecError
from kvframe.merge import ANY, FIRST_SET, kv_field

T = TypeVar("T")
Self = TypeVar("Self", bound="SpecBase")

BLOCK_TABLE_ALIGNMENT = 128  # tokens; rows of a block table are widened to cover a multiple of this many


class KVCacheSpec(Protocol):
    """What planning, layouts and block management ask of a spec. Any frozen, hashable object with these will do.

    Sizes are bytes, lengths tokens, tables blocks. `SpecBase` has every rule that most specs share.
    """

    @property
    def block_size(self) -> int:
        """Tokens in one block."""

    @property
    def dcp_sharded(self) -> bool:
        """Whether decode context parallelism spreads token positions over ranks."""

    @property
    def num_heads(self) -> int:
        """Head slots of a page: H of the logical [B, H, N, C] shape."""

    @property
    def tokens_per_state(self) -> int | Fraction:
        """Tokens that one stored state covers; negative: one state a block."""

    @property
    def num_states(self) -> int:
        """States of a block: N of the logical shape."""

    @property
    def state_content_size_bytes(self) -> int:
        """Bytes of one (head slot, state) cell: C of the logical shape."""

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of one layer's page without padding."""

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one layer's page, padding included."""

    @property
    def block_stride_bytes_multiple(self) -> int:
        """The distance between two blocks must be a multiple of this many bytes."""

    @property
    def packed_stride_bytes_multiple(self) -> int:
        """The same where a block's pages of all layers lie together, as in block-outermost layouts."""

    @property
    def prefix_cacheable(self) -> bool:
        """Whether later requests may find its blocks."""

    @property
    def prefix_replay_tokens(self) -> int:
        """Tokens that a prefix hit computes again to rebuild what is not cached."""

    @property
    def block_table_token_alignment(self) -> int | None:
        """Rows of the block table cover a multiple of this many tokens; None: no widening."""

    @property
    def has_layer_views(self) -> bool:
        """Whether layers get tensors of their own; otherwise storage stays raw pages."""

    @property
    def uses_slot_mapping(self) -> bool:
        """Whether the worker maps each token to a slot."""

    def kernel_states(self, kernel_block_size: int) -> int:
        """States of `kernel_block_size` tokens."""

    def max_memory_usage_bytes(self, engine: EngineConfig) -> int:
        """The most bytes that one request can need of this layer."""

    def max_num_blocks_per_req(self, engine: EngineConfig, max_len: int) -> int:
        """Entries of a block-table row for requests of up to `max_len` tokens."""

    def copy_with_new_block_size(self: T, block_size: int) -> T:
        """The same spec with another block size; padding grows with the page if it must."""


@attrs.frozen
class MultipleOf:
    """A block-stride alignment in whole kernel blocks of at most `tokens` tokens, instead of bytes."""

    tokens: int = attrs.field(validator=at_least(1))


def _check_alignment(spec: Any, attribute: attrs.Attribute[Any], value: int | MultipleOf | None) -> None:
    if value is not None and not isinstance(value, MultipleOf):
        at_least(1)(spec, attribute, value)


@attrs.frozen(repr=False)
class SpecBase:
    """The root of specs: block size and the rules that most kinds share (contract 2.1).

    Subclasses give `num_heads`, `tokens_per_state`, `state_content_size_bytes`, `page_size_bytes` and
    `max_memory_usage_bytes`.

    Args:
        block_size: tokens in one block, at least 1.
        dcp_sharded: decode context parallelism spreads token positions over ranks.
        block_stride_alignment: bytes (or whole kernel blocks) that the block stride must be a multiple of.
        is_draft: the layer belongs to a draft model; takes no part in equality.

    Raises:
        SpecError: at construction, for a value that breaks its rule.
    """

    block_size: int = kv_field(validator=at_least(1))
    dcp_sharded: bool = kv_field(default=False, kw_only=True)
    block_stride_alignment: int | MultipleOf | None = kv_field(
        default=None, kw_only=True, validator=_check_alignment
    )
    is_draft: bool = kv_field(merge=ANY, default=False, kw_only=True, eq=False)

    def __repr__(self) -> str:
        """Only what differs from the defaults; subclasses pass `repr=False` to attrs to keep it."""
        shown = [str(self.block_size)]
        for field in attrs.fields(type(self))[1:]:
            value = getattr(self, field.name)
            if value != field.default:
                shown.append(f"{field.alias}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    def num_heads(self) -> int:
        """Head slots of a page (H)."""
        raise self._no_views("num_heads")

    @property
    def tokens_per_state(self) -> int | Fraction:
        """Tokens that one stored state covers; negative: one state a block."""
        raise self._no_views("tokens_per_state")

    @property
    def state_content_size_bytes(self) -> int:
        """Bytes of one (head slot, state) cell (C)."""
        raise self._no_views("state_content_size_bytes")

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one layer's page, padding included."""
        raise self._no_views("page_size_bytes")

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of one layer's page without padding."""
        return self.page_size_bytes

    @property
    def num_states(self) -> int:
        """States of a block (N)."""
        return self.kernel_states(self.block_size)

    def kernel_states(self, kernel_block_size: int) -> int:
        """States of `kernel_block_size` tokens.

        Raises:
            SpecError: the tokens do not hold a whole number of states.
        """
        per_state = self.tokens_per_state
        if per_state < 0:
            return 1
        if isinstance(per_state, int) and kernel_block_size % per_state == 0:
            return kernel_block_size // per_state  # nearly always: without the cost of fractions
        states = Fraction(kernel_block_size) / per_state
        if states.denominator != 1:
            raise SpecError(
                spec=type(self).__name__,
                field="tokens_per_state",
                value=per_state,
                rule=f"must divide the block of {kernel_block_size} tokens, or some tokens would have no storage",
            )
        return states.numerator

    @property
    def block_stride_bytes_multiple(self) -> int:
        """The block stride must be a multiple of this many bytes (contract 2.1)."""
        alignment = self.block_stride_alignment
        if not isinstance(alignment, MultipleOf):
            return alignment or 1
        tokens = math.gcd(alignment.tokens, self.block_size)
        return 1 if tokens == self.block_size else self.copy_with_new_block_size(tokens).page_size_bytes

    @property
    def packed_stride_bytes_multiple(self) -> int:
        """The same where a block's pages of all layers lie together, as in block-outermost layouts."""
        return self.block_stride_bytes_multiple

    @property
    def prefix_cacheable(self) -> bool:
        """Whether later requests may find its blocks."""
        return True

    @property
    def prefix_replay_tokens(self) -> int:
        """Tokens that a prefix hit computes again."""
        return 0

    @property
    def block_table_token_alignment(self) -> int | None:
        """Rows of the block table cover a multiple of this many tokens; None: no widening."""
        return BLOCK_TABLE_ALIGNMENT

    @property
    def has_layer_views(self) -> bool:
        """Whether layers get tensors of their own."""
        return True

    @property
    def uses_slot_mapping(self) -> bool:
        """Whether the worker maps each token to a slot."""
        return True

    def max_memory_usage_bytes(self, engine: EngineConfig) -> int:
        """The most bytes that one request can need of this layer."""
        raise self._no_views("max_memory_usage_bytes")

    def max_num_blocks_per_req(self, engine: EngineConfig, max_len: int) -> int:
        """Entries of a block-table row for requests of up to `max_len` tokens."""
        return cdiv(max_len, self.block_size)

    def copy_with_new_block_size(self: Self, block_size: int) -> Self:
        """The same spec with another block size."""
        return attrs.evolve(self, block_size=block_size)

    def _no_views(self, member: str) -> SpecError:
        return SpecError(
            spec=type(self).__name__,
            field=member,
            value=None,
            rule="this kind stores raw pages and has no [B, H, N, C] geometry",
        )


def check_padding(spec: SpecBase, padded: int | None) -> None:
    """The rule that padding never cuts into the page.

    Raises:
        SpecError: `page_size_padded` is below the page's own size, or the block holds no whole number of states.
    """
    content = spec.unpadded_page_size_bytes
    if padded is not None and padded < content:
        raise SpecError(
            spec=type(spec).__name__,
            field="page_size_padded",
            value=padded,
            rule=f"must be at least the page's own {content} bytes",
        )


def rescaled_padding(padded: int | None, unpadded: int) -> int | None:
    """Padding after the page changed to `unpadded` bytes: what was asked for, or the page if that is larger."""
    return None if padded is None else max(padded, unpadded)


def _as_mode(value: Any) -> Any:
    """A mode given by number as the mode; anything else as it is, for the validator to refuse."""
    return KVQuantMode(value) if value in tuple(KVQuantMode) else value


def _positive_tokens_per_state(spec: Any, attribute: attrs.Attribute[Any], value: int | Fraction) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, Fraction)) or value <= 0:
        rule = "must be a whole number or a Fraction above 0"
        raise SpecError(spec=type(spec).__name__, field=attribute.name, value=value, rule=rule)


@attrs.frozen(kw_only=True, repr=False)
class AttentionSpec(SpecBase):
    """A layer that stores keys and values (or one joint vector) for tokens (contract 2.2).

    Page bytes = H * N * C with H head slots, N = block_size / tokens_per_state states and C bytes a cell.

    Args:
        num_kv_heads: KV heads on this rank.
        head_size: elements of a K vector.
        head_size_v: elements of a V vector; None: as K; 0: one joint vector.
        dtype: element dtype of the stored cells, a name or a torch dtype.
        kv_quant_mode: how kernels dispatch on quantisation.
        page_size_padded: bytes of the page if it must be larger than its content.
        num_head_slots: H where the packing does not keep one slot a head.
        state_content_bytes: C where cells are packed.
        tokens_per_state: above 1 compresses; a fraction 1/p stores p states a token.
        max_tp_shards: distinct shards over tensor-parallel ranks; further ranks hold copies. None: unknown.
    """

    dcp_sharded: bool = kv_field(default=True)
    max_tp_shards: int | None = kv_field(default=None, validator=optional_at_least(1))
    num_kv_heads: int = kv_field(validator=at_least(1))
    head_size: int = kv_field(validator=at_least(1))
    dtype: str = kv_field(converter=dtype_name)
    _head_size_v: int | None = kv_field(default=None, alias="head_size_v", validator=optional_at_least(0))
    kv_quant_mode: KVQuantMode = kv_field(
        default=KVQuantMode.NONE, converter=_as_mode, validator=one_of(*KVQuantMode)
    )
    page_size_padded: int | None = kv_field(default=None, validator=optional_at_least(1))
    num_head_slots: int | None = kv_field(default=None, validator=optional_at_least(1))
    state_content_bytes: int | None = kv_field(default=None, validator=optional_at_least(1))
    tokens_per_state: int | Fraction = kv_field(default=1, validator=_positive_tokens_per_state)

    def __attrs_post_init__(self) -> None:
        element_size(self.dtype)
        if self._head_size_v == self.head_size:
            # one form for "as wide as K", so that equal specs compare equal and a new head_size carries over
            object.__setattr__(self, "_head_size_v", None)
        check_padding(self, self.page_size_padded)

    @property
    def head_size_v(self) -> int:
        """Elements of a V vector; 0 where K and V are one vector."""
        return self.head_size if self._head_size_v is None else self._head_size_v

    @property
    def num_heads(self) -> int:
        """Head slots of a page (H)."""
        return self.num_head_slots or self.num_kv_heads

    @property
    def state_content_size_bytes(self) -> int:
        """Bytes of one (head slot, state) cell (C)."""
        if self.state_content_bytes is not None:
            return self.state_content_bytes
        return (self.head_size + self.head_size_v) * element_size(self.dtype)

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of one layer's page without padding: H * N * C."""
        return self.num_heads * self.num_states * self.state_content_size_bytes

    @property
    def real_page_size_bytes(self) -> int:
        """The field's other name for `unpadded_page_size_bytes`."""
        return self.unpadded_page_size_bytes

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one layer's page, padding included."""
        return self.page_size_padded or self.unpadded_page_size_bytes

    def max_num_blocks_per_req(self, engine: EngineConfig, max_len: int) -> int:
        """Entries of a block-table row; context parallelism spreads a block's tokens over its ranks."""
        return cdiv(max_len, self.block_size * (engine.dcp if self.dcp_sharded else 1))

    def copy_with_new_block_size(self: A, block_size: int) -> A:
        """The same spec with another block size; padding grows with the page if it must."""
        bare = attrs.evolve(self, block_size=block_size, page_size_padded=None)
        padded = rescaled_padding(self.page_size_padded, bare.unpadded_page_size_bytes)
        return attrs.evolve(bare, page_size_padded=padded)


A = TypeVar("A", bound=AttentionSpec)


@attrs.frozen(kw_only=True, repr=False)
class FullAttentionSpec(AttentionSpec):
    """Every token stays for the request's whole life (contract 2.3).

    Args:
        sliding_window: tokens; the kernel's window of a layer whose blocks all stay.
        attention_chunk_size: tokens; likewise for chunks. Not together with a window.
        non_causal: attends in both directions; a hint to schedulers.
    """

    sliding_window: int | None = kv_field(merge=FIRST_SET, default=None, validator=optional_at_least(1))
    attention_chunk_size: int | None = kv_field(merge=FIRST_SET, default=None, validator=optional_at_least(1))
    non_causal: bool = kv_field(merge=ANY, default=False)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if self.sliding_window is not None and self.attention_chunk_size is not None:
            raise SpecError(
                spec=type(self).__name__,
                field="attention_chunk_size",
                value=self.attention_chunk_size,
                rule=f"a layer has a window or chunks, not both (sliding_window = {self.sliding_window})",
            )

    def max_memory_usage_bytes(self, engine: EngineConfig) -> int:
        """Bytes of ceil(M / block) pages, M the maximum length on this rank."""
        tokens = cdiv(engine.max_model_len, engine.dcp if self.dcp_sharded else 1)
        return cdiv(tokens, self.block_size) * self.page_size_bytes


def _as_pairs(specs: Mapping[str, Any] | tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    return tuple(specs.items()) if isinstance(specs, Mapping) else tuple(specs)


@attrs.frozen
class UniformTypeKVCacheSpecs:
    """The specs of a group whose layers need equally many blocks and differ in page size (contract 2.18).

    Args:
        kv_cache_specs: layer name to spec, in layer order.

    Raises:
        SpecError: no layers, or more than one block size or kind of context parallelism.
    """

    _pairs: tuple[tuple[str, Any], ...] = attrs.field(converter=_as_pairs, alias="kv_cache_specs")

    def __attrs_post_init__(self) -> None:
        if not self._pairs:
            raise self._error("kv_cache_specs", {}, "must name at least one layer")
        for name in ("block_size", "dcp_sharded"):
            values = {getattr(spec, name) for _, spec in self._pairs}
            if len(values) > 1:
                raise self._error(name, sorted(values), "must be equal in all layers of a group")

    def _error(self, field: str, value: Any, rule: str) -> SpecError:
        return SpecError(spec=type(self).__name__, field=field, value=value, rule=rule)

    @property
    def kv_cache_specs(self) -> dict[str, Any]:
        """Layer name to spec, in layer order."""
        return dict(self._pairs)

    @property
    def specs(self) -> tuple[Any, ...]:
        """The layers' specs, in layer order."""
        return tuple(spec for _, spec in self._pairs)

    @property
    def block_size(self) -> int:
        """Tokens in one block, the same for all layers."""
        return int(self.specs[0].block_size)

    @property
    def dcp_sharded(self) -> bool:
        """Whether context parallelism spreads tokens, the same for all layers."""
        return bool(self.specs[0].dcp_sharded)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block over all layers of the group."""
        return sum(int(spec.page_size_bytes) for spec in self.specs)

    @property
    def prefix_cacheable(self) -> bool:
        """Whether every layer may be found by later requests."""
        return all(spec.prefix_cacheable for spec in self.specs)

    @property
    def prefix_replay_tokens(self) -> int:
        """The most tokens that a layer replays."""
        return max(int(spec.prefix_replay_tokens) for spec in self.specs)

    @property
    def block_table_token_alignment(self) -> int | None:
        """Row widening of the block table, in tokens."""
        alignment: int | None = self.specs[0].block_table_token_alignment
        return alignment

    @property
    def uses_slot_mapping(self) -> bool:
        """Whether the worker maps tokens to slots."""
        return bool(self.specs[0].uses_slot_mapping)

    @property
    def has_layer_views(self) -> bool:
        """Whether any layer has tensors of its own."""
        return any(spec.has_layer_views for spec in self.specs)

    @property
    def max_layers_per_page_size(self) -> int:
        """Layers of the most common page size."""
        pages = [spec.page_size_bytes for spec in self.specs]
        return max(pages.count(page) for page in set(pages))

    def max_memory_usage_pages(self, engine: EngineConfig) -> int:
        """The most blocks that one request can need of the group."""
        return max(cdiv(spec.max_memory_usage_bytes(engine), spec.page_size_bytes) for spec in self.specs)

    def max_memory_usage_bytes(self, engine: EngineConfig) -> int:
        """The most bytes that one request can need of the group."""
        return self.max_memory_usage_pages(engine) * self.page_size_bytes

    def max_num_blocks_per_req(self, engine: EngineConfig, max_len: int) -> int:
        """Entries of a block-table row.

        Raises:
            SpecError: the layers need rows of different lengths.
        """
        rows = {spec.max_num_blocks_per_req(engine, max_len) for spec in self.specs}
        if len(rows) > 1:
            raise self._error("max_num_blocks_per_req", sorted(rows), "must be equal in all layers")
        return int(rows.pop())

    def copy_with_new_block_size(self, block_size: int) -> UniformTypeKVCacheSpecs:
        """The same group with every layer at another block size."""
        return UniformTypeKVCacheSpecs(
            {layer: spec.copy_with_new_block_size(block_size) for layer, spec in self._pairs}
        )


def iter_layer_specs(spec: Any) -> tuple[Any, ...]:
    """The specs of a group's layers: those of a uniform-type group in layer order, else the spec alone."""
    return spec.specs if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,)


def is_full_attention_spec(spec: Any) -> bool:
    """Whether every layer keeps all tokens by its class: it is, or derives from, full attention."""
    return all(isinstance(layer, FullAttentionSpec) for layer in iter_layer_specs(spec))


def replace_as(
    spec: Any, cls: type[T], *, drop: frozenset[str] | set[str] | tuple[str, ...] = (), **changes: Any
) -> T:
    """A `cls` with the fields of `spec`, less `drop`, with `changes` (contract 3.3).

    Raises:
        TypeError: `spec` has a field that `cls` lacks and that is not dropped.
    """
    fields = {
        field.alias: getattr(spec, field.name)
        for field in attrs.fields(type(spec))
        if field.init and field.alias not in drop
    }
    return cls(**{**fields, **changes})
