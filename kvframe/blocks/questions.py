"""Questions: what people and monitoring ask of a manager. Nothing here changes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvframe.blocks.requests import Admission, BlockRequest
from kvframe.blocks.results import HitLimit
from kvframe.blocks.wiring import Wiring

if TYPE_CHECKING:
    from kvframe.blocks.refusals import RefusalReason
    from kvframe.blocks.statistics import Statistics


class Questions(Wiring):
    """The manager's answers to why, and how much."""

    def explain_hit(self, request: BlockRequest) -> HitLimit:
        """Which group and which entry end the request's hit, and how far each group alone would go."""
        return self._search.explain(request.chain)

    def explain_refusal(
        self, who: Admission | int, num_new_tokens: int = 1, *, lookahead: int = 0, busy: bool = True
    ) -> RefusalReason:
        """Why a request was refused, or would be: what it needs, who holds it, and what preempting would free.

        Args:
            who: an admission, or the slot of a running request.
            num_new_tokens: tokens that a running request is to compute.
            lookahead: further tokens of it that need a place.
            busy: something else runs, so admission leaves the watermark free.

        Raises:
            BlockError: the slot holds no request, or the admission asks for nothing or too much.
        """
        from kvframe.blocks.refusals import explain_admission, explain_growth

        if isinstance(who, Admission):
            return explain_admission(self, self._admitter, who, busy)
        return explain_growth(self, self._ops, who, num_new_tokens, lookahead)

    def statistics(self) -> Statistics:
        """What the pool holds now, and what was counted so far. It looks at all blocks: for reports, not for steps."""
        from kvframe.blocks.statistics import collect

        return collect(self)
