"""Choice between a lean and an eager warm-up: running further ahead hides the time of messages, and
holds more memory.

Seq1F1B's warm-up is as short as possible: after it a rank waits for the whole time of each message.
With slices, passes are shorter and messages come more often.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_ext.base.words import shown
from megatron_ext.compile.program.memory import limited_amount, peaks
from megatron_ext.compile.program.simulate import simulate_unproved
from megatron_ext.schedule.limit import fits
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule

CHOICES = ("auto", "yes", "no")
# Factor by which an eager schedule must be shorter to be worth its additional memory.
_WORTH = 1.001


def eager_or_not(
    name: str, problem: Problem, requested: str, build: Callable[[bool], Schedule]
) -> Schedule:
    """Return the better of two schedules by ``build``: with and without a longer (eager) warm-up.

    Args:
        requested: one of `CHOICES`. ``auto`` chooses the eager schedule if microbatches are cut
            into slices of their sequence, and the eager schedule takes less time and fits into the
            memory limit.

    Raises:
        ValueError: ``requested`` is none of these.
    """
    if requested not in CHOICES:
        raise ValueError(
            f"{name}: eager is {shown(requested)!r}; write eager=auto, eager=yes or eager=no"
        )
    if requested != "auto":
        return build(requested == "yes")
    lean = build(False)
    if problem.slices.count == 1 or not problem.costs.links.p2p_seconds:
        return lean
    eager = build(True)
    takes, would_take = (simulate_unproved(made, problem).makespan for made in (lean, eager))
    is_worth_it = would_take * _WORTH < takes
    return eager if is_worth_it and _fits(eager, problem) else lean


def _fits(schedule: Schedule, problem: Problem) -> bool:
    if problem.memory_limit is None:
        return True
    amount, allowed = limited_amount(problem.memory_limit, schedule, problem.costs)
    return fits(max(peaks(schedule, amount)), allowed)
