"""Checks of error messages: a bad value is refused where it is given, by an error that names it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import attrs

from kvframe.errors import KVFrameError, SpecError
from kvframe.testing.outcome import NotApplicable, expect
from kvframe.testing.subject import Subject

_NUMBERS = re.compile(r"\b(int|Fraction|float)\b")


def _fields(spec: Any, pattern: re.Pattern[str]) -> Iterator[str]:
    """The names, as given at construction, of the fields whose annotation matches."""
    for field in attrs.fields(type(spec)):
        annotation = (
            field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
        )
        if (
            field.init
            and pattern.search(annotation)
            and not re.search(r"tuple|Mapping|frozenset", annotation)
        ):
            yield str(field.alias)


def _refused(spec: Any, alias: str, value: Any) -> None:
    """`value` for the field `alias` is refused, by an error that names both."""
    try:
        made = attrs.evolve(spec, **{alias: value})
    except SpecError as error:
        named = error.field == alias and repr(value) in str(error)
        expect(named, spec, f"refuses {alias} = {value!r} without naming it: {error}")
    except KVFrameError as error:
        expect(alias in str(error), spec, f"refuses {alias} = {value!r} without naming it: {error}")
    except Exception as error:  # the very fault that is looked for
        expect(False, spec, f"answers {alias} = {value!r} with {type(error).__name__}: {error}")
    else:
        expect(False, spec, f"takes {alias} = {value!r}: {made!r}")


def numbers_below_zero_are_refused(subject: Subject) -> None:
    """A field that holds a whole number refuses -1.

    Why: sizes, windows and counts are never negative; -1 taken in silence becomes a page of negative bytes.
    What to do: `kv_field(validator=at_least(0))`, or `at_least(1)` (`kvframe.checks`).
    """
    for spec in subject.examples:
        for alias in _fields(spec, _NUMBERS):
            _refused(spec, alias, -1)


def words_for_numbers_are_refused(subject: Subject) -> None:
    """A field that holds a number refuses text.

    Why: values come from config files; "16" taken as it is fails much later, in arithmetic.
    What to do: a validator of `kvframe.checks`; they test the type too. Give an own validator the same test.
    """
    for spec in subject.examples:
        for alias in _fields(spec, _NUMBERS):
            _refused(spec, alias, "many")


def unknown_dtypes_are_refused(subject: Subject) -> NotApplicable | None:
    """A dtype that does not exist is refused.

    Why: its size would be guessed, and every page be wrong.
    What to do: use `dtype_name` as converter and ask for `element_size` at construction, as `AttentionSpec` does.
    """
    known = [spec for spec in subject.examples if isinstance(getattr(spec, "dtype", None), str)]
    for spec in known:
        try:
            attrs.evolve(spec, dtype="float99")
        except KVFrameError as error:
            expect("float99" in str(error), spec, f"refuses dtype = 'float99' without naming it: {error}")
        else:
            expect(False, spec, "takes dtype = 'float99'")
    return None if known else NotApplicable("the spec has no field dtype")


def a_block_of_nothing_is_refused(subject: Subject) -> None:
    """Blocks of 0 tokens, or of half a token, are refused when the block size changes too.

    Why: every division by the block would fail far from here.
    What to do: derive from `SpecBase`, which validates `block_size`, and build copies by construction.
    """
    for spec in subject.examples:
        for block_size in (0, 0.5):
            try:
                made = spec.copy_with_new_block_size(block_size)
            except SpecError as error:
                expect(
                    error.field == "block_size",
                    spec,
                    f"a block of {block_size} tokens is refused as {error.field}",
                )
            else:
                expect(False, spec, f"takes a block of {block_size} tokens: {made!r}")


def padding_never_cuts_a_page(subject: Subject) -> NotApplicable | None:
    """`page_size_padded` below the page's own size is refused, naming the field.

    Why: the next block would start inside this one.
    What to do: call `kvframe.spec.check_padding` at construction.
    """
    padded = [spec for spec in subject.examples if hasattr(spec, "page_size_padded")]
    for spec in padded:
        if spec.unpadded_page_size_bytes > 1:
            _refused(spec, "page_size_padded", spec.unpadded_page_size_bytes - 1)
    return None if padded else NotApplicable("the spec stores no padding")
