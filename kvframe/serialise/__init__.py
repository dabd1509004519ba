"""Plans as JSON: exact, the same text for the same plan on every machine, and readable by tools that know no kvframe.

    text = to_json(config)
    config = from_json(text)
    fingerprint(config) == fingerprint(other)    # the same plan, by the same versions of plugins

Specs are written once each and tagged by their family's name; layers point at them by number. Beside its fields each
spec states its page bytes and [H, N, C] shape. `providers` says which distribution brought each family and layout, so
that a reader without it can be told what to install.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from kvframe.config import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor, Pool
from kvframe.errors import PlanFormatError
from kvframe.plain import (
    as_list,
    as_object,
    canonical,
    check_keys,
    fields_from_plain,
    fields_to_plain,
    parsed,
)
from kvframe.plugins import PluginHost, load_plugins
from kvframe.serialise.providers import check_providers, providers_to_plain
from kvframe.serialise.specs import SpecTable, spec_from_plain
from kvframe.spec import UniformTypeKVCacheSpecs
from kvframe.verify import verify
from kvframe.version import VERSION

FORMAT = "kvframe-plan/1"
"""The form of the text; a reader takes no other."""

_PARTS = frozenset({"pools", "groups", "tensors"})
_OWN = frozenset(
    {"format", "providers", "specs", *_PARTS}
)  # keys that are no field of KVCacheConfig as they stand
_SPECS = frozenset({"layer_specs", "kv_cache_spec"})
_UNIFORM = "uniform_type"


def to_json(config: KVCacheConfig, host: PluginHost | None = None) -> str:
    """The plan as canonical JSON: sorted keys, no spaces, whole numbers, ASCII.

    Args:
        config: the plan.
        host: the plugins that made it; None: the installed ones.

    Raises:
        MissingPluginError: the host does not know a spec's family.
        PlanFormatError: a spec would not be the same after reading: its class has no family of its own, or a field's
            type is none that can be read from JSON.
    """
    host = host or load_plugins()
    specs = SpecTable(host)
    return canonical(
        {
            "format": FORMAT,
            **fields_to_plain(config, skip=_PARTS),
            "pools": [fields_to_plain(config.pools[name]) for name in sorted(config.pools)],
            "groups": [_group_to_plain(group, specs) for group in config.groups],
            "tensors": [fields_to_plain(tensor) for tensor in config.tensors],
            "specs": specs.plain,
            "providers": {
                "families": providers_to_plain("families", specs.families, host),
                "layouts": providers_to_plain("layouts", {p.layout for p in config.pools.values()}, host),
            },
        }
    )


def from_json(text: str, host: PluginHost | None = None) -> KVCacheConfig:
    """The plan that `to_json` wrote, checked as if it had just been made.

    Another version of a plugin may read it if it computes the same pages; comparing fingerprints tells versions apart.

    Args:
        text: the JSON, in any order of keys.
        host: the plugins; None: the installed ones.

    Raises:
        PlanFormatError: the text is no plan of this format; says where, what, and the rule.
        MissingPluginError: a family or layout of the plan is not installed; names the distribution to install.
        SpecError: a number is out of its range.
        PlanError: the parts contradict each other.
        LayoutError: pages lie outside their pool, or overlap.
    """
    host = host or load_plugins()
    plain = as_object(parsed(text), "$")
    if plain.get("format") != FORMAT:
        rule = f"must be {FORMAT!r}, the only form that kvframe {VERSION} reads"
        raise PlanFormatError(path="$.format", value=plain.get("format"), rule=rule)
    scalars = {key: value for key, value in plain.items() if key not in _OWN}
    fields = fields_from_plain(KVCacheConfig, scalars, "$", skip=_PARTS)
    check_keys(plain, {*_OWN, *scalars}, "$")
    check_providers(plain["providers"], host)
    families = plain["providers"]["families"]
    specs = [
        spec_from_plain(spec, f"$.specs[{index}]", host, families)
        for index, spec in enumerate(as_list(plain["specs"], "$.specs"))
    ]
    config = KVCacheConfig(
        pools=_pools_from_plain(plain["pools"]),
        groups=tuple(
            _group_from_plain(group, f"$.groups[{index}]", specs)
            for index, group in enumerate(as_list(plain["groups"], "$.groups"))
        ),
        tensors=tuple(
            KVCacheTensor(**fields_from_plain(KVCacheTensor, tensor, f"$.tensors[{index}]"))
            for index, tensor in enumerate(as_list(plain["tensors"], "$.tensors"))
        ),
        **fields,
    )
    verify(config, host.layouts)
    return config


def fingerprint(config: KVCacheConfig, host: PluginHost | None = None) -> str:
    """SHA-256 of the canonical JSON, in hex: equal where the same plan was made by the same versions of plugins.

    Raises as `to_json`.
    """
    return hashlib.sha256(to_json(config, host).encode("ascii")).hexdigest()


def _group_to_plain(group: KVCacheGroupSpec, specs: SpecTable) -> dict[str, Any]:
    spec = group.kv_cache_spec
    uniform = isinstance(spec, UniformTypeKVCacheSpecs)
    return {
        **fields_to_plain(group, skip=_SPECS),
        "layers": _layers_to_plain(group.layer_specs, specs),
        "spec": {_UNIFORM: _layers_to_plain(spec.kv_cache_specs, specs)} if uniform else specs.number(spec),
    }


def _layers_to_plain(layers: Mapping[str, Any], specs: SpecTable) -> list[list[Any]]:
    # a list, since the order of layers is part of the plan
    return [[layer, specs.number(spec)] for layer, spec in layers.items()]


def _group_from_plain(plain: Any, path: str, specs: Sequence[Any]) -> KVCacheGroupSpec:
    rest = {key: value for key, value in as_object(plain, path).items() if key not in ("layers", "spec")}
    fields = fields_from_plain(KVCacheGroupSpec, rest, path, skip=_SPECS)
    check_keys(plain, {"layers", "spec", *rest}, path)
    spec = plain["spec"]
    if isinstance(spec, dict):
        check_keys(spec, (_UNIFORM,), f"{path}.spec")
        spec = UniformTypeKVCacheSpecs(_layers_from_plain(spec[_UNIFORM], f"{path}.spec.{_UNIFORM}", specs))
    else:
        spec = _spec(spec, f"{path}.spec", specs)
    layers = _layers_from_plain(plain["layers"], f"{path}.layers", specs)
    return KVCacheGroupSpec(layer_specs=layers, kv_cache_spec=spec, **fields)


def _layers_from_plain(plain: Any, path: str, specs: Sequence[Any]) -> dict[str, Any]:
    layers: dict[str, Any] = {}
    for index, pair in enumerate(as_list(plain, path)):
        where = f"{path}[{index}]"
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str) or pair[0] in layers:
            rule = "must be a layer's name, given once, and the number of its spec"
            raise PlanFormatError(path=where, value=pair, rule=rule)
        layers[pair[0]] = _spec(pair[1], where, specs)
    return layers


def _spec(number: Any, path: str, specs: Sequence[Any]) -> Any:
    if type(number) is not int or not 0 <= number < len(specs):
        raise PlanFormatError(
            path=path, value=number, rule=f"must be the number of one of {len(specs)} specs"
        )
    return specs[number]


def _pools_from_plain(plain: Any) -> dict[str, Pool]:
    pools: dict[str, Pool] = {}
    for index, fields in enumerate(as_list(plain, "$.pools")):
        pool = Pool(**fields_from_plain(Pool, fields, f"$.pools[{index}]"))
        if pool.name in pools:
            raise PlanFormatError(path=f"$.pools[{index}].name", value=pool.name, rule="must be given once")
        pools[pool.name] = pool
    return pools
