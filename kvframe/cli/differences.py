"""What differs between two plans, as `kvframe plan --json` prints them: causes first, then what follows from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

Result = Mapping[str, Any]

# What is put in: keys of the plan, in the order in which they are told. Objects are compared key by key.
_INPUTS = (
    "memory_bytes",
    "strategy",
    "engine",
    "layers",
    "kv_heads_per_rank",
    "bytes_per_token_per_layer",
    "constant_bytes_per_sequence",
    "options",
    "versions",
)
_BY_KIND = frozenset({"layers", "kv_heads_per_rank", "bytes_per_token_per_layer"})
# Options whose effect another input already tells.
_TOLD = frozenset(
    {
        *("memory", "gpu_memory", "weights", "reserve", "strategy", "no_prefix_caching"),
        *("max_model_len", "in_flight_tokens", "max_num_seqs", "tensor_parallel_size", "attention_tp", "dcp"),
    }
)
# What comes out, and from what it can come: other changes by name, or inputs by the start of their names.
_CHOICES = {
    "chosen": ("strategy", "memory_bytes", "engine", "layers", "bytes_per_token_per_layer", "options"),
    "layout": ("chosen", "options.layout"),
}
_GROUP = {
    "groups": ("strategy", "chosen", "layers", "engine.extras"),
    "layers_per_group": ("strategy", "chosen", "layers"),
    "block_tokens": ("options.block_size", "chosen", "layout"),
    "natural_page_bytes": (
        "layers_per_group",
        "block_tokens",
        "bytes_per_token_per_layer",
        "constant_bytes_per_sequence",
    ),
    "page_bytes": ("natural_page_bytes", "layout"),
    "blocks_per_slab": ("chosen", "page_bytes"),
    "stride_bytes": ("page_bytes", "blocks_per_slab", "slab_bytes"),
    "blocks_per_request": ("engine", "block_tokens"),
    "held_bytes": ("groups", "blocks_per_request", "stride_bytes"),
}
_WHOLE = ("groups", "layers_per_group", "held_bytes")  # what is told of groups that came or went
_POOL = {
    "slab_bytes": ("chosen", "layers_per_group", "page_bytes"),
    "num_slabs": ("memory_bytes", "options.host_memory", "slab_bytes"),
    "slabs_per_request": ("groups", "blocks_per_request", "blocks_per_slab"),
    "bytes_per_request": ("held_bytes",),
    "requests": ("num_slabs", "slabs_per_request"),
}
_RESULTS = {
    "limited_by": ("requests",),
    "max_concurrency": ("requests", "limited_by"),
    "tokens": ("max_concurrency", "engine.max_model_len"),
    "wasted_bytes_per_request": ("stride_bytes", "natural_page_bytes", "blocks_per_request"),
    "unused_bytes": ("memory_bytes", "num_slabs", "slab_bytes"),
}


@attrs.frozen(kw_only=True)
class Change:
    """One value that differs; None where a plan has none.

    Args:
        what: its name, a key of `kvframe plan --json`; with a dot, a key of an object there.
        a: in the first plan. Values of several groups are a list.
        b: in the second plan.
        pool: the pool that it belongs to, "" for one of the whole plan.
        group: the kinds of the groups that it belongs to, "" for one of the pool or the whole plan.
        because: the changes that it can come from.
    """

    what: str
    a: Any
    b: Any
    pool: str = ""
    group: str = ""
    because: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class Difference:
    """Two plans compared.

    Args:
        causes: what was put in differently.
        consequences: what came out differently: choices, groups, pools, and the whole plan's numbers.
        factors: second plan divided by the first, of the requests at once in the pool that limits both, and of what
            they are made of: budget, bytes of a request, length of a request. Empty where there is no such pool.
        silent: what the plans do not tell, since an older kvframe printed them.
    """

    causes: tuple[Change, ...]
    consequences: tuple[Change, ...]
    factors: Mapping[str, float]
    silent: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Nothing differs."""
        return not self.causes and not self.consequences


def difference(a: Result, b: Result) -> Difference:
    """What differs between two results of `kvframe plan --json`."""
    causes = tuple(_causes(a, b))
    changed = [*_changed(_CHOICES, a, b)]
    for place in dict.fromkeys((group["pool"], _kinds(group)) for plan in (a, b) for group in plan["groups"]):
        one, other = _group_values(a, *place), _group_values(b, *place)
        came_or_went = not (one["groups"] and other["groups"])
        changed += _changed(_WHOLE if came_or_went else _GROUP, one, other, *place)
    for pool in dict.fromkeys(pool["name"] for plan in (a, b) for pool in plan["pools"]):
        changed += _changed(_POOL, _pool_values(a, pool), _pool_values(b, pool), pool)
    changed += _changed(_RESULTS, a, b)
    known = (*causes, *changed)
    return Difference(
        causes=causes,
        consequences=tuple(attrs.evolve(change, because=_parents(change, known)) for change in changed),
        factors=_factors(a, b),
        silent=tuple(key for key in _INPUTS if key not in a or key not in b),
    )


