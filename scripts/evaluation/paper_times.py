"""Gains over 1F1B by simulation alone: with the pass times that the zero-bubble paper measured.

This checks the simulator and the description of Megatron's executor without the estimate of passes.
The time of a pass is proportional to its layers. The gains are computed twice: with `LAUNCH` added
to each F and I, and without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from megatron_ext.cost_model.gpus import LAUNCH
from megatron_ext.cost_model.model import Model, Stage
from megatron_ext.cost_model.model_memory import ModelBytes
from megatron_ext.planner.layouts.layout import Layout, evenly
from megatron_ext.planner.layouts.work import Work
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import Costs, LinkCosts, PassCosts
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import VocabularyParallel
from scripts.evaluation.measured import PublishedStep
from scripts.evaluation.predictions import PredictedStep
from scripts.evaluation.stage_times import PublishedStage
from scripts.evaluation.trainings import DescribedTraining, schedule_of

_PASSES = {Kind.FORWARD: "F", Kind.BACKWARD_INPUT: "I", Kind.BACKWARD_WEIGHT: "W"}


def simulated(
    steps: Iterable[PublishedStep], stages: Sequence[PublishedStage], *, launch: bool
) -> list[PredictedStep]:
    """Return each of the zero-bubble paper's ``steps``, simulated with the paper's pass times.

    Args:
        launch: whether `LAUNCH`, the seconds to launch a pass, is added to each F and I.
    """
    found = []
    for step in steps:
        times = [one for one in stages if one.source.endswith(step.job.removeprefix("zb "))]
        if step.job.startswith("zb ") and times:
            seconds = _training(step, times[0], LAUNCH if launch else 0.0).predicted().seconds
            found.append(PredictedStep(step, seconds, 0.0))
    return found


def _training(step: PublishedStep, times: PublishedStage, launch: float) -> DescribedTraining:
    stages = step.pipeline * step.chunks
    # The embedding and the output layer each take the place of one layer, so all stages count
    # equally many layers.
    layers = times.layers * step.pipeline
    model: Model = replace(times.model, layers=times.model.layers[:1] * layers)

    def costs_of(stages: Sequence[Stage], placement: Placement, slices: int) -> Costs:
        shares = [len(stage.layers) / times.layers for stage in stages]
        seconds = {
            kind: tuple(
                1e-3 * times.passes[name] * share + launch * (kind is not Kind.BACKWARD_WEIGHT)
                for share in shares
            )
            for kind, name in _PASSES.items()
        }
        return Costs(PassCosts(seconds), LinkCosts(1e-3 * times.passes["message"]))

    def bytes_of(
        stages: Sequence[Stage], placement: Placement, vocabulary: VocabularyParallel
    ) -> list[ModelBytes]:
        return [ModelBytes(0.0, 0.0, 0.0)] * placement.ranks

    spec, option = schedule_of(step)
    work = Work(
        model,
        step.pipeline,
        step.microbatches,
        costs_of=costs_of,
        bytes_of=bytes_of,
        seconds_outside_passes=lambda model: 0.0,
        steps_overlap=option == "post-validation",
    )
    return DescribedTraining(work, spec, Layout(evenly(layers, stages).layers))
