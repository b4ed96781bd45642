"""Costs that a training measures itself (``--pipeline-costs profile``), from its first step to its
last, when the prediction made with them is compared with what was measured then.

Not patched: anything. Whoever runs the steps asks.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_ext.adapter.observers.writers import log
from megatron_ext.runtime.held_bytes import Allocated, HeldBytes, SavedTensors
from megatron_ext.runtime.measure.measured_steps import MeasuredSteps
from megatron_ext.runtime.measure.profile import STEPS, Profile
from megatron_ext.runtime.messages.batched import PipelineGroup
from megatron_ext.runtime.messages.channels import Channels
from megatron_ext.runtime.messages.transport import Boundary
from megatron_ext.runtime.recorder import Recorder
from megatron_ext.runtime.recording import clock_of
from megatron_ext.schedule.build.head import Placed
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.costs_text import save_costs
from megatron_ext.schedule.show.summary import summary_of_change

Shape = tuple[int, int] | None  # micro batch, sequence; None where microbatches vary


class StepProfile:
    """Measures costs once for each shape of microbatches, and writes them to ``path``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._under_way: dict[Shape, Profile] = {}
        self._measured: set[Shape] = set()
        self._steps: MeasuredSteps | None = None  # since the costs were measured
        self._pipeline: dist.ProcessGroup | None = None
        self._is_written = False

    def begin(
        self,
        pipeline: dist.ProcessGroup,
        recorder: Recorder,
        models: Sequence[torch.nn.Module],
        shape: Shape,
        stages: int,
        boundary: Boundary,
    ) -> None:
        """Before the passes of a training step. ``boundary`` has a shape."""
        device = torch.device(torch.cuda.current_device())
        self._pipeline = pipeline
        if shape not in self._measured:
            if shape not in self._under_way:
                counting = _counting(device, models, stages, boundary)
                self._under_way[shape] = Profile(clock_of(device), counting)
            self._under_way[shape].begin(recorder)
        elif _is_compared(pipeline):
            self._steps = self._steps or MeasuredSteps(device)
            self._steps.begin(recorder)

    def end(
        self,
        recorder: Recorder,
        placed: Placed,
        connection: Channels | PipelineGroup,
        shape: Shape,
        boundary: Boundary,
        estimate: Costs,
    ) -> Costs | None:
        """After a training step: the costs, if they have just been measured.

        Collective over the world then; global rank 0 writes them.
        """
        if shape in self._measured:
            if self._steps is not None:
                self._steps.end(recorder, placed.program)
            return None
        profile = self._under_way[shape]
        if not profile.end(recorder, placed):
            return None
        del self._under_way[shape]
        self._measured.add(shape)
        schedule = placed.program.schedule.name
        what = f"{schedule} on {len(placed.program.schedule.rows)} ranks"
        if shape is not None:
            what += f", micro batch {shape[0]}, sequence {shape[1]}"
        costs = profile.costs(connection, boundary, estimate, what)
        if dist.get_rank() == 0:
            self._write(costs)
        return costs

    def change(self, before: Placed, now: Placed, costs: Costs) -> str:
        """What the measured ``costs`` have made of the schedule."""
        file = f"; costs written to {self._path}" if self._is_written else ""
        return summary_of_change(before, now, costs) + file

    def note(self) -> str:
        """For an error of a schedule made with the measured costs."""
        return f"megatron_ext: with the costs that were measured, which are in {self._path}"

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
            print(f"megatron_ext: nothing to compare with the prediction: {why}", flush=True)
            return
        for line in comparison.lines():
            print(f"megatron_ext: {line}", flush=True)
        predicted, measured = comparison.bubble_shares
        figures = {
            "pipeline/bubble share": measured,
            "pipeline/bubble share, predicted": predicted,
            "pipeline/step seconds": comparison.measured,
            "pipeline/step seconds, predicted": comparison.predicted,
        }
        log(figures, iteration)

    def _write(self, costs: Costs) -> None:
        try:
            save_costs(costs, self._path)
        except OSError as error:  # a full disk is no reason to end a training
            self._is_written = False
            print(f"megatron_ext: costs are not written: {error}", file=sys.stderr, flush=True)
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
