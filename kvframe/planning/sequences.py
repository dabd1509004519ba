"""How many sequences the layers of constant size allow: states and rings, which a request keeps however short it is."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from kvframe.config import KVCacheConfig, KVCacheGroupSpec
from kvframe.engine import EngineConfig
from kvframe.errors import SequenceLimitError
from kvframe.planning.sizing import exact_bound
from kvframe.plugins import PluginHost
from kvframe.spec import iter_layer_specs


def constant_blocks(group: KVCacheGroupSpec, engine: EngineConfig, host: PluginHost) -> int | None:
    """Blocks that every running request holds in a group, whatever its length; None where they grow with it."""
    spec = iter_layer_specs(group.kv_cache_spec)[0]
    lifetime = host.family(spec).lifetime(spec)
    if lifetime.per_token and lifetime.source == "decoder":
        return None
    return exact_bound(host)(group, attrs.evolve(engine, max_in_flight_tokens=1))


def most_at_once(blocks: Sequence[tuple[int, int]], slabs: int) -> int:
    """The most requests whose blocks fit into so many slabs, where a slab serves one group.

    Args:
        blocks: for each group, blocks of one request and blocks of one slab.
        slabs: slabs that requests can hold.
    """

    def fits(requests: int) -> bool:
        return sum(-(-requests * held // per_slab) for held, per_slab in blocks) <= slabs

    low, high = 0, slabs * max((per_slab for held, per_slab in blocks if held), default=0)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def check_sequences(configs: Sequence[KVCacheConfig], engine: EngineConfig, host: PluginHost) -> None:
    """What max_num_seqs requests keep all the time fits into each pool of every rank.

    Raises:
        SequenceLimitError: it does not; names the layers and the most sequences that do fit.
    """
    if engine.max_num_seqs is None:
        return
    for config in configs:
        for name, pool in config.pools.items():
            constant = {
                index: blocks
                for index, group in enumerate(config.groups)
                if group.pool == name and (blocks := constant_blocks(group, engine, host))
            }
            groups = [config.groups[index] for index in constant]
            held = list(zip(constant.values(), (group.blocks_per_slab for group in groups), strict=True))
            most = most_at_once(held, pool.usable_slabs) if held else engine.max_num_seqs
            if most < engine.max_num_seqs:
                raise SequenceLimitError(
                    max_num_seqs=engine.max_num_seqs,
                    max_sequences=most,
                    layers=[layer for group in groups for layer in group.layer_names],
                    pool=name,
                )
