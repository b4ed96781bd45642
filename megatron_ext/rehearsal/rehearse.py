"""Rehearsal of a launch command: its ranks run one by one, and their passes are composed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.base.progress import duration, task
from megatron_ext.base.words import counted
from megatron_ext.cost_model.gpus import gpu_named, short_name
from megatron_ext.launch.command.launch_words import Launch
from megatron_ext.launch.planner.parsed_launch import LaunchRequest
from megatron_ext.planner.mixed_gpus import ASSUMED_GPU
from megatron_ext.rehearsal.classes import RankClass
from megatron_ext.rehearsal.compose import compose
from megatron_ext.rehearsal.gpu_here import GpuHere, gpu_here
from megatron_ext.rehearsal.measured_file import COSTS, write_composed_trace, write_costs
from megatron_ext.rehearsal.prepare import (
    ESTIMATE,
    Preparation,
    PreparedSchedule,
    folder_of,
    prepare,
)
from megatron_ext.rehearsal.processes import RankProcesses, RunsRanks
from megatron_ext.rehearsal.rank_command import refuse_variables, words_alone
from megatron_ext.rehearsal.record import RankRecord
from megatron_ext.rehearsal.rehearsal_report import (
    RankResult,
    RehearsalReport,
    ScheduleFigures,
    bytes_refusal,
    check_record,
    not_rehearsed,
    rank_result,
    schedule_figures,
)
from megatron_ext.rehearsal.request import RECORD, RankRequest

# Seconds, about: to import everything once, and to build a rank in a fork. A process of its own
# takes both.
_IMPORTS, _FORK = 20.0, 9.0

_ENVIRONMENT = {
    # As torchrun sets it for several ranks of a node, unless the user has.
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    # Megatron asks torch for a GPU as it is imported. torch would ask the driver, after which no
    # process can be forked; so it asks NVML.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}

StartProcesses = Callable[
    [Mapping[str, str], Path], AbstractContextManager[RankProcesses | RunsRanks]
]


@dataclass(frozen=True)
class RehearsalRequest:
    """Request to rehearse a launch command.

    Attributes:
        names: schedules, as `schedules_of` returns them.
        folder: folder of everything that is written.
        warm_up, steps: numbers of steps before the timed ones, and of these.
        world_size: ranks of the launch; None: as the command says.
        is_cpu: whether the ranks run without a GPU.
    """

    launch: Launch
    names: tuple[str, ...]
    folder: Path
    warm_up: int = 2
    steps: int = 3
    world_size: int | None = None
    is_cpu: bool = False

    @property
    def iterations(self) -> int:
        return self.warm_up + self.steps


def rehearse(
    request: RehearsalRequest, start: StartProcesses, tell: Callable[[str], object]
) -> RehearsalReport:
    """Run the ranks of ``request`` and return the report on its schedules.

    Args:
        start: starts the processes of ranks.
        tell: receives a line at once: how long it will take, and what was done.

    Raises:
        ValueError: the command would be refused, cannot be rehearsed or does not fit, there is no
            GPU, or a rank has failed.
        PatchError: there is no Megatron to ask.
        OSError: a file cannot be written.
    """
    refuse_variables({**os.environ, **request.launch.environment})
    gpu = None if request.is_cpu else _gpu()
    folder = request.folder.absolute()
    known = None if gpu is None else gpu_named(gpu.name)
    launched = LaunchRequest(request.launch, world_size=request.world_size, gpu=known)
    prepared = prepare(launched, request.names, folder)
    iterations = prepared.train_iterations
    if iterations is not None and iterations < request.iterations:
        raise ValueError(
            f"--train-iters {iterations}: a rehearsal of {counted(request.warm_up, 'step')} of "
            f"--warm-up and {counted(request.steps, 'timed step')} trains {request.iterations}; "
            f"write --train-iters {request.iterations}, or a lower --steps"
        )
    if gpu is not None and gpu.free is not None:
        refusal = bytes_refusal(prepared.schedules, gpu.free)
        if refusal:
            raise ValueError(refusal)
    device = "the CPU" if gpu is None else gpu.name
    tell(_announcement(request, prepared, device))
    environment = _environment(request)
    schedules: list[ScheduleFigures] = []
    ranks: list[RankResult] = []
    with start(environment, folder / "processes.txt") as run:
        used_cuda = getattr(run, "used_cuda", "")
        if used_cuda:
            tell(
                f"{used_cuda} after the imports, so no rank can be forked: each starts anew, about "
                f"{duration(_IMPORTS)} more for each"
            )
        number = sum(len(one.classes) for one in prepared.schedules)
        with task("rehearsal, ranks", number, equal_steps=True) as work:
            for schedule in prepared.schedules:
                records = {}
                for rank_class, rank_request in _requests(request, prepared, schedule, folder):
                    record = run(rank_request)
                    check_record(record, schedule, request.iterations)
                    records[rank_class.rank] = record
                    ranks.append(rank_result(schedule, rank_class, record))
                    work.done += 1
                first = schedules[0].seconds if schedules else None
                schedules.append(_composed(schedule, records, first, device, folder))
    return RehearsalReport(
        facts=prepared.facts,
        device=device,
        estimated_for=short_name(known) or "h100",
        used_cuda=used_cuda,
        schedules=tuple(schedules),
        ranks=tuple(ranks),
        remarks=tuple(text for text in prepared.remarks if text != ASSUMED_GPU),
        not_rehearsed=tuple(not_rehearsed(prepared, is_cpu=request.is_cpu)),
    )


def _gpu() -> GpuHere:
    found = gpu_here()
    if found is None:
        raise ValueError(
            "--cpu: no GPU is here (nvidia-smi finds none), and a rehearsal times its kernels: run "
            "it on a node with a GPU, or write --cpu to see that the ranks run"
        )
    return found


def _environment(request: RehearsalRequest) -> dict[str, str]:
    """Return the variables of the process that imports what ranks need. It searches modules where
    the ranks would, and where their command was judged."""
    launch = request.launch
    environment = {**_ENVIRONMENT, **launch.environment}
    if launch.installs is False and not launch.is_module:
        search_path = environment.get("PYTHONPATH", os.environ.get("PYTHONPATH"))
        folders = (str(Path(launch.script).parent.absolute()), search_path)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    if request.is_cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def _announcement(request: RehearsalRequest, prepared: Preparation, device: str) -> str:
    """Return which ranks run, and how long they will take."""
    ranks = [(schedule, one) for schedule in prepared.schedules for one in schedule.classes]
    total = sum(one.program.schedule.placement.ranks for one in prepared.schedules)
    seconds = _IMPORTS + _FORK * len(ranks)
    text = (
        f"{len(ranks)} of {counted(total, 'rank')} run alone on {device}, one after another: about"
    )
    if request.is_cpu:
        return f"{text} {duration(seconds)} to start them, and their steps at the CPU's speed"
    steps = sum(
        request.iterations * (schedule.work(one.rank) + schedule.estimate.reductions)
        for schedule, one in ranks
    )
    return f"{text} {duration(seconds + steps)}"


def _requests(
    request: RehearsalRequest,
    prepared: Preparation,
    schedule: PreparedSchedule,
    folder: Path,
) -> Iterator[tuple[RankClass, RankRequest]]:
    """Yield the ranks to run, in order. In a direction in which a rank sends nothing, it receives
    values as large as those that the first rank sent there."""
    schedule_folder = folder_of(folder, schedule.name)
    arguments = words_alone(
        schedule.arguments,
        None if schedule.is_stock else schedule_folder / ESTIMATE,
        balances_experts=prepared.experts,
        is_cpu=request.is_cpu,
    )
    neighbour: Path | None = None
    for one in schedule.classes:
        rank = one.rank * prepared.stride
        rank_request = RankRequest(
            rank=rank,
            world_size=prepared.world_size,
            script=request.launch.script,
            arguments=arguments,
            folder=schedule_folder / f"rank{rank}",
            warm_up=request.warm_up,
            steps=request.steps,
            is_cpu=request.is_cpu,
            is_module=request.launch.is_module,
            neighbour=neighbour,
            environment=request.launch.environment,
        )
        yield one, rank_request
        neighbour = neighbour or rank_request.folder / RECORD


def _composed(
    schedule: PreparedSchedule,
    records: Mapping[int, RankRecord],
    first: float | None,
    device: str,
    folder: Path,
) -> ScheduleFigures:
    """Compose the step of ``schedule``, and write its costs and its trace."""
    schedule_folder = folder_of(folder, schedule.name)
    step = compose(schedule.program, schedule.classes, records)
    costs = schedule_folder / COSTS
    write_costs(schedule, records, device, costs)
    trace = write_composed_trace(schedule, step, schedule_folder)
    return schedule_figures(schedule, step, first, str(costs), str(trace))
