"""A family with one stage a rank and all weight gradients at the end.

Splitting the backward pass lets the gradients reach the first rank sooner. The simplest way to use
that is to compute every W after the last I; what W needs is held until then.
"""

from __future__ import annotations

from megatron_ext.compile.registry import Maturity, entries, family
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule


@family(
    "2bp",
    line,
    source="Rae et al. 2024, arXiv:2405.18047",
    maturity=Maturity.LABORATORY,
    splits_backward=True,
    takes_slices=True,
)
def two_bp(problem: Problem, *, base: str = "1f1b") -> Schedule:
    """The order of ``base`` (1f1b or gpipe) with I in place of B, and all W at the end.

    On p ranks with m microbatches: bubble (p-1)(F+I), peak memory m microbatches.

    With p = 3, m = 3:

    ::

        0  F0 F1 F2 .  .  I0 .  I1 .  I2 W0 W1 W2
        1  .  F0 F1 .  I0 F2 I1 .  I2 W0 W1 W2 .
        2  .  .  F0 I0 F1 I1 F2 I2 W0 W1 W2 .  .
    """
    if base not in ("1f1b", "gpipe"):
        raise ValueError(f"2bp: base is {base!r}; write base=1f1b or base=gpipe")
    rows = []
    for rank, row in enumerate(entries()[base].build(problem).rows):
        # Forward passes keep their places in this row, and I (the paper's backward-p1) replaces B.
        order = [Action(s, Kind.FORWARD if k is Kind.FORWARD else _I, n) for s, k, n in row]
        # W (the paper's backward-p2) of all microbatches follow at the end of the step.
        late = [Action(rank, Kind.BACKWARD_WEIGHT, n) for n in problem.backwards]
        rows.append((*order, *late))
    return Schedule("2bp", problem.placement, tuple(rows))


_I = Kind.BACKWARD_INPUT
