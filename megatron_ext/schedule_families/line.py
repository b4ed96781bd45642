"""Families with one stage a rank and unsplit backward passes: GPipe, and 1F1B, with which all
others are compared. Megatron has 1F1B itself."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from megatron_ext.compile.eager import eager_or_not
from megatron_ext.compile.registry import Maturity, family
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule


@family(
    "gpipe",
    line,
    source="Huang et al. 2019, arXiv:1811.06965",
    maturity=Maturity.STABLE,
    takes_slices=True,
    aliases=("ScheduleGPipe",),
)
def gpipe(problem: Problem) -> Schedule:
    """GPipe: all forward passes, then all backward passes.

    On p ranks with m microbatches: bubble (p-1)(F+I+W), peak memory m microbatches. With slices of
    the sequence it is TeraPipe (Li et al. 2021, arXiv:2102.07988), which chooses their lengths.

    With p = 3, m = 2:

    ::

        0  F0 F1 .  .  .  .  .  .  B0 =  B1 =
        1  .  F0 F1 .  .  .  B0 =  B1 =  .  .
        2  .  .  F0 F1 B0 =  B1 =  .  .  .  .
    """
    passes = ((Kind.FORWARD, problem.forwards), (Kind.FULL_BACKWARD, problem.backwards))
    rows = tuple(
        tuple(Action(rank, kind, k) for kind, order in passes for k in order)
        for rank in range(problem.ranks)
    )
    return Schedule("gpipe", problem.placement, rows)


@family(
    "1f1b",
    line,
    source="Narayanan et al. 2021, arXiv:2104.04473, section 2.2.1 (PipeDream-flush)",
    maturity=Maturity.STABLE,
    takes_slices=True,
    aliases=("Schedule1F1B",),
)
def one_forward_one_backward(problem: Problem, *, eager: str = "auto") -> Schedule:
    """1F1B: forward and backward passes alternate as soon as there is a gradient.

    On p ranks: bubble (p-1)(F+I+W) as in `gpipe`, but rank r holds only p-r microbatches. With k
    slices of the sequence it is Seq1F1B (Sun et al. 2024, arXiv:2406.03488): a rank starts with k-1
    more forwards, as the last slice of a microbatch goes back first. Bubble (p-1)(F+I+W)/k; rank r
    holds (p-1-r+k)/k microbatches. With ``eager=yes`` rank r starts with p-1-r more forwards, which
    hides the time of messages; by default (``eager=auto``) slices, costs and memory limit decide.

    With p = 3, m = 3:

    ::

        0  F0 F1 F2 .  .  .  .  B0 =  .  B1 =  .  B2 =
        1  .  F0 F1 .  .  B0 =  F2 B1 =  .  B2 =  .  .
        2  .  .  F0 B0 =  F1 B1 =  F2 B2 =  .  .  .  .
    """
    return eager_or_not("1f1b", problem, eager, partial(_one_forward_one_backward, problem))


def _one_forward_one_backward(problem: Problem, eager: bool) -> Schedule:
    p = problem.ranks

    def row(rank: int) -> Iterator[Action]:
        forwards, backwards = problem.forwards, problem.backwards
        warmup = (p - 1 - rank) * (1 + eager) + problem.slices.count - 1
        # The warm-up has forward passes only.
        yield from (Action(rank, Kind.FORWARD, k) for k in forwards[:warmup])
        # The steady state alternates both passes; the cool-down has backward passes only.
        for n, k in enumerate(backwards, start=warmup):
            yield from (Action(rank, Kind.FORWARD, later) for later in forwards[n : n + 1])
            yield Action(rank, Kind.FULL_BACKWARD, k)

    return Schedule("1f1b", problem.placement, tuple(tuple(row(rank)) for rank in range(p)))
