"""Timelines as a trace file that Perfetto (ui.perfetto.dev) and chrome://tracing open, and back.

A process is a pipeline rank. It has tracks for the measured passes (or simulated ones, if nothing
is measured), for the reductions of its chunks, and for the predicted passes and messages. Actions
that may overlap have separate tracks, since a track shows slices one after the other.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_ext.base.text_file import (
    how_to_rename,
    parse_json,
    read_text_file,
    whole_file,
    write_text_file,
)
from megatron_ext.base.words import bytes_text, shown
from megatron_ext.compile.program.graph import channel_of
from megatron_ext.compile.program.memory import in_microbatches, memory_curve
from megatron_ext.observe.fitted_parts import ModelParts
from megatron_ext.observe.json_record import Record
from megatron_ext.schedule.action import (
    Action,
    Kind,
    OverlappedPasses,
    Slice,
    parse_action,
    slices_named,
    whole_of,
)
from megatron_ext.schedule.kinds import HOST_LANES, RULES, Lane, Where
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.schedule.stock_executor import StockExecutor
from megatron_ext.schedule.timeline import Event, GradientReduction, Timeline

NAME = "trace.json"  # name of a trace in the folder that a training run is given
_VERSION = 3
_BEGIN = f'{{"displayTimeUnit": "ms", "version": {_VERSION}, "traceEvents": ['
_END = "\n]}\n"
_LARGEST = 2**31  # largest trace in bytes that is read
LARGEST_WRITTEN = 2**30  # largest trace in bytes that a training writes
TRACED_OF_RUN = range(5, 8)  # iterations of a run that are traced by default


# Categories of events in a trace.
_PASS, _PREDICTED_PASS, _REDUCTION = "compute", "predicted compute", "reduction"
# Name of an event that only steps of Megatron's own schedule have.
_STOCK = "a step of Megatron's own"
_PARTS = "parts of the model"  # event that holds the parts of the model
_RESERVED = "reserved beyond allocated"  # event that holds the reserved bytes

# The entries `weight_shares` and `executor` of a step of Megatron's own schedule.
_OfStock = tuple[tuple[float, ...], StockExecutor]


@dataclass(frozen=True)
class TracedStep:
    """One traced step of a training, with its prediction.

    Attributes:
        iteration: its number in Megatron's log.
        measured: start and end of each pass.
        predicted: the simulated step, with costs ``cost_factor`` times those of the program, so
            that all its passes together take as long as the measured ones. It starts together with
            ``measured``.
        clock_error: seconds by which a rank's clock may be off rank 0's, at most.
        weight_shares: for a step of Megatron's own schedule, the estimated share of W in each
            stage's backward pass; None for a step of this package's executor.
        executor: for a step of Megatron's own schedule, how Megatron sends its messages; else None.
        parts: for a step of Megatron's own schedule, the layers and other parts of its stages;
            None: not known.
        reserved: bytes of each rank that its allocator had reserved beyond the most that it had
            allocated; None without such an allocator, as on a CPU.
    """

    iteration: int
    measured: Timeline
    predicted: Timeline
    cost_factor: float
    clock_error: float
    weight_shares: tuple[float, ...] | None = None
    executor: StockExecutor | None = None
    parts: ModelParts | None = None
    reserved: tuple[float, ...] | None = None


def traced_step(
    iteration: int, measured: Timeline, simulated: Timeline, clock_error: float
) -> TracedStep:
    """Return a measured step with its prediction, which starts with it and is scaled to the same
    work.
    """
    (step,) = traced_steps([iteration], [measured], [simulated], clock_error)
    return step


def traced_steps(
    iterations: Sequence[int],
    measured: Sequence[Timeline],
    simulated: Sequence[Timeline],
    clock_error: float,
) -> list[TracedStep]:
    """Return measured steps of consecutive iterations with their predictions.

    The predicted steps are scaled to the same total work. They overlap as they were simulated
    (`simulate_steps`), and begin with the first step that was measured.
    """
    factor = sum(step.work for step in measured) / sum(step.work for step in simulated)
    start, first = measured[0].start, simulated[0].start
    return [
        TracedStep(
            iteration,
            measured_step,
            step.moved(start + (step.start - first) * factor, factor),
            factor,
            clock_error,
        )
        for iteration, measured_step, step in zip(iterations, measured, simulated, strict=True)
    ]


class TraceFile:
    """Trace file that is being written, and is complete, valid JSON after each step.

    Raises:
        OSError: it cannot be written, or a step would make it larger than ``largest`` bytes.
    """

    def __init__(self, path: Path, largest: float = math.inf) -> None:
        """Start the trace file ``path`` afresh; its folder is made if there is none."""
        self._largest = largest
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_file(path, _BEGIN + _END)
        self._path = path
        self._is_empty = True
        self._origin: float | None = None  # seconds of the clock that are time 0 in the trace
        self._tracks: dict[tuple[int, str], int] = {}  # numbers of tracks by rank and title

    def add(self, step: TracedStep) -> None:
        """Write one step to the trace: its passes and reductions, and the predicted passes."""
        origin = step.measured.start if self._origin is None else self._origin
        about = {
            "iteration": step.iteration,
            "schedule": step.measured.schedule.name,
            "cost_factor": step.cost_factor,
            "clock_error_us": step.clock_error * 1e6,
        }
        self._write(_events_of(step, about), origin, 1.0)
        self._origin = origin

    def add_simulated(self, steps: Sequence[Timeline], seconds_per_unit: float) -> None:
        """Write consecutive simulated ``steps`` to the trace, without measured ones."""
        for number, timeline in enumerate(steps):
            events = [*_slices(timeline, "", {"step": number}), *_held(timeline)]
            self._write(events, 0.0, seconds_per_unit)

    def _write(self, events: Sequence[dict[str, Any]], origin: float, scale: float) -> None:
        lines: list[str] = []
        tracks = dict(self._tracks)
        for event in events:
            placed = {"ts": (event["ts"] - origin) * scale * 1e6}
            if "dur" in event:
                placed["dur"] = event["dur"] * scale * 1e6
            if "track" in event:
                rank, title = event["pid"], event.pop("track")
                if (rank, title) not in tracks:
                    tracks[rank, title] = len(tracks)
                    lines += map(json.dumps, _names(rank, title, tracks[rank, title]))
                placed["tid"] = tracks[rank, title]
            lines.append(json.dumps(event | placed))
        text = ("\n" if self._is_empty else ",\n") + ",\n".join(lines) + _END
        with self._path.open("r+b", buffering=0) as file:
            end = file.seek(-len(_END), os.SEEK_END)
            if end + len(text) > self._largest:
                raise OSError(
                    errno.EFBIG,
                    f"the trace has {bytes_text(end)}, and no more than "
                    f"{bytes_text(self._largest)} are written",
                    str(self._path),
                )
            try:
                _write_all(file, text.encode())
            except OSError as error:  # for instance, the disk is full
                file.seek(end)
                # If the text cannot be written, the file's old end is restored. The file had these
                # bytes before, so even a full disk has room for them.
                file.write(_END.encode())
                file.truncate()
                raise OSError(error.errno, error.strerror, str(self._path)) from error
        self._is_empty, self._tracks = False, tracks


def _events_of(step: TracedStep, about: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        *_slices(step.measured, "", about),
        *_reductions(step.measured, about),
        *_slices(step.predicted, "predicted ", about),
        *_held(step.measured),
        *_step_metadata(step),
    ]


def bytes_of_step(simulated: Timeline) -> int:
    """Return about how many bytes a step takes in a trace, given its prediction."""
    passes = tuple(event for row in simulated.compute for event in row)
    step = traced_step(1000, replace(simulated, events=passes), simulated, 1e-5)
    about = {"iteration": 1000, "schedule": simulated.schedule.name, "cost_factor": 1 / 3}
    digits = 16  # digits of a measured time in the file
    return sum(
        len(json.dumps(event)) + digits * ("dur" in event) for event in _events_of(step, about)
    )


def _write_all(file: io.RawIOBase, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def write_trace(steps: Sequence[Timeline], path: Path, seconds_per_unit: float = 1e-3) -> None:
    """Write simulated ``steps``, one after the other on one clock, as a trace file.

    It has a process per rank with its passes, its messages and the memory that it holds.

    Args:
        seconds_per_unit: seconds in the trace of one unit of the costs; the default shows costs in
            milliseconds.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as begun:
        TraceFile(begun).add_simulated(steps, seconds_per_unit)


