"""A timeline as a trace file that Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_ext.schedule.kinds import RULES, Lane
from megatron_ext.schedule.memory import in_microbatches, memory_curve
from megatron_ext.schedule.timeline import Timeline

_TRACK = {Lane.COMPUTE: 0, Lane.SEND: 1}  # what is on a rank's tracks; the rest takes no time there


def write_trace(timeline: Timeline, path: Path, seconds_per_unit: float = 1e-3) -> None:
    """Write ``timeline``: a process per rank with its passes, its messages and what it holds.

    Args:
        seconds_per_unit: what one unit of the costs is in the trace; the default shows costs in
            milliseconds.
    """
    scale = seconds_per_unit * 1e6
    events: list[dict[str, Any]] = []
    for rank, row in enumerate(timeline.compute):
        events.append(_named("process_name", rank, 0, f"rank {rank}"))
        events.append(_named("thread_name", rank, _TRACK[Lane.COMPUTE], "passes"))
        events.append(_named("thread_name", rank, _TRACK[Lane.SEND], "messages"))
        curve = memory_curve(timeline.schedule.rows[rank], in_microbatches(timeline.schedule))
        for event, held in zip(row, curve, strict=True):
            events.append(_counter(rank, event.start * scale, held))
        if row:
            events.append(_counter(rank, row[-1].end * scale, 0.0))
    for event in timeline.events:
        lane = RULES[event.action.kind].lane
        if lane in _TRACK:
            events.append(
                {
                    "ph": "X",
                    "pid": event.rank,
                    "tid": _TRACK[lane],
                    "name": str(event.action),
                    "cat": lane.value,
                    "ts": event.start * scale,
                    "dur": (event.end - event.start) * scale,
                    "args": {"stage": event.action.stage, "microbatch": event.action.microbatch},
                }
            )
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _named(what: str, rank: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": track, "name": what, "args": {"name": name}}


def _counter(rank: int, ts: float, held: float) -> dict[str, Any]:
    return {"ph": "C", "pid": rank, "name": "held", "ts": ts, "args": {"microbatches": held}}
