"""Composition of the passes of ranks that ran alone into a step of the whole pipeline.

Each pass takes the seconds that it took alone, microbatch by microbatch: medians by stage and kind
make a step up to 3 % too short. Messages and copies take no time here, because no rank has measured
them: copies to the host are in the time between passes.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megatron_ext.compile.program.verify import Program
from megatron_ext.rehearsal.classes import RankClass
from megatron_ext.rehearsal.record import RankRecord
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.timeline import Event, Timeline

_Place = tuple[int, Kind, int]  # chunk of the rank, kind, microbatch


@dataclass(frozen=True)
class MeasuredPass:
    """Median seconds of a pass over the timed steps, and from its end to the next pass's start."""

    seconds: float
    after: float


@dataclass(frozen=True)
class ComposedStep:
    """Step of the whole pipeline, composed of passes that were measured.

    Attributes:
        timeline: passes only.
        outside: the most seconds of a rank's step outside the time from its first pass's start to
            its last pass's end: the optimizer, the loader, logs.
    """

    timeline: Timeline
    outside: float

    @property
    def seconds(self) -> float:
        return self.timeline.makespan + self.outside


def compose(
    program: Program, classes: Sequence[RankClass], records: Mapping[int, RankRecord]
) -> ComposedStep:
    """Return the step of ``program`` with the passes of ``records``, by the pipeline rank that ran.

    Raises:
        ValueError: a rank ran other passes than those of ``program``.
    """
    seconds: dict[Action, float] = {}
    after: dict[Action, float] = {}
    for one in classes:
        check_recorded_order(program, records[one.rank])
        measured = measured_passes(program, records[one.rank])
        for rank in one.members:
            for action in program.schedule.compute_rows[rank]:
                found = _of(measured, _place(program, rank, action))
                seconds[action], after[action] = found.seconds + found.after, found.after
    _, graph = program.as_run
    times = graph.longest_paths([seconds.get(action, 0.0) for action in graph.actions])
    passes = [
        Event(rank, action, start, end - after[action])
        for rank, action, start, end in zip(
            graph.ranks.tolist(), graph.actions, *times, strict=True
        )
        if action in seconds
    ]
    outside = max(map(seconds_outside, records.values()))
    return ComposedStep(Timeline(program.schedule, tuple(passes)), outside)


def check_recorded_order(program: Program, record: RankRecord) -> None:
    """Raise ValueError unless ``record`` has the passes of ``program``, in its order."""
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
            f"{place} is {was}, and {known} in the program of the launch command"
        )


def measured_passes(program: Program, record: RankRecord) -> dict[_Place, MeasuredPass]:
    """Return the passes of ``record`` by their place on the rank."""
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
    """Return the median seconds of a step of ``record`` outside its first to its last pass."""
    return statistics.median(
        step.seconds - (step.passes[-1].end - step.passes[0].start) for step in record.steps
    )


def _place(program: Program, rank: int, action: Action) -> _Place:
    chunk = program.schedule.placement.stages_of[rank].index(action.stage)
    return chunk, action.kind, action.microbatch


def _of(measured: Mapping[_Place, MeasuredPass], place: _Place) -> MeasuredPass:
    """Return the pass at ``place``, or the median of its kind: a table may run I and W of another
    microbatch as one B on the rank that ran."""
    if place in measured:
        return measured[place]
    return _median(found for (*at, _), found in measured.items() if (*at,) == place[:2])


def _median(passes: Iterable[MeasuredPass]) -> MeasuredPass:
    seconds, after = zip(*((one.seconds, one.after) for one in passes), strict=True)
    return MeasuredPass(statistics.median(seconds), statistics.median(after))