def _causes(a: Result, b: Result) -> Iterable[Change]:
    told = {*_TOLD, *a["engine"].get("extras", {}), *b["engine"].get("extras", {})}
    for key in _INPUTS:
        if key not in a or key not in b:
            continue
        one, other = _flat(key, a[key]), _flat(key, b[key])
        for what in dict.fromkeys((*one, *other)):
            if key == "options" and what.removeprefix("options.") in told:
                continue
            if one.get(what) != other.get(what):
                yield Change(what=what, a=one.get(what), b=other.get(what))


def _flat(name: str, value: Any) -> dict[str, Any]:
    """An object's values by their names with dots."""
    if not isinstance(value, Mapping):
        return {name: value}
    return {
        key: leaf for part, inner in value.items() for key, leaf in _flat(f"{name}.{part}", inner).items()
    }


def _changed(names: Iterable[str], a: Result, b: Result, pool: str = "", group: str = "") -> Iterable[Change]:
    for name in names:
        if a.get(name) != b.get(name):
            yield Change(what=name, a=a.get(name), b=b.get(name), pool=pool, group=group)


def _kinds(group: Result) -> str:
    return ", ".join(group["kinds"])


def _group_values(plan: Result, pool: str, kinds: str) -> dict[str, Any]:
    """Values of all groups of these kinds in the pool: one where they are equal, else a list."""
    groups = [group for group in plan["groups"] if (group["pool"], _kinds(group)) == (pool, kinds)]
    if not groups:
        return {"groups": 0}
    values: dict[str, Any] = {
        "groups": len(groups),
        "layers_per_group": _one_or_all([sum(group["kinds"].values()) for group in groups]),
        "held_bytes": _held(groups),
    }
    rest = [name for name in _GROUP if name not in values]
    return values | {name: _one_or_all([group[name] for group in groups]) for name in rest}


def _pool_values(plan: Result, name: str) -> dict[str, Any]:
    pool = next((pool for pool in plan["pools"] if pool["name"] == name), None)
    if pool is None:
        return {}
    held = _held([group for group in plan["groups"] if group["pool"] == name])
    return {**pool, "requests": pool["max_concurrency"], "bytes_per_request": held}


def _held(groups: Sequence[Result]) -> int:
    """Bytes that one request holds in the groups."""
    return sum(int(group["blocks_per_request"] * group["stride_bytes"]) for group in groups)


def _one_or_all(values: Sequence[Any]) -> Any:
    return values[0] if all(value == values[0] for value in values) else list(values)


def _parents(change: Change, known: Sequence[Change]) -> tuple[str, ...]:
    """Names of the changes that one can come from: of its own group and pool, or, if of a whole, any part."""
    found = []
    for parent in {**_CHOICES, **_RESULTS, **_POOL, **_GROUP}[change.what]:
        for other in known:
            named = other.what == parent or other.what.startswith(f"{parent}.")
            if named and other is not change and not _foreign(change, other):
                found.append(other.what)
    return tuple(dict.fromkeys(found))


def _foreign(change: Change, other: Change) -> bool:
    """Whether `other` belongs to another pool, group or kind."""
    key, _, name = other.what.partition(".")
    kind = change.group and key in _BY_KIND and name not in change.group.split(", ")
    pool = change.pool and other.pool not in ("", change.pool)
    return bool(kind or pool or (change.group and other.group not in ("", change.group)))


def _factors(a: Result, b: Result) -> dict[str, float]:
    limit = a["limited_by"]
    one, other = _pool_values(a, limit), _pool_values(b, limit)
    pairs = {
        "requests": (one.get("requests"), other.get("requests")),
        "budget": (one.get("budget_bytes"), other.get("budget_bytes")),
        "bytes_per_request": (one.get("bytes_per_request"), other.get("bytes_per_request")),
        "max_model_len": (a["max_model_len"], b["max_model_len"]),
        "tokens": (a["tokens"], b["tokens"]),
    }
    if b["limited_by"] != limit or not all(x and y for x, y in pairs.values()):
        return {}
    return {name: y / x for name, (x, y) in pairs.items()}
