"""Attention over block tables, in float32: the reference that a kernel must meet."""

from __future__ import annotations

import attrs
import torch

from kvframe.checks import optional_at_least
from kvframe.errors import SpecError


@attrs.frozen(kw_only=True)
class Mask:
    """Which keys a query sees.

    Args:
        causal: none after its own position.
        window: of those, the last so many, its own included.
        chunk: of those, the ones in its own chunk of so many positions.
        prefix: first positions that neither window nor chunk hides: sink tokens, or an R-SWA prompt; one number, or
            one for each request.
    """

    causal: bool = True
    window: int | None = attrs.field(default=None, validator=optional_at_least(1))
    chunk: int | None = attrs.field(default=None, validator=optional_at_least(1))
    prefix: int | torch.Tensor = attrs.field(default=0, eq=False)

    def visible(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """[R, Q, S] for query positions [R, Q] and key positions [S]."""
        query, key = queries.unsqueeze(-1), keys.view(1, 1, -1)
        seen = torch.ones_like(query == key)
        if self.window is not None:
            seen &= key > query - self.window
        if self.chunk is not None:
            seen &= key // self.chunk == query // self.chunk
        prefix = self.prefix
        seen |= key < (prefix.view(-1, 1, 1) if isinstance(prefix, torch.Tensor) else prefix)
        return seen & (key <= query) if self.causal else seen


CAUSAL = Mask()


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    query_starts: torch.Tensor,
    lengths: torch.Tensor,
    max_query_len: int,
    scale: float,
    mask: Mask,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of a batch of requests of different lengths over keys that are gathered already.

    Args:
        query: [T, query heads, width], the requests' tokens one after the other.
        key: [R, S, heads, width]; query heads share a head in equal consecutive numbers.
        value: [R, S, heads, width of V].
        query_starts: [R + 1], where each request's tokens start in `query`.
        lengths: [R], keys of each request; its queries are the last positions.
        max_query_len: the most tokens of one request.
        scale: of the scores.
        mask: which keys a query sees.
        softcap: scores s become softcap * tanh(s / softcap).

    Returns:
        [T, query heads, width of V], in the query's dtype.
    """
    heads, device = key.shape[2], query.device
    if query.shape[1] % heads:
        raise SpecError(
            spec="paged_attention",
            field="query",
            value=tuple(query.shape),
            rule=f"must have a multiple of the cache's {heads} heads",
        )
    step = torch.arange(max_query_len, device=device)
    starts, counts = query_starts[:-1, None], query_starts.diff()[:, None]
    padded = query[(starts + step).clamp(max=len(query) - 1)].unflatten(2, (heads, -1)).float()
    positions = torch.arange(key.shape[1], device=device)
    visible = mask.visible(lengths[:, None] - counts + step, positions)
    visible &= (positions < lengths[:, None])[:, None] & (step < counts)[:, :, None]
    scores = torch.einsum("rqhgd,rshd->rhgqs", padded, key.float()) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    shown = visible[:, None, None]
    weights = scores.masked_fill(~shown, -torch.inf).softmax(-1).masked_fill(~shown, 0)
    # bytes that nobody has written may read as NaN, and 0 * NaN is NaN
    value = value.float().masked_fill(~visible.any(1)[:, :, None, None], 0)
    attended = torch.einsum("rhgqs,rshd->rqhgd", weights, value).flatten(2, 3)
    token = torch.arange(len(query), device=device)
    row = torch.searchsorted(query_starts[1:].contiguous(), token, right=True)
    return attended[row, token - query_starts[row]].to(query.dtype)