def read_trace(path: Path) -> list[TracedStep]:
    """Return the steps that a training run has written to the trace ``path`` (or `NAME` in it).

    Raises:
        ValueError: there is no such file, it is not JSON, it has no measured step, another version
            wrote it, or a step of it differs from what `TraceFile` writes.
    """
    file = path / NAME if path.is_dir() else path
    try:
        text = read_text_file(file, "trace", _LARGEST)
    except ValueError as error:
        raise ValueError(
            f"{error}; --pipeline-trace DIR --pipeline-trace-iters A:B writes a trace while it "
            f"trains"
        ) from None
    try:
        data = parse_json(text)
    except ValueError as error:
        raise ValueError(
            f"{file} is no complete JSON file: {error}; write the trace again if its run was "
            "killed while it wrote"
        ) from None
    events = data.get("traceEvents") if isinstance(data, dict) else None
    if not isinstance(events, list):
        raise ValueError(f"{file} is no trace: the file has no list 'traceEvents' at the top level")
    if (version := data.get("version")) != _VERSION and any(map(_is_of_a_step, events)):
        raise ValueError(
            f"{file} was written by another version of megatron_ext: its version is "
            f"{shown(version)}, and only {_VERSION} is known; {how_to_rename(version, _VERSION)}"
            f"write a new trace with --pipeline-trace DIR"
        )
    iterations: dict[int, list[_Slice]] = {}
    of_stock: dict[int, _OfStock] = {}  # entries of steps of Megatron's own schedule, by iteration
    parts: dict[int, ModelParts] = {}
    reserved: dict[int, tuple[float, ...]] = {}
    for number, event in enumerate(events):
        where = f"{file}, event {number}"
        if _is_of_a_step(event):
            slice_ = _read_slice(event, where)
            iterations.setdefault(slice_.args.count("iteration"), []).append(slice_)
        elif _has_args(event) and event.get("name") == _STOCK:
            about = Record(event["args"], f"{where}, args")
            of_stock[about.count("iteration")] = _read_of_stock(about)
        elif _has_args(event) and event.get("name") == _PARTS:
            about = Record(event["args"], f"{where}, args")
            parts[about.count("iteration")] = _read_parts(about)
        elif _has_args(event) and event.get("name") == _RESERVED:
            about = Record(event["args"], f"{where}, args")
            reserved[about.count("iteration")] = about.amounts("bytes")
    if not iterations:
        raise ValueError(
            f"{file} has no measured step of a training; give a trace that --pipeline-trace DIR "
            "wrote"
        )
    traced = []
    for iteration, slices in iterations.items():
        where = f"{file}, iteration {iteration}"
        step = _step(iteration, slices, of_stock.get(iteration), where)
        step = _with_parts(step, parts.get(iteration), where)
        traced.append(replace(step, reserved=reserved.get(iteration)))
    return traced


