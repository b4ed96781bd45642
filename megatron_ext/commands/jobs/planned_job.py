"""The function that plans the job of ``megatron-ext plan``.

A launch is planned by Megatron's arguments, and sizes by a model without experts or by costs alone.
Both become a `JobPlan`, which is printed in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megatron_ext.base.words import counted
from megatron_ext.commands.jobs.job_argument import JobKind, launch_of
from megatron_ext.commands.jobs.job_sizes import JobSizes
from megatron_ext.commands.jobs.plan_options import CheckedPlan
from megatron_ext.commands.options import UNIT
from megatron_ext.compile.program.memory import bytes_for
from megatron_ext.config import ESTIMATE, OVERLAP, PREFIX, CostsSource, flag
from megatron_ext.cost_model.execution import Precision
from megatron_ext.cost_model.gpus import (
    FreeMemory,
    Gpu,
    assumed_rates,
    free_memory,
    parse_gpus,
    short_name,
)
from megatron_ext.cost_model.measured.file import measured_reserve
from megatron_ext.cost_model.model_memory import TrainingState, bytes_of_ranks, least_lasting
from megatron_ext.cost_model.rates import Rates
from megatron_ext.cost_model.short_form import Described
from megatron_ext.cost_model.tower import tower_of
from megatron_ext.observe.slow_ranks import speeds_in
from megatron_ext.observe.trace import read_trace, reserved_in
from megatron_ext.planner.job_plan import JobPlan, plan_job
from megatron_ext.planner.layouts.layout import evenly
from megatron_ext.planner.mixed_gpus import (
    ASSUMED_GPU,
    product_of,
    reference_of,
    speeds_of_gpus,
)
from megatron_ext.planner.training import TrainedModel, Training
from megatron_ext.planner.training_job import TrainingJob, training_job_of
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.problem import VocabularyParallel
from megatron_ext.schedule.rank_speeds import RankSpeeds
from megatron_ext.written_settings import from_argv, given_in

if TYPE_CHECKING:
    from megatron_ext.launch.planner.parsed_launch import LaunchRequest


def planned_job(checked: CheckedPlan) -> Callable[..., JobPlan]:
    """Return the function that plans the job. Its arguments are those of `plan_job`.

    Raises:
        ValueError, OSError, PatchError: the job or a file is not understood.
    """
    if checked.sizes is None:
        from megatron_ext.launch.planner.launch_plan import plan_launch

        return partial(plan_launch, launch_request(checked))
    traced = _traced_in(checked.options.trace)
    return partial(plan_job, _of_sizes(checked, checked.sizes, traced))


def launch_request(checked: CheckedPlan) -> LaunchRequest:
    """Return the request to plan a job that is a launch.

    Raises:
        ValueError, OSError, PatchError: the job or a file is not understood.
    """
    from megatron_ext.launch.command.arguments_file import read_arguments_file
    from megatron_ext.launch.planner.parsed_launch import LaunchRequest

    job, options, gpus = checked.job, checked.options, checked.gpus
    traced = _traced_in(options.trace)
    settings = {
        name: value
        for name in ("costs", "memory_limit", "rank_speeds")
        if (value := getattr(options, name)) is not None
    }
    words = [word for name, value in settings.items() for word in (flag(name), value)]
    launch, file, values = None, None, dict[str, Any]()
    ranks: int | None
    if job.kind is JobKind.ARGUMENTS:
        ours = [word for word in job.words if word != OVERLAP]
        from_argv(ours)  # refuses flags that have no effect on any schedule
        file = read_arguments_file(Path(job.word))
        values, ranks = dict(file.values), file.world_size
        in_launch = {name.removeprefix(PREFIX): value for name, value in values.items()} | given_in(
            ours
        )
        if OVERLAP in job.words:
            values["overlap_moe_expert_parallel_comm"] = True
        words = [*ours, *words]
    else:
        launch = launch_of(job)
        ranks = launch.world_size
        in_launch = given_in(launch.arguments)
        if not gpus and launch.gpu is not None:
            gpus = parse_gpus(launch.gpu)
    for name, value in settings.items():
        if in_launch.get(name) is not None and str(in_launch[name]) != value:
            option = f"--{name.replace('_', '-')}"
            typer.echo(
                f"{option} {value} counts, not {flag(name)} {in_launch[name]} of the {job.kind}",
                err=True,
            )
    if options.world_size is not None and ranks not in (None, options.world_size):
        typer.echo(
            f"--world-size {options.world_size} counts, not {ranks} of the {job.kind}", err=True
        )
    return LaunchRequest(
        launch=launch,
        values=values,
        config=None if file is None else file.path,
        world_size=options.world_size or ranks,
        gpu=reference_of(gpus) if gpus else None,
        settings=tuple(words),
        reserved=traced.reserved,
        gpus=gpus if len(gpus) > 1 else (),
        seen_speeds=traced.speeds,
        vision=options.vision,
    )


@dataclass(frozen=True)
class _Traced:
    """Measurements of a trace that a plan uses.

    Attributes:
        reserved: bytes that allocators reserved beyond their allocations; None if not measured.
        speeds: speeds of the ranks; None if no rank is slow.
    """

    reserved: float | None = None
    speeds: RankSpeeds | None = None


def _traced_in(trace: Path | None) -> _Traced:
    """Return what a plan uses of the file ``trace``. Without a file, all of it is None.

    Raises:
        ValueError: the trace cannot be read, or has nothing that a plan uses.
    """
    if trace is None:
        return _Traced()
    steps = read_trace(trace)
    speeds, of_medians = speeds_in(steps)
    traced = _Traced(reserved_in(steps), speeds)
    if of_medians != speeds:
        typer.echo(
            f"--trace {trace}: its {counted(len(steps), 'step')} differ by more than ranks do, so "
            f"the plan does not take {of_medians} as the speeds of the ranks; if a longer trace "
            f"shows the same, add --rank-speeds {of_medians}",
            err=True,
        )
    elif traced == _Traced():
        raise ValueError(
            f"--trace {trace} has nothing that a plan uses: no rank is slow, and only a trace of "
            f"GPUs has the memory that their allocators reserved"
        )
    return traced


def _of_sizes(checked: CheckedPlan, sizes: JobSizes, traced: _Traced) -> TrainingJob:
    """Return the training job with these ``sizes``, for the planner.

    Raises:
        ValueError: a value is not understood.
    """
    costs, model = checked.options.costs, sizes.model
    training = Training(
        sizes.pp,
        sizes.m,
        None if costs is None else partial(parse_costs, costs),
        limit=checked.limit,
        options=checked.schedules,
        layers=sizes.layers,
        speeds=product_of([checked.speeds, traced.speeds], sizes.pp),
        in_seconds=CostsSource(costs or (UNIT if model is None else ESTIMATE)).in_seconds,
    )
    if model is not None:
        return _of_model(training, model, sizes, checked, traced)
    given = training.costs or partial(parse_costs, UNIT)
    if checked.limit is not None and checked.limit.bytes is not None:
        try:
            on_a_line = given(line(sizes.pp))
        except ValueError:  # a file of costs may be for schedules with more stages
            pass
        else:
            bytes_for(checked.limit, on_a_line)
    return training_job_of(replace(training, costs=given))


def _of_model(
    training: Training,
    described: Described,
    sizes: JobSizes,
    checked: CheckedPlan,
    traced: _Traced,
) -> TrainingJob:
    """Return the training job of a model, with costs estimated for its layers and the GPUs.

    Raises:
        ValueError: the model or the GPU does not fit the job.
    """
    model, execution = described.model, described.execution(sizes.tp)
    if checked.tower is not None:
        tokens = checked.tower.get("tokens") or described.sequence
        model = replace(model, tower=tower_of(checked.tower, described.hidden, tokens))
    gpus = checked.gpus
    if len(gpus) > 1:
        of_gpus = speeds_of_gpus(gpus, model, execution)
        training = replace(training, speeds=product_of([training.speeds, of_gpus], training.ranks))
    state = TrainingState(
        distributed=sizes.distributed_optimizer,
        data_parallel=sizes.dp,
        expert_data_parallel=sizes.dp,
    )
    stages = evenly(len(model.layers), training.ranks).of(model)
    on_ranks = bytes_of_ranks(
        model, stages, execution, line(training.ranks), VocabularyParallel.NONE, state
    )
    costs, lasting = checked.options.costs, least_lasting(on_ranks)
    rates, free = _machine(gpus, execution.precision, costs, traced, lasting)
    trained = TrainedModel(model, execution, state, rates)
    assumed = (ASSUMED_GPU,) if not gpus and training.costs is None else ()
    return training_job_of(replace(training, trained=trained), free, assumed)


def _machine(
    gpus: Sequence[Gpu], precision: Precision, costs: str | None, traced: _Traced, lasting: float
) -> tuple[Rates, FreeMemory | None]:
    """Return the rates of a rank's GPU, and the memory that a rank may take.

    The memory is None if no GPU is named, or none is known for it.

    Args:
        costs: text of --costs, which may name a file with a measured reserve; None without it.
        lasting: bytes that a rank allocates once and keeps.

    Raises:
        ValueError: the file of costs is not understood.
    """
    if not gpus:
        return assumed_rates(precision), None
    machine, reserved = reference_of(gpus), traced.reserved
    if reserved is None and costs is not None:
        reserved = measured_reserve(CostsSource(costs).file, short_name(machine))
    free = (
        None if machine.memory is None else free_memory(machine.memory, reserved, lasting=lasting)
    )
    return machine.rates(precision), free
