"""What there is to say of traced steps, as data for programs. Times are in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_ext.schedule.show.explain import explain
from megatron_ext.schedule.show.trace import TracedStep
from megatron_ext.schedule.timeline import Timeline


def trace_report(steps: Sequence[TracedStep]) -> dict[str, Any]:
    """The step with the median makespan, explained, and the figures of all ``steps``."""
    by_makespan = sorted(steps, key=lambda step: step.measured.makespan)
    step = by_makespan[(len(steps) - 1) // 2]
    schedule = step.measured.schedule
    explanation = explain(step.measured, step.predicted)
    return {
        "schedule": schedule.name,
        "pp": schedule.placement.ranks,
        "microbatches": 1 + max(action.microbatch for row in schedule.rows for action in row),
        "iteration": step.iteration,
        "measured": _figures(step.measured),
        "predicted": _figures(step.predicted),
        "cost_factor": step.cost_factor,
        "clock_error": step.clock_error,
        "parts": {part.value: seconds for part, seconds in explanation.parts.items()},
        "causes": [{"seconds": each.seconds, "text": each.text} for each in explanation.causes],
        "iterations": [
            {
                "iteration": each.iteration,
                "measured": _figures(each.measured),
                "predicted": _figures(each.predicted),
            }
            for each in steps
        ],
    }


def _figures(timeline: Timeline) -> dict[str, float]:
    return {
        "makespan": timeline.makespan,
        "span": timeline.span,
        "bubble_share_makespan": timeline.bubble_share_makespan,
        "bubble_share_span": timeline.bubble_share_span,
    }
