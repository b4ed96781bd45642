"""A plan's best schedules, as a page shows them."""

from __future__ import annotations

from megatron_ext.schedule.plan.planner import Candidate, Plan, VocabMethod
from megatron_ext.schedule.show.page.run import Run, simulated

MOST_SCHEDULES = 6  # one under the other
_REFERENCE = "1f1b"


def runs_of_plan(plan: Plan) -> tuple[Run, ...]:
    """1F1B, if it can be taken, and those that no other beats in both time and memory, shortest
    first. Each is built again."""
    with_1f1b = (c for c in plan.candidates if c.schedule == _REFERENCE)
    shown = dict.fromkeys([*list(with_1f1b)[:1], *plan.front])
    return tuple(
        simulated(_title(candidate), candidate.program())
        for candidate in list(shown)[:MOST_SCHEDULES]
    )


def _title(candidate: Candidate) -> str:
    if candidate.method is VocabMethod.NAIVE:
        return candidate.schedule
    if candidate.method is VocabMethod.REDISTRIBUTED:
        return f"{candidate.schedule}, layers moved away from the output layer"
    return f"{candidate.schedule}, vocabulary parallelism {candidate.method}"
