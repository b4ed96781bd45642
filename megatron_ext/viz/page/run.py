"""Runs on a page: one step of a schedule, or several consecutive ones.

A page compares runs: a schedule with its baseline, a prediction with a measurement, or several
steps that overlap. Simulated and traced steps become the same boxes here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from megatron_ext.base.words import counted
from megatron_ext.compile.program.graph import Graph
from megatron_ext.compile.program.memory import in_bytes, in_microbatches, memory_curve, peaks
from megatron_ext.compile.program.simulate import simulate_steps
from megatron_ext.compile.program.verify import Program
from megatron_ext.observe.trace import TracedStep, track_of
from megatron_ext.schedule.action import Action, Kind, OverlappedPasses, Slice, whole_of
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.kinds import HOST_LANES, RULES, Lane, Where
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import ScheduleOptions
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.schedule.timeline import Event, Timeline
from megatron_ext.viz.page.box_waits import Nodes, waits_of_passes, waits_of_program
from megatron_ext.viz.page.boxes import Box, Track, TrackGroup, critical_path
from megatron_ext.viz.page.cut import cut_to_microbatches, kept_microbatches, shares

MOST_PASSES = 20_000  # number of passes up to which a page stays small and quick
REDUCTION = "reduction"

# Memory that is held while an action runs: in microbatches, and in bytes.
HeldTimes = Mapping[Action, tuple[float, float | None]]


@dataclass(frozen=True)
class PageFigures:
    """Makespan, span, bubbles and peak memory of a step on a page.

    ``peaks`` has the peak memory of each rank in microbatches: 1 is the activations of one
    microbatch on all stages of the rank.
    """

    makespan: float
    span: float
    bubble_share_makespan: float
    bubble_share_span: float
    peaks: tuple[float, ...]
    peaks_bytes: tuple[float, ...] | None


@dataclass(frozen=True)
class Run:
    """One or more simulated or traced steps of a schedule on a page.

    Attributes:
        title: name of the schedule with its options.
        chunk_of: by stage, the number of its rank's chunk.
        boxes: boxes of the actions, sorted by their tracks, and by time.
        critical: numbers of the boxes on the critical path.
        figures: figures of the first step.
        limit: memory limit of the schedule, if it has one.
        remarks: further remarks, a sentence each.
    """

    title: str
    chunk_of: tuple[int, ...]
    boxes: tuple[Box, ...]
    critical: tuple[int, ...]
    figures: PageFigures
    limit: MemoryLimit | None = None
    remarks: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return len(self.figures.peaks)

    @property
    def length(self) -> float:
        """Time from the start of the first step to the end of the last.

        The unit is seconds or that of the costs.
        """
        return max(box.end for box in self.boxes)

    @property
    def passes(self) -> int:
        """Number of boxes on the page that are compute passes."""
        return sum(box.track.group is TrackGroup.PASSES for box in self.boxes)


def title_of(name: str, options: ScheduleOptions) -> str:
    """Return the title of a schedule on a page: its ``name`` and its requested options."""
    return ", ".join([name, *map(options.phrase, options.requested)])


def simulated_run(title: str, program: Program, steps: int = 1, remarks: Sequence[str] = ()) -> Run:
    """Return ``steps`` simulated steps of ``program``, as a run to show on a page."""
    (schedule, graph), problem = program.as_run, program.problem
    timelines = simulate_steps(program, problem.costs, steps)
    begins = min(event.start for event in timelines[0].events)
    held = _held(schedule, problem.costs)
    boxes: list[Box] = []
    for number, timeline in enumerate(timelines):
        events = _with_whole_collectives(graph, timeline.events)
        tracks = [_track(event, schedule.placement) for event in events]
        waits = waits_of_program(graph, events, [track is not None for track in tracks])
        of_step = _boxes(events, tracks, waits, _costs_in(events, program), held, schedule.pairs)
        moved = [
            replace(
                box,
                step=number,
                start=box.start - begins,
                end=box.end - begins,
                needs=tuple(len(boxes) + other for other in box.needs),
            )
            for box in of_step
        ]
        if number and not problem.options.steps_overlap:
            moved = _after_all(moved, boxes)
        boxes += moved
    sorted_boxes = _sorted(boxes)
    return Run(
        title,
        _chunks(schedule.placement),
        sorted_boxes,
        critical_path(sorted_boxes),
        _figures(timelines[0], schedule, problem.costs),
        problem.memory_limit,
        (*remarks, *_pace(timelines)),
    )


def traced(step: TracedStep) -> tuple[Run, Run]:
    """Return a traced step as two runs to show on a page: as predicted, and as measured."""
    predicted = {event.action: event.end - event.start for event in step.predicted.events}
    name = step.measured.schedule.name
    return (
        of_passes(f"{name}, predicted", step.predicted, predicted.__getitem__),
        of_passes(
            f"{name}, measured in iteration {step.iteration}", step.measured, predicted.__getitem__
        ),
    )


def cut_to_fit(runs: Sequence[Run], most: int) -> tuple[Run, ...]:
    """Return ``runs`` cut to no more than ``most`` passes in all; each cut run says so."""
    granted = shares([run.passes for run in runs], most)
    return tuple(map(_cut_to, runs, granted))


def _cut_to(run: Run, most: int) -> Run:
    passes = run.passes
    microbatches = 1 + max(box.microbatch for box in run.boxes)
    kept = kept_microbatches(microbatches, passes, most)
    if len(kept) == 1:
        return run
    boxes, critical = cut_to_microbatches(run.boxes, kept, run.critical)
    parts = [f"{part[0]} to {part[-1]}" if len(part) > 1 else str(part[0]) for part in kept]
    remark = (
        f"{passes:,} passes are too many for one page: microbatches {parts[0]}, {parts[1]} and "
        f"{parts[2]} are drawn, and the passes of the others are grey."
    )
    return replace(run, boxes=boxes, critical=critical, remarks=(*run.remarks, remark))


def of_passes(title: str, timeline: Timeline, cost_of: Callable[[Action], float]) -> Run:
    """Return a run to show on a page, of a ``timeline`` of passes, perhaps with reductions."""
    schedule = timeline.schedule
    timeline = timeline.moved(0.0)
    tracks = [_track(event, schedule.placement) for event in timeline.events]
    boxes = _boxes(
        timeline.events,
        tracks,
        waits_of_passes(timeline),
        cost_of,
        _held(schedule, None),
        schedule.pairs,
    )
    for reduction in timeline.reductions:
        name = f"{REDUCTION} of stage {reduction.stage}"
        name += "" if reduction.is_exact else " (at the latest)"
        track = Track(reduction.rank, TrackGroup.MESSAGES, name)
        lasts = reduction.end - reduction.start
        place = REDUCTION, reduction.stage, 0, 0
        boxes.append(Box(track, *place, reduction.start, reduction.end, lasts))
    sorted_boxes = _sorted(boxes)
    return Run(
        title,
        _chunks(schedule.placement),
        sorted_boxes,
        critical_path(sorted_boxes),
        _figures(timeline, schedule, None),
    )


def _track(event: Event, placement: Placement) -> Track | None:
    """Return the track of a page that shows ``event``; None if the event is not shown."""
    rule = RULES[event.action.kind]
    title = track_of(event.action, placement)
    if title is None:
        is_mark = rule.where is Where.RANK and not rule.is_message
        return Track(event.rank, TrackGroup.PASSES, TrackGroup.PASSES.value) if is_mark else None
    if event.end <= event.start:
        return None
    group = TrackGroup.MESSAGES
    if rule.lane is Lane.COMPUTE:
        group = TrackGroup.PASSES
    elif rule.lane in HOST_LANES:
        group = TrackGroup.COPIES
    return Track(event.rank, group, title)


def _boxes(
    events: Sequence[Event],
    tracks: Sequence[Track | None],
    waits: Sequence[Nodes],
    cost_of: Callable[[Action], float],
    held: HeldTimes,
    pairs: Iterable[OverlappedPasses],
) -> list[Box]:
    """Return the boxes of a page: one for each event that has a track."""
    halves = {action: half for overlapped in pairs for half, action in enumerate(overlapped)}
    shown = [node for node, track in enumerate(tracks) if track is not None]
    place = {node: number for number, node in enumerate(shown)}
    boxes = []
    for node in shown:
        _, action, start, end = events[node]
        microbatch = action.microbatch
        track = tracks[node]
        assert track is not None
        here, here_bytes = held.get(action, (None, None))
        boxes.append(
            Box(
                track,
                action.kind.value,
                action.stage,
                whole_of(microbatch),
                0,
                start,
                end,
                cost_of(action),
                tuple(place[earlier] for earlier in waits[node]),
                held=here,
                held_bytes=here_bytes,
                slice=microbatch.slice if isinstance(microbatch, Slice) else None,
                half=halves.get(action),
            )
        )
    return boxes


def _costs_in(events: Sequence[Event], program: Program) -> Callable[[Action], float]:
    """Return a function that gives the expected seconds of an action, by the costs.

    For one of two overlapped passes it gives its share of both.
    """
    in_pairs = program.schedule.overlapped_with
    shares = {e.action: e.end - e.start for e in events if e.action in in_pairs}
    return lambda a: shares[a] if a in shares else program.problem.costs.of(a)


def _with_whole_collectives(graph: Graph, events: Sequence[Event]) -> Sequence[Event]:
    """Return ``events`` with each collective as long on all ranks as on the rank that has its time.

    The simulator gives a collective its duration on one rank only.
    """
    leaders = graph.leaders.tolist()
    return [
        event
        if leader == node
        else event._replace(start=events[leader].start, end=events[leader].end)
        for node, (event, leader) in enumerate(zip(events, leaders, strict=True))
    ]


def _after_all(boxes: Sequence[Box], before: Sequence[Box]) -> list[Box]:
    """Return the ``boxes`` of a step whose first pass on each rank waits for the step ``before``.

    The pass waits for the box of that step that ends last on any rank.
    """
    last = max(range(len(before)), key=lambda place: before[place].end)
    begun: set[int] = set()
    waiting = []
    for box in boxes:
        is_first = box.track.group is TrackGroup.PASSES and box.track.rank not in begun
        if is_first:
            begun.add(box.track.rank)
        waiting.append(replace(box, needs=(*box.needs, last)) if is_first else box)
    return waiting


def _sorted(boxes: Sequence[Box]) -> tuple[Box, ...]:
    """Return ``boxes`` sorted by track, with their needs renumbered.

    The need of the box before on the same track is dropped, as it is implied.
    """
    order = sorted(range(len(boxes)), key=lambda number: boxes[number].track.place)
    place = {number: at for at, number in enumerate(order)}
    placed = []
    for at, number in enumerate(order):
        box = boxes[number]
        follows = at > 0 and boxes[order[at - 1]].track == box.track
        needs = (place[other] for other in box.needs)
        placed.append(replace(box, needs=tuple(n for n in needs if not follows or n != at - 1)))
    return tuple(placed)


def _held(schedule: Schedule, costs: Costs | None) -> HeldTimes:
    held: dict[Action, tuple[float, float | None]] = {}
    for row, passes in zip(schedule.rows, schedule.compute_rows, strict=True):
        amounts = memory_curve(row, in_microbatches(schedule))
        in_their_bytes: Sequence[float | None] = [None] * len(passes)
        if costs is not None and costs.held_bytes is not None:
            in_their_bytes = memory_curve(row, in_bytes(costs))
        held |= zip(passes, zip(amounts, in_their_bytes, strict=True), strict=True)
    return held


def _figures(timeline: Timeline, schedule: Schedule, costs: Costs | None) -> PageFigures:
    in_their_bytes = None
    if costs is not None and costs.held_bytes is not None:
        in_their_bytes = tuple(peaks(schedule, in_bytes(costs)))
    return PageFigures(
        timeline.makespan,
        timeline.span,
        timeline.bubble_share_makespan,
        timeline.bubble_share_span,
        tuple(peaks(schedule, in_microbatches(schedule))),
        in_their_bytes,
    )


def _chunks(placement: Placement) -> tuple[int, ...]:
    chunk = {s: number for row in placement.stages_of for number, s in enumerate(row)}
    return tuple(chunk[stage] for stage in range(placement.stages))


def _pace(timelines: Sequence[Timeline]) -> tuple[str, ...]:
    """Return a sentence on the time between several steps; nothing for one step."""
    if len(timelines) == 1:
        return ()
    ends = [max(row[-1].end for row in timeline.compute if row) for timeline in timelines]
    intervals = [later - earlier for earlier, later in pairwise(ends)]
    pace = f"{counted(len(timelines), 'step')}, one every {sum(intervals) / len(intervals):.4g}."
    if any(event.action.kind is Kind.STEP for event in timelines[0].events):
        return (f"With post-validation: {pace}",)
    return (pace,)
