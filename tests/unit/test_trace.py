"""Trace files of measured steps: what is written is read back, and each moment's file is whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.build.registry import choose
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.program.simulate import simulate
from megatron_ext.schedule.schedule import is_compute
from megatron_ext.schedule.show.trace import (
    NAME,
    TracedStep,
    TraceFile,
    beside,
    read_trace,
    write_trace,
)
from megatron_ext.schedule.timeline import Reduction, Timeline
from tests.helpers.schedules import line_problem, program

PROGRAM = program("zb-h1", line_problem(3, 4, 10, 12, 8, 1))
SIMULATED = simulate(PROGRAM, PROGRAM.problem.costs)


def measured(start: float, slow: Action | None = None) -> Timeline:
    """As a recorder gives it: passes alone, here a hundredth of the costs long."""
    passes = tuple(event for event in SIMULATED.events if is_compute(event.action))
    timeline = replace(SIMULATED, events=passes).moved(start, 0.01)
    events = tuple(
        replace(event, end=event.end + 0.5) if event.action == slow else event
        for event in timeline.events
    )
    reductions = tuple(
        Reduction(rank, rank, row[-1].end, row[-1].end + 0.25, rank > 0)
        for rank, row in enumerate(timeline.compute)
    )
    return Timeline(timeline.schedule, events, reductions)


def written(folder: Path) -> list[TracedStep]:
    last = Action(2, Kind.BACKWARD_WEIGHT, 3)
    steps = [
        beside(7, measured(1000.0), SIMULATED, 2e-5),
        beside(8, measured(1003.0, slow=last), SIMULATED, 1e-5),
    ]
    file = TraceFile(folder / "new" / NAME)
    for step in steps:
        file.add(step)
    return steps


def events_of(folder: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads((folder / "new" / NAME).read_text())["traceEvents"]
    return events


def same(actual: Timeline, expected: Timeline, shift: float) -> bool:
    """Whether the passes and reductions of ``actual`` are ``expected``'s, ``shift`` later."""

    def times(timeline: Timeline) -> list[float]:
        passes = [(e.start, e.end) for row in timeline.compute for e in row]
        reductions = [(r.start, r.end) for r in timeline.reductions]
        return [time for both in (*passes, *reductions) for time in both]

    def names(timeline: Timeline) -> list[object]:
        passes = [(e.rank, e.action) for row in timeline.compute for e in row]
        return [*passes, *((r.rank, r.stage, r.is_exact) for r in timeline.reductions)]

    return names(actual) == names(expected) and times(actual) == pytest.approx(
        [time + shift for time in times(expected)]
    )


def test_steps_are_read_as_they_were_written(tmp_path: Path) -> None:
    steps = written(tmp_path)
    read = read_trace(tmp_path / "new")
    assert [(s.iteration, s.clock_error) for s in read] == [(7, 2e-5), (8, pytest.approx(1e-5))]
    for step, expected in zip(read, steps, strict=True):
        assert same(step.measured, expected.measured, -1000.0)
        assert same(step.predicted, expected.predicted, -1000.0)
        assert step.cost_factor == pytest.approx(expected.cost_factor)
        assert step.measured.schedule.name == "zb-h1"
        assert step.measured.schedule.placement.rank_of == (0, 1, 2)


def test_a_prediction_starts_with_its_step_and_has_its_work(tmp_path: Path) -> None:
    right, slow = written(tmp_path)
    assert right.cost_factor == pytest.approx(0.01)
    assert right.predicted.makespan == pytest.approx(right.measured.makespan)
    assert slow.cost_factor > 0.01 and slow.predicted.work == pytest.approx(slow.measured.work)
    assert slow.predicted.start == pytest.approx(slow.measured.start)


def test_the_file_is_whole_after_each_step(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / NAME)
    assert json.loads((tmp_path / NAME).read_text())["traceEvents"] == []
    with pytest.raises(ValueError, match="no measured step"):
        read_trace(tmp_path)
    for number in (1, 2, 3):
        file.add(beside(number, measured(float(number)), SIMULATED, 0.0))
        assert [step.iteration for step in read_trace(tmp_path)] == [*range(1, number + 1)]


def test_every_rank_has_its_tracks_named_once(tmp_path: Path) -> None:
    written(tmp_path)
    named = [
        (event["pid"], event["args"]["name"])
        for event in events_of(tmp_path)
        if event["name"] == "thread_name"
    ]
    expected = [
        (rank, title)
        for rank in range(3)
        for title in ("passes", f"reduction of stage {rank}", "predicted passes")
    ]
    for rank in range(2):
        expected.append((rank, f"predicted SEND_F to rank {rank + 1}"))
        expected.append((rank + 1, f"predicted SEND_B to rank {rank}"))
    assert sorted(named) == sorted(expected)


def overlapping(folder: Path) -> Timeline:
    """A V on which messages of all channels are under way at once."""
    placement = choose("zb-v").place(3)
    problem = Problem(placement, 6, uniform(placement, 1, 1, 1, 3))
    timeline = simulate(program("zb-v", problem), problem.costs)
    write_trace([timeline], folder / "new" / NAME)
    return timeline


@pytest.mark.parametrize("write", [written, overlapping])
def test_what_shares_a_track_does_not_overlap(
    write: Callable[[Path], object], tmp_path: Path
) -> None:
    """A viewer would show one of two slices that overlap, or nest them."""
    write(tmp_path)
    ends: dict[tuple[int, int], float] = {}
    spans = [event for event in events_of(tmp_path) if event["ph"] == "X"]
    for event in sorted(spans, key=lambda event: float(event["ts"])):
        track = event["pid"], event["tid"]
        assert event["ts"] >= ends.get(track, 0.0) - 1e-3, event
        ends[track] = event["ts"] + event["dur"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read"),
        ("{", "is no trace"),
        ('{"events": []}', "is no trace"),
        ("[]", "is no trace"),
        ('{"traceEvents": []}', "no measured step"),
    ],
)
def test_no_trace(content: str | None, why: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / NAME).write_text(content)
    result = CliRunner().invoke(app, ["trace", str(tmp_path)])
    assert result.exit_code == 2 and why in result.output, result.output


def test_the_command_tells_of_the_median_step(tmp_path: Path) -> None:
    written(tmp_path)
    folder = str(tmp_path / "new")
    report = json.loads(CliRunner().invoke(app, ["trace", folder, "--json"]).stdout)
    assert report["iteration"] == 7 and [row["iteration"] for row in report["iterations"]] == [7, 8]
    assert (report["schedule"], report["pp"], report["microbatches"]) == ("zb-h1", 3, 4)
    for key in ("makespan", "span", "bubble_share_makespan", "bubble_share_span"):
        assert report["measured"][key] == pytest.approx(report["predicted"][key])
    assert sum(report["parts"].values()) == pytest.approx(report["measured"]["makespan"])
    text = CliRunner().invoke(app, ["trace", folder]).stdout
    assert "iteration 7, the median of 2" in text and "the schedule's own bubble" in text


def test_the_command_names_what_cost_the_most(tmp_path: Path) -> None:
    slow = Action(2, Kind.BACKWARD_WEIGHT, 3)
    last = measured(0.0, slow)
    assert last.compute[2][-1] == next(e for e in last.events if e.action == slow), "not its last"
    TraceFile(tmp_path / NAME).add(beside(3, last, SIMULATED, 0.0))
    text = CliRunner().invoke(app, ["trace", str(tmp_path / NAME)]).stdout
    assert "1. 2W3 on rank 2 was a slow pass: 580 ms, usually 80 ms" in text, text