def reserved_in(steps: Sequence[TracedStep]) -> float | None:
    """Return the most bytes that a rank's allocator had reserved beyond its allocations.

    They are those of the last traced step; None if it was not traced on GPUs.
    """
    latest = steps[-1].reserved
    return max(latest) if latest else None


@dataclass(frozen=True)
class _Slice:
    """One slice (event) of a step, as read from a trace."""

    rank: int
    name: str
    category: str
    start: float
    end: float
    args: Record


def _is_of_a_step(event: Any) -> bool:
    return _has_args(event) and event.get("ph") == "X" and "iteration" in event["args"]


def _has_args(event: Any) -> bool:
    return isinstance(event, dict) and isinstance(event.get("args"), dict)


def _read_slice(event: dict[str, Any], where: str) -> _Slice:
    record = Record(event, where)
    start, seconds = record.number("ts") / 1e6, record.number("dur") / 1e6
    if seconds < 0:
        raise ValueError(f"{where}: dur is {seconds * 1e6:g}, and no duration is negative")
    args = Record(event["args"], f"{where}, args")
    rank, name, category = record.count("pid"), record.text("name"), record.text("cat")
    return _Slice(rank, name, category, start, start + seconds, args)


def _step(
    iteration: int, slices: Sequence[_Slice], of_stock: _OfStock | None, where: str
) -> TracedStep:
    shares, executor = of_stock or (None, None)
    about = slices[0].args
    measured = _timeline(slices, _PASS, f"{where}, measured")
    predicted = _timeline(slices, _PREDICTED_PASS, f"{where}, predicted")
    if measured.schedule.rows != predicted.schedule.rows:
        raise ValueError(
            f"{where}: the predicted passes are in another order than the measured ones, or are "
            "others"
        )
    stages = measured.schedule.placement.stages
    if shares is not None and len(shares) != stages:
        raise ValueError(
            f"{where}: weight_shares has {len(shares)} figures, and the schedule has {stages} "
            "stages"
        )
    return TracedStep(
        iteration,
        measured,
        predicted,
        about.number("cost_factor"),
        about.number("clock_error_us") / 1e6,
        shares,
        executor,
    )


