"""Costs that a training measures itself (``--pipeline-costs profile``), from its first step to its
last, when the prediction made with them is compared with what was measured then.

This patches nothing: whoever runs the steps calls it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import log_single_rank

from megatron_ext.adapter.observers.observer import Step, StepObserver
from megatron_ext.adapter.observers.writers import log_step
from megatron_ext.adapter.programs import Programs, Shape
from megatron_ext.logger import logger
from megatron_ext.runtime.held_bytes import Allocated, HeldBytes, SavedTensors
from megatron_ext.runtime.measure.measured_steps import MeasuredSteps
from megatron_ext.runtime.measure.profile import STEPS, Profile
from megatron_ext.runtime.messages.transport import Boundary
from megatron_ext.runtime.recording import clock_of
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.costs_text import save_costs
from megatron_ext.schedule.model.measured.file import as_data
from megatron_ext.schedule.model.measured.layer_costs import LayerCosts, layer_costs, not_told_apart
from megatron_ext.schedule.model.measured_costs import Machine
from megatron_ext.schedule.problem import VocabularyParallel
from megatron_ext.schedule.show.program_summary import summary_of_change


class StepProfile(StepObserver[Step]):
    """Measures costs once for each shape of microbatches, writes them to ``path``, and has
    ``programs`` made with them."""

    def __init__(self, path: Path, programs: Programs) -> None:
        self._path = path
        self._programs = programs
        self._under_way: dict[Shape, Profile] = {}
        self._measured: set[Shape] = set()
        self._steps: MeasuredSteps | None = None  # since the costs were measured
        self._pipeline: dist.ProcessGroup | None = None
        self._is_written = False

    def begin(self, step: Step) -> None:
        device = torch.device(torch.cuda.current_device())
        self._pipeline = step.pipeline
        if step.shape not in self._measured:
            if step.shape not in self._under_way:
                stages = step.program.schedule.placement.stages
                counting = _counting(device, step.call.models, stages, step.boundary)
                self._under_way[step.shape] = Profile(clock_of(device), counting)
            self._under_way[step.shape].begin(step.recorder)
        elif _is_compared(step.pipeline):
            self._steps = self._steps or MeasuredSteps(device)
            self._steps.begin(step.recorder)

    def end(self, step: Step) -> None:
        """If costs have just been measured, use them from now on. Collective over the world then;
        global rank 0 writes them."""
        if step.shape in self._measured:
            if self._steps is not None:
                self._steps.end(step.program)
            return
        if not self._under_way[step.shape].end(step.recorder, step.program):
            return
        costs, machine = self._costs(step, self._under_way.pop(step.shape))
        self._measured.add(step.shape)
        if dist.get_rank() == 0:
            self._write(costs, as_data(self._layers(step, costs), machine))
        try:
            now = self._programs.make_again(
                step.pipeline, step.call.config, step.shape, costs, step.program
            )
        except ValueError as error:
            error.add_note(
                f"megatron_ext: with the costs that were measured, which are in {self._path}"
            )
            raise
        file = f"; costs written to {self._path}" if self._is_written else ""
        change = summary_of_change(step.program, now, costs) + file
        log_single_rank(logger, logging.INFO, change)

    def _costs(self, step: Step, profile: Profile) -> tuple[Costs, Machine]:
        schedule = step.program.schedule
        what = f"{schedule.name} on {len(schedule.rows)} ranks"
        if step.shape is not None:
            what += f", micro batch {step.shape[0]}, sequence {step.shape[1]}"
        connection, estimate = step.connections.p2p, self._programs.costs[step.shape]
        return profile.costs(connection, step.pipeline, step.boundary, estimate, what)

    def _layers(self, step: Step, costs: Costs) -> LayerCosts | None:
        """Costs per layer type; None where layers are not known, or not all trained alike."""
        basis = self._programs.bases.get(step.shape)
        if basis is None:
            return None
        vocabulary = step.program.problem.extras.vocabulary
        layers = layer_costs(costs, basis, is_divided=vocabulary is not VocabularyParallel.NONE)
        for group in layers.alike:
            logger.info(not_told_apart(group))
        return layers

    def finish(self, iteration: int) -> None:
        """The training has ended with ``iteration``: compare. Collective over the pipeline."""
        if self._pipeline is None or not _is_compared(self._pipeline):
            return
        comparison = None if self._steps is None else self._steps.compare(self._pipeline)
        if dist.get_rank() != dist.get_world_size() - 1:
            return
        if comparison is None:
            steps = sum(profile.steps for profile in self._under_way.values())
            why = (
                "no iteration has run with the measured costs"
                if self._measured
                else f"costs are not measured, the training has had {steps} of {STEPS} iterations"
            )
            logger.info(f"nothing to compare with the prediction: {why}")
            return
        for line in comparison.lines():
            logger.info(line)
        log_step(
            iteration,
            bubble_shares=comparison.bubble_shares,
            seconds=(comparison.predicted, comparison.measured),
        )

    def _write(self, costs: Costs, measured: Mapping[str, Any]) -> None:
        try:
            save_costs(costs, self._path, measured)
        except OSError as error:  # a full disk is no reason to end a training
            self._is_written = False
            logger.error(f"costs are not written to {self._path}: {error}")
        else:
            self._is_written = True


def _is_compared(pipeline: dist.ProcessGroup) -> bool:
    """Whether ``pipeline`` is the one that Megatron's log is about."""
    return dist.get_world_size() - 1 in dist.get_process_group_ranks(pipeline)


def _counting(
    device: torch.device, models: Sequence[torch.nn.Module], stages: int, boundary: Boundary
) -> HeldBytes:
    if device.type == "cuda":
        assert boundary.shape is not None
        return Allocated(stages, math.prod(boundary.shape) * boundary.dtype.itemsize)
    return SavedTensors(parameter for model in models for parameter in model.parameters())
