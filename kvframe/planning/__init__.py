"""Planning: layers' specs and a budget to pools, groups and placements."""

from typing import TYPE_CHECKING, Any

from kvframe.planning.cost import Limits
from kvframe.planning.plan import STRATEGIES, Plan, plan
from kvframe.planning.report import PlanReport

if TYPE_CHECKING:
    from kvframe.planning.agreement import Agreement, agree

__all__ = ["STRATEGIES", "Agreement", "Limits", "Plan", "PlanReport", "agree", "plan"]


def __getattr__(name: str) -> Any:
    # what ranks exchange is imported by those that agree, not by every `kvframe plan`
    if name in ("Agreement", "agree"):
        from kvframe.planning import agreement

        return getattr(agreement, name)
    raise AttributeError(name)
