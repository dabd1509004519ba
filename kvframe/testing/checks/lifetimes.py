"""Checks of the lifetime rule, from which freeing, hits, admission and pool sizing follow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvframe.lifetime import Lifetime
from kvframe.testing.outcome import NotApplicable, expect
from kvframe.testing.simulate import dead_entries, prompts, simulated_peak
from kvframe.testing.subject import Subject

_TOKENS = 700  # looked at one by one; longer reaches are looked at around their own length


def _cases(subject: Subject) -> Iterator[tuple[Any, Lifetime, int]]:
    """An example, its lifetime, and each prompt worth trying."""
    for spec in subject.examples:
        lifetime = subject.lifetime(spec)
        for prompt in prompts(lifetime, _TOKENS):
            yield spec, lifetime, prompt


def _lengths(lifetime: Lifetime) -> list[int]:
    """Settled tokens to look at: the first ones, and those around the length at which holdings have peaked."""
    steady = lifetime.steady_from or 0
    reach = min(2 * lifetime.block, _TOKENS)
    return sorted({*range(_TOKENS), *range(max(0, steady - reach), steady + reach if steady else 0)})


def the_lifetime_has_the_specs_block(subject: Subject) -> None:
    """The lifetime's block is the spec's.

    Why: entries of the table are the spec's blocks; a rule in other units frees blocks that are still read.
    What to do: pass `block=spec.block_size`. Context parallelism is added by the core.
    """
    for spec in subject.examples:
        block = subject.lifetime(spec).block
        expect(
            block == spec.block_size,
            spec,
            f"its lifetime has blocks of {block} tokens, the spec of {spec.block_size}",
        )


def lifetimes_compare_by_value(subject: Subject) -> None:
    """Equal specs have equal lifetimes, which hash equally.

    Why: layers share a block table where their lifetimes are equal; a rule that compares by identity keeps them apart.
    What to do: declare the rule as `@attrs.frozen(kw_only=True) class MyLifetime(Lifetime)` with fields.
    """
    for spec in subject.examples:
        one, other = subject.lifetime(spec), subject.lifetime(spec)
        expect(one == other and hash(one) == hash(other), spec, f"{one!r} is not equal to {other!r}")


def nothing_is_dead_that_is_still_written(subject: Subject) -> None:
    """Nothing is dead at the start, and never the entry that the next token goes to.

    Why: its block would go back to the pool, and be another request's, while this one writes to it.
    What to do: divide down: `tokens // block` entries are complete, the next one is not.
    """
    for spec, lifetime, prompt in _cases(subject):
        if lifetime.fixed is not None:
            continue
        for n in _lengths(lifetime):
            # a state that is written next starts from the state after the last settled token
            running = max(0, n - 1) // lifetime.block if lifetime.state else n // lifetime.block
            dead = dead_entries(lifetime, n, prompt, running + 3)
            late = [entry for entry in dead if entry >= running]
            expect(
                not late,
                spec,
                f"entry {late[:1]} is dead after {n} tokens (prompt {prompt}), and still in use",
            )


def the_window_is_kept(subject: Subject) -> NotApplicable | None:
    """The last `window` tokens that the family reports in events are never dead, the next token counted as one of them.

    Why: attention reads them. One entry too few is read as another request's keys, and no error shows it.
    What to do: after n tokens the oldest token that is read is n - window + 1; round its entry down.
    """
    stated = False
    for spec, lifetime, prompt in _cases(subject):
        window = subject.family.window(spec)
        if window is None or lifetime.fixed is not None:
            continue
        stated = True
        for n in _lengths(lifetime):
            first = max(0, n - max(1, window) + 1) // lifetime.block
            dead = dead_entries(lifetime, n, prompt, n // lifetime.block + 1)
            lost = [entry for entry in dead if entry >= first]
            text = f"entry {lost[:1]} is dead after {n} tokens, in a window of {window} that starts in entry {first}"
            expect(not lost, spec, text)
    return None if stated else NotApplicable("the family reports no window")


def dead_entries_stay_dead(subject: Subject) -> None:
    """What is dead after n tokens is dead after more.

    Why: its block is gone; a rule that takes it back reads what another request wrote. The core bisects on this.
    What to do: let `hi` never fall and `lo` never rise as n grows.
    """
    for spec, lifetime, prompt in _cases(subject):
        before, at = (0, 0), 0
        for n in _lengths(lifetime):
            low, high = (int(edge) for edge in lifetime.dead(n, prompt))
            if before[1] > before[0]:
                kept = low <= before[0] and high >= before[1]
                text = f"after {at} tokens (prompt {prompt}) entries {before} are dead, after {n} only {(low, high)}"
                expect(kept, spec, text)
            if high > low:
                before, at = (low, high), n


def arrays_and_numbers_agree(subject: Subject) -> None:
    """`dead` gives for a whole batch what it gives for each request alone, in the batch's shape.

    Why: freeing asks for one request, the hit search and sizing for thousands at once.
    What to do: use numpy's `maximum` and `//`, no `if` on n and no `max`.
    """
    for spec, lifetime, prompt in _cases(subject):
        n = np.asarray(_lengths(lifetime), np.int64)
        for given in (prompt, np.full_like(n, prompt)):
            low, high = lifetime.dead(n, given)
            shapes = {np.shape(low), np.shape(high)}
            expect(shapes == {n.shape}, spec, f"dead gives arrays of shapes {sorted(shapes)} for {n.shape}")
            for i in range(0, len(n), 3):
                alone = tuple(int(edge) for edge in lifetime.dead(int(n[i]), prompt))
                found = (int(low[i]), int(high[i]))
                text = f"after {n[i]} tokens (prompt {prompt}) dead gives {found} in a batch, {alone} alone"
                expect(found == alone, spec, text)
        whole = all(np.issubdtype(np.asarray(edge).dtype, np.integer) for edge in lifetime.dead(n, prompt))
        expect(whole, spec, "dead gives numbers that are not whole")


def longer_prompts_keep_more(subject: Subject) -> None:
    """With a longer prompt, no more entries are dead after as many tokens.

    Why: sizing takes the longest prompt as the worst case.
    What to do: let only tokens outside the prompt die earlier, never tokens inside it.
    """
    for spec in subject.examples:
        lifetime = subject.lifetime(spec)
        for n in range(0, _TOKENS, 11):
            counts = [len(dead_entries(lifetime, n, prompt, n)) for prompt in range(1, _TOKENS, 23)]
            falls = counts == sorted(counts, reverse=True)
            expect(falls, spec, f"after {n} tokens a longer prompt frees more: {counts}")


def the_peak_is_what_a_request_holds(subject: Subject) -> None:
    """The lifetime's `peak` is exactly the most entries that a simulated request holds.

    Why: pools and admission are sized by it. Above it, memory is idle; below it, requests stop.
    What to do: leave `peak` to the core. If it is the core's, look at `steady_from` and at what `dead` promises.
    """
    for spec in subject.examples:
        lifetime = subject.lifetime(spec)
        for engine in subject.engines(spec):
            limits = (engine.max_in_flight_tokens, engine.max_model_len)
            peak = lifetime.peak(*limits, max_encoder_tokens=engine.max_encoder_tokens)
            held = simulated_peak(lifetime, *limits, engine.max_encoder_tokens)
            text = f"its peak is {peak} entries and it holds {held} (in flight, longest: {limits})"
            expect(peak == held, spec, text)


def steady_from_keeps_its_word(subject: Subject) -> NotApplicable | None:
    """After `steady_from` tokens, a request never holds more than it did before.

    Why: the core looks at no longer requests when it sizes a pool.
    What to do: give the length from which holdings repeat, rounded up by a block; or leave it None.
    """
    stated = False
    for spec in subject.examples:
        lifetime = subject.lifetime(spec)
        steady = lifetime.steady_from
        if steady is None:
            continue
        stated = True
        for in_flight in (1, 7, lifetime.block, 300):
            before = simulated_peak(lifetime, in_flight, steady + in_flight + lifetime.block)
            after = simulated_peak(lifetime, in_flight, 2 * steady + in_flight + 5 * lifetime.block)
            text = f"holds {after} entries after its steady_from of {steady}, {before} before ({in_flight} in flight)"
            expect(after <= before, spec, text)
    return None if stated else NotApplicable("the rule does not state it")


def the_next_death_is_the_first(subject: Subject) -> None:
    """`next_death` is the first length at which more is dead than now.

    Why: the block manager sleeps until then; a later answer keeps blocks too long, an earlier one costs every step.
    What to do: leave it to the core, or give a closed form that agrees with `dead`.
    """
    for spec, lifetime, prompt in _cases(subject):
        highs = [int(lifetime.dead(n, prompt)[1]) for n in range(_TOKENS)]
        for n in range(0, _TOKENS, 29):
            wanted = next((at for at in range(n + 1, _TOKENS) if highs[at] > highs[n]), None)
            found = lifetime.next_death(n, prompt, _TOKENS - 1)
            expect(
                found == wanted,
                spec,
                f"next_death after {n} tokens (prompt {prompt}) is {found}, not {wanted}",
            )


def hits_fit_the_spec(subject: Subject) -> None:
    """A spec that is not prefix-cacheable, or that replays tokens, is not keyed.

    Why: keyed groups must serve every prefix hit; blocks that are overwritten or rebuilt never can.
    What to do: say `hits="free"` where a hit needs nothing of the kind, `hits="never"` where it forbids hits.
    """
    for spec in subject.examples:
        hits = subject.lifetime(spec).hits
        if not spec.prefix_cacheable or spec.prefix_replay_tokens:
            expect(
                hits != "keyed", spec, "is not served by the prefix cache, yet its lifetime has hits='keyed'"
            )
