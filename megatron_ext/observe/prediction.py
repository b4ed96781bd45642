"""A program's predicted step compared with the measured ones, rank by rank.

One number would hide why a step was longer than predicted: slower passes, or more waiting. So each
rank's first start, last end and sum of passes are compared with the predicted ones, and the
measured bubble with the predicted one.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_ext.base.words import counted
from megatron_ext.schedule.timeline import Timeline


class RankStep(NamedTuple):
    """Measured step on one rank: start of its first pass, end of its last, seconds of all."""

    start: float
    end: float
    busy: float


@dataclass(frozen=True)
class Comparison:
    """Predicted step of a program compared with measured steps.

    Attributes:
        predicted, measured: makespan of a step, in seconds.
        predicted_busy, measured_busy: seconds of all passes of a step, for each rank.
        steps: number of measured steps. The measured times are their medians.
    """

    predicted: float
    measured: float
    predicted_busy: tuple[float, ...]
    measured_busy: tuple[float, ...]
    steps: int

    @property
    def error(self) -> float:
        """Excess of the measured makespan over the predicted one, as a share of the predicted."""
        return self.measured / self.predicted - 1

    @property
    def bubble_shares(self) -> tuple[float, float]:
        """Share of the step that ranks are idle, predicted and measured."""
        ranks = len(self.measured_busy)
        return (
            1 - sum(self.predicted_busy) / ranks / self.predicted,
            1 - sum(self.measured_busy) / ranks / self.measured,
        )

    def lines(self) -> list[str]:
        """Return one line of text for each rank that compares predicted and measured step."""
        error = f"{abs(self.error):.1%} {'shorter' if self.error < 0 else 'longer'}"
        step = f"step predicted {_ms(self.predicted)}, measured {_ms(self.measured)} ({error})"
        pairs = zip(self.predicted_busy, self.measured_busy, strict=True)
        return [
            f"pipeline rank {rank}: {step}; idle share predicted "
            f"{1 - predicted / self.predicted:.1%}, "
            f"measured {1 - measured / self.measured:.1%}; median of {counted(self.steps, 'step')}"
            for rank, (predicted, measured) in enumerate(pairs)
        ]


def compare_prediction(predicted: Timeline, ranks: Sequence[Sequence[RankStep]]) -> Comparison:
    """Compare a ``predicted`` step with the measured steps of each rank.

    Args:
        ranks: for each rank its steps. All ranks have the same steps, timed by one clock.
    """
    steps = list(zip(*ranks, strict=True))
    makespans = [max(r.end for r in step) - min(r.start for r in step) for step in steps]
    return Comparison(
        predicted.makespan,
        statistics.median(makespans),
        tuple(sum(event.end - event.start for event in row) for row in predicted.compute),
        tuple(statistics.median(step.busy for step in rank) for rank in ranks),
        len(steps),
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"
