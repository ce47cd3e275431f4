"""From rows to shards: what to run, in which order, in which unit of commit. See `planner`."""

from bulkrun.job.plan.planner import Planner, dry_plan
from bulkrun.job.plan.report import PlanReport

__all__ = ["PlanReport", "Planner", "dry_plan"]
