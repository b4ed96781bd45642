"""Program for microbatches whose cost depends on their position in the step.

Microbatches that are dealt and ordered by their costs have about the same cost at the same position
of each step. One program made for the mean cost at each position then serves all steps. It is not
always better than a program for equal microbatches, so both have to be judged (`unequal`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron_ext.compile.build import complete, prove_built
from megatron_ext.compile.program.memory import in_microbatches, peaks
from megatron_ext.compile.program.unequal import (
    PlaceCosts,
    UnequalMicrobatches,
    profile_of,
    with_unequal_microbatches,
)
from megatron_ext.compile.program.verify import Program
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.action_arrays import Floats
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.problem import Problem, ScheduleOptions
from megatron_ext.search.best import searched_briefly
from megatron_ext.search.job_shop import job_shop_of


def judged_for_places(
    program: Program, costs: Mapping[Kind, Floats], replicas: int, *, expert_replicas: int = 1
) -> tuple[UnequalMicrobatches, Program | None]:
    """Return the makespans of steps with unequal microbatches, and a program made for their costs.

    ``costs`` are as in `with_unequal_microbatches`. The program is made for the mean cost at each
    position of a step; None if there is none.
    """
    for_profile = program_for_places(program, profile_of(costs, replicas))
    steps = with_unequal_microbatches(
        program, costs, replicas, for_profile, expert_replicas=expert_replicas
    )
    return steps, for_profile


def program_for_places(program: Program, at_places: PlaceCosts) -> Program | None:
    """Search a program for microbatches with the costs ``at_places``; None if no search is
    possible.

    A search is possible if the backward pass of ``program`` is split, all its stages are trained,
    and it has no options in addition to the order of its passes.

    Args:
        program: a program for equal microbatches. The result has its placement and memory limit, or
            without a limit, at most its peak.
        at_places: for each kind of pass, the cost at each position of a step relative to the mean.
    """
    problem = problem_for_places(program, at_places)
    if problem is None:
        return None
    return complete(searched_briefly(program.schedule.name, problem), problem)


def at_places_of(program: Program, at_places: PlaceCosts) -> Program:
    """Return ``program`` with costs that depend on a microbatch's position in the step.

    Its passes keep their order. Pictures of a step show such a program. ``program`` itself is
    returned if it has options that cannot be combined with such costs: all except the kind of
    communication.

    Args:
        at_places: for each kind of pass, the cost at each position of a step relative to the mean.
    """
    problem = program.problem
    if not _is_plain(problem):
        return program
    costs = replace(problem.costs, at_places=at_places)
    return prove_built(program.schedule, replace(problem, costs=costs))


def problem_for_places(program: Program, at_places: PlaceCosts) -> Problem | None:
    """Return the problem that `program_for_places` solves; None if it cannot be searched."""
    problem, schedule = program.problem, program.schedule
    splits = any(kind is Kind.BACKWARD_WEIGHT for _, kind in schedule.arrays.stage_kinds)
    is_even = {len(stages) for stages in problem.placement.stages_of} == {problem.placement.chunks}
    is_trained = not (problem.forward_only or problem.first_trained_stage)
    if not (splits and is_even and is_trained and _is_plain(problem)):
        return None
    limit = problem.memory_limit
    if limit is None:
        limit = MemoryLimit(microbatches=max(peaks(schedule, in_microbatches(schedule))))
    costs = replace(problem.costs, at_places=at_places)
    problem = replace(problem, costs=costs, memory_limit=limit)
    return problem if job_shop_of(problem).fits else None


def _is_plain(problem: Problem) -> bool:
    """Return whether ``problem`` has no options (such as offload) beyond the order of passes."""
    return replace(problem.options, p2p=ScheduleOptions.p2p) == ScheduleOptions()