def _timeline(slices: Sequence[_Slice], category: str, where: str) -> Timeline:
    """Return the timeline of the passes of one trace ``category``, measured or predicted.

    A measured one has the reductions of gradients too.
    """
    of_rank: dict[int, list[Event]] = {}
    reductions, pairs = [], list[OverlappedPasses]()
    try:
        parts = slices_named(" ".join(s.name for s in slices if s.category == category))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    for slice_ in slices:
        if slice_.category == category:
            try:
                event = Event(
                    slice_.rank, parse_action(slice_.name, parts), slice_.start, slice_.end
                )
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            of_rank.setdefault(slice_.rank, []).append(event)
            if event.action.kind is Kind.FORWARD and "overlapped_with" in slice_.args.data:
                pairs.append(OverlappedPasses(event.action, _paired_with(slice_.args, where)))
        elif slice_.category == _REDUCTION and category == _PASS:
            stage, is_exact = slice_.args.count("stage"), slice_.args.truth("is_exact")
            reductions.append(
                GradientReduction(slice_.rank, stage, slice_.start, slice_.end, is_exact)
            )
    rows = [tuple(of_rank[rank]) for rank in sorted(of_rank)]
    _check_rows(rows, where)
    rank_of = {event.action.stage: event.rank for row in rows for event in row}
    placement = Placement("trace", tuple(rank_of[stage] for stage in range(len(rank_of))))
    actions = tuple(tuple(event.action for event in row) for row in rows)
    schedule = Schedule(slices[0].args.text("schedule"), placement, actions, frozenset(pairs))
    return Timeline(schedule, tuple(event for row in rows for event in row), tuple(reductions))


def _paired_with(args: Record, where: str) -> Action:
    try:
        return parse_action(args.text("overlapped_with"))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _check_rows(rows: Sequence[tuple[Event, ...]], where: str) -> None:
    """Raise ValueError unless the passes in a trace are complete and in order.

    All ranks and stages must have passes, one after the other, each once.
    """
    events = [event for row in rows for event in row]
    for what, numbers in (
        ("rank", {event.rank for event in events}),
        ("stage", {event.action.stage for event in events}),
    ):
        missing = next(n for n in range(len(numbers) + 1) if n not in numbers)
        if missing < len(numbers) or not numbers:
            raise ValueError(f"{where}: {what} {missing} has no pass")
    if len({event.action for event in events}) < len(events):
        raise ValueError(f"{where}: a pass occurs twice")
    for row in rows:
        if any(later.start < event.start for event, later in pairwise(row)):
            raise ValueError(
                f"{where}: the passes of rank {row[0].rank} are not in the order of their starts"
            )
        if not any(event.end > event.start for event in row):
            raise ValueError(f"{where}: all passes of rank {row[0].rank} take no time")


def track_of(action: Action, placement: Placement) -> str | None:
    """Return the title of the track that shows ``action`` in a trace; None if it takes no time."""
    rule = RULES[action.kind]
    if rule.lane is Lane.COMPUTE:
        return "passes"
    if rule.where is Where.RANK:
        return None  # marks and messages of a few bytes take no time, so they have no track
    if rule.lane is Lane.SEND:
        return f"{action.kind} to rank {channel_of(action, placement).receiver}"
    if rule.lane is Lane.COLLECTIVE:
        return action.kind.value
    return rule.lane.value if rule.lane in HOST_LANES else None


