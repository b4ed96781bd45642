"""Comparisons of two measured steps: whether the prediction has their order, and how far it is off.

An error is predicted over measured, less 1, of the ratio of two steps' seconds. It decides what a
plan recommends, unlike the error of the seconds themselves, which both steps share.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_ext.planner.verdict import WORTH
from scripts.evaluation.predictions import CARDS, NEW_CONTAINERS, PredictedStep, group_of

LAYERS_MOVED = "1f1b, layers moved"  # 1F1B with layers moved to other stages
TRAINED, ADAPTED = "all weights trained, one layout", "LoRA, one layout"


@dataclass(frozen=True)
class StepRatio:
    """Two steps of one job, compared by the seconds of the ``first`` over the ``second``'s."""

    first: PredictedStep
    second: PredictedStep

    @property
    def measured(self) -> float:
        return self.first.step.seconds / self.second.step.seconds

    @property
    def predicted(self) -> float:
        return self.first.seconds / self.second.seconds

    @property
    def error(self) -> float:
        """The predicted ratio divided by the measured one, less 1."""
        return self.predicted / self.measured - 1

    @property
    def differs(self) -> bool:
        """Whether the measured steps differ by more than `plan` counts as a difference."""
        return max(self.measured, 1 / self.measured) > 1 + WORTH

    @property
    def is_right(self) -> bool:
        """Whether the step that was measured to be longer is also predicted to be longer."""
        return (self.measured > 1) == (self.predicted > 1)


def jobs(found: Iterable[PredictedStep]) -> Mapping[str, list[PredictedStep]]:
    """Return the predictions grouped by job. A job is the same training under several schedules."""
    rows: dict[str, list[PredictedStep]] = defaultdict(list)
    for one in found:
        rows[one.step.job].append(one)
    return rows


def over_1f1b(found: Iterable[PredictedStep]) -> Mapping[str, list[StepRatio]]:
    """Return 1F1B compared with each other schedule of the same job, by the name of that schedule.

    The row of 1F1B has equally many layers on each stage, except at the ends, where it has the
    number that the job's own script chose.
    """
    gains: dict[str, list[StepRatio]] = defaultdict(list)
    for rows in jobs(found).values():
        base = next((one for one in rows if one.step.schedule == "1f1b"), None)
        for one in rows if base is not None else ():
            assert base is not None
            if one.step.schedule != "1f1b":
                gains[one.step.schedule].append(StepRatio(base, one))
            elif one.step.layers != base.step.layers:
                gains[LAYERS_MOVED].append(StepRatio(base, one))
    return gains


def pairs_in_order(found: Iterable[PredictedStep]) -> tuple[int, int]:
    """Return how many pairs of steps are predicted in the right order, and how many there are.

    Both steps of a pair are of one job, and their measured seconds differ.
    """
    pairs = [
        StepRatio(a, b) for rows in jobs(found).values() for a, b in itertools.combinations(rows, 2)
    ]
    different = [ratio for ratio in pairs if ratio.differs]
    return sum(ratio.is_right for ratio in different), len(different)


_OF_6311 = {
    "full recompute": (329, 330),
    "overlap of experts, 1 connection": (330, 331),
    "overlap of experts, 32 connections": (330, 332),
}


def overlaps(found: Sequence[PredictedStep]) -> Iterator[tuple[str, StepRatio]]:
    """Yield the pairs of steps that Megatron-LM #6311 measured, if ``found`` has its rows.

    One shows the effect of recomputing whole layers. The others add to that the overlap of experts'
    messages with the passes of other microbatches.
    """
    numbered = {one.step.number: one for one in found}
    for name, (first, second) in _OF_6311.items():
        if {first, second} <= set(numbered):
            yield name, StepRatio(numbered[first], numbered[second])


Work = tuple[str, ...]


def on_both_generations(found: Iterable[PredictedStep]) -> list[StepRatio]:
    """Return the ratios of seconds on GB300 to seconds on GB200, for each work measured on both.

    Only rows from containers of 26.06 or later and from model cards count. Each GPU has its own
    layout.
    """
    by_work: dict[Work, dict[str, PredictedStep]] = defaultdict(dict)
    for one in found:
        if group_of(one.step).startswith((NEW_CONTAINERS, CARDS)):
            job = re.sub("gb[23]00", "", one.step.job, flags=re.IGNORECASE)
            work = (job, one.step.source, one.step.cells["precision"])
            by_work[work][one.step.gpu] = one
    pairs = [(of.get("DGX-GB300"), of.get("DGX-GB200")) for of in by_work.values()]
    return [StepRatio(a, b) for a, b in pairs if a is not None and b is not None]


_LAYOUT = ("tp", "pp", "cp", "ep", "vpp", "mbs", "layout")


def in_both_scales(found: Iterable[PredictedStep]) -> Mapping[str, list[StepRatio]]:
    """Return, by what is trained, the ratios of seconds in MXFP8 to seconds in FP8.

    FP8 has one scale for a tensor here. A job counts if it was measured in both with one layout.
    """
    by_job: dict[Work, dict[str, PredictedStep]] = defaultdict(dict)
    for one in found:
        step = one.step
        layout = (step.job, step.source, *(step.cells[name] for name in _LAYOUT))
        by_job[layout][step.cells["precision"]] = one
    pairs: dict[str, list[StepRatio]] = defaultdict(list)
    for of in by_job.values():
        if {"MXFP8", "FP8"} <= set(of):
            name = ADAPTED if " lora" in of["FP8"].step.job else TRAINED
            pairs[name].append(StepRatio(of["MXFP8"], of["FP8"]))
    return pairs
