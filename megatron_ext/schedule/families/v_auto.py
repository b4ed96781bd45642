"""The best V schedule that can be found for given costs and a given memory limit (`best`)."""

from __future__ import annotations

import math
from dataclasses import replace

from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.build.registry import Mark, entries, family
from megatron_ext.schedule.placement import v
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.program.memory import peaks
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.schedule.search.best import best_known, best_schedule
from megatron_ext.schedule.search.weight_gradient_filling import (
    DoesNotFit,
    fill_best,
    makespan,
    memory_of,
)

NAME = "v-auto"
_OF_SLICES = ("zb-v", "v-half", "v-min")


def v_at_once(problem: Problem) -> Schedule:
    """The best without a search. Raises as `v_auto`."""
    return best_known(NAME, problem) if problem.slices.count == 1 else _best_of_slices(problem)


@family(
    NAME,
    v,
    source="ours; the V is that of Qi et al. 2024, arXiv:2405.15362",
    mark=Mark.STABLE,
    splits_backward=True,
    uses_costs=True,
    searches=True,
    steps_overlap=True,
    fits_recompute=True,
    takes_slices=True,
    keeps_pairs=True,
    at_once=v_at_once,
)
def v_auto(problem: Problem) -> Schedule:
    """Least makespan within the memory limit (without one: p microbatches, as ZB-V needs); with
    post-validation, least span. Where recompute is to fit into the limit, R is placed too.

    Where microbatches are cut into slices nothing is searched for: it is the best of the V's with
    slices, as they are or with their W where there is time for them.

    Raises:
        ValueError: no V schedule fits into the limit.
    """
    return best_schedule(NAME, problem) if problem.slices.count == 1 else _best_of_slices(problem)


def _best_of_slices(problem: Problem) -> Schedule:
    memory = memory_of(problem, math.inf if problem.memory_limit else problem.held_by_1f1b)
    known = [entries()[name].build(problem) for name in _OF_SLICES]
    candidates = list(known)
    for schedule in known:
        order = [[a for a in row if a.kind is not Kind.BACKWARD_WEIGHT] for row in schedule.rows]
        try:
            filled = fill_best(order, problem, memory)
        except DoesNotFit:
            continue
        candidates.append(replace(schedule, rows=filled.rows))
    held = [peaks(schedule, memory.amount) for schedule in candidates]
    fitting = [
        schedule
        for schedule, of_ranks in zip(candidates, held, strict=True)
        if all(memory.fits(rank, most) for rank, most in enumerate(of_ranks))
    ]
    if not fitting:
        limit, least = problem.memory_limit, min(map(max, held))
        assert limit is not None
        raise ValueError(
            f"{NAME}: no schedule of {problem.slices.count} slices fits into the memory limit of "
            f"{limit}; the least feasible limit is {limit.at_least(least)}"
        )
    best = min(fitting, key=lambda schedule: makespan(schedule, problem))
    return replace(best, name=NAME)
