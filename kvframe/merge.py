"""How many layers' specs become one: declared field by field, derived once, never an exception as control flow."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar

import attrs

from kvframe.errors import MergeError, SpecError

S = TypeVar("S")


class MergePolicy(Enum):
    """What a field of the merged spec is, given the layers' values."""

    EQUAL = "all layers must hold the same value"
    ANY = "true if it is true in any layer"
    MAX = "the largest value that is set"
    FIRST_SET = "the one value that is set; unset layers do not conflict"


EQUAL, ANY, MAX, FIRST_SET = MergePolicy


def kv_field(*, merge: MergePolicy = EQUAL, **options: Any) -> Any:
    """An attrs field that says how it merges. Fields without a policy must be equal in all layers.

    Args:
        merge: the field's policy.
        options: passed to `attrs.field` as they are.
    """
    return attrs.field(metadata={"kvframe.merge": merge}, **options)


@attrs.frozen(kw_only=True)
class Refusal:
    """The answer "these layers cannot be one": the field, its rule, and per value the layers that hold it."""

    field: str
    rule: str
    layers: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)

    def error(self) -> MergeError:
        """The refusal as the error that `merge_specs` raises."""
        return MergeError(field=self.field, layers=dict(self.layers), rule=self.rule)


def refuse(field: str, rule: str, values: Mapping[str, Any]) -> Refusal:
    """A refusal over `values`, a map from layer to its value of `field`, grouped by value and independent of order."""
    holders: dict[str, list[str]] = {}
    for layer, value in values.items():
        holders.setdefault(value if isinstance(value, str) else repr(value), []).append(layer)
    return Refusal(
        field=field,
        rule=rule,
        layers={value: tuple(sorted(holders[value])) for value in sorted(holders)},
    )


def merge_fields(specs: Mapping[str, S]) -> S | Refusal:
    """Merge specs of one attrs class by their fields' policies; the derived merge of every family.

    It is idempotent and does not depend on the order of layers (contract 8, laws).

    Args:
        specs: layer name to spec; at least one.
    """
    types = {layer: type(spec).__name__ for layer, spec in specs.items()}
    if len(set(map(type, specs.values()))) != 1:
        return refuse("family", "layers of different kinds keep different entries alive", types)
    first = next(iter(specs.values()))
    if not attrs.has(type(first)):  # a spec may be any frozen object, and then says nothing of its fields
        same = len(set(specs.values())) == 1
        return first if same else refuse("spec", EQUAL.value, specs)
    cls: Any = type(first)
    changes: dict[str, Any] = {}
    for field in attrs.fields(cls):
        if not field.init:
            continue
        values = {layer: getattr(spec, field.name) for layer, spec in specs.items()}
        merged = _merge_values(field, values)
        if isinstance(merged, Refusal):
            return merged
        changes[field.alias] = merged
    try:
        merged_spec: S = cls(**changes)
    except SpecError as error:  # fields that are fine one by one, and break a rule together
        return refuse(error.field, error.rule, {layer: repr(spec) for layer, spec in specs.items()})
    return merged_spec


def _merge_values(field: attrs.Attribute[Any], values: Mapping[str, Any]) -> Any:
    policy: MergePolicy = field.metadata.get("kvframe.merge", EQUAL)
    distinct = list(dict.fromkeys(values.values()))
    if len(distinct) == 1:
        return distinct[0]
    if policy is ANY:
        return any(distinct)
    given = [value for value in distinct if value is not None]
    if policy is MAX:
        return max(given)
    if policy is FIRST_SET and len(given) == 1:
        return given[0]
    return refuse(field.alias or field.name, policy.value, values)
