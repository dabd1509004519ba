"""Checks of sizing: what a spec says it needs against what a simulated request holds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvframe.checks import cdiv
from kvframe.engine import EngineConfig
from kvframe.errors import SpecError
from kvframe.testing.outcome import NotApplicable, expect
from kvframe.testing.simulate import simulated_peak
from kvframe.testing.subject import Subject

SLACK_BLOCKS = 1  # a bound in closed form may be so many blocks above the simulated need


def pages_hold_their_content(subject: Subject) -> None:
    """A page is H * N * C bytes, and never less with padding.

    Why: a page that is too small lets one block's cells run into the next.
    What to do: compute `unpadded_page_size_bytes` from the geometry and call `check_padding` at construction.
    """
    for spec in subject.examples:
        expect(spec.page_size_bytes >= 1, spec, f"its page has {spec.page_size_bytes} bytes")
        pages = (spec.unpadded_page_size_bytes, spec.page_size_bytes)
        expect(pages[0] <= pages[1], spec, f"its page of {pages[1]} bytes cannot hold {pages[0]} bytes")
        if spec.has_layer_views:
            content = spec.num_heads * spec.num_states * spec.state_content_size_bytes
            expect(
                content == pages[0],
                spec,
                f"H * N * C = {content} bytes, unpadded_page_size_bytes = {pages[0]}",
            )


def states_cover_every_token(subject: Subject) -> NotApplicable | None:
    """A block's states stand for all its tokens: N * tokens_per_state = block_size, with nothing rounded off.

    Why: tokens of a dropped remainder have no storage, and their keys overwrite others'.
    What to do: let `SpecBase.kernel_states` refuse blocks that hold no whole number of states.
    """
    if all(not spec.has_layer_views or spec.tokens_per_state < 0 for spec in subject.examples):
        return NotApplicable("the kind keeps no state for each token")
    for spec in subject.examples:
        for tokens in (spec.block_size, 2 * spec.block_size, spec.block_size + 1, cdiv(spec.block_size, 2)):
            try:
                states = spec.kernel_states(tokens)
            except SpecError:
                continue
            covered = states * spec.tokens_per_state
            expect(covered == tokens, spec, f"{states} states for {tokens} tokens cover {covered}")
    return None


def pages_grow_with_the_block(subject: Subject) -> None:
    """Twice the block is twice the content, for kinds that scale; no change at all for states, and never less.

    Why: the planner brings kinds to one page size by growing blocks, and takes `paging.scales` at its word.
    What to do: keep every per-token number out of the page's constant part, or say `Paging(scales=False)`: such a kind
    may hold something once a block beside its tokens.
    """
    for spec in subject.examples:
        page = spec.unpadded_page_size_bytes
        for factor in (2, 3):
            found = spec.copy_with_new_block_size(factor * spec.block_size).unpadded_page_size_bytes
            wanted = factor * page if subject.family.paging.scales else page
            beside = not subject.family.paging.scales and subject.lifetime(spec).per_token and found > page
            expect(
                found == wanted or beside,
                spec,
                f"with {factor} times the block its page is {found} bytes, not {wanted}",
            )


def a_new_block_size_keeps_the_rest(subject: Subject) -> None:
    """`copy_with_new_block_size` changes the block and its lifetime's block, keeps the class, and can be undone.

    Why: the planner tries block sizes and goes back; padding that is kept from the old block would cut the new page.
    What to do: inherit it. Where padding is stored, use `rescaled_padding`.
    """
    for spec in subject.examples:
        grown = spec.copy_with_new_block_size(2 * spec.block_size)
        expect(type(grown) is type(spec), spec, f"becomes a {type(grown).__name__}")
        expect(grown.block_size == 2 * spec.block_size, spec, f"becomes {grown!r}")
        block = subject.lifetime(grown).block
        expect(block == grown.block_size, grown, f"its lifetime still has blocks of {block} tokens")
        expect(
            grown.page_size_bytes >= grown.unpadded_page_size_bytes,
            grown,
            "its padding is that of the old block",
        )
        back = grown.copy_with_new_block_size(spec.block_size)
        same = (
            back == spec
            or back.unpadded_page_size_bytes == spec.unpadded_page_size_bytes != spec.page_size_bytes
        )
        expect(same, spec, f"comes back as {back!r}")


def _needs(subject: Subject, spec: Any, *, dcp: int = 1) -> Iterator[tuple[EngineConfig, int, int]]:
    """Limits, the pages that the spec asks for, and the pages that a simulated request holds."""
    for engine in subject.engines(spec, dcp=dcp):
        lifetime = subject.family.engine_lifetime(spec, engine)
        held = simulated_peak(
            lifetime, engine.max_in_flight_tokens, engine.max_model_len, engine.max_encoder_tokens
        )
        yield engine, spec.max_memory_usage_bytes(engine), held * spec.page_size_bytes


def sizing_covers_the_need(subject: Subject) -> NotApplicable | None:
    """`max_memory_usage_bytes` is at least what a simulated request holds at its worst moment.

    Why: admission and start-up trust it. If it is too small, an admitted request runs out of blocks and stops.
    What to do: count the entry that a window starts inside, tokens in flight, and spares; or use the lifetime's `peak`.
    """
    if subject.family.traits.freed_by_plugin:
        return NotApplicable("the plugin also frees entries itself, which no simulation of tokens shows")
    for spec in subject.examples:
        for engine, asked, held in _needs(subject, spec):
            expect(asked >= held, spec, f"asks for {asked} bytes and holds {held} under {engine}")
    return None


def sizing_is_tight(subject: Subject) -> None:
    """`max_memory_usage_bytes` is at most one page above what a simulated request holds.

    Why: memory that no request can use makes the engine refuse lengths and requests that would fit.
    What to do: bound by the window, chunk or state, not by the longest request; never count an entry twice.
    """
    for spec in subject.examples:
        for engine, asked, held in _needs(subject, spec):
            most = held + SLACK_BLOCKS * spec.page_size_bytes
            expect(
                asked <= most,
                spec,
                f"asks for {asked} bytes, though no request holds more than {held}, under {engine}",
            )


def sizing_never_falls(subject: Subject) -> None:
    """A longer request, or more tokens in flight, never needs less.

    Why: the planner bisects over lengths to find the largest that fits.
    What to do: use `min` and `max` with the longest length, never a remainder.
    """
    for spec in subject.examples:
        block = subject.lifetime(spec).block
        steps = sorted(
            {*range(1, 200), *(times * block + more for times in range(7) for more in (1, 2, block))}
        )
        for grow in ("max_model_len", "max_in_flight_tokens"):
            before = 0
            for value in steps:
                length, in_flight = (value, 5) if grow == "max_model_len" else (1000, value)
                asked = spec.max_memory_usage_bytes(subject.engine(spec, length, in_flight))
                expect(asked >= before, spec, f"asks for {before} bytes, and {asked} with {grow} = {value}")
                before = asked


def sizing_counts_whole_pages(subject: Subject) -> None:
    """`max_memory_usage_bytes` is a whole number of pages.

    Why: blocks are handed out whole; the planner divides by the page.
    What to do: round tokens up to blocks with `cdiv`, then multiply by `page_size_bytes`, padding included.
    """
    for spec in subject.examples:
        for engine in subject.engines(spec):
            asked, page = spec.max_memory_usage_bytes(engine), spec.page_size_bytes
            expect(
                asked % page == 0,
                spec,
                f"asks for {asked} bytes, no multiple of its page of {page}, under {engine}",
            )


def table_rows_hold_every_entry(subject: Subject) -> None:
    """A block-table row of `max_num_blocks_per_req` entries holds every entry of the longest request.

    Why: rows have that width on the device; an entry beyond is written into the next request's row.
    What to do: give at least `ceil(max_len / block)` entries, spares included; fixed kinds their number.
    """
    for spec in subject.examples:
        for engine in subject.engines(spec):
            lifetime = subject.family.engine_lifetime(spec, engine)
            encoder = lifetime.source == "encoder"
            tokens = engine.max_encoder_tokens if encoder else engine.max_model_len
            row, entries = spec.max_num_blocks_per_req(engine, tokens), int(lifetime.entries(tokens))
            expect(
                row >= entries, spec, f"its row has {row} entries, a request of {tokens} tokens has {entries}"
            )


def context_parallel_sizing_covers_the_need(subject: Subject) -> NotApplicable | None:
    """Where context parallelism spreads the tokens, sizing still covers what one rank holds.

    Why: every rank holds ceil(tokens / (block * ranks)) entries, of which the last may be nearly empty.
    What to do: divide tokens by `engine.dcp` first, rounding up; or say `Traits(dcp="unsupported")`.
    """
    if subject.family.traits.dcp == "unsupported":
        return NotApplicable("the family does not support context parallelism")
    if subject.family.traits.freed_by_plugin:
        return NotApplicable("the plugin also frees entries itself, which no simulation of tokens shows")
    for spec in subject.examples:
        for dcp in (2, 4):
            for engine, asked, held in _needs(subject, spec, dcp=dcp):
                expect(asked >= held, spec, f"asks for {asked} bytes and holds {held} under {engine}")
    return None
