"""HiSparse in the planner (contract 5.10): latent pages in the host pool, and their companions on the device.

Every latent layer L gets two companions, `L.hisparse_resident` and `L.hisparse_hot`. Latent layers are one group in
the pool "host", their indexers one group on the device. Companions are packed: a pack is one group of resident pages
and one of hot pages, so that its layers share two block tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvframe import EngineConfig, KVCacheGroupSpec, LayerGroup, Pool, hookimpl
from kvframe.checks import at_least, cdiv, optional_at_least, round_up
from kvframe.errors import PlanError, UsageError
from kvframe_hisparse.spec import HiSparseHotSpec, HiSparseResidentSpec
from kvframe_mla import MLAAttentionSpec, SparseCacheRole

if TYPE_CHECKING:
    import click

SOURCE_ROLE = "hisparse_source"  # the group of host pages
INDEXER_ROLE = "hisparse_indexer"  # the group of the caches that choose tokens
HOST = "host"
HOST_LAYOUT = "LBNHC"
HOST_RESERVE = 2  # blocks: the null block, and the target of a copy-on-write
SHARED_ALIGNMENT = 4096  # bytes: ranks map one region by pages of the operating system
LARGEST_BUFFER = 32768  # tokens: slots of a hot region are indexed in 16 bits
RESIDENT, HOT = ".hisparse_resident", ".hisparse_hot"

Sources = dict[str, MLAAttentionSpec]


@attrs.frozen(kw_only=True)
class Settings:
    """What was asked for, under these names in `EngineConfig.extras` with "hisparse" before them.

    Args:
        buffer: tokens of a request's hot region; None: (query_len + 1) times the tokens that the indexer chooses.
        query_len: tokens that one decode step of a request computes at most: 1, and drafts beside it.
        shared_host: tensor-parallel ranks map one host pool.
    """

    buffer: int | None = attrs.field(default=None, validator=optional_at_least(1))
    query_len: int = attrs.field(default=1, validator=at_least(1))
    shared_host: bool = False

    @classmethod
    def read(cls, engine: EngineConfig) -> Settings | None:
        """The settings, None where HiSparse is off.

        Raises:
            UsageError: a setting without HiSparse, or a shared pool that ranks cannot share.
            SpecError: a number is out of its range.
        """
        extras = engine.extras
        given = {
            field.name: extras[f"hisparse_{field.name}"]
            for field in attrs.fields(cls)
            if extras.get(f"hisparse_{field.name}")
        }
        if not extras.get("hisparse"):
            for name, value in given.items():
                option = f"--hisparse-{name.replace('_', '-')}"
                raise UsageError(option=option, value=value, rule="goes with --hisparse")
            return None
        if given.get("shared_host") and (engine.tp == 1 or engine.dcp * engine.pcp > 1):
            rule = (
                f"needs several tensor-parallel ranks and no context parallelism, not tp {engine.tp}, "
                f"dcp {engine.dcp}, pcp {engine.pcp}"
            )
            raise UsageError(option="--hisparse-shared-host", value=None, rule=rule)
        return cls(**given)


@hookimpl
def kvframe_plan_options() -> list[click.Option]:
    """The options of `kvframe plan` that turn HiSparse on."""
    import click  # only the command line pays for it

    return [
        click.Option(
            ["--hisparse"],
            is_flag=True,
            help="Keep latent pages on the host, and on the device those in use; needs --host-memory.",
        ),
        click.Option(
            ["--hisparse-buffer"],
            type=click.IntRange(1),
            metavar="TOKENS",
            help="A request's hot region; default: (query length + 1) times the tokens that an indexer chooses.",
        ),
        click.Option(
            ["--hisparse-query-len"],
            type=click.IntRange(1),
            metavar="TOKENS",
            help="Tokens that one decode step of a request computes, drafts included; default: 1.",
        ),
        click.Option(
            ["--hisparse-shared-host"],
            is_flag=True,
            help="The tensor-parallel ranks of one node map one host pool.",
        ),
    ]


@hookimpl
def kvframe_adjust_specs(specs: Mapping[str, Any], engine: EngineConfig) -> Mapping[str, Any] | None:
    """The specs with two companions for each latent layer.

    Raises:
        PlanError: the layers cannot be planned with HiSparse; names them, what they hold and the rule.
        UsageError: see `Settings.read`.
    """
    settings = Settings.read(engine)
    if settings is None:
        return None
    sources, _ = _checked(specs)
    block = next(iter(sources.values())).block_size
    hot_blocks = cdiv(_buffer(sources, settings), block)
    companions: dict[str, Any] = {}
    for layer, spec in sources.items():
        page = spec.page_size_bytes
        companions[layer + RESIDENT] = HiSparseResidentSpec(block, page_size=page)
        companions[layer + HOT] = HiSparseHotSpec(block, page_size=page, blocks_per_request=hot_blocks)
    return {**specs, **companions}


@hookimpl
def kvframe_group_layers(
    specs: Mapping[str, Any], engine: EngineConfig, even: bool
) -> list[LayerGroup] | None:
    """Source, indexers, resident pages, hot pages, and what other layers there are.

    Where blocks must be about equally wide, a pack's pages are no wider than the indexers'; else a pack holds all
    layers of one page size.

    Raises:
        PlanError: layers that must share a pack have pages of several sizes.
    """
    if Settings.read(engine) is None:
        return None
    sources, indexers = _checked(specs)
    packs = (
        _packs(sources, sum(spec.page_size_bytes for spec in indexers.values())) if even else _alike(sources)
    )
    groups = [
        LayerGroup(layers=sources, pool=HOST, role=SOURCE_ROLE, uniform=True),
        LayerGroup(layers=indexers, role=INDEXER_ROLE, uniform=True),
        *(
            LayerGroup(layers=[layer + suffix for layer in pack])
            for suffix in (RESIDENT, HOT)
            for pack in packs
        ),
    ]
    named = {layer for group in groups for layer in group.layers}
    others = [layer for layer in specs if layer not in named]
    return [*groups, LayerGroup(layers=others, by_core=True)] if others else groups


@hookimpl
def kvframe_place_groups(
    groups: Sequence[KVCacheGroupSpec], pools: Mapping[str, Pool], engine: EngineConfig
) -> dict[str, Pool] | None:
    """The host pool, with room for a copy-on-write, and aligned where ranks map one region."""
    settings = Settings.read(engine)
    if settings is None or HOST not in pools:
        return None
    ranks = engine.tp if settings.shared_host else 1
    pool = pools[HOST]
    return {
        HOST: attrs.evolve(
            pool,
            slab_bytes=round_up(pool.slab_bytes, SHARED_ALIGNMENT if ranks > 1 else 1),
            layout=HOST_LAYOUT,
            shared_by_ranks=ranks,
            reserved_slabs=HOST_RESERVE,
        )
    }


def _checked(specs: Mapping[str, Any]) -> tuple[Sources, Sources]:
    """Latent layers and their indexers.

    Raises:
        PlanError: one of them is missing, their blocks differ, or the rows are of a format that HiSparse cannot move.
    """
    latent = {layer: spec for layer, spec in specs.items() if isinstance(spec, MLAAttentionSpec)}
    sources, indexers = (
        {layer: spec for layer, spec in latent.items() if spec.cache_role == role}
        for role in (SparseCacheRole.SPARSE, SparseCacheRole.INDEXER)
    )
    if not sources or not indexers:
        raise PlanError(
            reason="HiSparse needs latent layers and indexers that choose their tokens",
            layers=list(latent),
            values={"latent layers": len(sources), "indexers": len(indexers)},
            advice="Plan this model without --hisparse",
        )
    versions = {
        layer: spec.model_version for layer, spec in latent.items() if spec.model_version == "deepseek_v4"
    }
    if versions:
        raise PlanError(
            reason="HiSparse cannot move pages that hold compressed and separated rows",
            layers=list(versions),
            values={"model_version": "deepseek_v4"},
            advice="Plan this model without --hisparse",
        )
    blocks = {layer: spec.block_size for layer, spec in latent.items()}
    if len(set(blocks.values())) > 1:
        raise PlanError(
            reason="HiSparse needs one block size in all latent layers and indexers",
            layers=list(blocks),
            values={"block sizes": sorted(set(blocks.values()))},
            advice="Give all of them one block size",
        )
    return sources, indexers


def _buffer(sources: Sources, settings: Settings) -> int:
    """Tokens of a request's hot region.

    Raises:
        PlanError: no layer says how many tokens are chosen, or the region is too small or too large.
    """
    widths = [spec.topk_buffer_width for spec in sources.values() if spec.topk_buffer_width]
    if not widths:
        raise PlanError(
            reason="HiSparse needs to know how many tokens the indexer chooses",
            layers=list(sources),
            values={"topk_buffer_width": None},
            advice="Set topk_buffer_width on the latent layers, as a config with index_topk does",
        )
    chosen = settings.query_len * max(widths)
    buffer = settings.buffer or chosen + max(widths)
    if not chosen <= buffer <= LARGEST_BUFFER:
        raise PlanError(
            reason="a hot region must hold what one step reads, and its slots be indexed in 16 bits",
            values={"tokens of the region": buffer, "at least": chosen, "at most": LARGEST_BUFFER},
            advice="Change --hisparse-buffer, or leave it out",
        )
    return buffer


def _packs(sources: Sources, room: int) -> list[list[str]]:
    """Layers packed in order: units that choose their tokens together, as many as `room` bytes of pages hold.

    A unit begins at each layer that leads an index group; the first may begin without one. A unit wider than the room
    is a pack of its own.

    Raises:
        PlanError: a pack has pages of several sizes.
    """
    units: list[list[str]] = []
    for layer, spec in sources.items():
        if spec.is_index_group_leader or not units:
            units.append([])
        units[-1].append(layer)
    packs: list[list[str]] = [[]]
    for unit in units:
        width = sum(sources[layer].page_size_bytes for layer in (*packs[-1], *unit))
        if packs[-1] and width > room:
            packs.append([])
        packs[-1] += unit
    for pack in packs:
        pages = sorted({sources[layer].page_size_bytes for layer in pack})
        if len(pages) > 1:
            raise PlanError(
                reason="HiSparse needs one page size in layers whose companions share a block table",
                layers=pack,
                values={"page bytes": pages},
                advice="Store the latent layers in one cache dtype",
            )
    return packs


def _alike(sources: Sources) -> list[list[str]]:
    """Layers by page size."""
    alike: dict[int, list[str]] = {}
    for layer, spec in sources.items():
        alike.setdefault(spec.page_size_bytes, []).append(layer)
    return list(alike.values())
