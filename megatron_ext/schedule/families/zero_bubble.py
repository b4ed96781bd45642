"""One stage a rank, the backward pass split into I and W (Qi et al. 2024, arXiv:2401.10241)."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.registry import family
from megatron_ext.schedule.schedule import Problem, Schedule


@family("zb-h1", line, source="Qi et al. 2024, arXiv:2401.10241, section 2.1", splits_backward=True)
def zb_h1(problem: Problem) -> Schedule:
    """1F1B's order with W put off: rank r starts its weight gradients r microbatches late.

    Each I passes its gradient on earlier, the W left over fill the cool-down. Peak p microbatches
    on every rank, as on 1F1B's first; bubble (p-1)(F+I-W).

    ::

        0  F0 F1    I0 W0 F2 I1 W1    I2 W2
        1     F0 I0 F1 I1 W0 F2 I2 W1 W2
    """
    p, m = problem.ranks, problem.microbatches

    def row(rank: int) -> Iterator[Action]:
        warmup = min(p - rank - 1, m)
        for k in range(warmup):
            yield Action(rank, Kind.FORWARD, k)
        for k in range(m):
            if warmup + k < m:
                yield Action(rank, Kind.FORWARD, warmup + k)
            yield Action(rank, Kind.BACKWARD_INPUT, k)
            if k >= rank:
                yield Action(rank, Kind.BACKWARD_WEIGHT, k - rank)
        for k in range(max(m - rank, 0), m):
            yield Action(rank, Kind.BACKWARD_WEIGHT, k)

    return Schedule("zb-h1", problem.placement, tuple(tuple(row(rank)) for rank in range(p)))
