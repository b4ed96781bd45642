"""Costs that a training measures itself (``--pipeline-costs profile``).

When the training ends, the step time predicted from these costs is compared with the measured one.

This patches nothing: the code that runs the steps calls it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import log_single_rank

from megatron_ext.adapter.observers.observer import Step, StepObserver
from megatron_ext.adapter.observers.writers import log_step
from megatron_ext.adapter.programs import BatchShape, Programs
from megatron_ext.adapter.training_globals import checkpoint_folder
from megatron_ext.adapter.transformer_engine.captured import captures
from megatron_ext.base.logger import logger
from megatron_ext.compile.program.verify import Program
from megatron_ext.config import COSTS_FILE, PROFILE, PipelineConfig
from megatron_ext.cost_model.execution import Precision
from megatron_ext.cost_model.measured.file import as_data
from megatron_ext.cost_model.measured.layer_costs import (
    Basis,
    LayerCosts,
    alike_remark,
    layer_costs,
)
from megatron_ext.cost_model.measured.machine_factors import MachineFactors
from megatron_ext.cost_model.measured.places import measured_places
from megatron_ext.cost_model.measured.timed_operations import (
    GATHERED,
    timed_attention,
    timed_collectives,
    timed_grouped,
    timed_products,
)
from megatron_ext.cost_model.measured_costs import Machine, RankFigures, measured_costs
from megatron_ext.cost_model.operations.operation import Group
from megatron_ext.observe.program_summary import summary_of_change
from megatron_ext.runtime.held_bytes import Allocated, HeldBytes, SavedTensors
from megatron_ext.runtime.measure.measured_steps import MeasuredSteps
from megatron_ext.runtime.measure.operation_time import (
    attention_seconds,
    exchange_seconds,
    gather_seconds,
    grouped_seconds,
    machine_versions,
    product_seconds,
)
from megatron_ext.runtime.measure.profile import MEASURED, STEPS, Profile
from megatron_ext.runtime.messages.transport import Boundary
from megatron_ext.runtime.recording import clock_of
from megatron_ext.runtime.world import gather_from_all, told_by_rank_0
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.costs_text import save_costs
from megatron_ext.schedule.problem import VocabularyParallel

# Seconds of collectives on this machine by their size in bytes, for each group of ranks.
_Collectives = Mapping[Group, Mapping[float, float]]
_SELDOMER = 8  # the next exchange of measurements comes after 1/8 as many further steps as have run


def costs_path(config: PipelineConfig, args: Any) -> Path | None:
    """Return the file that measured costs are written to; None if none are measured.

    If the setting names no file, it is `COSTS_FILE` in the folder of checkpoints, where the next
    start finds it. Without such a folder it is in the trace's folder, or in the working directory.

    Args:
        args: Megatron's arguments; None if its training loop does not run.
    """
    if config.costs.text != PROFILE:
        return config.costs.profile
    return (checkpoint_folder(args, "save") or config.trace or Path()) / COSTS_FILE


@dataclass(frozen=True)
class _Measured:
    """Measurements of this rank in steps whose microbatches have one shape.

    Attributes:
        program: the program of these steps.
        figures: measured seconds and bytes of this rank.
        what: readable description of what was measured.
        message_bytes: bytes of a message between stages.
    """

    program: Program
    figures: RankFigures
    what: str
    message_bytes: int


class StepProfile(StepObserver[Step]):
    """Observer that measures the costs of each shape of microbatches once, and rebuilds programs.

    Costs are written to ``path``. Pipelines may reach a shape, or enough steps of one program, at
    different training steps. So a rank that has measured a shape waits for a training step at which
    all ranks exchange costs. All ranks know the numbers of these steps: they begin with step
    `STEPS`, and each comes after 1/8 as many further steps as have run.
    """

    def __init__(self, path: Path, programs: Programs, *, by_place: bool) -> None:
        """Initialise the measurement.

        ``by_place``: microbatches are ordered by cost, so costs are measured for each place in the
        step.
        """
        self._path = path
        self._programs = programs
        self._by_place = by_place
        self._profiles: dict[BatchShape, Profile] = {}
        # Measured costs by shape of a batch, which no schedule has used yet.
        self._ready: dict[BatchShape, _Measured] = {}
        self._measured: set[BatchShape] = set()
        self._count = 0  # number of training steps so far
        self._meets = STEPS  # training step after which all ranks exchange their measurements
        self._steps: MeasuredSteps | None = None  # recorded steps since costs were last measured
        self._pipeline: dist.ProcessGroup | None = None
        self._is_written = False
        told = f"costs are measured in iterations 2 to {STEPS}, and written to {path}"
        log_single_rank(logger, logging.INFO, told)

    def begin(self, step: Step) -> None:
        device = torch.device(torch.cuda.current_device())
        self._pipeline = step.pipeline
        if step.shape in self._measured:
            if _is_compared(step.pipeline):
                self._steps = self._steps or MeasuredSteps(device)
                self._steps.begin(step.recorder)
        elif step.shape not in self._ready:
            if step.shape not in self._profiles:
                stages = step.program.schedule.placement.stages
                counting = _counting(device, step.call.models, stages, step.boundary)
                self._profiles[step.shape] = Profile(clock_of(device), counting)
            self._profiles[step.shape].begin(step.recorder)

    def end(self, step: Step) -> None:
        """Store the step's record, and use the costs of all ranks if all meet after this step."""
        self._count += 1
        if step.shape in self._measured:
            if self._steps is not None:
                self._steps.end(step.program)
        elif step.shape in self._profiles:
            profile = self._profiles[step.shape]
            if profile.end(step.recorder, step.program):
                profile = self._profiles.pop(step.shape)
                self._ready[step.shape] = _measured(step, profile, self._by_place)
        if self._count == self._meets:
            self._meets += max(1, self._count // _SELDOMER)
            self._meet(step)

    def _meet(self, step: Step) -> None:
        """Use the costs of those shapes of microbatches that every rank has measured.

        Collective over the world.
        """
        gathered = gather_from_all(
            {shape: measured.figures for shape, measured in self._ready.items()}
        )
        for shape in gathered[0]:
            if all(shape in figures for figures in gathered):
                self._use(step, shape, [figures[shape] for figures in gathered])

    def _use(self, step: Step, shape: BatchShape, ranks: list[RankFigures]) -> None:
        """Rebuild programs with the costs of ``shape``, and write the costs on global rank 0.

        Global rank 0 computes the costs from the measurements of all ``ranks``. Collective over the
        world.
        """
        ready = self._ready.pop(shape)
        collectives = _collectives()
        costs = told_by_rank_0(lambda: self._costs(ready, shape, ranks))
        self._measured.add(shape)
        if dist.get_rank() == 0:
            layers = self._layers(ready.program, shape, costs, collectives)
            tower = None if layers is None else layers.tower
            forwards = next((rank.forwards for rank in ranks if rank.forwards), ())
            measured = as_data(layers, Machine.of(ranks), forwards)
            self._write(replace(costs, tower=tower), measured)
        try:
            now = self._programs.rebuild(
                step.pipeline, step.call.config, shape, costs, ready.program
            )
        except ValueError as error:
            error.add_note(
                f"megatron_ext: with the costs that were measured, which are in {self._path}"
            )
            raise
        file = f"; costs written to {self._path}" if self._is_written else ""
        change = summary_of_change(ready.program, now, costs) + file
        log_single_rank(logger, logging.INFO, change)
        if all(rank.places is not None for rank in ranks):
            self._use_places(step, shape, ranks, now)

    def _use_places(
        self, step: Step, shape: BatchShape, ranks: list[RankFigures], now: Program
    ) -> None:
        """Run a program made for the cost of each microbatch's place, if it is better than ``now``.

        Collective over the world.
        """
        if captures(step.call.config):
            said = "kept, as CUDA graphs are captured in its order"
        else:
            measured = measured_places([rank.places for rank in ranks if rank.places is not None])
            judged = None
            if measured is not None:
                judged = self._programs.make_for_places(
                    step.pipeline, step.call.config, shape, measured, now
                )
            if judged is None:
                said = "kept, as it cannot be searched for unequal ones"
            else:
                ratio = judged.places / judged.equal
                said = "replaced by one" if judged.is_better else "better than one"
                said += f" for the cost of each place in a step, which takes {ratio:.3f} of it"
        what = f"{now.schedule.name}, microbatches that differ: the program for equal ones is"
        log_single_rank(logger, logging.INFO, f"{what} {said}")

    def _costs(self, measured: _Measured, shape: BatchShape, ranks: list[RankFigures]) -> Costs:
        """Return the costs of ``shape`` from the measurements of all ranks."""
        estimate = self._programs.costs[shape]
        what = f"{measured.what}, {MEASURED} iterations"
        costs = measured_costs(measured.program, estimate, ranks, what)
        return costs.with_links(message_bytes=measured.message_bytes)

    def _layers(
        self, program: Program, shape: BatchShape, costs: Costs, collectives: _Collectives
    ) -> LayerCosts | None:
        """Return the measured costs by layer type.

        None if the layers are not known, or only some of them are trained.
        """
        basis = self._programs.bases.get(shape)
        if basis is None:
            return None
        factors = _machine_factors(basis, collectives)
        basis = replace(basis, rates=replace(basis.rates, factors=factors))
        vocabulary = program.problem.options.vocab_parallel
        layers = layer_costs(costs, basis, is_divided=vocabulary is not VocabularyParallel.NONE)
        for group in layers.alike:
            logger.info(alike_remark(group))
        return layers

    def finish(self, iteration: int) -> None:
        """Compare the prediction with the measured steps, as the training ends after ``iteration``.

        Collective over the pipeline.
        """
        if self._pipeline is None or not _is_compared(self._pipeline):
            return
        comparison = None if self._steps is None else self._steps.compare(self._pipeline)
        if dist.get_rank() != dist.get_world_size() - 1:
            return
        if comparison is None:
            steps = sum(profile.steps for profile in self._profiles.values())
            why = (
                "no iteration has run with the measured costs"
                if self._measured
                else "costs are not measured, other pipelines have had too few steps of one program"
                if self._ready
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
            # The folder may not exist yet, as Megatron makes it when it saves the first checkpoint.
            self._path.parent.mkdir(parents=True, exist_ok=True)
            save_costs(costs, self._path, measured)
        except OSError as error:  # a full disk does not end a training
            self._is_written = False
            logger.error(f"costs are not written to {self._path}: {error}")
        else:
            self._is_written = True


def _measured(step: Step, profile: Profile, by_place: bool) -> _Measured:
    """Return the measurements of this rank, after the last measured ``step``.

    Collective over the pipeline.
    """
    schedule, boundary = step.program.schedule, step.boundary
    assert boundary.shape is not None
    what = f"{schedule.name} on {len(schedule.rows)} ranks"
    if step.shape is not None:
        what += f", micro batch {step.shape[0]}, sequence {step.shape[1]}"
    figures = profile.figures(step.connections.p2p, step.pipeline, boundary, by_place=by_place)
    message_bytes = math.prod(boundary.shape) * boundary.dtype.itemsize
    return _Measured(profile.program, figures, what, message_bytes)


def _is_on_gpu() -> bool:
    return torch.device(torch.cuda.current_device()).type == "cuda"


def _collectives() -> _Collectives:
    """Return the seconds of collectives of this rank's groups, by group and size in bytes.

    The collectives are all-gathers of tensor-parallel ranks and all-to-alls of expert-parallel
    ranks. A group of one rank has no times, and without a GPU the result is empty. Collective over
    both groups.
    """
    if not _is_on_gpu() or not parallel_state.model_parallel_is_initialized():
        return {}
    tensor = parallel_state.get_tensor_model_parallel_group()
    experts = parallel_state.get_expert_model_parallel_group()
    return {
        Group.TENSOR: gather_seconds(tensor, GATHERED) if tensor.size() > 1 else {},
        Group.EXPERT: exchange_seconds(experts, GATHERED) if experts.size() > 1 else {},
    }


def _machine_factors(basis: Basis, collectives: _Collectives) -> MachineFactors | None:
    """Return measurements of single operations on this GPU, which correct the estimate.

    None without a GPU, if the estimate for this GPU does not depend on shapes, or if torch has no
    matrix products in this precision.
    """
    model, execution, rates = basis.model, basis.execution, basis.rates
    precisions = (
        Precision.BF16,
        Precision.FP8,
        Precision.MXFP8,
    )  # precisions for which torch itself has matrix products
    if not _is_on_gpu() or not rates.sms or execution.precision not in precisions:
        return None
    measure = partial(product_seconds, in_fp8=execution.precision is not Precision.BF16)
    is_bf16 = execution.precision is Precision.BF16
    grouped = timed_grouped(model, execution, rates, grouped_seconds) if is_bf16 else ()
    attention, backward = timed_attention(model, execution, rates, attention_seconds)
    tensor, experts = execution.tensor_parallel, execution.expert_parallel
    is_exchanged = execution.dispatcher == "alltoall"
    exchanges = collectives.get(Group.EXPERT, {}) if is_exchanged else {}
    return MachineFactors(
        torch.cuda.get_device_name(),
        machine_versions(),
        execution.precision,
        timed_products(model, execution, rates, measure),
        timed_collectives(Group.TENSOR, tensor, 1, rates, collectives.get(Group.TENSOR, {})),
        grouped,
        attention,
        backward,
        timed_collectives(
            Group.EXPERT, experts, execution.expert_tensor_parallel, rates, exchanges
        ),
    )


def _is_compared(pipeline: dist.ProcessGroup) -> bool:
    """Return whether ``pipeline`` has the last global rank, which writes Megatron's log."""
    return dist.get_world_size() - 1 in dist.get_process_group_ranks(pipeline)


def _counting(
    device: torch.device, models: Sequence[torch.nn.Module], stages: int, boundary: Boundary
) -> HeldBytes:
    if device.type == "cuda":
        assert boundary.shape is not None
        return Allocated(stages, math.prod(boundary.shape) * boundary.dtype.itemsize)
    return SavedTensors(parameter for model in models for parameter in model.parameters())
