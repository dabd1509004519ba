"""Checks of merging: many layers' specs to one group spec, in any order, without losing what a layer needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations, islice, permutations
from typing import Any

import attrs

from kvframe.merge import ANY, EQUAL, FIRST_SET, MAX, Refusal
from kvframe.testing.outcome import expect
from kvframe.testing.subject import Subject, variants

_PAIRS = 60  # tried an example: enough for every field, and a bound where examples are many


def _trials(subject: Subject) -> Iterator[dict[str, Any]]:
    """Layers to merge: each example beside each of its one-field variants, and pairs of examples."""
    for example in subject.examples:
        for _, changed in islice(variants(example), _PAIRS):
            yield {"a": example, "b": changed}
    for one, other in islice(combinations(subject.examples, 2), _PAIRS):
        yield {"a": one, "b": other}


def _merged(subject: Subject, specs: Mapping[str, Any]) -> Any:
    try:
        return subject.family.merge(specs)
    except Exception as error:  # the very fault that this file looks for
        expect(
            False,
            next(iter(specs.values())),
            f"merge raised {type(error).__name__}: {error}; it must return a Refusal",
        )


def merge_never_raises(subject: Subject) -> None:
    """Layers that cannot become one spec get a Refusal, whatever their fields.

    Why: the planner tries groupings and goes on where a merge is refused; an exception ends the plan.
    What to do: leave `merge` out, or return `refuse(field, rule, values)` where it says no.
    """
    for specs in _trials(subject):
        _merged(subject, specs)


def merge_of_equals_changes_nothing(subject: Subject) -> None:
    """Equal specs merge to that spec.

    Why: most layers of a model are equal; if merging changed them, group and layers would disagree about pages.
    What to do: leave `merge` out, so that it follows from the fields.
    """
    for spec in subject.examples:
        for count in (1, 2, 5):
            merged = _merged(subject, {f"layer {i}": attrs.evolve(spec) for i in range(count)})
            expect(merged == spec, spec, f"merged with itself it becomes {merged!r}")


def merge_ignores_order(subject: Subject) -> None:
    """The order of layers changes neither the merged spec nor whether it is refused.

    Why: pipeline stages name their layers in different orders and must agree on one plan.
    What to do: never use the first layer's value; say `kv_field(merge=EQUAL | ANY | MAX | FIRST_SET)`.
    """
    for specs in _trials(subject):
        answers = [_merged(subject, dict(order)) for order in permutations(specs.items())]
        same = all(_alike(answer, answers[0]) for answer in answers)
        expect(same, specs["a"], f"and {specs['b']!r} merge to {answers[0]!r} or {answers[1]!r} by order")


def merge_in_parts_is_the_same(subject: Subject) -> None:
    """Merging layers at once, or some first and the rest later, gives the same.

    Why: the planner merges groups that are already merged.
    What to do: derive the merge from the fields. A sum or a count is no merge: it counts layers twice.
    """
    for specs in _trials(subject):
        three = {**specs, "c": specs["a"]}
        whole, part = _merged(subject, three), _merged(subject, specs)
        if not isinstance(part, Refusal):
            part = _merged(subject, {"ab": part, "c": specs["a"]})
        expect(
            _alike(whole, part),
            specs["a"],
            f"and {specs['b']!r} merge to {whole!r} at once, to {part!r} in parts",
        )


def merge_follows_the_fields(subject: Subject) -> None:
    """Every field of a merged spec is what its policy makes of the layers' values; else the merge is refused.

    Why: a field that is silently dropped or taken from one layer is lost for all others.
    What to do: give the field the policy that is meant, or return `refuse(field, rule, values)`.
    """
    for specs in _trials(subject):
        merged = _merged(subject, specs)
        if isinstance(merged, Refusal):
            continue
        for field in attrs.fields(type(merged)):
            values = [getattr(spec, field.name, None) for spec in specs.values()]
            policy = field.metadata.get("kvframe.merge", EQUAL)
            found = getattr(merged, field.name)
            right = _by_policy(policy, values, found)
            text = f"and {specs['b']!r} merge to {field.alias} = {found!r}, against its policy {policy.name}"
            expect(right, specs["a"], text)


def _by_policy(policy: Any, values: list[Any], found: Any) -> bool:
    if policy is ANY:
        return bool(found) == any(values)
    if policy is MAX:
        return bool(found == max(values))
    given = [value for value in values if value is not None] if policy is FIRST_SET else values
    return all(value == found for value in given) and (bool(given) or found is None)


def merge_keeps_pages_and_lifetimes(subject: Subject) -> None:
    """A merged spec has each layer's page and each layer's lifetime.

    Why: the group's one block table frees entries for all its layers, and one page size places them all. A rule that
    frees earlier than a layer allows destroys tokens that the layer still reads.
    What to do: fields that the page or the lifetime depends on must have the policy EQUAL (or be refused).
    """
    for specs in _trials(subject):
        merged = _merged(subject, specs)
        if isinstance(merged, Refusal):
            continue
        for spec in specs.values():
            pages = (spec.page_size_bytes, merged.page_size_bytes)
            expect(
                pages[0] == pages[1], spec, f"its page of {pages[0]} bytes becomes {pages[1]} in {merged!r}"
            )
            same = subject.lifetime(spec) == subject.lifetime(merged)
            expect(
                same, spec, f"its lifetime {subject.lifetime(spec)!r} becomes {subject.lifetime(merged)!r}"
            )


def refusals_name_every_layer(subject: Subject) -> None:
    """A refusal names a field, a rule, and every layer with its value.

    Why: it is all that a user sees when layers cannot share a group.
    What to do: build it with `kvframe.merge.refuse(field, rule, {layer: value})`.
    """
    for specs in _trials(subject):
        merged = _merged(subject, specs)
        if not isinstance(merged, Refusal):
            continue
        named = {layer for layers in merged.layers.values() for layer in layers}
        expect(merged.field and merged.rule, specs["a"], f"is refused without field or rule: {merged!r}")
        expect(named == set(specs), specs["a"], f"is refused without its layers {sorted(specs)}: {merged!r}")


def one_table_means_one_need(subject: Subject) -> None:
    """Specs with equal table keys need equally many blocks for every request.

    Why: they share a block table: an entry that one of them lets die is gone for the others too.
    What to do: put what decides the blocks into the lifetime, as fields of an `@attrs.frozen` class; the rest into
    `group_key`.
    """
    keyed: dict[Any, Any] = {}
    for spec in subject.specs_and_variants():
        first = keyed.setdefault(subject.family.table_key(spec), spec)
        if first is spec:
            continue
        for n in (0, 1, 15, 16, 17, 100, 333, 1000, 4096):
            for prompt in (1, 50, 1000):
                one, other = subject.lifetime(first), subject.lifetime(spec)
                same = _needs(one, n, prompt) == _needs(other, n, prompt)
                text = f"has the table key of {first!r}, and needs other entries after {n} tokens (prompt {prompt})"
                expect(same, spec, text)


def _needs(lifetime: Any, n: int, prompt: int) -> tuple[int, int, int]:
    low, high = lifetime.dead(n, prompt)
    low, high = (int(low), int(high)) if high > low else (0, 0)
    return int(lifetime.entries(n)), low, high


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, Refusal) or isinstance(other, Refusal):
        return isinstance(one, Refusal) and isinstance(other, Refusal)
    return bool(one == other and getattr(one, "is_draft", None) == getattr(other, "is_draft", None))
