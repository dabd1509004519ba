"""State groups: an entry is the state after one position, so growing a table moves states too.

A step writes only its last entry, spares behind it, and one before it when the kernel exports a state; entries in
between stay null (contract 6.4).
"""

from __future__ import annotations

import attrs

from kvframe.blocks.config import BlockConfig
from kvframe.blocks.publish import prompt_checkpoint
from kvframe.checks import cdiv


@attrs.frozen(kw_only=True)
class StateGrowth:
    """How a state table grows by one step.

    Args:
        nulls: null entries to add first.
        moves: entries whose spare blocks move to the new end, in this order.
        fresh: blocks to take for the end of the table.
    """

    nulls: int = 0
    moves: tuple[int, ...] = ()
    fresh: int = 0


def state_growth(
    *, length: int, running: bool, tokens: int, block: int, spare: int, exported: bool
) -> StateGrowth:
    """How a table of `length` entries comes to hold the state after `tokens` tokens.

    Args:
        length: entries now.
        running: the table already has a running state and its spares; else only what a hit or an import brought.
        tokens: tokens of the main model after the step.
        block: tokens of an entry.
        spare: spare entries at the end.
        exported: the entry before the running state is needed too.
    """
    required = cdiv(tokens, block) + spare
    if required <= length and not exported:
        return StateGrowth()
    running_entry = required - spare - 1
    first_used = running_entry - exported
    nulls = max(0, first_used - length) if length < running_entry else 0
    moves = tuple(entry for entry in range(length - spare, length) if entry < first_used) if running else ()
    return StateGrowth(nulls=nulls, moves=moves, fresh=max(0, required - length - nulls - len(moves)))


def exported_position(config: BlockConfig, g: int, start: int, stop: int, prefill_end: int) -> int:
    """The position inside the chunk [start, stop) whose state the kernel saves too, 0 if it saves none (contract 3.9).

    Args:
        config: the groups and their units.
        g: a state group.
        start: tokens computed before the chunk.
        stop: tokens computed after it.
        prefill_end: the token at which the request's prefill ends.
    """
    lifetime = config.groups[g].lifetime
    last_chunk = stop >= prefill_end or config.retention_interval != 0
    if lifetime.export is None or not last_chunk or not config.prefix_caching:
        return 0
    position = prompt_checkpoint(stop, config.alignment, bool(config.draft_groups))
    unit, block = config.hash_unit, lifetime.block
    fits = cdiv(stop, block) - 2 > (start - 1) // block
    inside = start + unit <= position < stop
    aligned = start % unit == 0 and (position - start) % lifetime.export == 0
    return position if fits and inside and aligned else 0


def chunk_stops(config: BlockConfig, start: int, stop: int, prompt: int, junction: int = 0) -> int:
    """Where a prefill chunk over [start, stop) must end so that every state worth keeping is written (contract 9.1).

    An engine with state groups asks this before it schedules a chunk; without keyed state groups any end will do.

    Args:
        config: the groups and their units.
        start: tokens computed before the chunk.
        stop: where the engine would end it.
        prompt: tokens of the prompt (or of all known tokens, for a resumed request).
        junction: the request's junction, 0 if it has none.

    Returns:
        The chunk's end, above `start`. An end of at most `prompt` that is not the prompt's own is a multiple of the
        state's block, unless not even one block fits.
    """
    blocks = [config.groups[g].lifetime.block for g in config.keyed if config.groups[g].lifetime.state]
    if not blocks or not config.reads_cache:
        return stop
    block = max(blocks)
    stops = [stop]
    if start % block:
        stops.append(start + block - start % block)
    draft = bool(config.draft_groups)
    last = max(0, prompt // block * block - (block if draft else 0))
    checkpoint = prompt_checkpoint(prompt, config.hash_unit, draft) if config.fine_grained else 0
    stops += [
        at for at in (last, checkpoint, start + (junction - start) // block * block) if start < at < stop
    ]
    end = min(stops)
    if end < prompt and end == stop and end // block * block > start:
        end = end // block * block
    return end
