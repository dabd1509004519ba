"""From token positions to slots. A slot is block * N + state: it is the same number whatever the kernel block."""

from __future__ import annotations

from typing import Any

import attrs
import torch

from kvframe.checks import at_least
from kvframe.errors import SpecError
from kvframe.plugins import PluginHost

PAD_SLOT = 0  # of tokens that only fill a batch: the first state of the null block, which nobody reads


@attrs.frozen(kw_only=True)
class TokenMap:
    """How one group's tokens lie in its table entries. Block sizes differ between groups: there is no global one.

    Args:
        block: tokens of an entry.
        states: states of an entry, N.
        ring: entries that a request reuses in turn; None: entries follow the positions.
    """

    block: int = attrs.field(validator=at_least(1))
    states: int = attrs.field(validator=at_least(1))
    ring: int | None = None

    def block_index(self, positions: torch.Tensor) -> torch.Tensor:
        """The table entry of each position."""
        entry = torch.div(positions, self.block, rounding_mode="floor")
        return entry if self.ring is None else entry % self.ring

    def state_index(self, positions: torch.Tensor) -> torch.Tensor:
        """The first state of each position within its entry."""
        return torch.div(positions % self.block * self.states, self.block, rounding_mode="floor")


def token_map(host: PluginHost, spec: Any) -> TokenMap:
    """The token map of a group, from its spec and its family's lifetime.

    Raises:
        SpecError: the kind keeps one state a block, so tokens have no slots.
    """
    lifetime = host.family(spec).lifetime(spec)
    if spec.tokens_per_state < 0:
        raise SpecError(
            spec=type(spec).__name__,
            field="tokens_per_state",
            value=spec.tokens_per_state,
            rule="must be above 0: this kind keeps one state a block, and its tokens have no slots",
        )
    return TokenMap(block=spec.block_size, states=spec.num_states, ring=lifetime.fixed)


def slot_mapping(
    tokens: TokenMap, block_table: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """The slot of every token, int64, of the shape of `positions`; one call for a whole batch.

    Where several tokens share a state it is that state's slot, where a token has several states the first one's.

    Args:
        tokens: the group's token map.
        block_table: [requests, entries], the group's block ids.
        rows: the request of each token, or what broadcasts to it.
        positions: of each token in its request; below 0: a token that only fills the batch, whose slot is PAD_SLOT.
    """
    known = positions.clamp(min=0)
    blocks = block_table[rows, tokens.block_index(known)].to(torch.int64)
    slots = blocks * tokens.states + tokens.state_index(known)
    return slots.masked_fill(positions < 0, PAD_SLOT)


def kernel_block_table(
    block_table: torch.Tensor, ratio: int, kernel_block_stride: int | None = None
) -> torch.Tensor:
    """The table in kernel blocks, [requests, entries * ratio].

    Args:
        block_table: [requests, entries], block ids.
        ratio: kernel blocks of a block.
        kernel_block_stride: kernel pages from one block to the next, for packed groups whose kernels count pages
            themselves (contract 4.1); None: `ratio`.
    """
    first = block_table * (ratio if kernel_block_stride is None else kernel_block_stride)
    parts = torch.arange(ratio, dtype=block_table.dtype, device=block_table.device)
    return (first.unsqueeze(-1) + parts).flatten(-2)
