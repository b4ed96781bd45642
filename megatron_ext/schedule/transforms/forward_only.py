"""Evaluation: a schedule's forward passes alone, in its own order."""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.schedule.kinds import FORWARD_ONLY_DUTIES, RULES
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule


def keep_forward(schedule: Schedule, problem: Problem) -> Schedule:
    """``schedule`` without what only training needs."""
    rows = tuple(
        tuple(a for a in row if FORWARD_ONLY_DUTIES.issuperset(RULES[a.kind].covers))
        for row in schedule.rows
    )
    return replace(schedule, rows=rows)
