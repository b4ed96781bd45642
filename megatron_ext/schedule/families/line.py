"""One stage a rank, whole backward passes."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.build.registry import Mark, family
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule


@family(
    "gpipe",
    line,
    source="Huang et al. 2019, arXiv:1811.06965",
    mark=Mark.STABLE,
    aliases=("ScheduleGPipe",),
)
def gpipe(problem: Problem) -> Schedule:
    """All forwards, then all backwards. Bubble (p-1)(F+I+W), peak m microbatches.

    With p = 3, m = 2:

    ::

        0  F0 F1 .  .  .  .  .  .  B0 =  B1 =
        1  .  F0 F1 .  .  .  B0 =  B1 =  .  .
        2  .  .  F0 F1 B0 =  B1 =  .  .  .  .
    """
    m = range(problem.microbatches)
    rows = tuple(
        tuple(Action(rank, kind, k) for kind in (Kind.FORWARD, Kind.FULL_BACKWARD) for k in m)
        for rank in range(problem.ranks)
    )
    return Schedule("gpipe", problem.placement, rows)


@family(
    "1f1b",
    line,
    source="Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1 (PipeDream-flush)",
    mark=Mark.STABLE,
    aliases=("Schedule1F1B",),
)
def one_forward_one_backward(problem: Problem) -> Schedule:
    """Forward and backward in turn as soon as there is a gradient.

    Bubble (p-1)(F+I+W) as `gpipe`; but rank r holds p-r microbatches only.

    With p = 3, m = 3:

    ::

        0  F0 F1 F2 .  .  .  .  B0 =  .  B1 =  .  B2 =
        1  .  F0 F1 .  .  B0 =  F2 B1 =  .  B2 =  .  .
        2  .  .  F0 B0 =  F1 B1 =  F2 B2 =  .  .  .  .
    """
    p, m = problem.ranks, problem.microbatches

    def row(rank: int) -> Iterator[Action]:
        warmup = min(p - rank - 1, m)
        for k in range(warmup):
            yield Action(rank, Kind.FORWARD, k)
        for k in range(m):
            if warmup + k < m:
                yield Action(rank, Kind.FORWARD, warmup + k)
            yield Action(rank, Kind.FULL_BACKWARD, k)

    return Schedule("1f1b", problem.placement, tuple(tuple(row(rank)) for rank in range(p)))
