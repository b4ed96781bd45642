"""Timelines as a trace file that Perfetto (ui.perfetto.dev) and chrome://tracing open, and back.

A process is a pipeline rank. Its tracks: the passes as measured (or as simulated, where nothing is
measured), the reductions of its chunks, the passes and messages as predicted.
"""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.schedule.action import Action, parse
from megatron_ext.schedule.kinds import RULES, Lane
from megatron_ext.schedule.memory import in_microbatches, memory_curve
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.schedule.timeline import Event, Reduction, Timeline

NAME = "trace.json"  # in the folder that a training run is given
_END = "\n]}\n"


class _Track(enum.IntEnum):
    """Tracks of a rank, from top to bottom. A chunk's reductions are beneath `REDUCTIONS`."""

    PASSES = 0
    MESSAGES = 1
    PREDICTED_PASSES = 2
    PREDICTED_MESSAGES = 3
    REDUCTIONS = 4


_LANES = (Lane.COMPUTE, Lane.SEND)  # what takes time there


@dataclass(frozen=True)
class TracedStep:
    """A measured step beside its prediction.

    Attributes:
        iteration: as Megatron's log counts.
        predicted: simulated, with costs ``cost_factor`` times those of the program: so that its
            passes take as long as the measured ones, all together. It starts with ``measured``.
        clock_error: seconds by which a rank's clock may be off rank 0's, at most.
    """

    iteration: int
    measured: Timeline
    predicted: Timeline
    cost_factor: float
    clock_error: float


def beside(
    iteration: int, measured: Timeline, simulated: Timeline, clock_error: float
) -> TracedStep:
    """``measured`` with its prediction, scaled to the same work and moved to the same start."""
    factor = measured.work / simulated.work
    predicted = simulated.moved(measured.start, factor)
    return TracedStep(iteration, measured, predicted, factor, clock_error)


