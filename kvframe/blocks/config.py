"""What the block manager is built from: groups by their lifetimes, and the limits of the pool and the batch."""

from __future__ import annotations

import math
from functools import cached_property

import attrs

from kvframe.checks import at_least, optional_at_least
from kvframe.errors import SpecError
from kvframe.lifetime import Lifetime


@attrs.frozen(kw_only=True)
class GroupBlocks:
    """One group: the layers that share a block table.

    Args:
        name: for messages and statistics.
        lifetime: when its entries die; its block is the effective one, after context-parallel scaling.
        blocks_per_slab: blocks that the group cuts a slab into.
        draft: a draft model reads it, so a hit must leave its last unit to be computed again.
        zeroed: its new blocks must be zeroed: they are listed in `KVCacheManager.take_fresh`.
    """

    name: str
    lifetime: Lifetime
    blocks_per_slab: int = attrs.field(default=1, validator=at_least(1))
    draft: bool = False
    zeroed: bool = False

    @property
    def keyed(self) -> bool:
        """Whether later requests find its blocks."""
        return self.lifetime.hits == "keyed"

    @property
    def dense(self) -> bool:
        """Whether a hit needs every entry of it, so that its hits are downward closed."""
        lifetime = self.lifetime
        return not (lifetime.state or lifetime.fixed is not None or lifetime.thins)


def _some_groups(config: object, attribute: object, value: tuple[GroupBlocks, ...]) -> None:
    names = [group.name for group in value]
    if not names or len(set(names)) < len(names):
        raise SpecError(
            spec="BlockConfig",
            field="groups",
            value=names,
            rule="must name at least one group, each name once",
        )


