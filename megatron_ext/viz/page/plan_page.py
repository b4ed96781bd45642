"""A plan's best schedules, as a page shows them."""

from __future__ import annotations

from megatron_ext.planner.candidate import Candidate, Plan, VocabMethod
from megatron_ext.viz.page.run import Run, simulated, title_of

MOST_SCHEDULES = 6  # one under the other
_REFERENCE = "1f1b"


def runs_of_plan(plan: Plan) -> tuple[Run, ...]:
    """Return 1F1B as it is in Megatron, if it can be taken, and the candidates that no other beats
    in both time and memory, shortest first. Each is rebuilt."""
    plain = (c for c in plan.candidates if c.method is VocabMethod.NAIVE)
    stock = [candidate for candidate in plain if candidate.schedule == _REFERENCE]
    shown = dict.fromkeys([*stock, *plan.front])
    return tuple(
        simulated(_title(candidate), candidate.program())
        for candidate in list(shown)[:MOST_SCHEDULES]
    )


def _title(candidate: Candidate) -> str:
    title = title_of(candidate.schedule, candidate.variant.problem.extras)
    if candidate.method is VocabMethod.REDISTRIBUTED:
        title += ", layers moved away from the output layer"
    return title
