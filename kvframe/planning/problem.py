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
from kvframe.planning.alignment import align_state_pages, changed
from kvframe.planning.cost import BYTE, LENGTHS, Demand, Floats, Limits
from kvframe.planning.ranks import project
from kvframe.plugins import PluginHost

TABLE_ROWS = 256  # running requests that block tables are sized for where max_num_seqs says nothing

LARGE_POOL = 40 << 30  # bytes; from here on a plan adds at most half of the limit on structural shares

Specs = Mapping[str, Any]


@attrs.frozen(kw_only=True, eq=False)
class Kind:
    """Layers that may share a block table, with what one request holds of them.

    Args:
        layers: layer name to spec.
        pages: layer name to bytes of its page.
        alike: positions of layers that have one page size and lie on one pipeline stage.
        blocks: blocks of one request, shape [rows] (kvframe.planning.cost.Demand).
        longest: blocks of one request of max_model_len.
        entries: block-table entries of all running requests.
    """

    layers: Specs
    pages: Mapping[str, int]
    alike: Sequence[Sequence[int]]
    blocks: Floats
    longest: int
    entries: int

    def dealt(self, count: int) -> list[list[str]]:
        """The layers dealt to `count` groups of near-equal pages, none of them empty.

        Alike layers go round-robin, if they can from the first group on: a group then has about the same share of
        every stage.
        """
        names = list(self.layers)
        anew = all(len(positions) >= count for positions in self.alike)
        rows: list[list[int]] = [[] for _ in range(count)]
        start = 0
        for positions in self.alike:
            for number, position in enumerate(positions, start):
                rows[number % count].append(position)
            start = 0 if anew else start + len(positions)
        return [[names[position] for position in sorted(row)] for row in rows]


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
        stages: the layers of each pipeline stage, in the order that the caller gave them.
        stage: which of them this rank is.
    """

    specs: Specs
    host: PluginHost
    engine: EngineConfig
    memory: int
    limits: Limits
    exact: bool = False
    stages: tuple[tuple[str, ...], ...] = ()
    stage: int = 0
    _known_holdings: dict[Lifetime, tuple[Floats, int]] = attrs.field(factory=dict, init=False)

    @property
    def lengths(self) -> tuple[int, ...]:
        """The lengths that plans are compared at, none above max_model_len."""
        return tuple(sorted({min(length, self.engine.max_model_len) for length in LENGTHS}))

    @cached_property
    def aligned(self) -> Specs:
        """The specs with one page for tokens and states, as layouts with equal pages need them."""
        distinct = set(self.specs.values())
        tokens = [spec.block_size for spec in distinct if self.host.family(spec).paging.scales]
        return align_state_pages(
            self.specs,
            host=self.host,
            block_size=max(tokens, default=1),
            max_model_len=self.engine.max_model_len,
        )

    @cached_property
    def natural_specs(self) -> Specs:
        """The model's specs, nothing padded; cached states at the borders that the aligned plan has."""
        states = {s for s in set(self.specs.values()) if self.host.family(s).lifetime(s).state}
        blocks = {spec: self.aligned[layer].block_size for layer, spec in self.specs.items()}
        return changed(self.specs, states, lambda spec: spec.copy_with_new_block_size(blocks[spec]))

    @cached_property
    def natural_kinds(self) -> list[Kind]:
        """The kinds of the model's own specs."""
        return self.kinds(self.natural_specs)

    @cached_property
    def natural(self) -> Floats:
        """Bytes that each row's request needs: blocks of the model's own specs at their pages."""
        total: Floats = np.array([sum(k.pages.values()) * k.blocks for k in self.natural_kinds]).sum(axis=0)
        return total

    @cached_property
    def ceilings(self) -> tuple[Floats, ...]:
        """Bytes that each row's request may hold by the limit on shares, the tightest wish first; shape [rows] each.

        The wish: kernels' padding of pages counts as empty too, and in a large pool, where slabs may be large, a plan
        adds no more than half of the limit. The exact search knows the limit alone.
        """
        limit = self.limits.structural_share
        with np.errstate(divide="ignore"):
            allowed = self.natural / np.float64(1 - limit)
            if self.exact:
                return (allowed,)
            added = self.natural / np.float64(1 - limit / 2) if self.memory >= LARGE_POOL else allowed
            wish = np.minimum(added, self._content / np.float64(1 - limit))
        return (wish, allowed) if (wish < allowed).any() else (allowed,)

    def tier(self, held: Floats) -> int:
        """Which of the ceilings a plan keeps that holds so much: the number of the first, or how many there are."""
        return sum(bool((held > ceiling + BYTE).any()) for ceiling in self.ceilings)

    @property
    def _content(self) -> Floats:
        """As `natural`, but of the pages' content: without the padding that kernels ask for."""
        sizes = {spec: spec.unpadded_page_size_bytes for spec in set(self.natural_specs.values())}
        content = [
            sum(sizes[spec] for layer, spec in kind.layers.items() if self.holds(layer)) * kind.blocks
            for kind in self.natural_kinds
        ]
        total: Floats = np.array(content).sum(axis=0)
        return total

    @property
    def floor_bytes(self) -> int:
        """Bytes that one request of max_model_len needs on this rank, whatever the plan."""
        return sum(kind.longest * sum(kind.pages.values()) for kind in self.natural_kinds)

    def kinds(self, specs: Specs) -> list[Kind]:
        """The kinds of (planned) specs: layers that may share a block table; groups of their own apart."""
        found: dict[Any, dict[str, Any]] = {}
        keys: dict[Any, Any] = {}
        for layer, spec in specs.items():
            if spec not in keys:
                family = self.host.family(spec)
                keys[spec] = (family.table_key(spec), family.paging.own_group)
            found.setdefault(keys[spec], {})[layer] = spec
        return [self.kind(layers) for layers in found.values()]

    def kind(self, layers: Specs) -> Kind:
        """Layers that share a block table, as one kind."""
        spec = next(iter(layers.values()))
        blocks, longest = self._holdings(self.host.family(spec).engine_lifetime(spec, self.engine))
        rows = self.engine.max_num_seqs or TABLE_ROWS
        page_of = {planned: int(planned.page_size_bytes) for planned in set(layers.values())}
        pages: dict[str, int] = {}
        alike: dict[tuple[int, int], list[int]] = {}
        for position, (layer, planned) in enumerate(layers.items()):
            pages[layer] = page_of[planned] if self.holds(layer) else 0
            alike.setdefault((self.stage_of(layer), page_of[planned]), []).append(position)
        return Kind(
            layers=layers,
            pages=pages,
            alike=list(alike.values()),
            blocks=blocks,
            longest=longest,
            entries=rows * cdiv(self.engine.max_model_len, spec.block_size),
        )

    def holds(self, layer: str) -> bool:
        """Whether this rank holds the layer."""
        return self.stage_of(layer) == self.stage

    def stage_of(self, layer: str) -> int:
        """The pipeline stage that holds a layer."""
        return self._stage_of.get(layer, self.stage)

    @cached_property
    def _stage_of(self) -> Mapping[str, int]:
        return {layer: number for number, layers in enumerate(self.stages) for layer in layers}

    def in_stage_order(self, specs: Specs) -> Specs:
        """Specs in the order of the stages, where there are several: engines deal layers to groups in that order."""
        if len(self.stages) < 2:
            return specs
        return {layer: specs[layer] for layers in self.stages for layer in layers if layer in specs}

    def on_stage(self, groups: Sequence[KVCacheGroupSpec], stage: int) -> tuple[KVCacheGroupSpec, ...]:
        """The groups with only the layers of one pipeline stage."""
        return project(groups, self.stages[stage], self.host) if len(self.stages) > 1 else tuple(groups)

    def _holdings(self, lifetime: Lifetime) -> tuple[Floats, int]:
        """Blocks that the request of each row holds, and one of max_model_len at its peak.

        Rows: requests of the compared lengths in decode; then of all `LENGTHS` in decode and at their peaks.
        """
        if lifetime not in self._known_holdings:
            flights = sorted({1, self.engine.max_in_flight_tokens})
            rows = [self._decoding(lifetime, length) for length in (*self.lengths, *LENGTHS)]
            rows += [self._peak(lifetime, length, flight) for length in LENGTHS for flight in flights]
            longest = self._peak(lifetime, self.engine.max_model_len, self.engine.max_in_flight_tokens)
            self._known_holdings[lifetime] = np.array(rows, dtype=np.float64), longest
        return self._known_holdings[lifetime]

    def _decoding(self, lifetime: Lifetime, length: int) -> int:
        """Blocks of a request that decodes its token number `length`."""
        if lifetime.per_token and lifetime.source == "decoder":
            return int(lifetime.alive(length - 1, length, length))
        return self._peak(lifetime, length, 1)

    def _peak(self, lifetime: Lifetime, length: int, in_flight: int) -> int:
        return lifetime.peak(in_flight, length, max_encoder_tokens=self.engine.max_encoder_tokens)

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
            compared=len(self.lengths),
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
