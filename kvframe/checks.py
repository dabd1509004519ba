"""Integer helpers, and the attrs validators that specs share: a broken rule is a SpecError."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from kvframe.errors import SpecError, nearest


def cdiv(a: int, b: int) -> int:
    """a / b rounded up, for integers of any size."""
    return -(-a // b)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `value`."""
    return cdiv(value, multiple) * multiple


def one_of(*allowed: Any) -> Any:
    """An attrs validator: the value is one of `allowed`, else SpecError."""

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value not in allowed:
            raise SpecError(
                spec=type(instance).__name__,
                field=attribute.alias or attribute.name,
                value=value,
                rule=f"must be one of {', '.join(map(repr, allowed))}",
            )

    return check


def at_least(low: int) -> Any:
    """An attrs validator: the value is a whole number of at least `low`, else SpecError."""

    def check(instance: Any, attribute: attrs.Attribute[Any], value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise SpecError(
                spec=type(instance).__name__,
                field=attribute.alias or attribute.name,
                value=value,
                rule=f"must be a whole number of at least {low}",
            )

    return check


def name_rule(name: str, known: Iterable[str]) -> str:
    """The rule that a name must be a known one, with the one that was most likely meant."""
    names = sorted(known)
    near = nearest(name, names)
    return f"must be one of {', '.join(names)}" + (f"; did you mean {near!r}?" if near else "")


def optional_at_least(low: int) -> Any:
    """An attrs validator: None, or a whole number of at least `low`."""
    return attrs.validators.optional(at_least(low))
