"""Planning: layers' specs and a budget to pools, groups and placements."""

from kvframe.planning.plan import STRATEGIES, Plan, plan
from kvframe.planning.report import PlanReport

__all__ = ["STRATEGIES", "Plan", "PlanReport", "plan"]
