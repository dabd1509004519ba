"""Planning: layers' specs and a budget to pools, groups and placements."""

from kvframe.planning.agree import Agreement, agree
from kvframe.planning.cost import Limits
from kvframe.planning.plan import STRATEGIES, Plan, plan
from kvframe.planning.report import PlanReport

__all__ = ["STRATEGIES", "Agreement", "Limits", "Plan", "PlanReport", "agree", "plan"]
