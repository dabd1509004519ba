"""Checks of spec types: values that can be hashed, stored, sent to other processes, and asked for their geometry."""

from __future__ import annotations

import pickle
from collections.abc import Hashable
from fractions import Fraction
from typing import Any

import attrs

from kvframe.errors import SpecError
from kvframe.lifetime import Lifetime
from kvframe.merge import Refusal
from kvframe.spec import FullAttentionSpec
from kvframe.testing.outcome import NotApplicable, expect
from kvframe.testing.subject import Subject

_TYPES: dict[str, tuple[type, ...]] = {
    "block_size": (int,),
    "dcp_sharded": (bool,),
    "unpadded_page_size_bytes": (int,),
    "page_size_bytes": (int,),
    "block_stride_bytes_multiple": (int,),
    "prefix_cacheable": (bool,),
    "prefix_replay_tokens": (int,),
    "block_table_token_alignment": (int, type(None)),
    "has_layer_views": (bool,),
    "uses_slot_mapping": (bool,),
}
_GEOMETRY: dict[str, tuple[type, ...]] = {
    "num_heads": (int,),
    "tokens_per_state": (int, Fraction),
    "num_states": (int,),
    "state_content_size_bytes": (int,),
}


def examples_are_of_the_family(subject: Subject) -> None:
    """There is at least one example, and every example is found under the family.

    Why: all other checks try the examples; without one they would pass and say nothing.
    What to do: give `SpecFamily(examples=...)`, or the class's `examples`, two to four specs of real models' layers, of
    the family's own `spec_type`.
    """
    expect(subject.examples, f"family {subject.family.name!r}", "has no examples")
    for example in subject.examples:
        found = subject.host.family(example)
        expect(
            found.name == subject.family.name and isinstance(example, subject.family.spec_type),
            example,
            f"belongs to family {found.name!r}, not to {subject.family.name!r}",
        )


def specs_answer_the_protocol(subject: Subject) -> None:
    """A spec has every member of KVCacheSpec, each of its type.

    Why: planning, layouts and the block manager ask for these and nothing else. Floats lose bytes of large pools.
    What to do: derive from `SpecBase` or `AttentionSpec`, and give what it cannot know. Use `//` or `cdiv`, never `/`.
    """
    for spec in subject.examples:
        wanted = {**_TYPES, **(_GEOMETRY if spec.has_layer_views else {})}
        for name, types in wanted.items():
            expect(hasattr(spec, name), spec, f"has no {name}")
            value = getattr(spec, name)
            fits = isinstance(value, types) and (bool in types or not isinstance(value, bool))
            expect(fits, spec, f"{name} = {value!r} is of type {type(value).__name__}")
        engine = subject.engine(spec, 1000)
        for name, value in (
            ("max_memory_usage_bytes", spec.max_memory_usage_bytes(engine)),
            ("max_num_blocks_per_req", spec.max_num_blocks_per_req(engine, 1000)),
        ):
            expect(type(value) is int, spec, f"{name} gives {value!r}, which is no whole number")


def specs_cannot_change(subject: Subject) -> None:
    """A spec's fields cannot be set, and hold no list, dict, set or array.

    Why: plans and block tables are keyed by specs; one that changes later makes them wrong without a sign.
    What to do: use `@attrs.frozen` and tuples; turn lists into tuples with a converter.
    """
    for spec in subject.examples:
        expect(attrs.has(type(spec)), spec, "is of no attrs class")
        for field in attrs.fields(type(spec)):
            value = getattr(spec, field.name)
            frozen = isinstance(value, Hashable) and _hashes(value)
            expect(frozen, spec, f"{field.alias} holds a {type(value).__name__}, which can change")
            try:
                setattr(spec, field.name, value)
            except AttributeError:
                continue
            expect(False, spec, f"{field.alias} can be set")


