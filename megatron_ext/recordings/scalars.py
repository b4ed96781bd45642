"""Losses and gradient norms of runs, iteration by iteration.

Losses are what people look at, and a loss that does not change proves nothing. Both runs' scalars
are compared in units in the last place of single precision, in which Megatron computes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ext.recordings.run_recording import RunRecording
from megatron_ext.recordings.ulps import bits_difference

NORM = "gradient norm"


@dataclass(frozen=True)
class ComparedScalar:
    """Loss or gradient norm of one iteration in two runs. Two NaNs count as equal."""

    iteration: int
    name: str
    a: float
    b: float

    def __bool__(self) -> bool:
        """Return whether the two runs differ in this loss or norm."""
        return self.a != self.b and not (math.isnan(self.a) and math.isnan(self.b))

    @property
    def relative(self) -> float:
        if not self:
            return 0.0
        return abs(self.a - self.b) / abs(self.a) if self.a else math.inf

    @property
    def ulps(self) -> int:
        """Difference in units in the last place (ulps) of single precision.

        It is at least 1 if the two values differ. Megatron computes losses and norms in single
        precision.
        """
        if not self:
            return 0
        with np.errstate(over="ignore"):
            a, b = (np.array([x], np.float32).view(np.int32) for x in (self.a, self.b))
        return max(1, bits_difference(a, b, "float32").ulps)


def compared_scalars(a: RunRecording, b: RunRecording) -> list[ComparedScalar]:
    """Return the losses and the norm of each iteration of two runs, in the order of iterations."""
    found: list[ComparedScalar] = []
    for one, other in zip(a.trained, b.trained, strict=True):
        for name in [*one.losses, *(other.losses.keys() - one.losses.keys())]:
            values = (one.losses.get(name, math.nan), other.losses.get(name, math.nan))
            found.append(ComparedScalar(one.number, name, *values))
        norms = [math.nan if x.norm is None else x.norm for x in (one, other)]
        found.append(ComparedScalar(one.number, NORM, *norms))
    return found


def floor_of(figures: Sequence[ComparedScalar]) -> Mapping[str, float]:
    """Return the largest relative difference between a run and its repetition, by loss or norm."""
    floor: dict[str, float] = {}
    for figure in figures:
        floor[figure.name] = max(floor.get(figure.name, 0.0), figure.relative)
    return floor


def standstill(run: RunRecording) -> str | None:
    """Return why a run proves nothing about its numbers; None if it proves something.

    A run whose loss or gradients do not change would be equal to any other such run.
    """
    trained = run.trained
    if len(trained) < 2:
        return "one iteration cannot show whether the loss moves: take at least 2"
    names = {name for iteration in trained for name in iteration.losses}
    if not names:
        return "no rank logged a loss"
    values = {name: [x.losses.get(name, math.nan) for x in trained] for name in sorted(names)}
    for name, course in values.items():
        if all(map(math.isnan, course)):
            return f"{name} is nan in all {len(course)} iterations: mend the training first"
    if all(len(set(course)) == 1 for course in values.values()):
        name, course = next(iter(values.items()))
        return f"{name} is {course[0]:g} in all {len(course)} iterations: it does not move"
    if all(not iteration.norm for iteration in trained):
        return f"the gradients' norm is 0 in all {len(trained)} iterations: nothing is trained"
    if all(iteration.skipped for iteration in trained):
        return (
            f"the optimizer skipped all {len(trained)} iterations: take more, until the loss scale "
            f"has come down, or give a lower --initial-loss-scale"
        )
    return None
