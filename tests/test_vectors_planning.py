"""`planning.json`: the engines' strategy gives the figures of a real engine, refusals included."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pytest

from kvframe import EngineConfig, KVQuantMode, MultipleOf, UniformTypeKVCacheSpecs, load_plugins
from kvframe.config import DEVICE, KVCacheConfig, KVCacheGroupSpec, Pool
from kvframe.errors import (
    InsufficientMemoryError,
    KVFrameError,
    LayoutError,
    MergeError,
    PlanError,
    SpecError,
)
from kvframe.layout import KVCacheLayout
from kvframe.planning.block_sizes import block_sizes
from kvframe.planning.given import given_groups, given_layers
from kvframe.planning.grouping import engine_groups, with_draft_flags, with_lookahead
from kvframe.planning.ranks import (
    RankBudget,
    check_memory,
    configs_for_ranks,
    merge_ranks,
    project,
    rank_pools,
)
from kvframe.planning.sizing import (
    blocks_per_request,
    bytes_per_block,
    engine_bound,
    largest_fitting_len,
)
from tests.vectors import NotRun, engine_of, params, setup_of, spec_of

HOST = load_plugins()


def planned(case: Mapping[str, Any]) -> dict[str, Any]:
    """A case through the engines' strategy, in the vectors' words."""
    words = case["input"]
    setup = setup_of(words["setup"])
    layout, engine = HOST.layouts.get(setup["layout"]), limits_of(setup)
    ranks = ranks_of(words, setup, engine)
    groups = with_draft_flags(groups_of(merge_ranks(ranks), setup, engine, layout), engine.draft_drop)
    result: dict[str, Any] = {"groups": groups, "layout": layout}
    override = setup["num_blocks_override"]
    parts = [project(groups, rank.specs, HOST) for rank in ranks]
    if override is not None:
        blocks = [bytes_per_block(part, layout) for part in parts]
        ranks = [attrs.evolve(rank, memory=override * b) for rank, b in zip(ranks, blocks, strict=True)]
    result |= {"engine": engine, "parts": parts, "ranks": ranks}
    try:
        result["pools"] = [
            rank_pools(part, rank, host=HOST, layout=layout, engine=engine)
            for part, rank in zip(parts, ranks, strict=True)
        ]
        if setup["auto_fit"]:
            engine = engine.with_max_model_len(fitted(result, engine))
        configs = configs_for_ranks(
            groups, ranks, host=HOST, layout=layout, engine=engine, bound=engine_bound, num_blocks=override
        )
    except KVFrameError as error:
        return result | {"sizing_error": error}
    return result | {"engine": engine, "configs": configs, "match_unit": setup["prefix_match_unit"]}


def limits_of(setup: Mapping[str, Any]) -> EngineConfig:
    draft = setup["draft"] or {}
    tiers = setup["hisparse"]
    extras = {"hisparse": True, "hisparse_buffer": tiers["device_buffer_size"]} if tiers else {}
    return attrs.evolve(
        engine_of(setup),
        prefill_lookahead=draft.get("modules", 1) if draft else 0,
        draft_drop=bool(draft),
        extras=extras,
    )


def ranks_of(words: Mapping[str, Any], setup: Mapping[str, Any], engine: EngineConfig) -> list[RankBudget]:
    """The workers, with the layers that the case gives them.

    As in the reference, a worker has none of the layers that HiSparse adds: their groups are empty on it, and their
    pages do not widen its blocks. `kvframe.plan` places them too (kvframe-hisparse's tests).
    """
    specs = {name: spec_of(spec) for name, spec in words["specs"].items()}
    pools = {"host": int(setup["hisparse"]["host_pool_gib"] * 2**30)} if setup["hisparse"] else {}
    ranks = []
    for worker, memory in zip(words["workers"], words["memory"], strict=True):
        layers = with_lookahead({layer: specs[key] for layer, key in worker}, HOST, engine)
        ranks.append(RankBudget(specs=layers, memory=memory, pools=pools))
    return ranks


def groups_of(
    model: Mapping[str, Any], setup: Mapping[str, Any], engine: EngineConfig, layout: KVCacheLayout
) -> tuple[KVCacheGroupSpec, ...]:
    specs = HOST.fold("kvframe_adjust_specs", "specs", model, engine=engine)
    given = given_layers(specs, host=HOST, engine=engine, even=True)
    if given is not None:
        return given_groups(given, specs, specs, host=HOST, layout=layout)
    return engine_groups(specs, host=HOST, layout=layout, hybrid=not setup["disable_hybrid"])


def fitted(result: Mapping[str, Any], engine: EngineConfig) -> int:
    """The longest request that fits on every rank.

    Raises:
        InsufficientMemoryError: not one token does.
    """
    lengths = []
    for part, rank, pools in zip(result["parts"], result["ranks"], result["pools"], strict=True):
        lengths.append(largest_fitting_len(part, engine, engine_bound, pools=pools.values()))
        if lengths[-1] == 0:
            check_memory(part, engine, engine_bound, budgets=rank.budgets, pools=pools)
    return min(lengths)


def spec_words(spec: Any) -> dict[str, Any]:
    """A spec in the vectors' words, fields at their defaults left out."""
    families = {
        "KpoolTailSpec": "kpool_tail",
        "RSWASpec": "rswa",
        "SinkFullAttentionSpec": "sink",
    }
    if isinstance(spec, UniformTypeKVCacheSpecs):
        members: dict[str, Any] = {}
        for layer, inner in spec.kv_cache_specs.items():
            members.setdefault(inner, []).append(layer)
        return {
            "family": "uniform_type",
            "block_size": spec.block_size,
            "page_size_bytes": spec.page_size_bytes,
            "members": [{"layers": layers, "spec": spec_words(inner)} for inner, layers in members.items()],
        }
    words: dict[str, Any] = {
        "family": families.get(type(spec).__name__, HOST.family(spec).name),
        "block_size": spec.block_size,
        "page_size_bytes": spec.page_size_bytes,
    }
    for field in attrs.fields(type(spec)):
        value = getattr(spec, field.name)
        if field.name in ("block_size", "page_size_padded") or value == field.default:
            continue
        word = {"kv_quant_mode": "quant"}.get(field.alias, field.alias)
        if isinstance(value, KVQuantMode):
            value = value.name.lower()
        elif isinstance(value, MultipleOf):
            value = {"multiple_of_kernel_block": value.tokens}
        elif field.alias in ("shapes", "dtypes"):
            value = [list(v) if isinstance(v, tuple) else v for v in value]
        elif field.alias in ("cache_role",):
            value = str(getattr(value, "value", value))
        elif field.alias == "tokens_per_state" and not isinstance(value, int):
            value = str(value)
        words[word] = value
    if hasattr(spec, "page_size_padded") and spec.page_size_bytes != spec.unpadded_page_size_bytes:
        words["page_size_padded"] = spec.page_size_bytes
    return words


def comparable(words: Mapping[str, Any]) -> dict[str, Any]:
    """Expected spec words; padding that follows from alignment is not a word of its own in either."""
    result = dict(words)
    if "members" in result:
        result["members"] = [{**m, "spec": comparable(m["spec"])} for m in result["members"]]
    result.pop("page_size_padded", None)
    result.pop("is_draft", None)  # the group's flag says it
    return result


def check_groups(groups: Sequence[KVCacheGroupSpec], expected: Sequence[Mapping[str, Any]]) -> None:
    assert [list(group.layer_names) for group in groups] == [group["layers"] for group in expected]
    for group, want in zip(groups, expected, strict=True):
        assert comparable(spec_words(group.kv_cache_spec)) == comparable(want["spec"])
        assert group.is_eagle_group == want["is_draft_group"]
        assert (group.pool != DEVICE) == want["host_resident"]
        assert group.enable_kv_transfer == want["transferable"]
        assert group.role == want["role"]


def check_worker(config: KVCacheConfig, want: Mapping[str, Any], engine: Any, layout: Any) -> None:
    assert config.num_blocks == want["num_blocks"]
    assert config.kv_tp_replicas == want["tp_replicas"]
    assert config.needs_kv_cache_zeroing == want["needs_zeroing"]
    assert config.has_family("mamba") == want["has_mamba"]
    assert config.has_mixed_precision_kv_cache == want["mixed_precision"]
    got = [
        {
            "size": tensor.size,
            "layers": list(tensor.layers),
            "layer_stride": tensor.layer_stride,
            "block_stride": tensor.block_stride,
            "offset": tensor.offset,
            "host_resident": tensor.host_resident,
        }
        for tensor in config.tensors
    ]
    assert got == [{"host_resident": False, **tensor} for tensor in want["tensors"]]
    if "host" in want:
        pool = config.pools["host"]
        assert want["host"] == {
            "num_blocks": pool.num_slabs,
            "block_stride": pool.slab_bytes,
            "shared_pool": pool.shared_by_ranks > 1,
        }
    if "bytes_per_block" in want:
        block = bytes_per_block(config.groups, layout)
        assert block == want["bytes_per_block"]
        needed = blocks_per_request(config.groups, engine, engine_bound) * block
        assert needed == want["needed_bytes_one_request"]
    if "group_layers" in want:
        assert [list(group.layer_names) for group in config.groups] == want["group_layers"]


def check_scheduler(result: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    config, engine = result["configs"][0], result["engine"]
    groups = result["groups"]
    first = [
        next(iter(g.kv_cache_spec.kv_cache_specs.values()))
        if isinstance(g.kv_cache_spec, UniformTypeKVCacheSpecs)
        else g.kv_cache_spec
        for g in groups
    ]
    assert [comparable(spec_words(spec)) for spec in first] == [comparable(w) for w in want["group_specs"]]
    each = {name: blocks_per_request(groups, engine, engine_bound, name) for name in config.pools}
    if "error" not in want["capacity"] and all(each.values()):
        concurrency = min(pool.num_slabs / each[name] for name, pool in config.pools.items())
        assert concurrency == pytest.approx(want["capacity"]["max_concurrency"], rel=1e-9)
        assert int(concurrency * engine.max_model_len) == want["capacity"]["tokens"]
    if "error" in want["block_sizes"]:
        with pytest.raises(PlanError):
            block_sizes(groups, engine, HOST, result["match_unit"])
        return
    sizes = block_sizes(groups, engine, HOST, result["match_unit"])
    if sizes is not None:
        assert {"scheduler": sizes.scheduler, "hash": sizes.hash} == want["block_sizes"]
        assert sizes.hit_alignment == want["hit_alignment_tokens"]


def check_figures(result: Mapping[str, Any], figures: Sequence[Mapping[str, Any]]) -> None:
    engine, error = result["engine"], result["sizing_error"]
    found = result.get("pools") or [{} for _ in figures]  # none where the layout is refused
    for part, rank, pools, want in zip(result["parts"], result["ranks"], found, figures, strict=True):
        block, memory = bytes_per_block(part, result["layout"]), rank.memory
        device = Pool(slab_bytes=block, num_slabs=max(memory // block, 0), budget_bytes=0, layout="any")
        longest = largest_fitting_len(part, engine, engine_bound, pools=[device, *pools.values()])
        got = {
            "bytes_per_block": block,
            "memory_minus_reserved_block": memory - block,
            "needed_bytes": blocks_per_request(part, engine, engine_bound) * block,
            "estimated_max_model_len": longest,
        }
        assert got == {key: want[key] for key in got}
    if isinstance(error, InsufficientMemoryError) and error.pool == DEVICE:
        told = (error.needed_bytes, error.available_bytes, error.largest_fitting_len)
        names = ("needed_bytes", "memory_minus_reserved_block", "estimated_max_model_len")
        assert told in [tuple(want[name] for name in names) for want in figures]


def check_reason(error: KVFrameError, reason: str) -> None:
    """The error is about what the reference refused for, where more than its type tells."""
    if reason.startswith("hot_buffer"):
        assert isinstance(error, PlanError)
        size, low = error.values["tokens of the region"], error.values["at least"]
        assert size < low if reason == "hot_buffer_too_small" else size > error.values["at most"]
    if isinstance(error, InsufficientMemoryError):
        assert (error.pool == "host") == reason.startswith("host_pool")
    else:
        assert not reason.startswith("host_pool")


REFUSALS = {
    "sizing": (InsufficientMemoryError, LayoutError, SpecError, PlanError),
    "grouping": (PlanError, MergeError, SpecError),
}
BETTER_BY_TAG = {
    "refused_though_plannable",  # two recorded windows are no reason to refuse (README, quirk 5; contract Q5)
    "crash_instead_of_message",  # a plan, or an error that says what is wrong (README, quirks 10, 12, 16, 19, 20)
    "sink_lost_in_merge",  # the order of layers decides nothing, and no layer loses its sinks (README, quirk 3)
}


def better(case: Mapping[str, Any]) -> str | None:
    """Why kvframe does not follow the figures of a case, by rule; None where it does."""
    specs = case["input"]["specs"].values()
    families = {spec["family"] for spec in specs}
    tags = BETTER_BY_TAG.intersection(case.get("quirk", ()))
    if tags:
        return tags.pop()
    if "rswa" in families and len(families) > 1:
        return "kinds that keep different blocks alive never share a table (contract Q4)"
    rings = families & {"kpool_tail", "circular_buffer"}
    if case["input"]["setup"].get("disable_hybrid") and rings and len(families) > 1:
        return "a ring is not kept as full attention: its block is no run of tokens (contract 2.8)"
    return None


def attempt(case: Mapping[str, Any]) -> tuple[dict[str, Any], KVFrameError | None]:
    try:
        return planned(case), None
    except KVFrameError as error:
        return {}, error


def check_better(case: Mapping[str, Any]) -> None:
    """A plan that loses nothing, or an error that says what is wrong."""
    result, error = attempt(case)
    if error is not None:
        assert error.fields()
        assert str(error)
        return
    layers = {layer: spec for worker in case["input"]["workers"] for layer, spec in worker}
    placed = [layer for group in result["groups"] for layer in group.layer_names]
    assert sorted(placed) == sorted(layers)
    specs = {name: spec_of(words) for name, words in case["input"]["specs"].items()}
    for group in result["groups"]:
        lifetimes = {HOST.family(spec).lifetime(spec) for spec in group.layer_specs.values()}
        assert len(lifetimes) == 1
        for layer, spec in group.layer_specs.items():
            assert type(spec) is type(specs[layers[layer]]) or case["input"]["setup"].get("disable_hybrid")
    assert "configs" in result or result["sizing_error"].fields()


def only_own_layers(want: Mapping[str, Any], layers: Sequence[str]) -> dict[str, Any]:
    """A worker's figures without placements of layers that it does not have: a rank places its own layers only."""
    return {**want, "tensors": [t for t in want["tensors"] if set(t["layers"]) <= set(layers)]}


def group_block_rule(case: Mapping[str, Any], groups: Sequence[KVCacheGroupSpec]) -> bool:
    """With one group the figures follow the option `block_size`; kvframe follows the group's (log.md row 10)."""
    return len(groups) == 1 and groups[0].block_size != setup_of(case["input"]["setup"])["block_size"]


@pytest.mark.parametrize("case", params("planning"))
def test_planning(case: Mapping[str, Any]) -> None:
    want = case["expect"]
    try:
        if better(case):
            check_better(case)
            return
        if want.get("stage") == "grouping":
            with pytest.raises(REFUSALS["grouping"]) as caught:
                planned(case)
            check_reason(caught.value, want["reason"])
            return
        result = planned(case)
    except NotRun as reason:
        pytest.skip(f"not run: {reason}")
    check_groups(result["groups"], want["groups"])
    if want.get("stage") == "sizing":
        assert isinstance(result.get("sizing_error"), REFUSALS["sizing"])
        check_reason(result["sizing_error"], want["reason"])
        if "figures" in want:
            check_figures(result, want["figures"])
        return
    assert "sizing_error" not in result, result.get("sizing_error")
    assert result["engine"].max_model_len == want["max_model_len"]
    assert len(result["configs"]) == len(want["workers"])
    for config, worker, layers in zip(
        result["configs"], want["workers"], case["input"]["workers"], strict=True
    ):
        described = want["workers"][worker["same_as"]] if "same_as" in worker else worker
        described = only_own_layers(described, [layer for layer, _ in layers])
        check_worker(config, described, result["engine"], result["layout"])
    scheduler = want["scheduler"]
    if group_block_rule(case, result["groups"]):
        block = result["groups"][0].block_size
        scheduler = {
            **scheduler,
            "block_sizes": {"scheduler": block, "hash": block},
            "hit_alignment_tokens": block,
        }
    check_scheduler(result, scheduler)
