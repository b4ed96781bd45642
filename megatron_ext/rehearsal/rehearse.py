"""Rehearsal of a launch command: its ranks run one by one, and their passes are composed.

A launch on 64 GPUs cannot be tried on one, but each of its ranks can run there. Ranks with equal
stages run once; the simulator then composes the step of the whole pipeline from the measured
passes, for each schedule.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_ext.base.progress import Task, duration, task
from megatron_ext.base.words import counted
from megatron_ext.cost_model.gpus import gpu_named, short_name
from megatron_ext.launch.command.launch_words import Launch
from megatron_ext.launch.planner.parsed_launch import LaunchRequest
from megatron_ext.planner.mixed_gpus import ASSUMED_GPU
from megatron_ext.rehearsal.classes import RankClass, sending_ranks, sends
from megatron_ext.rehearsal.compose import ComposedStep, compose
from megatron_ext.rehearsal.gpu_here import GpuHere, gpu_here
from megatron_ext.rehearsal.measured_file import COSTS, TRACE, write_composed_trace, write_costs
from megatron_ext.rehearsal.prepare import (
    ESTIMATE,
    Preparation,
    PreparedSchedule,
    folder_of,
    prepare,
)
from megatron_ext.rehearsal.processes import RankProcesses, RunsRanks
from megatron_ext.rehearsal.rank_command import refuse_imbalance, refuse_variables, words_alone
from megatron_ext.rehearsal.record import RankRecord
from megatron_ext.rehearsal.rehearsal_report import (
    RankResult,
    RehearsalReport,
    ReplayFigures,
    ScheduleFigures,
    bytes_refusal,
    check_record,
    not_rehearsed,
    rank_result,
    replay_figures,
    schedule_figures,
)
from megatron_ext.rehearsal.request import (
    BACKWARD,
    FORWARD,
    RECORD,
    PeerValues,
    RankRequest,
    ReplayRequest,
    sent_file,
)

# Rough seconds to import all packages once, and to build a rank in a forked process. A rank in a
# process that is not forked takes both times.
_IMPORTS, _FORK = 20.0, 9.0

# CTAs that NCCL 2.28 uses without a limit for a message between two ranks: two over a network
# (ncclTopoGetNchannels in its src/graph/paths.cc); over Hopper's NVLink twice its 18 links, but at
# most the 32 of its collectives (ncclTopoComputeP2pChannels). The slowest link of a communicator
# counts for all its ranks. These numbers were read in NCCL's source, and not measured.
CTAS_BETWEEN_NODES, CTAS_OF_NVLINK = 2, 32

_ENVIRONMENT = {
    # OMP_NUM_THREADS is 1, as torchrun sets it if a node has several ranks, unless the user has set
    # the variable.
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    # Megatron's import makes torch look for a GPU. With PYTORCH_NVML_BASED_CUDA_CHECK torch asks
    # NVML, and not the CUDA driver, after whose use no process could be forked.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}

StartProcesses = Callable[
    [Mapping[str, str], Path], AbstractContextManager[RankProcesses | RunsRanks]
]


@dataclass(frozen=True)
class RehearsalRequest:
    """Request to rehearse a launch command.

    Attributes:
        launch: launch command.
        names: names of schedules, as `schedules_of` returns them.
        folder: folder for all files of the rehearsal.
        warm_up, steps: number of steps before the timed ones, and number of timed steps.
        world_size: number of ranks of the launch; None if the command tells it.
        is_cpu: whether the ranks run without a GPU.
        replays: whether each rank runs a second time, with messages at the times of the composed
            step.
        has_blocks: whether messages that wait in that second run occupy thread blocks of the GPU.
        values: kind of values that made-up peers send. With real ones a rank receives values that a
            neighbouring rank sent before, so ranks with the first stages run first.
        imbalance: standard deviation of a random bias for each expert in Megatron's router; None:
            each expert gets equally many tokens, unless the command decides otherwise.
    """

    launch: Launch
    names: tuple[str, ...]
    folder: Path
    warm_up: int = 2
    steps: int = 3
    world_size: int | None = None
    is_cpu: bool = False
    replays: bool = False
    has_blocks: bool = True
    values: PeerValues = PeerValues.NORMAL
    imbalance: float | None = None

    @property
    def iterations(self) -> int:
        return self.warm_up + self.steps

    @property
    def rounds(self) -> int:
        """Number of times that each rank runs."""
        return 2 if self.replays else 1


def rehearse(
    request: RehearsalRequest, start: StartProcesses, tell: Callable[[str], object]
) -> RehearsalReport:
    """Run the ranks of ``request`` one after another, and return the report on its schedules.

    Args:
        start: function that starts the processes of ranks.
        tell: function that receives lines to print at once: how long the ranks will take, and then
            what was done.

    Raises:
        ValueError: the command would be refused, cannot be rehearsed or does not fit, there is no
            GPU, or a rank has failed.
        PatchError: Megatron, which parses the command's arguments, is not installed.
        OSError: a file cannot be written.
    """
    _refuse_without_blocks(request)
    refuse_variables({**os.environ, **request.launch.environment})
    gpu = None if request.is_cpu else _gpu()
    folder = request.folder.absolute()
    known = None if gpu is None else gpu_named(gpu.name)
    launched = LaunchRequest(request.launch, world_size=request.world_size, gpu=known)
    prepared = prepare(launched, request.names, folder)
    refuse_imbalance(request.launch.arguments, request.imbalance, has_experts=prepared.has_experts)
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
    replays: list[ReplayFigures] = []
    with start(environment, folder / "processes.txt") as run:
        used_cuda = getattr(run, "used_cuda", "")
        if used_cuda:
            tell(
                f"{used_cuda} after the imports, so no rank can be forked: each starts anew, about "
                f"{duration(_IMPORTS)} more for each"
            )
        number = sum(len(one.classes) for one in prepared.schedules) * request.rounds
        with task("rehearsal, ranks", number, equal_steps=True) as work:
            ranks = _Ranks(request, prepared, folder, run, work)
            for schedule in prepared.schedules:
                records = ranks.run(schedule)
                step = compose(schedule.program, schedule.classes, records)
                first = schedules[0].seconds if schedules else None
                schedules.append(schedule_figures(schedule, step, first, *_paths(schedule, folder)))
                if request.replays:
                    on_time = ranks.run(schedule, step)
                    replayed = compose(schedule.program, schedule.classes, records, on_time)
                    first = replays[0].figures.seconds if replays else None
                    figures = schedule_figures(schedule, replayed, first, *_paths(schedule, folder))
                    replays.append(replay_figures(schedule, figures, step, replayed, on_time))
                    records, step = on_time, replayed
                _write(schedule, records, step, device, folder)
    return RehearsalReport(
        facts=prepared.facts,
        device=device,
        estimated_for=short_name(known) or "h100",
        used_cuda=used_cuda,
        schedules=tuple(schedules),
        replays=tuple(replays),
        ranks=tuple(ranks.results),
        remarks=tuple(text for text in prepared.remarks if text != ASSUMED_GPU),
        not_rehearsed=tuple(
            not_rehearsed(
                prepared,
                is_cpu=request.is_cpu,
                replays=request.replays,
                has_blocks=request.has_blocks,
                imbalance=request.imbalance,
            )
        ),
    )


def _refuse_without_blocks(request: RehearsalRequest) -> None:
    if request.has_blocks:
        return
    if not request.replays:
        raise ValueError(
            "--without-blocks: only in a replay do messages wait and occupy thread blocks; add "
            "--replay, or drop --without-blocks"
        )
    if request.is_cpu:
        raise ValueError(
            "--without-blocks: with --cpu there are no thread blocks to leave free; drop "
            "--without-blocks"
        )


def _gpu() -> GpuHere:
    found = gpu_here()
    if found is None:
        raise ValueError(
            "--cpu is missing: a rehearsal times GPU kernels, and there is no GPU here "
            "(nvidia-smi finds none); run the command on a node with a GPU, or write --cpu to "
            "see only that the ranks run"
        )
    return found


def _environment(request: RehearsalRequest) -> dict[str, str]:
    """Return the variables of the process that imports modules for all ranks.

    This process looks for modules where the ranks of the launch command would.
    """
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
    """Return a line on the number of ranks that run, and on how long they will take."""
    ranks = [(schedule, one) for schedule in prepared.schedules for one in schedule.classes]
    total = sum(one.program.schedule.placement.ranks for one in prepared.schedules)
    seconds = _IMPORTS + _FORK * len(ranks) * request.rounds
    text = f"{len(ranks)} of {counted(total, 'rank')} run alone on {device}, one after another"
    if request.replays:
        text += ", and once more with their messages on time"
    text += ": about"
    if request.is_cpu:
        return f"{text} {duration(seconds)} to start them, and their steps at the CPU's speed"
    steps = sum(
        request.iterations * (schedule.work(one.rank) + schedule.estimate.reductions)
        for schedule, one in ranks
    )
    return f"{text} {duration(seconds + request.rounds * steps)}"


def _requests(
    request: RehearsalRequest,
    prepared: Preparation,
    schedule: PreparedSchedule,
    folder: Path,
) -> Iterator[tuple[RankClass, RankRequest]]:
    """Yield the ranks of ``schedule`` to run, in order, each with its class.

    A rank that sends nothing in a direction receives values there as large as those that the first
    rank sent.
    """
    schedule_folder = folder_of(folder, schedule.name)
    arguments = words_alone(
        schedule.arguments,
        None if schedule.is_stock else schedule_folder / ESTIMATE,
        balances_experts=prepared.balances_experts,
        imbalance=request.imbalance,
        is_cpu=request.is_cpu,
    )
    neighbour: Path | None = None
    classes = schedule.classes
    if request.values is PeerValues.REAL:
        stages_of = schedule.program.schedule.placement.stages_of
        classes = tuple(sorted(classes, key=lambda one: min(stages_of[one.rank])))
    for one in classes:
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
            values=request.values,
        )
        yield one, rank_request
        neighbour = neighbour or rank_request.folder / RECORD


class _Ranks:
    """Runner of the ranks of a rehearsal, one after another.

    Attributes:
        results: times and memory of each rank that has run.
    """

    def __init__(
        self,
        request: RehearsalRequest,
        prepared: Preparation,
        folder: Path,
        run: RunsRanks,
        work: Task,
    ) -> None:
        self.results: list[RankResult] = []
        self._request, self._prepared, self._folder = request, prepared, folder
        self._run, self._work = run, work
        self._ran: set[Path] = set()  # folders of the ranks that have been rehearsed

    def run(
        self, schedule: PreparedSchedule, step: ComposedStep | None = None
    ) -> dict[int, RankRecord]:
        """Run the ranks of ``schedule``, and return their records by pipeline rank.

        Args:
            step: composed step at whose times messages come; None: they come at once.
        """
        records = {}
        for one, request in _requests(self._request, self._prepared, schedule, self._folder):
            if step is not None:
                request = self._on_time(request, step.moved[one.rank])
            if request.values is PeerValues.REAL:
                request = replace(request, received=self._received(schedule, one.rank))
            record = self._run(request)
            check_record(record, schedule, self._request.iterations)
            records[one.rank] = record
            self._ran.add(request.folder)
            self.results.append(
                rank_result(
                    schedule,
                    one,
                    record,
                    is_replay=step is not None,
                    real=tuple(sorted(request.received)),
                )
            )
            self._work.done += 1
        return records

    def _received(self, schedule: PreparedSchedule, rank: int) -> dict[str, Path]:
        """Return files of tensors that pipeline ``rank`` receives, by direction of the message.

        They come from a rank of the class of a neighbour, if one has run, and else from any rank
        that has run and sends in that direction.
        """
        found = {}
        placement = schedule.program.schedule.placement
        for number, direction in enumerate((FORWARD, BACKWARD)):
            neighbours = sending_ranks(placement, rank)[number]
            ran = [
                (bool(neighbours.intersection(one.members)), self._folder_of(schedule, one.rank))
                for one in schedule.classes
                if neighbours and sends(placement, one.rank)[number]
            ]
            ran = [(is_near, folder) for is_near, folder in ran if folder in self._ran]
            if ran:
                _, folder = max(ran, key=lambda one: one[0])
                found[direction] = sent_file(folder, direction)
        return found

    def _folder_of(self, schedule: PreparedSchedule, rank: int) -> Path:
        return folder_of(self._folder, schedule.name) / f"rank{rank * self._prepared.stride}"

    def _on_time(self, request: RankRequest, moved: Mapping[str, tuple[float, ...]]) -> RankRequest:
        ctas = CTAS_BETWEEN_NODES if self._prepared.leaves_node else CTAS_OF_NVLINK
        replay = ReplayRequest(moved, ctas, self._request.has_blocks)
        folder = request.folder.with_name(f"{request.folder.name}-replayed")
        return replace(request, folder=folder, replay=replay)


def _paths(schedule: PreparedSchedule, folder: Path) -> tuple[str, str]:
    """Return the paths of the costs file and of the trace of ``schedule``, below ``folder``."""
    of_schedule = folder_of(folder, schedule.name)
    return str(of_schedule / COSTS), str(of_schedule / TRACE)


def _write(
    schedule: PreparedSchedule,
    records: Mapping[int, RankRecord],
    step: ComposedStep,
    device: str,
    folder: Path,
) -> None:
    """Write the costs file and the trace of ``schedule``."""
    costs, trace = map(Path, _paths(schedule, folder))
    write_costs(schedule, records, device, costs)
    write_composed_trace(schedule, step, trace)
