"""What is to be planned: the model's kinds of layers, and what one request holds of each at the compared lengths."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs
import numpy as np

from kvframe.checks import cdiv
from kvframe.config import KVCacheGroupSpec
from kvframe.engine import EngineConfig
from kvframe.lifetime import Lifetime
from kvframe.planning.alignment import align_state_pages
from kvframe.planning.cost import LENGTHS, Demand, Floats, Limits
from kvframe.planning.ranks import project
from kvframe.plugins import PluginHost

TABLE_ROWS = 256  # running requests that block tables are sized for where max_num_seqs says nothing

Specs = Mapping[str, Any]


@attrs.frozen(kw_only=True, eq=False)
class Kind:
    """Layers that may share a block table, with what one request holds of them.

    Args:
        layers: layer name to spec.
        pages: layer name to bytes of its page.
        blocks: blocks of one request at each length, shape [lengths].
        longest: blocks of one request of max_model_len.
        entries: block-table entries of all running requests.
    """

    layers: Specs
    pages: Mapping[str, int]
    blocks: Floats
    longest: int
    entries: int


@attrs.define(kw_only=True)
class Problem:
    """What is to be planned on one rank.

    Args:
        specs: layer name to spec as the model gave them, in natural order of names.
        host: who knows the families.
        engine: limits.
        memory: bytes for the cache.
        limits: what a plan may not exceed.
        exact: search exhaustively.
        stage: the layers that this rank holds, where the model is spread over pipeline stages; None: all.
    """

    specs: Specs
    host: PluginHost
    engine: EngineConfig
    memory: int
    limits: Limits
    exact: bool = False
    stage: frozenset[str] | None = None
    _known_peaks: dict[Lifetime, list[int]] = attrs.field(factory=dict, init=False)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths that plans are compared at, none above max_model_len."""
        return tuple(sorted({min(length, self.engine.max_model_len) for length in LENGTHS}))

    @cached_property
    def aligned(self) -> Specs:
        """The specs with one page for tokens and states, as layouts with equal pages need them."""
        tokens = [spec.block_size for spec in self.specs.values() if self.host.family(spec).paging.scales]
        return align_state_pages(
            self.specs,
            host=self.host,
            block_size=max(tokens, default=1),
            max_model_len=self.engine.max_model_len,
        )

    @cached_property
    def natural_specs(self) -> Specs:
        """The model's specs, nothing padded; cached states at the borders that the aligned plan has."""
        states = {layer for layer, spec in self.specs.items() if self.host.family(spec).lifetime(spec).state}
        return {
            layer: spec.copy_with_new_block_size(self.aligned[layer].block_size) if layer in states else spec
            for layer, spec in self.specs.items()
        }

    @cached_property
    def natural(self) -> Floats:
        """Bytes that one request needs at each length: blocks of the model's own specs at their pages."""
        kinds = self.kinds(self.natural_specs)
        total: Floats = np.array([sum(kind.pages.values()) * kind.blocks for kind in kinds]).sum(axis=0)
        return total

    @property
    def floor_bytes(self) -> int:
        """Bytes that one request of max_model_len needs on this rank, whatever the plan."""
        kinds = self.kinds(self.natural_specs)
        return sum(kind.longest * sum(kind.pages.values()) for kind in kinds)

    def kinds(self, specs: Specs) -> list[Kind]:
        """The kinds of (planned) specs: layers that may share a block table; groups of their own apart."""
        found: dict[Any, dict[str, Any]] = {}
        keys: dict[Any, Any] = {}
        for layer, spec in specs.items():
            if spec not in keys:
                family = self.host.family(spec)
                keys[spec] = (family.table_key(spec), family.paging.own_group)
            found.setdefault(keys[spec], {})[layer] = spec
        return [self._kind(layers) for layers in found.values()]

    def _kind(self, layers: Specs) -> Kind:
        spec = next(iter(layers.values()))
        lifetime = self.host.family(spec).engine_lifetime(spec, self.engine)
        blocks = self._peaks(lifetime)
        rows = self.engine.max_num_seqs or TABLE_ROWS
        return Kind(
            layers=layers,
            pages={layer: self.page_of(layer, planned) for layer, planned in layers.items()},
            blocks=np.array(blocks[:-1], dtype=np.float64),
            longest=blocks[-1],
            entries=rows * cdiv(self.engine.max_model_len, spec.block_size),
        )

    def page_of(self, layer: str, spec: Any) -> int:
        """Bytes of a layer's page on this rank: 0 for a layer of another stage."""
        return int(spec.page_size_bytes) if self.stage is None or layer in self.stage else 0

    def on_stage(self, groups: Sequence[KVCacheGroupSpec]) -> tuple[KVCacheGroupSpec, ...]:
        """The groups with only the layers that this rank holds."""
        return project(groups, self.stage, self.host) if self.stage is not None else tuple(groups)

    def _peaks(self, lifetime: Lifetime) -> list[int]:
        """Blocks that one request holds at each length, and last at max_model_len."""
        if lifetime not in self._known_peaks:
            self._known_peaks[lifetime] = [
                lifetime.peak(
                    self.engine.max_in_flight_tokens,
                    length,
                    max_encoder_tokens=self.engine.max_encoder_tokens,
                )
                for length in (*self.lengths, self.engine.max_model_len)
            ]
        return self._known_peaks[lifetime]

    def demand(self, kinds: Sequence[Kind], rows: Sequence[Sequence[Sequence[str]]]) -> Demand:
        """What groups ask for.

        Args:
            rows: for each kind, its groups as lists of layers.
        """
        owners = [kind for kind, groups in zip(kinds, rows, strict=True) for _ in groups]
        layers = [group for groups in rows for group in groups]
        pages = [sum(kind.pages[name] for name in group) for kind, group in zip(owners, layers, strict=True)]
        # A group without layers here still takes slabs, since block ids are common to all ranks: count it as the least.
        least = min((page for page in pages if page), default=1)
        pages = [page or least for page in pages]
        return Demand(
            pages=np.array(pages, dtype=np.float64),
            blocks=np.array([kind.blocks for kind in owners]).T,
            longest=np.array([kind.longest for kind in owners], dtype=np.float64),
            table_entries=np.array([kind.entries for kind in owners], dtype=np.float64),
            natural=self.natural,
            pool_bytes=max(self.memory, 1),
        )


def natural_order(specs: Specs) -> dict[str, Any]:
    """Specs by layer name, numbers in names counted as numbers, so that the order they came in does not matter."""

    def key(layer: str) -> list[tuple[bool, int, str]]:
        parts = re.split(r"(\d+)", layer)
        return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]

    return dict(sorted(specs.items(), key=lambda item: key(item[0])))
