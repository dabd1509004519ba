"""Where a long prefill can leave a state for later requests, besides those at block ends (contract 3.8, 3.9)."""

from __future__ import annotations

from kvframe.checks import cdiv
from kvframe.errors import SpecError


def _positive(function: str, field: str, value: int, unit: str) -> None:
    if value < 1:
        raise SpecError(spec=function, field=field, value=value, rule=f"must be at least 1 {unit}")


def get_mamba_prefill_checkpoint_position(
    num_tokens: int, hash_block_size: int, drop_eagle_block: bool, lookahead: int | None = None
) -> int:
    """The token position whose state a later request with the same prompt can resume from, 0 for none.

    Two forms are in use, and they differ where a draft model drops a unit and the hash unit divides the prompt: of 96
    tokens in units of 16 the first form gives 64, the second 80.

    Args:
        num_tokens: tokens of the prompt.
        hash_block_size: tokens of the hash unit; the position is a multiple of it.
        drop_eagle_block: a draft model computes one more unit again.
        lookahead: None: the form that always leaves the last token to compute. A number chooses the form of engines
            that hash that many tokens ahead (0 or 1: none): there a dropped unit already leaves enough to compute.

    Raises:
        SpecError: `hash_block_size` is below 1.
    """
    _positive("get_mamba_prefill_checkpoint_position", "hash_block_size", hash_block_size, "token")
    reserved = 1 if lookahead is None else 0 if drop_eagle_block else max(1, lookahead)
    units = (num_tokens - reserved) // hash_block_size - drop_eagle_block
    return max(0, units * hash_block_size)


def is_mamba_prefill_checkpoint_valid(
    query_start: int,
    query_end: int,
    checkpoint_position: int,
    hash_block_size: int,
    mamba_block_size: int,
    checkpoint_alignment: int | None,
) -> bool:
    """Whether the kernel that computes [query_start, query_end) can save the state at `checkpoint_position`.

    All are token positions or token counts.

    Args:
        query_start: first position that the step computes.
        query_end: one past the last.
        checkpoint_position: position whose state is wanted.
        hash_block_size: tokens of the hash unit.
        mamba_block_size: tokens of a state's block.
        checkpoint_alignment: the kernel saves states at multiples of this many tokens after its start; None: nowhere.

    Raises:
        SpecError: an alignment or block size is below 1.
    """
    if checkpoint_alignment is None:
        return False
    for field, value in (
        ("checkpoint_alignment", checkpoint_alignment),
        ("hash_block_size", hash_block_size),
        ("mamba_block_size", mamba_block_size),
    ):
        _positive("is_mamba_prefill_checkpoint_valid", field, value, "token")
    first_column = (
        query_start - 1
    ) // mamba_block_size  # of the state that the step starts from, -1 at a request's start
    free_column = (
        cdiv(query_end, mamba_block_size) - 2
    )  # just before the one of the state that the step ends with
    return (
        query_start % hash_block_size == 0
        and free_column > first_column
        and query_start + hash_block_size <= checkpoint_position < query_end
        and (checkpoint_position - query_start) % checkpoint_alignment == 0
    )
