"""SpecFamily: what a kind of cache does. A spec is data; its family is the behaviour that the core asks for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, Generic, TypeVar

import attrs

from kvframe.checks import at_least, one_of
from kvframe.engine import EngineConfig
from kvframe.lifetime import Lifetime
from kvframe.merge import Refusal, merge_fields, refuse
from kvframe.spec import FullAttentionSpec

S = TypeVar("S")


@attrs.frozen(kw_only=True)
class Paging:
    """How the planner may shape a family's pages.

    Args:
        scales: a block of twice the tokens makes a page of twice the bytes; False for states, whose page is padded
            instead, and for kinds that hold something once a block beside their tokens.
        pads: the page may carry padding.
        own_group: every layer is a group of its own and never decides another layer's page.
        bucket: "layers", layers of the family are split into groups so that few slots stay empty; "state", as many
            layers a group as fit the widest group (contract 5.4); "window", as "state" where no compressed kind sets
            the pace, else as "layers".
        kernel_block: tokens; the smallest block that the family's kernels index.
        fallback: where pages cannot be brought to one size, engines keep it as full attention instead of refusing.
    """

    scales: bool = True
    pads: bool = True
    own_group: bool = False
    bucket: str = attrs.field(default="layers", validator=one_of("layers", "state", "window"))
    kernel_block: int = attrs.field(default=1, validator=at_least(1))
    fallback: bool = False


@attrs.frozen(kw_only=True)
class Traits:
    """Facts about a family that other parts of an engine ask for.

    Args:
        event_kind: the kind's word in block events (contract 3.14).
        needs_zeroing: new blocks must be zeroed, since kernels read before they have written everything.
        dcp: decode context parallelism spreads its tokens, "sharded", or is not possible, "unsupported".
        transferable: its blocks may be moved to another engine; False for replicas that can be rebuilt.
        freed_by_plugin: its entries also go back when the plugin says so, which no count of tokens tells: its sizing
            may be below what the lifetime holds.
    """

    event_kind: str = "unknown"
    needs_zeroing: bool = False
    dcp: str = attrs.field(default="sharded", validator=one_of("sharded", "unsupported"))
    transferable: bool = True
    freed_by_plugin: bool = False


def no_promotion(spec: Any, block_size: int | None = None) -> FullAttentionSpec | Refusal:
    """The `promote` of families that nothing can stand in for."""
    return refuse("family", "this kind cannot be kept as full attention", {"": type(spec).__name__})


@attrs.frozen(kw_only=True)
class SpecFamily(Generic[S]):
    """One kind of cache: its spec type and its behaviour, most of it derived from the fields and the lifetime.

    Args:
        name: unique, stable; tags specs in JSON.
        spec_type: the spec class; its subclasses belong to the family unless they have one of their own.
        lifetime: spec to its lifetime rule, before context-parallel scaling.
        merge: layers' specs to one spec or a Refusal; the default derives it from the fields' policies.
        group_key: what two layers must have in common, beside equal lifetimes, to share a block table.
        promote: spec (and the block size of the model's full layers, or None) to the full-attention spec that can
            stand in for it.
        retain: spec and tokens to a spec that keeps so many tokens longer than attention reads; None if it keeps all.
        window: spec to the window that block events report, in tokens, or None.
        make_views: spec and one layer's bytes (int8, [B, H, N, C]; raw pages [B, bytes] for kinds without layer views)
            to named tensors over them, never copies; None: by the spec's packing (`kvframe.views`). It may import
            torch when it is called, not before.
        paging: how the planner may shape its pages.
        traits: facts for other parts of an engine.
        replaces: the name of a family that this one takes over, of any plugin.
        examples: specs of common models' layers, which `kvframe check` tests the family with.
    """

    name: str
    spec_type: type[S]
    lifetime: Callable[[S], Lifetime]
    merge: Callable[[Mapping[str, S]], S | Refusal] = merge_fields
    group_key: Callable[[S], Hashable] = attrs.field(default=lambda spec: None)
    promote: Callable[[S, int | None], FullAttentionSpec | Refusal] = no_promotion
    retain: Callable[[S, int], S] | None = None
    window: Callable[[S], int | None] = attrs.field(default=lambda spec: None)
    make_views: Callable[[S, Any], Mapping[str, Any]] | None = None
    paging: Paging = attrs.field(factory=Paging)
    traits: Traits = attrs.field(factory=Traits)
    replaces: str | None = None
    examples: tuple[S, ...] = ()

    def table_key(self, spec: S) -> Hashable:
        """Equal keys, and only those, need the same blocks for every request: such layers may share a block table.

        It follows from the lifetime (which holds the block size) and context parallelism; `group_key` adds what a
        family's kernels need beyond that.
        """
        sharded = bool(getattr(spec, "dcp_sharded", False))
        return (self.lifetime(spec), sharded, self.group_key(spec))

    def engine_lifetime(self, spec: S, engine: EngineConfig) -> Lifetime:
        """The lifetime with the block as wide as context parallelism makes it."""
        sharded = bool(getattr(spec, "dcp_sharded", False))
        return self.lifetime(spec).scaled(engine.dcp if sharded else 1)


def full_attention_family() -> SpecFamily[FullAttentionSpec]:
    """The one family that the core brings itself."""
    return SpecFamily(
        name="full_attention",
        spec_type=FullAttentionSpec,
        lifetime=lambda spec: Lifetime(block=spec.block_size),
        promote=lambda spec, block_size: spec,
        traits=Traits(event_kind="full_attention"),
        examples=(
            FullAttentionSpec(16, num_kv_heads=8, head_size=128, dtype="bfloat16"),
            FullAttentionSpec(64, num_kv_heads=2, head_size=192, head_size_v=128, dtype="float16"),
            FullAttentionSpec(16, num_kv_heads=4, head_size=64, dtype="bfloat16", page_size_padded=20_480),
        ),
    )