def _hashes(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def specs_hash_by_value(subject: Subject) -> None:
    """Two specs of equal fields are equal, hash equally, and differ from a spec of other fields.

    Why: layers share a group where their specs are equal; a hash by identity makes every layer a group of its own.
    What to do: use `@attrs.frozen` without `eq=False`, and keep caches out of the fields.
    """
    for spec in subject.examples:
        twin = attrs.evolve(spec)
        expect(
            spec == twin and hash(spec) == hash(twin),
            spec,
            "is not equal to a copy of itself, or hashes differently",
        )
        larger = spec.copy_with_new_block_size(2 * spec.block_size)
        expect(spec != larger, spec, f"is equal to {larger!r}")


def specs_say_what_they_are(subject: Subject) -> None:
    """A spec's repr begins with its class, and specs that differ have different reprs.

    Why: refusals and error messages show specs by their repr; two that look alike make them useless.
    What to do: pass `repr=False` to attrs so that the repr of `SpecBase` stays.
    """
    for spec in subject.examples:
        expect(repr(spec).startswith(type(spec).__name__), spec, "its repr does not begin with its class")
        other = spec.copy_with_new_block_size(2 * spec.block_size)
        expect(repr(spec) != repr(other), spec, "its repr hides the block size")


def specs_survive_pickle(subject: Subject) -> None:
    """A spec that goes to another process and back is equal to what it was.

    Why: engines send specs and plans to their workers.
    What to do: define the class at the top level of a module, without functions in its fields.
    """
    for spec in subject.examples:
        for protocol in (2, pickle.HIGHEST_PROTOCOL):
            found = pickle.loads(pickle.dumps(spec, protocol))
            expect(found == spec and type(found) is type(spec), spec, f"comes back from pickle as {found!r}")


def families_answer_with_their_types(subject: Subject) -> None:
    """`lifetime`, `group_key`, `promote`, `retain`, `window` and `merge` give what `SpecFamily` promises.

    Why: the planner calls them without looking at what comes back; a wrong type fails far from its cause.
    What to do: see `kvframe.family.SpecFamily` for each one's result. A refusal is `kvframe.merge.refuse(...)`.
    """
    family = subject.family
    for spec in subject.examples:
        lifetime = family.lifetime(spec)
        expect(isinstance(lifetime, Lifetime), spec, f"lifetime gives {lifetime!r}, which is no Lifetime")
        key = family.group_key(spec)
        expect(_hashes(key), spec, f"group_key gives {key!r}, which cannot be hashed")
        for block_size in (None, spec.block_size, 2 * spec.block_size):
            promoted = family.promote(spec, block_size)
            fits = isinstance(promoted, (FullAttentionSpec, Refusal))
            expect(fits, spec, f"promote gives {promoted!r}: neither a FullAttentionSpec nor a Refusal")
        window = family.window(spec)
        expect(window is None or type(window) is int, spec, f"window gives {window!r}")
        merged = family.merge({"a": spec})
        expect(isinstance(merged, (family.spec_type, Refusal)), spec, f"merge gives {merged!r}")


def promotion_keeps_every_byte(subject: Subject) -> NotApplicable | None:
    """The full-attention spec that stands in for a layer has the layer's content, and keeps every token.

    Why: the kernel still reads the layer's own bytes, in pages that only are freed later.
    What to do: build it with `replace_as(spec.copy_with_new_block_size(block_size or spec.block_size), ...)`.
    """
    promoted_any = False
    for spec in subject.examples:
        for block_size in (spec.block_size, 2 * spec.block_size):
            promoted = subject.family.promote(spec, block_size)
            if isinstance(promoted, Refusal):
                continue
            promoted_any = True
            lifetime = subject.host.family(promoted).lifetime(promoted)
            expect(not lifetime.recycles, spec, f"its promotion {promoted!r} gives entries back")
            own = spec.copy_with_new_block_size(promoted.block_size).unpadded_page_size_bytes
            found = promoted.unpadded_page_size_bytes
            expect(found == own, spec, f"its promotion has pages of {found} bytes, the layer's have {own}")
    return None if promoted_any else NotApplicable("nothing can stand in for this kind")


def retaining_keeps_longer(subject: Subject) -> NotApplicable | None:
    """`retain(spec, tokens)` keeps at least so many tokens longer, and changes no byte of a page.

    Why: several draft modules prefill those tokens again; a window that has let them go would be read after its end.
    What to do: give the spec a field for the tokens, and subtract it in the lifetime's `dead` (see `slack`).
    """
    if subject.family.retain is None:
        return NotApplicable("the family has no retain")
    for spec in subject.examples:
        none, kept = (subject.family.retain(spec, tokens) for tokens in (0, 5))
        expect(type(kept) is type(spec), spec, f"retain gives {kept!r}")
        expect(kept.page_size_bytes == spec.page_size_bytes, spec, "retain changes the page")
        before, after = subject.lifetime(none), subject.lifetime(kept)
        for n in range(5, 3000, 7):
            _, high = after.dead(n, 1)
            _, allowed = before.dead(n - 5, 1)
            expect(
                int(high) <= int(allowed),
                spec,
                f"with 5 tokens retained, entries below {high} are dead at {n}",
            )
    return None


def facts_are_in_range(subject: Subject) -> None:
    """Replay, table alignment and stride multiple are in range, and traits name an event kind.

    Why: the block table's rows, strides and events are made from them.
    What to do: alignment is None or at least 1, replay at least 0, the stride multiple at least 1 byte.
    """
    expect(bool(subject.family.traits.event_kind), f"family {subject.family.name!r}", "has no event kind")
    for spec in subject.examples:
        alignment = spec.block_table_token_alignment
        expect(alignment is None or alignment >= 1, spec, f"block_table_token_alignment = {alignment}")
        expect(spec.prefix_replay_tokens >= 0, spec, f"prefix_replay_tokens = {spec.prefix_replay_tokens}")
        expect(spec.block_stride_bytes_multiple >= 1, spec, "block_stride_bytes_multiple is below 1")
        window = subject.family.window(spec)
        expect(window is None or window >= 0, spec, f"window = {window}")


def raw_storage_has_no_geometry(subject: Subject) -> NotApplicable | None:
    """A kind without layer views answers questions about [B, H, N, C] with a SpecError.

    Why: a made-up geometry would be viewed as tensors, and kernels would read pages that are laid out otherwise.
    What to do: leave `num_heads` and the like out; `SpecBase` refuses them.
    """
    raw = [spec for spec in subject.examples if not spec.has_layer_views]
    for spec in raw:
        for name in _GEOMETRY:
            try:
                value = getattr(spec, name)
            except SpecError:
                continue
            expect(False, spec, f"has no layer views, yet {name} = {value!r}")
    return None if raw else NotApplicable("the kind has layer views")