@attrs.frozen(kw_only=True)
class BlockConfig:
    """The manager's groups and limits. Lengths are tokens.

    Args:
        groups: in table order.
        num_blocks: slabs of the pool, the one with the null block included; blocks, where no group splits slabs.
        max_model_len: the longest request.
        max_in_flight_tokens: tokens scheduled and not settled, for the admission bound; None: max_model_len.
        max_requests: rows of the block tables.
        max_encoder_tokens: encoder positions, for groups whose source is the encoder.
        prefix_caching: whether blocks are found by later requests.
        hash_unit: tokens of one hash; None: the greatest common divisor of the keyed groups' blocks.
        hash_name: one of `hashing.HASHES`.
        hash_lookahead: tokens beyond a unit that its hash covers too.
        draft_drop: hits leave the last unit of draft groups to be computed again; without a flag, of all groups.
        prefill_lookahead: tokens after a chunk that a draft module's prefill reads.
        retention_interval: None: all that can serve a hit is published; 0: only where this prompt can be resumed;
            else one resume point every so many tokens.
        watermark: share of the blocks that admission leaves free.
        eviction: name of the eviction policy.
        pin_limit: share of the pool that pinned prefixes may take.

    Raises:
        SpecError: a limit is out of range, or two of them contradict each other.
    """

    groups: tuple[GroupBlocks, ...] = attrs.field(converter=tuple, validator=_some_groups)
    num_blocks: int = attrs.field(validator=at_least(1))
    max_model_len: int = attrs.field(validator=at_least(1))
    max_in_flight_tokens: int | None = attrs.field(default=None, validator=optional_at_least(1))
    max_requests: int = attrs.field(default=256, validator=at_least(1))
    max_encoder_tokens: int = attrs.field(default=0, validator=at_least(0))
    prefix_caching: bool = True
    hash_unit: int = attrs.field(
        default=attrs.Factory(lambda self: self._common_unit(), takes_self=True), validator=at_least(1)
    )
    hash_name: str = "sha256"
    hash_lookahead: int = attrs.field(default=0, validator=at_least(0))
    draft_drop: bool = False
    prefill_lookahead: int = attrs.field(default=0, validator=at_least(0))
    retention_interval: int | None = attrs.field(default=None, validator=optional_at_least(0))
    watermark: float = 0.0
    eviction: str = "lru"
    pin_limit: float = 0.25

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.watermark < 1:
            raise self._error("watermark", "must be a share of the pool, from 0 to below 1")
        if not 0 <= self.pin_limit <= 1:
            raise self._error("pin_limit", "must be a share of the pool, from 0 to 1")
        if not self.prefix_caching:
            return
        if not self.keyed:
            raise self._error("prefix_caching", "no group has keyed hits: switch prefix caching off")
        odd = [self.groups[g].name for g in self.keyed if self.groups[g].lifetime.block % self.hash_unit]
        if odd:
            raise self._error(
                "hash_unit", f"must divide the block of every keyed group, not so in {', '.join(odd)}"
            )
        interval = self.retention_interval
        if interval and interval % self.step_unit:
            raise self._error(
                "retention_interval", f"must be a multiple of {self.step_unit} tokens, or 0, or None"
            )
        if interval and all(self.groups[g].dense for g in self.keyed):
            raise self._error("retention_interval", "has no effect: no keyed group ever lets an entry die")
        if self.draft_groups and self.step_unit < self.prefill_lookahead:
            raise self._error(
                "prefill_lookahead", f"must be at most the {self.step_unit} tokens of a hit's step"
            )

    def _error(self, field: str, rule: str) -> SpecError:
        return SpecError(spec="BlockConfig", field=field, value=getattr(self, field), rule=rule)

    def _common_unit(self) -> int:
        keyed = [group.lifetime.block for group in self.groups if group.keyed]
        return math.gcd(*keyed) if keyed else 1

    @cached_property
    def keyed(self) -> tuple[int, ...]:
        """Indices of the groups whose blocks later requests find."""
        return tuple(g for g, group in enumerate(self.groups) if group.keyed)

    @cached_property
    def reads_cache(self) -> bool:
        """Whether hits are possible: caching is on and no group forbids them."""
        return self.prefix_caching and all(group.lifetime.hits != "never" for group in self.groups)

    @cached_property
    def step_unit(self) -> int:
        """Tokens of the least common multiple of all blocks: what hits are multiples of, unless fine-grained."""
        return math.lcm(*(group.lifetime.block for group in self.groups))

    @cached_property
    def fine_grained(self) -> bool:
        """Whether a hit may end inside a block: a keyed state is wider than the hash unit, and the rest can follow."""
        if not self.prefix_caching:
            return False
        groups = [self.groups[g] for g in self.keyed]
        wide = any(group.lifetime.state and group.lifetime.block > self.hash_unit for group in groups)
        return wide and all(
            group.lifetime.state or group.dense or group.lifetime.block == self.hash_unit for group in groups
        )

    @cached_property
    def alignment(self) -> int:
        """Tokens that a hit is a multiple of."""
        return self.hash_unit if self.fine_grained else self.step_unit

    @cached_property
    def draft_groups(self) -> frozenset[int]:
        """The groups whose last unit a hit leaves out."""
        if not self.draft_drop:
            return frozenset()
        flagged = frozenset(g for g, group in enumerate(self.groups) if group.draft)
        return flagged or frozenset(range(len(self.groups)))

    def drop_unit(self, g: int) -> int:
        """Tokens beyond a hit that group `g` must have cached as well: 0 unless it is a draft group of tokens."""
        lifetime = self.groups[g].lifetime
        if g not in self.draft_groups or lifetime.state or self.hash_lookahead:
            return 0
        return self.hash_unit if self.fine_grained and lifetime.block > self.hash_unit else lifetime.block

    @cached_property
    def watermark_blocks(self) -> int:
        """Blocks that admission leaves free."""
        return int(self.watermark * self.num_blocks)

    @cached_property
    def uniform(self) -> bool:
        """Whether a slab is a block for every group, so that all groups share one set of block ids."""
        return all(group.blocks_per_slab == 1 for group in self.groups)
