"""Evaluation: the forward passes of a schedule alone, in the schedule's order."""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.schedule.kinds import RULES
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule


def keep_forward(schedule: Schedule, problem: Problem) -> Schedule:
    """Return ``schedule`` without the actions that only training needs."""
    rows = tuple(
        tuple(action for action in row if RULES[action.kind].in_evaluation) for row in schedule.rows
    )
    return replace(schedule, rows=rows, pairs=frozenset())
