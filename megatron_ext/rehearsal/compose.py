"""Composition of the passes of ranks that ran alone into a step of the whole pipeline.

Each pass takes the seconds that it took alone, microbatch by microbatch: medians by stage and kind
make a step up to 3 % too short. Messages take no time here, because no rank has measured them.
Copies to the host are part of the measured time between passes.

In a replay each rank runs once more, with its messages at the times of the composed step, and the
passes of that run are composed: a pass may be longer after a wait, or next to a waiting message.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_ext.compile.program.graph import channel_of
from megatron_ext.compile.program.verify import Program
from megatron_ext.rehearsal.classes import RankClass
from megatron_ext.rehearsal.record import RankRecord
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.kinds import RULES, Lane
from megatron_ext.schedule.timeline import Event, Timeline

_Place = tuple[int, Kind, int]  # key of a pass on a rank: chunk, kind and microbatch


@dataclass(frozen=True)
class MeasuredPass:
    """Measured times of a pass on a rank that ran alone, medians over the timed steps.

    Attributes:
        seconds: seconds that the pass takes.
        after: seconds from its end to the start of the rank's next pass.
    """

    seconds: float
    after: float


@dataclass(frozen=True)
class ComposedStep:
    """Step of the whole pipeline, composed of passes that ranks ran alone.

    Attributes:
        timeline: events of the passes, without messages.
        outside: seconds of a step before a rank's first pass and after its last one, as for the
            optimizer and the data loader; the most of any rank.
        moved: for each rank, the times at which the messages of each channel and the collectives of
            each kind are complete (`ReplayRequest.moved`).
    """

    timeline: Timeline
    outside: float
    moved: tuple[Mapping[str, tuple[float, ...]], ...]

    @property
    def seconds(self) -> float:
        return self.timeline.makespan + self.outside


def compose(
    program: Program,
    classes: Sequence[RankClass],
    records: Mapping[int, RankRecord],
    replayed: Mapping[int, RankRecord] | None = None,
) -> ComposedStep:
    """Return the step of ``program`` that the measured passes of ``records`` add up to.

    Args:
        classes: classes of ranks; the passes of the rank that ran count for all ranks of its class.
        records: records of the ranks that ran, by pipeline rank.
        replayed: records of the same ranks from a second run, whose messages came at the times of
            the composed step. If given, their passes count, and the time between passes is still
            that of ``records``, where no rank waits.

    Raises:
        ValueError: a rank ran other passes than those of ``program``.
    """
    seconds: dict[Action, float] = {}
    after: dict[Action, float] = {}
    for one in classes:
        check_recorded_order(program, records[one.rank])
        measured = measured_passes(program, records[one.rank])
        if replayed is not None:
            check_recorded_order(program, replayed[one.rank])
            slowed = measured_passes(program, replayed[one.rank])
            measured = {
                place: MeasuredPass(slowed[place].seconds, found.after)
                for place, found in measured.items()
            }
        for rank in one.members:
            for action in program.schedule.compute_rows[rank]:
                found = _of(measured, _place(program, rank, action))
                seconds[action], after[action] = found.seconds + found.after, found.after
    schedule, graph = program.as_run
    times = graph.longest_paths([seconds.get(action, 0.0) for action in graph.actions])
    passes: list[Event] = []
    moved: list[dict[str, list[float]]] = [defaultdict(list) for _ in schedule.rows]
    for rank, action, start, end in zip(graph.ranks.tolist(), graph.actions, *times, strict=True):
        if action in seconds:
            passes.append(Event(rank, action, start, end - after[action]))
        elif RULES[action.kind].is_message:
            moved[rank][str(channel_of(action, schedule.placement))].append(end)
        elif RULES[action.kind].lane is Lane.COLLECTIVE:
            moved[rank][str(action.kind)].append(end)
    return ComposedStep(
        Timeline(program.schedule, tuple(passes)),
        # In a replay a step begins with the wait for the rank's first message. The composition
        # contains this wait already.
        max(map(seconds_outside, records.values())),
        tuple({name: tuple(ends) for name, ends in of_rank.items()} for of_rank in moved),
    )


def check_recorded_order(program: Program, record: RankRecord) -> None:
    """Raise ValueError unless the steps of ``record`` have the passes of ``program``, in order."""
    expected = tuple(map(str, program.schedule.compute_rows[record.pipeline_rank]))
    for number, step in enumerate(record.steps, 1):
        ran = tuple(str(one.action) for one in step.passes)
        if ran == expected:
            continue
        pairs = zip((*ran, "nothing"), (*expected, "nothing"), strict=False)
        place, (was, known) = next(
            (place, both) for place, both in enumerate(pairs, 1) if both[0] != both[1]
        )
        raise ValueError(
            f"{record.schedule}, pipeline rank {record.pipeline_rank}, timed step {number}: pass "
            f"{place} of the rehearsed rank was {was}, and the launch command's program has "
            f"{known} there"
        )


def measured_passes(program: Program, record: RankRecord) -> dict[_Place, MeasuredPass]:
    """Return the measured times of the passes of ``record``, by chunk, kind and microbatch."""
    lasted, followed = defaultdict(list), defaultdict(list)
    for step in record.steps:
        for one, later in pairwise(step.passes):
            place = _place(program, record.pipeline_rank, one.action)
            followed[place].append(max(later.start - one.end, 0.0))
        for one in step.passes:
            place = _place(program, record.pipeline_rank, one.action)
            lasted[place].append(one.end - one.start)
    return {
        place: MeasuredPass(
            statistics.median(figures), statistics.median(followed.get(place, (0.0,)))
        )
        for place, figures in lasted.items()
    }


def seconds_outside(record: RankRecord) -> float:
    """Return the median seconds of a step outside the time from its first to its last pass."""
    return statistics.median(
        step.seconds - (step.passes[-1].end - step.passes[0].start) for step in record.steps
    )


def _place(program: Program, rank: int, action: Action) -> _Place:
    chunk = program.schedule.placement.stages_of[rank].index(action.stage)
    return chunk, action.kind, action.microbatch


def _of(measured: Mapping[_Place, MeasuredPass], place: _Place) -> MeasuredPass:
    """Return the measured times of the pass at ``place``, or the median over passes of its kind.

    The median stands in where the rank that ran has no such pass: a schedule may run the backward
    pass of a microbatch whole (B) on one rank, and in two parts (I and W) on another of its class.
    """
    if place in measured:
        return measured[place]
    return _median(found for (*at, _), found in measured.items() if (*at,) == place[:2])


def _median(passes: Iterable[MeasuredPass]) -> MeasuredPass:
    seconds, after = zip(*((one.seconds, one.after) for one in passes), strict=True)
    return MeasuredPass(statistics.median(seconds), statistics.median(after))
