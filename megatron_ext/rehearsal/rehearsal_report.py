"""Report of a rehearsal.

Some parts of a step cannot be measured here: messages, reductions, bytes of other ranks. Measured
and estimated seconds are never added up, and the report lists what the measured seconds do not
include.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_ext.base.words import bytes_text
from megatron_ext.cost_model.operations.operation import Group
from megatron_ext.rehearsal.classes import RankClass
from megatron_ext.rehearsal.compose import ComposedStep, measured_passes, seconds_outside
from megatron_ext.rehearsal.prepare import EstimatedStep, Preparation, PreparedSchedule
from megatron_ext.rehearsal.record import RankRecord
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.schedule import is_compute


@dataclass(frozen=True)
class ScheduleFigures:
    """Measured times of a rehearsed schedule.

    Attributes:
        name, schedule: name of the schedule as the user wrote it, and as its program has it.
        passes: seconds from the first to the last pass of the pipeline, composed of measured
            passes.
        span: seconds from a rank's own first pass to its own last one; the most of any rank.
        outside: measured seconds of a step outside the passes.
        seconds: sum of ``passes`` and ``outside``: a step with nothing estimated in it.
        bubble: share of ``passes`` for which ranks are idle.
        of_first: ``seconds`` as a multiple of those of the first schedule.
        estimate: estimated seconds of a step, none of which are in the figures above.
        costs, trace: files of costs and of the trace that were written.
    """

    name: str
    schedule: str
    passes: float
    span: float
    outside: float
    seconds: float
    bubble: float
    of_first: float
    estimate: EstimatedStep
    costs: str
    trace: str


@dataclass(frozen=True)
class ReplayFigures:
    """Measured times of a schedule from a second run of its ranks, whose messages come on time.

    Attributes:
        figures: times of the step composed of the passes of the second run.
        over_alone: its seconds from first to last pass, as a multiple of those of the first run.
        off_end: error of the composition: the most by which the seconds from a rank's first to its
            last pass differ from those in the composed step, as a share of the whole step.
    """

    figures: ScheduleFigures
    over_alone: float
    off_end: float


@dataclass(frozen=True)
class RankResult:
    """Measured times and memory of a rank that ran.

    Attributes:
        schedule: name of the schedule, as the user wrote it.
        is_replay: whether messages came at the times of the composed step, not at once.
        rank, pipeline_rank: global rank, and its place in the pipeline.
        stands_for: pipeline ranks with equal stages, this one included.
        real: directions in which the rank received values that another rank has sent.
        trained: number of steps that it trained.
        seconds: measured mean seconds of a pass, by kind.
        estimated: estimated mean seconds of a pass, by kind.
        between: seconds between passes in a step.
        outside: seconds of a step before the first pass and after the last one.
        host: seconds that the host spends between passes in a step.
        allocated, reserved: most bytes of tensors, and of torch's allocator; None without a GPU.
        predicted: predicted bytes of tensors; None if they are not known.
        activations: bytes of ``predicted`` that are stored activations.
        digest: digest of the rank's program; "" under Megatron's own schedules.
    """

    schedule: str
    is_replay: bool
    rank: int
    pipeline_rank: int
    stands_for: tuple[int, ...]
    real: tuple[str, ...]
    trained: int
    seconds: Mapping[str, float]
    estimated: Mapping[str, float]
    between: float
    outside: float
    host: float
    allocated: int | None
    reserved: int | None
    predicted: float | None
    activations: float | None
    digest: str


@dataclass(frozen=True)
class RehearsalReport:
    """Report of a rehearsal.

    Attributes:
        facts: model, ranks and microbatches in words.
        device: name of the GPU on which ranks ran, or "the CPU".
        estimated_for: GPU for which seconds are estimated.
        used_cuda: why ranks ran in processes of their own; "" if they were forked.
        schedules: figures of each schedule.
        replays: figures of each schedule from a second run of its ranks, whose messages come on
            time; empty without such runs.
        ranks: figures of each rank that ran.
        remarks: assumptions of the estimate.
        not_rehearsed: parts of a training that no figure here shows, a sentence each.
    """

    facts: str
    device: str
    estimated_for: str
    used_cuda: str
    schedules: tuple[ScheduleFigures, ...]
    replays: tuple[ReplayFigures, ...]
    ranks: tuple[RankResult, ...]
    remarks: tuple[str, ...]
    not_rehearsed: tuple[str, ...]


def schedule_figures(
    prepared: PreparedSchedule, step: ComposedStep, first: float | None, costs: str, trace: str
) -> ScheduleFigures:
    """Return the times of a rehearsed schedule from its composed ``step``.

    Args:
        first: seconds of a step of the first schedule; None if this is the first.
        costs, trace: files of costs and of the trace that were written.
    """
    timeline = step.timeline
    return ScheduleFigures(
        name=prepared.name,
        schedule=prepared.spec,
        passes=timeline.makespan,
        span=timeline.span,
        outside=step.outside,
        seconds=step.seconds,
        bubble=timeline.bubble_share_makespan,
        of_first=1.0 if first is None else step.seconds / first,
        estimate=prepared.estimate,
        costs=costs,
        trace=trace,
    )


def replay_figures(
    prepared: PreparedSchedule,
    figures: ScheduleFigures,
    alone: ComposedStep,
    step: ComposedStep,
    records: Mapping[int, RankRecord],
) -> ReplayFigures:
    """Return the times of a schedule from the second run of its ranks, with messages on time.

    Args:
        figures: times of ``step``.
        alone: step composed of the first run, whose times the messages of the second run had.
        step: step composed of the second run.
        records: records of the second run, by pipeline rank.
    """
    off = []
    for one in prepared.classes:
        row = step.timeline.compute[one.rank]
        ran = statistics.median(
            run.passes[-1].end - run.passes[0].start for run in records[one.rank].steps
        )
        off.append(abs(ran - (row[-1].end - row[0].start)))
    return ReplayFigures(
        figures=figures,
        over_alone=step.timeline.makespan / alone.timeline.makespan,
        off_end=max(off) / step.timeline.makespan,
    )


def rank_result(
    prepared: PreparedSchedule,
    rank_class: RankClass,
    record: RankRecord,
    *,
    is_replay: bool,
    real: tuple[str, ...],
) -> RankResult:
    """Return times and memory of the rank that ran for ``rank_class``, from its ``record``."""
    measured = measured_passes(prepared.program, record)
    by_kind: dict[Kind, list[float]] = defaultdict(list)
    for (_, kind, _), found in measured.items():
        by_kind[kind].append(found.seconds)
    predicted, activations = None, None
    estimated: dict[Kind, list[float]] = defaultdict(list)
    for action in filter(is_compute, prepared.program.schedule.rows[rank_class.rank]):
        estimated[action.kind].append(prepared.costs.of(action))
    if prepared.memory is not None:
        bytes_of = prepared.memory[rank_class.rank]
        # CUDA's context is subtracted from the memory, as no tensor can use it.
        predicted = bytes_of.total - bytes_of.model.context
        activations = bytes_of.activations
    return RankResult(
        schedule=prepared.name,
        is_replay=is_replay,
        rank=record.rank,
        pipeline_rank=record.pipeline_rank,
        stands_for=rank_class.members,
        real=real,
        trained=record.trained,
        seconds={str(kind): statistics.fmean(all_of) for kind, all_of in by_kind.items()},
        estimated={str(kind): statistics.fmean(all_of) for kind, all_of in estimated.items()},
        between=sum(found.after for found in measured.values()),
        outside=seconds_outside(record),
        host=max(step.host_seconds for step in record.steps),
        allocated=record.allocated,
        reserved=record.reserved,
        predicted=predicted,
        activations=activations,
        digest=record.digest,
    )


def not_rehearsed(
    prepared: Preparation,
    *,
    is_cpu: bool,
    replays: bool,
    has_blocks: bool,
    imbalance: float | None,
) -> Iterator[str]:
    """Yield sentences on the parts of a training that the results of a rehearsal do not show.

    Args:
        replays: whether ranks ran a second time, with their messages on time.
        has_blocks: whether waiting messages then occupied thread blocks of the GPU.
        imbalance: standard deviation of the router's bias; None if the rehearsal set none.
    """
    if is_cpu:
        yield (
            "the GPU: passes took the time of this CPU, so their seconds say nothing about a "
            "cluster; order, programs and steps are as there"
        )
    arrival = "comes when the composed step says" if replays else "is there at once"
    yield (
        f"messages between pipeline ranks: what a rank receives is made up and {arrival}; their "
        f"seconds are estimated"
    )
    if is_cpu or not replays or not has_blocks:
        yield (
            "multiprocessors that waiting receives occupy, which can make passes longer on a "
            "cluster"
        )
    else:
        yield (
            "NCCL's own choice of thread blocks: messages that wait occupy as many as its source "
            "says for such links"
        )
    if prepared.tensor_parallel > 1:
        yield (f"collectives of {Group.TENSOR} ranks: they copy locally; the waiting is estimated")
    if prepared.context_parallel > 1:
        yield f"messages of {Group.CONTEXT} ranks: they copy locally; the waiting is estimated"
    if prepared.expert_parallel > 1:
        yield f"the all-to-all of {Group.EXPERT} ranks: it copies locally; the waiting is estimated"
    if imbalance is not None:
        yield (
            f"the balance of experts: logits of routers are random, with a bias whose standard "
            f"deviation is {imbalance:g} (--moe-router-force-biased)"
        )
    elif prepared.balances_experts:
        yield (
            "the balance of experts: each gets equally many tokens "
            "(--moe-router-force-load-balancing)"
        )
    if prepared.data_parallel > 1:
        yield "data-parallel reductions and gathers: they are no work here, and estimated"
    yield "other ranks on the same host, stragglers, and NCCL's memory"
    yield "data and checkpoints: data are mock data, weights are random" + (
        f" ({', '.join(prepared.loads)} replaced)" if prepared.loads else ""
    )


def check_record(record: RankRecord, prepared: PreparedSchedule, iterations: int) -> None:
    """Raise ValueError unless ``record`` shows a rank that trained all steps of this schedule."""
    where = f"{prepared.name}, rank {record.rank}"
    if record.trained != iterations:
        raise ValueError(
            f"{where} trained {record.trained} of {iterations} steps, so its times show nothing; "
            "report this error with the launch command"
        )
    if record.digest and record.digest != prepared.program.digest:
        raise ValueError(
            f"{where} ran another program ({record.digest[:12]}) than the launch command's "
            f"({prepared.program.digest[:12]}): report this error with the launch command"
        )


def bytes_refusal(prepared: Sequence[PreparedSchedule], free: float) -> str:
    """Return a line on the ranks that do not fit into ``free`` bytes, and those that do.

    Return "" if all of them fit.
    """
    too_large, fitting = [], []
    for schedule in prepared:
        if schedule.memory is None:
            continue
        for one in schedule.classes:
            needed = schedule.memory[one.rank].total
            text = f"pipeline rank {one.rank} of {schedule.name}"
            if needed > free:
                too_large.append(f"{text} ({bytes_text(needed)})")
            else:
                fitting.append(text)
    if not too_large:
        return ""
    others = f"; {', '.join(fitting)} would fit" if fitting else "; no rank would fit"
    return (
        f"{bytes_text(free)} are free on this GPU, and predicted are more for "
        f"{', '.join(too_large)}{others}: rehearse on a larger GPU, or name other --schedules"
    )
