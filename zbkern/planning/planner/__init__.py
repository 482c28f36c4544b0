"""The planner: a schedule for given costs under a memory limit, with a lower bound beside it."""

from __future__ import annotations

from zbkern.planning.planner.batch import BatchPlan, plan_batch
from zbkern.planning.planner.idle_time import IdleTime
from zbkern.planning.planner.plan import Plan, plan
from zbkern.planning.planner.request import PlanOptions

__all__ = ["BatchPlan", "IdleTime", "Plan", "PlanOptions", "plan", "plan_batch"]
