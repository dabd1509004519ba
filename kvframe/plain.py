"""Frozen values as plain JSON data, and back by the types that their fields declare; and JSON's text, read strictly.

Numbers that are no whole numbers, and mutable values, have no plain form: what is written is exact, and the same for
equal values.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Collection, Mapping
from enum import Enum
from fractions import Fraction
from typing import Any, Literal, Union, get_args, get_origin

import attrs

from kvframe.errors import PlanFormatError

_NO_MATCH = object()
_PLAIN = (bool, int, str, type(None))


def fields_to_plain(value: Any, *, skip: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The fields that a frozen attrs object is built from, by their names in its constructor.

    Enums become their values, fractions "1/4", tuples lists, and values that are attrs objects themselves
    {class name: fields}.

    Args:
        value: the object.
        skip: fields to leave out.

    Raises:
        PlanFormatError: a field's value has no plain form.
    """
    return {
        field.alias: _to_plain(getattr(value, field.name), f"{type(value).__name__}.{field.alias}")
        for field in attrs.fields(type(value))
        if field.init and field.alias not in skip
    }


def _to_plain(value: Any, path: str) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Enum):
        return _to_plain(value.value, path)
    if isinstance(value, Fraction):
        # as the equal whole number, so that equal values have one form
        return str(value) if value.denominator != 1 else value.numerator
    if isinstance(value, tuple):
        return [_to_plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if attrs.has(type(value)):
        return {type(value).__name__: fields_to_plain(value)}
    rule = "cannot be written: only whole numbers, fractions, text, enums, tuples and attrs objects can"
    raise PlanFormatError(path=path, value=value, rule=rule)


def fields_from_plain(
    cls: type[Any], plain: Any, path: str, *, skip: frozenset[str] = frozenset()
) -> dict[str, Any]:
    """The constructor's arguments of `cls` from what `fields_to_plain` gave.

    Args:
        cls: a frozen attrs class.
        plain: the fields.
        path: where they stand, for messages.
        skip: fields that are not in it.

    Raises:
        PlanFormatError: a field is unknown, is missing, or is not of its declared type.
    """
    fields = {f.alias: f for f in attrs.fields(cls) if f.init and f.alias not in skip}
    check_keys(plain, fields, path)
    hints = _hints(cls, path)
    arguments = {}
    for alias, field in fields.items():
        arguments[alias] = _from_plain(plain[alias], hints[field.name], f"{path}.{alias}")
        if arguments[alias] is _NO_MATCH:
            rule = f"must be {_spelled(hints[field.name])}"
            raise PlanFormatError(path=f"{path}.{alias}", value=plain[alias], rule=rule)
    return arguments


def check_keys(plain: Any, known: Collection[str], path: str) -> None:
    """`plain` is an object with exactly the known keys.

    Raises:
        PlanFormatError: it is not; names the keys.
    """
    given = as_object(plain, path).keys()
    unknown, missing = sorted(given - set(known)), sorted(set(known) - given)
    if unknown or missing:
        rules = [f"has unknown keys {', '.join(unknown)}"] * bool(unknown)
        rules += [f"lacks {', '.join(missing)}"] * bool(missing)
        raise PlanFormatError(path=path, value=sorted(given), rule=" and ".join(rules))


def as_object(plain: Any, path: str) -> dict[str, Any]:
    """`plain`, if it is an object.

    Raises:
        PlanFormatError: it is not.
    """
    if not isinstance(plain, dict):
        raise PlanFormatError(path=path, value=plain, rule="must be an object")
    return plain


def as_list(plain: Any, path: str) -> list[Any]:
    """`plain`, if it is a list.

    Raises:
        PlanFormatError: it is not.
    """
    if not isinstance(plain, list):
        raise PlanFormatError(path=path, value=plain, rule="must be a list")
    return plain


def canonical(plain: Any) -> str:
    """The one text of plain data: sorted keys, no spaces, ASCII."""
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def parsed(text: str) -> Any:
    """Plain data from JSON text, which may have spaces and any order of keys.

    Raises:
        PlanFormatError: it is no JSON, gives a key twice, or has a number that is no whole number.
    """
    try:
        return json.loads(
            text, object_pairs_hook=_without_repeats, parse_float=_no_number, parse_constant=_no_number
        )
    except PlanFormatError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise PlanFormatError(path="text", value=text, rule=f"must be JSON: {error}") from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    plain = dict(pairs)
    if len(plain) != len(pairs):
        raise PlanFormatError(path="text", value=[key for key, _ in pairs], rule="must give every key once")
    return plain


def _no_number(text: str) -> Any:
    raise PlanFormatError(path="text", value=text, rule="must be a whole number")


# --- values by declared types ---


def _hints(cls: type[Any], path: str) -> Mapping[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except NameError as error:
        rule = f"the field types of {cls.__qualname__} cannot be found at run time: {error}"
        raise PlanFormatError(path=path, value=cls.__qualname__, rule=rule) from error


def _spelled(hint: Any) -> str:
    if hint is Any:
        return "a whole number, text, true, false or null"
    return hint.__name__ if isinstance(hint, type) else str(hint)


def _from_plain(value: Any, hint: Any, path: str) -> Any:
    """`value` as the declared type, _NO_MATCH if it is none."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        found = (_from_plain(value, arm, path) for arm in arguments)
        return next((item for item in found if item is not _NO_MATCH), _NO_MATCH)
    if origin is Literal:
        return next((item for item in arguments if _same(item, value)), _NO_MATCH)
    if origin is tuple:
        return _tuple(value, arguments, path)
    if hint is Any:
        return value if type(value) in _PLAIN else _NO_MATCH
    if hint in _PLAIN:
        return value if type(value) is hint else _NO_MATCH
    if hint is Fraction:
        return _fraction(value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return next((member for member in hint if _same(member.value, value)), _NO_MATCH)
    if isinstance(hint, type) and attrs.has(hint):
        return _object(value, hint, path)
    return _NO_MATCH


def _object(value: Any, cls: type[Any], path: str) -> Any:
    if not isinstance(value, dict) or list(value) != [cls.__name__]:
        return _NO_MATCH
    return cls(**fields_from_plain(cls, value[cls.__name__], f"{path}.{cls.__name__}"))


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _tuple(value: Any, arguments: tuple[Any, ...], path: str) -> Any:
    if not isinstance(value, list):
        return _NO_MATCH
    if arguments[1:] == (Ellipsis,):
        arguments = arguments[:1] * len(value)
    items = [_from_plain(item, hint, path) for item, hint in zip(value, arguments, strict=False)]
    fits = len(value) == len(arguments) and all(item is not _NO_MATCH for item in items)
    return tuple(items) if fits else _NO_MATCH


def _fraction(value: Any) -> Any:
    if type(value) is int:
        return Fraction(value)
    try:
        found = Fraction(value) if isinstance(value, str) else None
    except (ValueError, ZeroDivisionError):
        return _NO_MATCH
    return found if found is not None and str(found) == value else _NO_MATCH
