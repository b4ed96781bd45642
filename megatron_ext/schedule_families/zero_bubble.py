"""Families with one stage a rank and the backward pass split into I and W (Qi et al. 2024,
arXiv:2401.10241). The next rank waits for I alone, so W fills bubbles."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ext.compile.eager import eager_or_not
from megatron_ext.compile.registry import Maturity, family
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule


@family(
    "zb-h1",
    line,
    source="Qi et al. 2024, arXiv:2401.10241, section 2.1",
    maturity=Maturity.STABLE,
    splits_backward=True,
    takes_slices=True,
)
def zb_h1(problem: Problem, *, eager: str = "auto") -> Schedule:
    """ZB-H1: 1F1B's order with W deferred: rank r starts its weight gradients r microbatches late.

    Each I sends its gradient earlier, and the remaining W fill the cool-down. On p ranks: peak p
    microbatches on every rank, as on 1F1B's first rank; bubble (p-1)(F+I-W). With k slices of the
    sequence: bubble (p-1)(F+I-W)/k, peak (p-1+k)/k microbatches on every rank. ``eager`` is as in
    `1f1b`: rank r then holds (p-1-r)/k microbatches more.

    With p = 3, m = 4:

    ::

        0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    p = problem.ranks

    def build(is_eager: bool) -> Schedule:
        ahead = [(p - 1 - rank) * (1 + is_eager) + 1 for rank in range(p)]
        rows = (_row(problem, rank, ahead=ahead[rank], late=rank) for rank in range(p))
        return Schedule("zb-h1", problem.placement, tuple(map(tuple, rows)))

    return eager_or_not("zb-h1", problem, eager, build)


@family(
    "zb-h2",
    line,
    source="Qi et al. 2024, arXiv:2401.10241, section 2.2",
    maturity=Maturity.STABLE,
    splits_backward=True,
    takes_slices=True,
)
def zb_h2(problem: Problem) -> Schedule:
    """ZB-H2: twice as far ahead as `zb_h1`, so at equal costs no rank idles between its passes.

    Rank r of p runs 2(p-r)-1 forwards before the first I, and weight gradients 2r microbatches
    late. Peak 2p-1 microbatches on every rank. With at least 2p-1 microbatches, the span's bubble
    is (p-1)(F+I-2W), and the makespan's is the larger of that and (p-1)F.

    With p = 3, m = 6:

    ::

        0  F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 .  .
        1  .  F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5 .
        2  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5
    """
    p = problem.ranks
    rows = (_row(problem, rank, ahead=2 * (p - rank) - 1, late=2 * rank) for rank in range(p))
    return Schedule("zb-h2", problem.placement, tuple(map(tuple, rows)))


def _row(problem: Problem, rank: int, *, ahead: int, late: int) -> Iterator[Action]:
    """Yield the passes of one rank of a zero-bubble schedule, with I and W split.

    ``ahead`` forward passes come before the first I (with k slices of the sequence, k-1 more), then
    F and I alternate, each I followed by the W of the microbatch (or slice) ``late`` places
    earlier.
    """
    forwards, backwards = problem.forwards, problem.backwards
    warmup = ahead - 2 + problem.slices.count
    # The warm-up has forward passes only.
    yield from (Action(rank, Kind.FORWARD, k) for k in forwards[:warmup])
    # The steady state runs F, I, and W of an earlier microbatch; the cool-down runs I and W.
    for n, k in enumerate(backwards):
        yield from (Action(rank, Kind.FORWARD, later) for later in forwards[warmup + n :][:1])
        yield Action(rank, Kind.BACKWARD_INPUT, k)
        if n >= late:
            yield Action(rank, Kind.BACKWARD_WEIGHT, backwards[n - late])
    # The W that were deferred fill the end of the step.
    yield from (Action(rank, Kind.BACKWARD_WEIGHT, k) for k in backwards[max(n + 1 - late, 0) :])
