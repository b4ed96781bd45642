"""Report on traced steps, as data for programs. Times are in seconds.

The text of `megatron-ext trace` and its ``--json`` have the same values, which are computed once,
here, under the names that are printed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_ext.observe.explain import (
    Cause,
    MakespanPart,
    explain,
    seconds_over_predicted,
)
from megatron_ext.observe.slow_ranks import speeds_of
from megatron_ext.observe.trace import TracedStep
from megatron_ext.observe.traced_costs import traced_costs
from megatron_ext.observe.what_if import SECONDS, WhatIf, what_if
from megatron_ext.schedule.timeline import Timeline


@dataclass(frozen=True)
class StepFigures:
    """Makespan, span and bubbles of one traced step, measured or predicted."""

    makespan: float
    span: float
    bubble_share_makespan: float
    bubble_share_span: float


@dataclass(frozen=True)
class IterationFigures:
    """Makespan, span and bubbles of a traced step, and those that were predicted."""

    iteration: int
    measured: StepFigures
    predicted: StepFigures


@dataclass(frozen=True)
class TraceReport:
    """Explanation of the traced step with the median makespan, by the keys that ``--json`` prints.

    Attributes:
        cost_factor, clock_error: as `TracedStep` has them.
        parts, causes: as `Explanation` has them.
        iterations: all traced steps.
        what_if: predicted steps of this package's schedules, if the traced steps are Megatron's
            own.
        rank_speeds: speeds of the ranks if some are slow, as --rank-speeds takes them; None if none
            is.
    """

    schedule: str
    pp: int
    microbatches: int
    iteration: int
    measured: StepFigures
    predicted: StepFigures
    cost_factor: float
    clock_error: float
    parts: Mapping[MakespanPart, float]
    causes: tuple[Cause, ...]
    iterations: tuple[IterationFigures, ...]
    what_if: WhatIf | None = None
    rank_speeds: tuple[float, ...] | None = None


def median_step(steps: Sequence[TracedStep]) -> TracedStep:
    """Return the traced step with the median makespan; of two in the middle, the shorter."""
    by_makespan = sorted(steps, key=lambda step: step.measured.makespan)
    return by_makespan[(len(steps) - 1) // 2]


def trace_report(steps: Sequence[TracedStep], seconds: float = SECONDS) -> TraceReport:
    """Return an explanation of the traced step with the median makespan, and metrics of all steps.

    ``seconds`` is the time limit of `what_if`.
    """
    median = median_step(steps)
    schedule = median.measured.schedule
    explanation = explain(median.measured, median.predicted)
    traced = traced_costs(steps)
    speeds = speeds_of(seconds_over_predicted(median.measured, median.predicted))
    return TraceReport(
        schedule=schedule.name,
        pp=schedule.placement.ranks,
        microbatches=schedule.microbatches,
        iteration=median.iteration,
        measured=_figures(median.measured),
        predicted=_figures(median.predicted),
        cost_factor=median.cost_factor,
        clock_error=median.clock_error,
        parts=explanation.parts,
        causes=explanation.causes,
        iterations=tuple(
            IterationFigures(step.iteration, _figures(step.measured), _figures(step.predicted))
            for step in steps
        ),
        what_if=None if traced is None else what_if(traced, seconds),
        rank_speeds=None if speeds is None else speeds.values,
    )


def _figures(timeline: Timeline) -> StepFigures:
    return StepFigures(
        timeline.makespan,
        timeline.span,
        timeline.bubble_share_makespan,
        timeline.bubble_share_span,
    )
