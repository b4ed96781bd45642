"""Which schedules have passes that run as one, where that is asked for."""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.schedule.build.registry import Choice, entries
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.schedule.transforms.pairs import pair_up


def check_pairs(choice: Choice, problem: Problem) -> None:
    """Raise ValueError where pairs are asked of a schedule that can have none."""
    if problem.extras.pairs and problem.placement.chunks < 2:
        others = [name for name, entry in entries().items() if entry.keeps_pairs]
        raise ValueError(
            f"schedule {choice.spec} has one stage on each rank, and forward and backward passes "
            f"run in pairs on several (Megatron too asks for virtual stages): take one of "
            f"{', '.join(others)}, or no pairs"
        )


def with_pairs(schedule: Schedule, problem: Problem) -> Schedule:
    """``schedule``, which has passes only, with pairs where ``problem`` asks for them."""
    if not problem.extras.pairs or problem.forward_only:
        return replace(schedule, pairs=frozenset()) if schedule.pairs else schedule
    return pair_up(schedule, problem)
