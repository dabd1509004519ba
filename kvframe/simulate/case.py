"""One simulation: a model planned into a pool, a stream of requests, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from kvframe.blocks import BlockConfig, KVCacheManager, block_config
from kvframe.checks import optional_at_least
from kvframe.config import DEVICE
from kvframe.engine import EngineConfig
from kvframe.planning import Limits, Plan, plan
from kvframe.plugins import PluginHost, load_plugins
from kvframe.simulate.counts import Counts
from kvframe.simulate.engine import Engine, Pace
from kvframe.simulate.meter import Meter
from kvframe.simulate.streams import Arrival, RandomStream, RecordedStream


@attrs.frozen(kw_only=True)
class Case:
    """What is simulated. Plain values, so that it can be sent to another process.

    Args:
        name: what tells it from the others of a sweep: option to value.
        specs: layer name to spec.
        engine: the engine's limits.
        memory: bytes for the cache on one rank.
        stream: the requests.
        strategy, layout, limits: of the plan.
        kinds: layer name to the word that reports use.
        pace: of the engine.
        eviction: name of the eviction policy.
        max_requests: requests that can run at once.
        retention_interval, watermark: as in BlockConfig; None: the plan's, 0.
    """

    name: Mapping[str, Any] = attrs.field(factory=dict)
    specs: Mapping[str, Any]
    engine: EngineConfig
    memory: int
    stream: RandomStream | RecordedStream
    strategy: str = "optimal"
    layout: str | None = None
    limits: Limits = attrs.field(factory=Limits)
    kinds: Mapping[str, str] = attrs.field(factory=dict)
    pace: Pace = attrs.field(factory=Pace)
    eviction: str = "lru"
    max_requests: int = 4096
    retention_interval: int | None = attrs.field(default=None, validator=optional_at_least(0))
    watermark: float = 0.0


@attrs.frozen(kw_only=True)
class GroupResult:
    """One group: what it stores, its hits and evictions.

    Args:
        name: of the group, by its layers' kinds.
        layers: how many.
        block_tokens, blocks_per_slab: of the plan.
        hit_rate: share of the prompts' tokens that the group alone would have found; None without keys.
        limited_hits: hits that it ended before others would have.
        evicted_blocks: cached blocks that were overwritten.
    """

    name: str
    layers: int
    block_tokens: int
    blocks_per_slab: int
    hit_rate: float | None
    limited_hits: int
    evicted_blocks: int


@attrs.frozen(kw_only=True)
class Result:
    """What came of a case. Shares are of the pool's budget; counts of tokens are those of first admissions.

    Args:
        name: the case's.
        strategy, layout, pool_bytes, slab_bytes, num_slabs: of the plan.
        caching: whether blocks got keys: not where the stream shares nothing, since nothing could be found.
        requests: of the stream; finished; unservable: did not fit alone; too_long: beyond the longest.
        alive_at_first_refusal: running requests when the first did not fit; None: none was refused.
        useful_at_first_refusal: share of the pool in useful bytes then.
        useful_at_refusals: the mean over later refusals, of which every 25th is measured; None: there were too few.
        refusals: rounds in which a request did not fit.
        mean_alive, peak_alive: running requests.
        hit_rate: share of the prompts' tokens that were found.
        evictions: cached blocks that were overwritten.
        preemptions, recomputed_tokens: what growth beyond the pool cost.
        simulated_seconds: until the last request ended.
    """

    name: Mapping[str, Any]
    strategy: str
    layout: str
    pool_bytes: int
    slab_bytes: int
    num_slabs: int
    caching: bool
    requests: int
    finished: int
    unservable: int
    too_long: int
    alive_at_first_refusal: int | None
    useful_at_first_refusal: float | None
    useful_at_refusals: float | None
    refusals: int
    mean_alive: float
    peak_alive: int
    prompt_tokens: int
    output_tokens: int
    hit_tokens: int
    hit_rate: float
    evictions: int
    preemptions: int
    recomputed_tokens: int
    simulated_seconds: float
    groups: tuple[GroupResult, ...]

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values, for JSON."""
        return attrs.asdict(self)


