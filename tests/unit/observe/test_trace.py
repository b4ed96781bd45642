"""Tests of trace files of measured steps: written files can be read back, and the file is whole at
every moment."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.registry import choose
from megatron_ext.observe.trace import (
    NAME,
    TracedStep,
    TraceFile,
    bytes_of_step,
    read_trace,
    reserved_in,
    traced_step,
    write_trace,
)
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import is_compute
from megatron_ext.schedule.timeline import GradientReduction, Timeline
from tests.helpers.full_disk import full_disk
from tests.helpers.schedules import line_problem, program

PROGRAM = program("zb-h1", line_problem(3, 4, 10, 12, 8, 1))
SIMULATED = simulate(PROGRAM, PROGRAM.problem.costs)


def measured(start: float, slow: Action | None = None) -> Timeline:
    """Return a timeline as a recorder gives it: passes only, with a hundredth of their costs as
    seconds."""
    passes = tuple(event for event in SIMULATED.events if is_compute(event.action))
    timeline = replace(SIMULATED, events=passes).moved(start, 0.01)
    events = tuple(
        event._replace(end=event.end + 0.5) if event.action == slow else event
        for event in timeline.events
    )
    reductions = tuple(
        GradientReduction(rank, rank, row[-1].end, row[-1].end + 0.25, rank > 0)
        for rank, row in enumerate(timeline.compute)
    )
    return Timeline(timeline.schedule, events, reductions)


def written(folder: Path) -> list[TracedStep]:
    last = Action(2, Kind.BACKWARD_WEIGHT, 3)
    steps = [
        traced_step(7, measured(1000.0), SIMULATED, 2e-5),
        traced_step(8, measured(1003.0, slow=last), SIMULATED, 1e-5),
    ]
    file = TraceFile(folder / "new" / NAME)
    for step in steps:
        file.add(step)
    return steps


def events_of(folder: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads((folder / "new" / NAME).read_text())["traceEvents"]
    return events


def same(actual: Timeline, expected: Timeline, shift: float) -> bool:
    """Return whether ``actual`` has the passes and reductions of ``expected``, each later by
    ``shift``."""

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


def test_what_allocators_reserve_is_kept(tmp_path: Path) -> None:
    step = traced_step(7, measured(1000.0), SIMULATED, 0.0)
    TraceFile(tmp_path / NAME).add(replace(step, reserved=(3.0, 5.0, 4.0)))
    (read,) = read_trace(tmp_path)
    assert read.reserved == (3.0, 5.0, 4.0) and reserved_in([read]) == 5.0
    text = (tmp_path / NAME).read_text()
    (tmp_path / NAME).write_text(text.replace("[3.0, 5.0, 4.0]", "[-3.0]"))
    with pytest.raises(ValueError, match=r"bytes is .* a list of numbers from 0 is expected"):
        read_trace(tmp_path)


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
        file.add(traced_step(number, measured(float(number)), SIMULATED, 0.0))
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
    """Write the trace of a V on which messages of all channels are pending at the same time."""
    placement = choose("zb-v").place(3)
    problem = Problem(placement, 6, uniform(placement, 1, 1, 1, 3))
    timeline = simulate(program("zb-v", problem), problem.costs)
    write_trace([timeline], folder / "new" / NAME)
    return timeline


@pytest.mark.parametrize("write", [written, overlapping])
def test_what_shares_a_track_does_not_overlap(
    write: Callable[[Path], object], tmp_path: Path
) -> None:
    """Events on one track of a trace do not overlap. A viewer would omit one of two overlapping
    events, or nest them."""
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
        ("", "is no complete JSON file: Expecting value"),
        ("{", "is no complete JSON file"),
        ("[" * 100_000, "is no complete JSON file"),
        ('{"events": []}', "is no trace"),
        ('{"traceEvents": {}}', "is no trace"),
        ('{"traceEvents": [1, null, {}, {"ph": "X"}, {"ph": "X", "args": 3}]}', "no measured st"),
        ("[]", "is no trace"),
        ('{"traceEvents": []}', "no measured step"),
    ],
)
def test_no_trace(content: str | None, why: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / NAME).write_text(content)
    result = CliRunner().invoke(app, ["trace", str(tmp_path)])
    assert result.exit_code == 2 and why in result.output, result.output


@pytest.mark.parametrize("version", [None, 1, 2, 4])
def test_a_trace_of_another_version_is_named(version: object, tmp_path: Path) -> None:
    """A trace of another version is refused with its file name, because its passes might be
    misread."""
    written(tmp_path)
    file = tmp_path / "new" / NAME
    data = json.loads(file.read_text())
    file.write_text(json.dumps(data | {"version": version}))
    with pytest.raises(
        ValueError, match=r"trace\.json was written by another version .* new trace"
    ):
        read_trace(file)


def test_a_trace_that_was_cut_off(tmp_path: Path) -> None:
    written(tmp_path)
    file = tmp_path / "new" / NAME
    text = file.read_text()
    for length in range(1, len(text) - 2, 487):
        file.write_text(text[:length])
        with pytest.raises(ValueError, match=r"trace\.json is no complete JSON file: .* killed"):
            read_trace(file)


Events = list[dict[str, Any]]


def _first(events: Events, category: str) -> dict[str, Any]:
    return next(event for event in events if event.get("cat") == category)


def _without(category: str) -> Callable[[Events], Events]:
    return lambda events: [event for event in events if event.get("cat") != category]


def _with(key: str, value: Any, category: str = "compute") -> Callable[[Events], Events]:
    def change(events: Events) -> Events:
        _first(events, category)[key] = value
        return events

    return change


def _with_args(key: str, value: Any, category: str = "compute") -> Callable[[Events], Events]:
    def change(events: Events) -> Events:
        _first(events, category)["args"][key] = value
        return events

    return change


def _doubled(events: Events) -> Events:
    return [event for event in events for _ in range(1 + (event is _first(events, "compute")))]


def _timeless(events: Events) -> Events:
    return [event | {"dur": 0} if "dur" in event else event for event in events]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_with("ts", "soon"), r"event \d+: ts is 'soon'; a finite number is expected"),
        (_with("ts", float("nan")), "ts is nan"),
        # This number used to raise an OverflowError.
        (_with("ts", 10**400), "ts is 1000.*; a finite number is expected"),
        (_with("pid", 10**400), "pid is 1000.*; a whole number from 0 is expected"),
        (_with("dur", None), "dur is None"),
        (_with("dur", -1), "dur is -1, and no duration"),
        (_with("pid", "one"), "pid is 'one'; a whole number from 0 is expected"),
        (_with("pid", 999999999999), "measured: rank 3 has no pass"),
        (_with("pid", -1), "pid is -1"),
        (_with("name", "gemm"), r"iteration 7, measured: 'gemm' is not an action"),
        (_with("name", ["0F0"]), "name is .*; a text is expected"),
        (_with("name", "9F0"), "measured: stage 3 has no pass"),
        (_with("name", "0F9"), "the predicted passes are in another order than"),
        (_with("ts", 1e9), "the passes of rank 0 are not in the order"),
        (_with_args("iteration", "7"), "args: iteration is '7'"),
        (_with_args("schedule", None), "args: schedule is None"),
        (_with_args("cost_factor", "1"), "args: cost_factor is '1'"),
        (_with_args("clock_error_us", True), "args: clock_error_us is True"),
        (_with_args("stage", 0.5, "reduction"), "args: stage is 0.5"),
        (_with_args("is_exact", 1, "reduction"), "args: is_exact is 1; true or false"),
        (_without("compute"), "measured: rank 0 has no pass"),
        (_without("predicted compute"), "predicted: rank 0 has no pass"),
        (_doubled, "a pass occurs twice"),
        (_timeless, "all passes of rank 0 take no time"),
    ],
)
def test_an_odd_trace_is_named_with_the_place(
    change: Callable[[Events], Events], why: str, tmp_path: Path
) -> None:
    """The command `trace` refuses an invalid trace with file and place of the mistake. A trace that
    a user has filtered, merged or written by hand used to end the command with a traceback."""
    written(tmp_path)
    events = change(events_of(tmp_path))
    (tmp_path / "new" / NAME).write_text(json.dumps({"version": 3, "traceEvents": events}))
    result = CliRunner().invoke(app, ["trace", str(tmp_path / "new")])
    assert result.exit_code == 2 and re.search(why, result.output), result.output
    assert NAME in result.output


def test_a_file_is_whole_when_the_disk_is_full(tmp_path: Path) -> None:
    """A trace file on a full disk keeps its former steps, and the error names the file. It used to
    be cut off in the middle of an event, with a message that named no file."""
    file = TraceFile(tmp_path / NAME)
    file.add(traced_step(1, measured(1.0), SIMULATED, 0.0))
    before = (tmp_path / NAME).read_bytes()
    with full_disk(len(before) + 1000), pytest.raises(OSError, match=NAME):
        file.add(traced_step(2, measured(2.0), SIMULATED, 0.0))
    assert (tmp_path / NAME).read_bytes() == before
    file.add(traced_step(3, measured(3.0), SIMULATED, 0.0))
    assert [step.iteration for step in read_trace(tmp_path)] == [1, 3]


def test_tracks_are_named_though_the_first_step_did_not_fit(tmp_path: Path) -> None:
    """The tracks of a trace have names even if the first step did not fit on the disk. The names
    used to be assumed to be in the file, which was empty."""
    file = TraceFile(tmp_path / NAME)
    with full_disk(1000), pytest.raises(OSError, match=NAME):
        file.add(traced_step(1, measured(1.0), SIMULATED, 0.0))
    file.add(traced_step(2, measured(2.0), SIMULATED, 0.0))
    events = json.loads((tmp_path / NAME).read_text())["traceEvents"]
    names = [event for event in events if event["name"] == "process_name"]
    assert len(names) >= 3


def test_the_command_explains_the_median_step(tmp_path: Path) -> None:
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
    TraceFile(tmp_path / NAME).add(traced_step(3, last, SIMULATED, 0.0))
    text = CliRunner().invoke(app, ["trace", str(tmp_path / NAME)]).stdout
    assert "1. 2W3 on rank 2 was a slow pass: 580 ms, usually 80 ms" in text, text


def test_a_trace_has_a_limit_on_disk(tmp_path: Path) -> None:
    """A trace stops growing at a limit, and the error names the file. A training with
    --pipeline-trace-iters 1:1000000 used to fill the disk."""
    step = traced_step(7, measured(1000.0), SIMULATED, 0.0)
    limit = 3.5 * bytes_of_step(SIMULATED)
    file = TraceFile(tmp_path / NAME, limit)
    with pytest.raises(OSError, match=r"no more than .* KiB are written") as error:
        for iteration in range(1000):
            file.add(replace(step, iteration=iteration))
    assert error.value.filename == str(tmp_path / NAME)
    assert (tmp_path / NAME).stat().st_size <= limit
    assert len(read_trace(tmp_path)) == iteration >= 2


def test_the_bytes_of_a_trace_are_known_before(tmp_path: Path) -> None:
    step = traced_step(1234, measured(1000.0 / 7), SIMULATED, 1.23456789e-5)
    TraceFile(tmp_path / NAME).add(step)
    size = (tmp_path / NAME).stat().st_size
    assert bytes_of_step(SIMULATED) == pytest.approx(size, rel=0.25)