class TraceFile:
    """A trace file being written: whole, and good JSON, after each step."""

    def __init__(self, path: Path) -> None:
        """Start ``path`` afresh; its folder is made if there is none."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"displayTimeUnit": "ms", "traceEvents": [' + _END)
        self._path = path
        self._is_empty = True
        self._origin: float | None = None  # what time 0 of the trace is
        self._tracks: set[tuple[int, int]] = set()

    def add(self, step: TracedStep) -> None:
        """Write ``step``: its passes and reductions, and what was predicted beside them."""
        if self._origin is None:
            self._origin = step.measured.start
        about = {
            "iteration": step.iteration,
            "schedule": step.measured.schedule.name,
            "cost_factor": step.cost_factor,
            "clock_error_us": step.clock_error * 1e6,
        }
        events = [
            *_passes(step.measured, _Track.PASSES, _Track.MESSAGES, about),
            *_reductions(step.measured, about),
            *_passes(step.predicted, _Track.PREDICTED_PASSES, _Track.PREDICTED_MESSAGES, about),
            *_held(step.measured),
        ]
        self._write(events, self._origin, 1.0)

    def add_simulated(self, timeline: Timeline, seconds_per_unit: float) -> None:
        """Write ``timeline`` alone."""
        events = [*_passes(timeline, _Track.PASSES, _Track.MESSAGES, {}), *_held(timeline)]
        self._write(events, 0.0, seconds_per_unit)

    def _write(self, events: Sequence[dict[str, Any]], origin: float, scale: float) -> None:
        lines: list[str] = []
        for event in events:
            lines += map(json.dumps, self._names(event["pid"], event.get("tid", 0)))
            times = {"ts": (event["ts"] - origin) * scale * 1e6}
            if "dur" in event:
                times["dur"] = event["dur"] * scale * 1e6
            lines.append(json.dumps(event | times))
        text = ("\n" if self._is_empty else ",\n") + ",\n".join(lines) + _END
        with self._path.open("r+b") as file:
            file.seek(-len(_END), os.SEEK_END)
            file.write(text.encode())
        self._is_empty = False

    def _names(self, rank: int, track: int) -> Iterator[dict[str, Any]]:
        """What has to be said of a track before its first event."""
        if (rank, track) in self._tracks:
            return
        self._tracks.add((rank, track))
        yield _named("process_name", rank, track, {"name": f"rank {rank}"})
        yield _named("thread_name", rank, track, {"name": _title(track)})
        yield _named("thread_sort_index", rank, track, {"sort_index": track})


def write_trace(timeline: Timeline, path: Path, seconds_per_unit: float = 1e-3) -> None:
    """Write a simulated ``timeline``: a process per rank with its passes, its messages and what it
    holds.

    Args:
        seconds_per_unit: what one unit of the costs is in the trace; the default shows costs in
            milliseconds.
    """
    TraceFile(path).add_simulated(timeline, seconds_per_unit)


def read_trace(path: Path) -> list[TracedStep]:
    """The steps that a training run has written to ``path``, or to `NAME` in that folder.

    Raises:
        ValueError: there is no such file, it is not JSON, or it has no measured step.
    """
    file = path / NAME if path.is_dir() else path
    try:
        events = json.loads(file.read_text())["traceEvents"]
    except OSError as error:
        raise ValueError(
            f"{file} cannot be read: {error}; --pipeline-trace DIR --pipeline-trace-iters A:B "
            f"writes a trace there while it trains"
        ) from None
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is no trace: {error!r}") from None
    iterations: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X" and "iteration" in event["args"]:
            iterations.setdefault(event["args"]["iteration"], []).append(event)
    if not iterations:
        raise ValueError(f"{file} has no measured step: it is not of a training run")
    return [_step(iteration, mine) for iteration, mine in iterations.items()]


def _step(iteration: int, events: Sequence[dict[str, Any]]) -> TracedStep:
    about = events[0]["args"]
    return TracedStep(
        iteration,
        _timeline(events, _Track.PASSES),
        _timeline(events, _Track.PREDICTED_PASSES),
        about["cost_factor"],
        about["clock_error_us"] / 1e6,
    )


def _timeline(events: Sequence[dict[str, Any]], track: _Track) -> Timeline:
    """The passes of ``track``, and with them the reductions of a measured step."""
    found: list[list[Event]] = [[] for _ in range(1 + max(event["pid"] for event in events))]
    reductions = []
    for event in events:
        rank, start, end = event["pid"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
        if event["tid"] == track:
            found[rank].append(Event(rank, parse(event["name"]), start, end))
        elif event["tid"] >= _Track.REDUCTIONS and track is _Track.PASSES:
            args = event["args"]
            reductions.append(Reduction(rank, args["stage"], start, end, args["is_exact"]))
    rows = tuple(tuple(event.action for event in row) for row in found)
    rank_of = {action.stage: rank for rank, row in enumerate(rows) for action in row}
    placement = Placement("trace", tuple(rank_of[stage] for stage in range(len(rank_of))))
    schedule = Schedule(events[0]["args"]["schedule"], placement, rows)
    return Timeline(schedule, tuple(event for row in found for event in row), tuple(reductions))


def _passes(
    timeline: Timeline, passes: _Track, messages: _Track, about: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    for event in timeline.events:
        lane = RULES[event.action.kind].lane
        if lane in _LANES:
            track = passes if lane is Lane.COMPUTE else messages
            yield _slice(event.rank, track, str(event.action), lane.value, event) | {
                "args": _whose(event.action) | about
            }


def _reductions(timeline: Timeline, about: dict[str, Any]) -> Iterator[dict[str, Any]]:
    stages_of = timeline.schedule.placement.stages_of
    for each in timeline.reductions:
        # Those of two chunks may overlap, which one track could not show.
        track = _Track.REDUCTIONS + stages_of[each.rank].index(each.stage)
        name = f"reduction of stage {each.stage}" + ("" if each.is_exact else " (at the latest)")
        yield _slice(each.rank, track, name, "reduction", each) | {
            "args": {"stage": each.stage, "is_exact": each.is_exact} | about
        }


def _held(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for rank, row in enumerate(timeline.compute):
        curve = memory_curve(timeline.schedule.rows[rank], in_microbatches(timeline.schedule))
        for event, held in zip(row, curve, strict=True):
            yield _counter(rank, event.start, held)
        if row:
            yield _counter(rank, row[-1].end, 0.0)


def _whose(action: Action) -> dict[str, int]:
    return {"stage": action.stage, "microbatch": action.microbatch}


def _slice(
    rank: int, track: int, name: str, category: str, event: Event | Reduction
) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": rank,
        "tid": int(track),
        "name": name,
        "cat": category,
        "ts": event.start,
        "dur": event.end - event.start,
    }


def _counter(rank: int, ts: float, held: float) -> dict[str, Any]:
    return {"ph": "C", "pid": rank, "name": "held", "ts": ts, "args": {"microbatches": held}}


def _title(track: int) -> str:
    if track >= _Track.REDUCTIONS:
        return f"reduction, chunk {track - _Track.REDUCTIONS}"
    return _Track(track).name.lower().replace("_", " ")


def _named(what: str, rank: int, track: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": int(track), "name": what, "args": args}