def run_case(
    case: Case, progress: Callable[[int], None] = lambda done: None, host: PluginHost | None = None
) -> Result:
    """Plan, and run the stream to its end.

    Args:
        case: what to simulate.
        progress: called with the requests that are done, now and then.
        host: the plugins; None: the installed ones.

    Raises:
        KVFrameError: the model cannot be planned so.
    """
    host = host or load_plugins()
    made = plan(
        case.specs,
        engine=case.engine,
        memory=case.memory,
        host=host,
        layout=case.layout,
        strategy=case.strategy,
        kinds=case.kinds,
        limits=case.limits,
    )
    arrivals = case.stream.arrivals()
    config = _config(case, made, arrivals, host)
    manager = KVCacheManager(config, host.eviction_policies)
    counts = Engine(manager, arrivals, case.pace, Meter.of(made.config), progress).run()
    return _result(case, made, manager, counts, len(arrivals))


def shares(arrivals: list[Arrival]) -> bool:
    """Whether any part comes twice, so that a prefix could be found."""
    seen: set[Any] = set()
    for arrival in arrivals:
        for name, _ in arrival.prefix[:1]:
            if name in seen:
                return True
            seen.add(name)
        if arrival.output_id is not None:
            return True
    return False


def _config(case: Case, made: Plan, arrivals: list[Arrival], host: PluginHost) -> BlockConfig:
    """The manager's configuration; rows no longer than the stream's requests, which costs less."""
    limits: dict[str, Any] = {
        "max_requests": case.max_requests,
        "eviction": case.eviction,
        "watermark": case.watermark,
    }
    if case.retention_interval is not None:
        limits["retention_interval"] = case.retention_interval
    config = block_config(made.config, case.engine, host=host, **limits)
    if not shares(arrivals):
        config = attrs.evolve(config, prefix_caching=False)
    longest = max((arrival.tokens for arrival in arrivals), default=1)
    widest = max(group.lifetime.block for group in config.groups)
    return attrs.evolve(config, max_model_len=min(config.max_model_len, max(longest, widest)))


def _result(case: Case, made: Plan, manager: KVCacheManager, counts: Counts, requests: int) -> Result:
    pool, first = made.config.pools[DEVICE], counts.first_refusal
    counted = manager.statistics()
    asked = counted.asked_tokens or 1
    groups = [group for group in made.config.groups if group.pool == DEVICE]
    return Result(
        name=dict(case.name),
        strategy=case.strategy,
        layout=pool.layout,
        pool_bytes=pool.budget_bytes,
        slab_bytes=pool.slab_bytes,
        num_slabs=pool.num_slabs,
        caching=manager.config.prefix_caching,
        requests=requests,
        finished=counts.finished,
        unservable=counts.unservable,
        too_long=counts.too_long,
        alive_at_first_refusal=first.alive if first else None,
        useful_at_first_refusal=first.useful_share if first else None,
        useful_at_refusals=sum(counts.shares) / len(counts.shares) if counts.shares else None,
        refusals=counts.refusals,
        mean_alive=counts.request_seconds / counts.seconds if counts.seconds else 0.0,
        peak_alive=counts.peak_alive,
        prompt_tokens=counts.prompt_tokens,
        output_tokens=counts.output_tokens,
        hit_tokens=counts.hit_tokens,
        hit_rate=counts.hit_tokens / counts.prompt_tokens if counts.prompt_tokens else 0.0,
        evictions=sum(group.evicted_blocks for group in counted.groups),
        preemptions=counts.preemptions,
        recomputed_tokens=counts.recomputed_tokens,
        simulated_seconds=counts.seconds,
        groups=tuple(
            GroupResult(
                name=", ".join(
                    dict.fromkeys(
                        case.kinds.get(layer, family)
                        for layer, family in zip(group.layer_names, group.family, strict=True)
                    )
                ),
                layers=len(group.layer_names),
                block_tokens=numbers.block_tokens,
                blocks_per_slab=numbers.blocks_per_slab,
                hit_rate=None if numbers.hit_tokens is None else numbers.hit_tokens / asked,
                limited_hits=numbers.limited_hits,
                evicted_blocks=numbers.evicted_blocks,
            )
            for group, numbers in zip(groups, counted.groups, strict=True)
        ),
    )
