"""Simulated steps whose times and peaks stand in README.md and docs/.

Pages compare schedules by makespan and peak, on costs that a reader can type into `megatron-ext
simulate`. The scripts that write the pages all take their numbers from here.
"""

from __future__ import annotations

from megatron_ext.compile.registry import choose
from megatron_ext.compile.report import ScheduleReport, report
from megatron_ext.planner.stock import run_by_stock
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.limit import parse_limit
from megatron_ext.schedule.problem import Problem, ScheduleOptions
from megatron_ext.schedule.stock_executor import STOCK_EXECUTOR

USUAL_COSTS = "f=10,i=12,w=8,comm=1"
PLAIN = ScheduleOptions()


def simulated_step(
    spec: str,
    costs: str,
    ranks: int,
    microbatches: int,
    options: ScheduleOptions = PLAIN,
    limit: str = "",
    *,
    by_stock: bool = True,
) -> ScheduleReport:
    """Return the simulated step of ``spec`` at ``costs``, within a memory ``limit`` if given.

    Args:
        by_stock: whether Megatron's own executor runs the schedules that Megatron has too.
    """
    resolved = choose(spec)
    placement = resolved.place(ranks)
    problem = Problem(
        placement,
        microbatches,
        parse_costs(costs, placement),
        parse_limit(limit, ranks, microbatches) if limit else None,
        options=options,
    )
    if by_stock:
        problem = run_by_stock(problem, spec, STOCK_EXECUTOR)
    return report(resolved, problem)[1]
