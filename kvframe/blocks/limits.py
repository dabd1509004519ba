"""Limits: what bounds a request beside the pool, asked before anything is taken for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Limits(Protocol):
    """Quotas of tenants, for instance."""

    def over(self, tenant: str | None, needs: Sequence[int], found: Sequence[Sequence[int]]) -> int:
        """Slabs (blocks, where no group splits slabs) by which the tenant would hold too much.

        Args:
            tenant: the salt of the request.
            needs: blocks that would be taken, by group.
            found: cached blocks that would be held, by group.
        """
