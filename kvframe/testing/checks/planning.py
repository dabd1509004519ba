"""Checks of planning: the family alone and beside full attention, by every strategy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvframe.errors import KVFrameError
from kvframe.planning import STRATEGIES, Plan, plan
from kvframe.serialise import from_json, to_json
from kvframe.testing.outcome import expect
from kvframe.testing.simulate import simulated_peak
from kvframe.testing.subject import Subject, full_attention
from kvframe.verify import verify

_LENGTH, _IN_FLIGHT = 2000, 64  # tokens
_MEMORY = 1 << 31


def _models(subject: Subject) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """An example, and models that hold it: alone, and beside full attention."""
    for spec in subject.examples:
        if subject.lifetime(spec).fixed == 0:
            continue  # a layer that keeps nothing is no part of a plan
        yield spec, {f"layer.{i}": spec for i in range(3)}
        full = full_attention(spec.block_size if subject.family.paging.scales else 16)
        yield spec, {f"layer.{i}": full if i % 3 == 0 else spec for i in range(6)}


def _plan(subject: Subject, spec: Any, specs: Mapping[str, Any], strategy: str) -> Plan:
    try:
        return plan(
            specs,
            engine=subject.engine(spec, _LENGTH, _IN_FLIGHT),
            memory=_MEMORY,
            host=subject.host,
            strategy=strategy,
        )
    except KVFrameError as error:
        kinds = sorted({type(layer).__name__ for layer in specs.values()})
        expect(False, spec, f"cannot be planned by strategy {strategy!r} among {', '.join(kinds)}: {error}")
        raise


def a_model_of_it_can_be_planned(subject: Subject) -> None:
    """Layers of the family alone, and beside full attention, get a plan from every strategy, with every layer in it.

    Why: it is what the family is installed for.
    What to do: the message says what stands in the way: often `Paging`, which says how its pages may be shaped.
    """
    for spec, specs in _models(subject):
        for strategy in STRATEGIES:
            config = _plan(subject, spec, specs, strategy).config
            placed = sorted(layer for tensor in config.tensors for layer in tensor.layers)
            expect(placed == sorted(specs), spec, f"is planned as {placed} by strategy {strategy!r}")


def plans_share_no_byte(subject: Subject) -> None:
    """In a plan, no two blocks that live at once share a byte.

    Why: they would overwrite each other.
    What to do: `page_size_bytes` and `block_stride_bytes_multiple` must not depend on anything but the spec's fields.
    """
    for spec, specs in _models(subject):
        for strategy in STRATEGIES:
            config = _plan(subject, spec, specs, strategy).config
            try:
                verify(config, subject.host.layouts)
            except KVFrameError as error:
                expect(False, spec, f"by strategy {strategy!r}: {error}")


def plans_survive_json(subject: Subject) -> None:
    """A plan that is written as JSON and read again is the same plan, with the same specs.

    Why: engines send plans to their workers and to routers, and keep them to compare.
    What to do: give fields types that JSON has (numbers, text, tuples, enums), and the spec class a family of its own.
    """
    for spec, specs in _models(subject):
        config = _plan(subject, spec, specs, "optimal").config
        found = from_json(to_json(config, subject.host), subject.host)
        expect(found == config, spec, f"its plan comes back from JSON as {found!r}")


def plans_ignore_the_order_of_layers(subject: Subject) -> None:
    """The order in which layers are given changes neither the number of blocks nor what a request needs.

    Why: ranks that name their layers in different orders must agree.
    What to do: make `merge` and `group_key` depend on the specs alone.
    """
    for spec, specs in _models(subject):
        one = _plan(subject, spec, specs, "optimal").config
        other = _plan(subject, spec, dict(reversed(list(specs.items()))), "optimal").config
        for name in ("num_blocks", "bytes_per_block"):
            numbers = (getattr(one, name), getattr(other, name))
            expect(
                numbers[0] == numbers[1],
                spec,
                f"has {name} = {numbers[0]}, with its layers reversed {numbers[1]}",
            )


def a_planned_request_fits(subject: Subject) -> None:
    """The blocks that a plan reserves for a request are at least what a simulated request holds.

    Why: admission lets as many requests in as the plan says.
    What to do: see the checks of the lifetime's peak.
    """
    for spec, specs in _models(subject):
        engine = subject.engine(spec, _LENGTH, _IN_FLIGHT)
        made = _plan(subject, spec, specs, "optimal")
        for group, row in zip(made.config.groups, made.report.groups, strict=True):
            layer = next(iter(group.layer_specs.values()))
            lifetime = subject.host.family(layer).engine_lifetime(layer, engine)
            held = simulated_peak(lifetime, _IN_FLIGHT, _LENGTH, engine.max_encoder_tokens)
            planned = row.blocks_per_request
            expect(
                planned >= held, layer, f"is planned with {planned} blocks a request, and one holds {held}"
            )
