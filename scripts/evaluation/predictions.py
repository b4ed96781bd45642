"""Predicted and measured steps, and the errors of the predictions by group of sources.

Rows of one source share a machine and a framework, so their errors are alike. They are counted by
group, and each group's percentiles are printed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from scripts.evaluation.measured import PublishedStep
from scripts.evaluation.recipes.configured import NoEstimate
from scripts.evaluation.trainings import training_of


@dataclass(frozen=True)
class PredictedStep:
    """A measured step with its prediction: seconds, and bytes of the fullest rank."""

    step: PublishedStep
    seconds: float
    peak: float

    @property
    def ratio(self) -> float:
        """Predicted seconds divided by measured seconds."""
        return self.seconds / self.step.seconds

    @property
    def peak_ratio(self) -> float | None:
        """Predicted peak divided by the published peak; None if none is published."""
        return None if self.step.peak is None else self.peak / self.step.peak


def predict(steps: Iterable[PublishedStep], report: Callable[[], None]) -> list[PredictedStep]:
    """Return the predictions of those of ``steps`` that have an estimate. ``report`` is called
    after each step."""
    found = []
    for step in steps:
        with suppress(NoEstimate):
            made = training_of(step).predicted()
            found.append(PredictedStep(step, made.seconds, made.fullest))
        report()
    return found


@dataclass(frozen=True)
class Percentiles:
    """Median, 10th and 90th percentile of values, and the number of ``rows`` that they come
    from."""

    median: float
    p10: float
    p90: float
    rows: int

    @classmethod
    def of(cls, figures: Sequence[float]) -> Percentiles:
        p10, median, p90 = map(float, np.percentile(figures, (10, 50, 90)))
        return cls(median, p10, p90, len(figures))


NEW_CONTAINERS = "Megatron-Bridge, containers from 26.06 on"
# First version of Megatron-Bridge's container whose published step times are of today's software.
_NEW_SOFTWARE = 26.06
GLM = "GLM-5.2 (sparse attention), H100 and GB200"
CARDS = "model cards, GB200 and GB300"
_JOBS = {
    "zb": "zero bubble, A100",
    "vocab artifact": "vocabulary parallelism, its artifact, A100",
    "vocab paper": "vocabulary parallelism, its paper, A100",
    "paper Llama": "Llama 3 405B, H100",
    "paper Nemotron": "Nemotron-4 340B, H100",
    "korthikanti": "Korthikanti et al. 2022, A100",
    "dsv3": "DeepSeek-V3, ISCA 2025, H800",
    "pr6311": "Megatron-LM #6311, H100",
    "moe_recipes": "Megatron-LM's moe_recipes, B200",
    "card GLM": GLM,
    "card": CARDS,
}


def group_of(step: PublishedStep) -> str:
    """Return the name of the group of sources that ``step`` belongs to."""
    if "GPT OSS" in step.job:
        return "gpt-oss 120B, H100"
    if step.job.startswith("bridge"):
        container = re.search(r"container (\d+\.\d+)", step.source)
        assert container is not None
        gpu = step.gpu.removeprefix("DGX-")
        if float(container[1]) < _NEW_SOFTWARE:
            return "Megatron-Bridge, containers before 26.06"
        return f"{NEW_CONTAINERS}, {gpu}"
    return next(name for prefix, name in _JOBS.items() if step.job.startswith(prefix))


def by_group(found: Iterable[PredictedStep]) -> Mapping[str, list[PredictedStep]]:
    """Return the predictions by group of sources, in the order of their rows."""
    groups: dict[str, list[PredictedStep]] = defaultdict(list)
    for one in found:
        groups[group_of(one.step)].append(one)
    return groups
