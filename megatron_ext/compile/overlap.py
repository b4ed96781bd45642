"""Gains of post-validation, which lets the steps of some schedules overlap.

Overlapping steps cost the span in place of the makespan, which is less for a few schedules only. A
schedule that would gain nothing by it is refused, with the names of those that gain.
"""

from __future__ import annotations

from megatron_ext.base.words import counted
from megatron_ext.compile.program.simulate import simulate, step_seconds
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import entries

_LEAST = 1e-3  # least gain of post-validation as a share of the makespan


def is_gain(makespan: float, step: float) -> bool:
    """Return whether post-validation pays: overlapping steps are clearly shorter than the makespan.

    ``step`` are the seconds of an overlapping step, ``makespan`` those of a synchronous step.
    """
    return step < makespan * (1 - _LEAST)


def what_overlapping_gains(program: Program) -> str:
    """Return a line on the gain of post-validation: the overlapping step's seconds against the
    makespan."""
    makespan, step = _figures(program)
    if not is_gain(makespan, step):
        return (
            f"post-validation: {program.schedule.name}'s steps cannot overlap, its span is its "
            f"makespan; those of {_overlapping_families()} can, on more than one rank"
        )
    return (
        f"post-validation: in the long run a step takes {1 - step / makespan:.1%} less than the "
        f"makespan, which it takes without"
    )


def check_overlaps(program: Program) -> None:
    """Raise ValueError if post-validation (optimizer steps that overlap) does not shorten the
    steps."""
    makespan, step = _figures(program)
    if not is_gain(makespan, step):
        raise ValueError(
            f"post-validation gains nothing with {program.schedule.name} on "
            f"{counted(program.problem.ranks, 'rank')} and "
            f"{counted(program.problem.microbatches, 'microbatch')}: its steps cannot overlap, so "
            "a step takes as long as without post-validation; choose a schedule whose steps can "
            f"overlap ({_overlapping_families()}), or drop post-validation"
        )


def _overlapping_families() -> str:
    """Return the names of the schedule families whose steps can overlap, for an error.

    Families with fewer chunks a rank come first, searches last.
    """
    able = [entry for entry in entries().values() if entry.traits.steps_overlap]
    able.sort(key=lambda entry: (entry.place(2).chunks, entry.traits.searches, entry.name))
    *others, last = (entry.name for entry in able)
    return f"{', '.join(others)} and {last}"


def _figures(program: Program) -> tuple[float, float]:
    costs = program.problem.costs
    return simulate(program, costs).makespan, step_seconds(program, costs)