def _slices(timeline: Timeline, prefix: str, about: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield trace events for the passes, messages, optimizer steps and verdicts of ``timeline``.

    ``prefix`` precedes the names of their tracks and categories.
    """
    placement, overlapped_with = timeline.schedule.placement, timeline.schedule.overlapped_with
    for event in timeline.events:
        action, rule = event.action, RULES[event.action.kind]
        category, title = prefix + rule.lane.value, track_of(action, placement)
        if title is not None:
            args = {"stage": action.stage, "microbatch": whole_of(action.microbatch)} | about
            if isinstance(action.microbatch, Slice):
                args["slice"] = action.microbatch.slice
            if action in overlapped_with:
                args["overlapped_with"] = str(overlapped_with[action])
            yield _slice(event, str(action), prefix + title, category, args)
        elif rule.where is Where.RANK and not rule.is_message:
            yield _instant(event, str(action), prefix + "passes", category, about)


def _reductions(timeline: Timeline, about: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for reduction in timeline.reductions:
        name = f"reduction of stage {reduction.stage}"
        args = {"stage": reduction.stage, "is_exact": reduction.is_exact} | about
        doubt = "" if reduction.is_exact else " (at the latest)"
        yield _slice(reduction, name + doubt, name, _REDUCTION, args)


def _held(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for rank, row in enumerate(timeline.compute):
        curve = memory_curve(timeline.schedule.rows[rank], in_microbatches(timeline.schedule))
        for event, held in zip(row, curve, strict=True):
            yield _counter(rank, event.start, held)
        if row:
            yield _counter(rank, row[-1].end, 0.0)


def _step_metadata(step: TracedStep) -> Iterator[dict[str, Any]]:
    """Yield metadata events of a traced step, for its values that belong to no pass or message."""
    about: dict[str, dict[str, Any]] = {}
    if step.weight_shares is not None:
        assert step.executor is not None
        about[_STOCK] = {"weight_shares": step.weight_shares, **asdict(step.executor)}
    if step.reserved is not None:
        about[_RESERVED] = {"bytes": step.reserved}
    if step.parts is not None:
        about[_PARTS] = asdict(step.parts)
    for name, facts in about.items():
        args = {"iteration": step.iteration, **facts}
        yield {"ph": "M", "pid": 0, "name": name, "ts": step.measured.start, "args": args}


def _read_of_stock(about: Record) -> _OfStock:
    executor = StockExecutor(about.truth("overlaps"), about.truth("overlaps_ends"))
    return about.shares("weight_shares"), executor


def _read_parts(about: Record) -> ModelParts:
    return ModelParts(
        about.texts_of_rows("layers"),
        about.triples("of_layer"),
        about.triples("first"),
        about.triples("last"),
        about.triple("each"),
    )


def _with_parts(step: TracedStep, parts: ModelParts | None, where: str) -> TracedStep:
    if parts is None:
        return step
    stages = step.measured.schedule.placement.stages
    if len(parts.layers) != stages:
        raise ValueError(
            f"{where}: the table 'layers' has {len(parts.layers)} rows, and the schedule has "
            f"{stages} stages"
        )
    if kinds := {kind for stage in parts.layers for kind in stage} - set(parts.of_layer):
        raise ValueError(
            f"{where}: the table 'of_layer' lacks the kinds of layers {', '.join(sorted(kinds))}"
        )
    return replace(step, parts=parts)


def _slice(
    what: Event | GradientReduction, name: str, track: str, category: str, args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": what.rank,
        "track": track,
        "name": name,
        "cat": category,
        "ts": what.start,
        "dur": what.end - what.start,
        "args": args,
    }


def _instant(
    event: Event, name: str, track: str, category: str, args: dict[str, Any]
) -> dict[str, Any]:
    """Return the end of ``event`` as an instant event on its rank's track in the trace."""
    return {
        "ph": "i",
        "s": "t",
        "pid": event.rank,
        "track": track,
        "name": name,
        "cat": category,
        "ts": event.end,
        "args": args,
    }


def _counter(rank: int, ts: float, held: float) -> dict[str, Any]:
    return {"ph": "C", "pid": rank, "name": "held", "ts": ts, "args": {"microbatches": held}}


def _names(rank: int, title: str, number: int) -> Iterator[dict[str, Any]]:
    """Yield metadata events that name a rank and a track, before the first event of the track."""
    for what, args in (
        ("process_name", {"name": f"rank {rank}"}),
        ("thread_name", {"name": title}),
        ("thread_sort_index", {"sort_index": number}),
    ):
        yield {"ph": "M", "pid": rank, "tid": number, "name": what, "args": args}
