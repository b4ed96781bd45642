"""A plan as data for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatron_ext.schedule.build.registry import Mark
from megatron_ext.schedule.build.report import ScheduleReport
from megatron_ext.schedule.plan.candidate import Plan, VocabMethod, pareto_front, stable_of
from megatron_ext.schedule.plan.recommendation import Recommendation, recommendation


@dataclass(frozen=True)
class VocabularyRow:
    """A schedule, and what a step costs with each thing that can be done about the vocabulary.

    Attributes:
        steps: None where there is no such schedule.
        refused: why.
    """

    schedule: str
    steps: Mapping[VocabMethod, float | None]
    refused: Mapping[VocabMethod, str]

    def as_data(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        steps = {method.value: step for method, step in self.steps.items()}
        return {"schedule": self.schedule, **steps, "refused": self.refused}


@dataclass(frozen=True)
class PlanReport:
    """A plan; ``--json`` prints these names in this order.

    Attributes:
        choice: the first of ``schedules`` that is stable; where none is, the first.
        pareto: those of ``schedules`` like it that no other beats in both time and memory.
        schedules: as they are, nothing done about the vocabulary, shortest first.
        marks: of each of ``schedules``.
        refused: why others are not among them.
        vocabulary: all that can be done about it, if there is more than one thing.
    """

    choice: str | None
    pareto: tuple[str, ...]
    schedules: tuple[ScheduleReport, ...]
    marks: Mapping[str, Mark]
    refused: Mapping[str, str]
    vocabulary: tuple[VocabularyRow, ...]
    recommended: Recommendation | None

    def as_data(self) -> dict[str, Any]:
        """As ``--json`` prints it."""
        return asdict(self) | {"vocabulary": [row.as_data() for row in self.vocabulary]}


def plan_report(plan: Plan, layers: int | None) -> PlanReport:
    """What there is to say of ``plan``.

    Args:
        layers: of the model, for `recommendation`.
    """
    naive = [candidate for candidate in plan.candidates if candidate.method is VocabMethod.NAIVE]
    recommendable = stable_of(naive) or tuple(naive)
    front = pareto_front(recommendable, lambda candidate: candidate.report.peak)
    return PlanReport(
        choice=recommendable[0].schedule if recommendable else None,
        pareto=tuple(candidate.schedule for candidate in front),
        schedules=tuple(candidate.report for candidate in naive),
        marks={candidate.schedule: candidate.mark for candidate in naive},
        refused={
            name: why
            for (name, method), why in plan.refusals.items()
            if method is VocabMethod.NAIVE
        },
        vocabulary=side_by_side(plan),
        recommended=recommendation(plan, layers),
    )


def side_by_side(plan: Plan) -> tuple[VocabularyRow, ...]:
    """For each schedule of ``plan`` that can run as it is what a step costs with all methods.
    Nothing if there is one method only."""
    methods = plan.methods
    if len(methods) == 1:
        return ()
    steps = {
        (candidate.schedule, candidate.method): candidate.step for candidate in plan.candidates
    }
    names = [c.schedule for c in plan.candidates if c.method is VocabMethod.NAIVE]
    return tuple(
        VocabularyRow(
            name,
            {method: steps.get((name, method)) for method in methods},
            {
                method: plan.refusals[name, method]
                for method in methods
                if (name, method) in plan.refusals
            },
        )
        for name in names
    )
