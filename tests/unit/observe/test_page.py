"""Tests of the HTML page of timelines, without a browser: its boxes, the dependencies between them,
and its file."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.memory import in_microbatches, peaks
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import choose
from megatron_ext.observe.trace import traced_step
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.problem import Offload, Problem, ScheduleOptions, VocabularyParallel
from megatron_ext.schedule.slices import Slices
from megatron_ext.viz.draw import COLOURS
from megatron_ext.viz.page.boxes import OMITTED, Box, TrackGroup, before, critical_path
from megatron_ext.viz.page.cut import kept_microbatches, shares
from megatron_ext.viz.page.run import MOST_PASSES, Run, cut_to_fit, simulated_run, traced
from megatron_ext.viz.page.write import (
    BROWSER,
    SCRIPTS,
    Page,
    check_page,
    data_of,
    text_of,
    write_page,
)
from tests.helpers.combinations import at_night
from tests.helpers.pages import data_in
from tests.helpers.schedules import line_problem, program
from tests.unit.observe.test_trace import SIMULATED, measured, written

runner = CliRunner()


def program_of(name: str, p: int = 4, m: int = 6, **options: Any) -> Program:
    costs = "f=10,i=12,w=8,comm=1,output_layer=6/6/6,embedding=1/2,d2h=4"
    resolved = choose(name)
    placement = resolved.place(p)
    problem = Problem(
        placement, m, parse_costs(costs, placement), options=ScheduleOptions(**options)
    )
    return build_program(resolved, problem)


ALL_SORTS = {
    "line": program_of("zb-h1"),
    "v": program_of("zb-v"),
    "loop": program_of("interleaved"),
    "vocabulary": program_of("1f1b", vocab_parallel=VocabularyParallel.ONE),
    "offload": program_of("zb-v", activation_offload=Offload.FULL),
    "post-validation": program_of("zb-h2", steps_overlap=True),
    "slices": program_of("1f1b", slices=Slices(2)),
}
EACH = pytest.mark.parametrize("sort", ALL_SORTS)


def label(box: Box) -> str:
    part = "" if box.slice is None else f".{box.slice}"
    return f"{box.stage}{box.kind}{box.microbatch}{part}"


@EACH
def test_every_pass_has_its_box(sort: str) -> None:
    made = ALL_SORTS[sort]
    timeline = simulate(made, made.problem.costs)
    wanted = [
        (event.rank, str(event.action), event.start, event.end)
        for row in timeline.compute
        for event in row
        if event.end > event.start
    ]
    run = simulated_run("x", made)
    boxes = [
        box for box in run.boxes if box.track.group is TrackGroup.PASSES and box.end > box.start
    ]
    assert [(b.track.rank, label(b), b.start, b.end) for b in boxes] == wanted
    assert all(box.cost == pytest.approx(box.end - box.start) for box in boxes)
    tracks = [box.track for box in run.boxes]
    assert tracks == sorted(tracks, key=lambda track: track.place)


@EACH
def test_nothing_starts_before_what_it_waited_for_has_ended(sort: str) -> None:
    """On a page no action starts before the one that it waits for has ended. In a simulated run a
    pass starts as soon as the last of the actions that it waits for has ended."""
    run = simulated_run("x", ALL_SORTS[sort], steps=2)
    for place, box in enumerate(run.boxes):
        ends = [run.boxes[other].end for other in before(run.boxes, place)]
        if box.track.title.isupper():
            continue  # a collective begins when the last rank joins
        assert max(ends, default=0.0) <= box.start + 1e-9, label(box)
        if box.track.group is TrackGroup.PASSES and box.end > box.start:
            assert box.start == pytest.approx(max(ends, default=0.0)), label(box)


def test_a_pass_waits_for_the_message_and_that_for_a_pass_of_another_rank() -> None:
    boxes = simulated_run("x", ALL_SORTS["line"]).boxes
    place = {(label(box), box.track.rank): at for at, box in enumerate(boxes)}
    assert place["1SEND_F0", 1] in boxes[place["2F0", 2]].needs
    assert place["1F0", 1] in boxes[place["1SEND_F0", 1]].needs
    assert place["3SEND_B0", 3] in boxes[place["2I0", 2]].needs


def test_messages_that_take_no_time_are_not_there_and_passes_wait_for_passes() -> None:
    problem = line_problem(3, 4)
    run = simulated_run("x", program("1f1b", problem))
    assert {box.track.group for box in run.boxes} == {TrackGroup.PASSES}
    place = {label(box): at for at, box in enumerate(run.boxes)}
    assert run.boxes[place["1F0"]].needs == (place["0F0"],)
    assert run.boxes[place["1B3"]].needs == (place["1F3"], place["2B3"])


@EACH
def test_the_critical_path_is_without_a_gap(sort: str) -> None:
    run = simulated_run("x", ALL_SORTS[sort])
    path = [run.boxes[place] for place in run.critical]
    assert path[0].start == 0 and path[-1].end == run.length
    for earlier, later in itertools.pairwise(path):
        assert later.start == pytest.approx(earlier.end) or later.track.title.isupper()


def test_the_critical_path_of_a_line_is_down_and_up_again() -> None:
    run = simulated_run("x", program("1f1b", line_problem(3, 2, 1, 1, 1)))
    names = [label(run.boxes[place]) for place in run.critical]
    assert names[:3] == ["0F0", "1F0", "2F0"] and names[-3:] == ["2B1", "1B1", "0B1"]


@EACH
def test_memory_is_that_of_the_proof(sort: str) -> None:
    """The peak of a page's memory curve is the peak of the proof. Counted in microbatches, messages
    take no memory, so the peak is at a pass."""
    made = ALL_SORTS[sort]
    run = simulated_run("x", made)
    wanted = peaks(made.schedule, in_microbatches(made.schedule))
    for rank, peak in enumerate(wanted):
        held = [box.held for box in run.boxes if box.track.rank == rank and box.held is not None]
        assert max(held) <= peak + 1e-9
        if sort != "offload":  # with offload, copies back take memory between passes
            assert max(held) == pytest.approx(peak)
    assert run.figures.peaks == tuple(wanted) and run.figures.peaks_bytes is None


def test_memory_in_bytes_where_costs_have_them() -> None:
    problem = line_problem(2, 3)
    held = {Held.ACTIVATION: (2e9, 3e9), Held.WEIGHT_INPUTS: (1e9, 1e9), Held.LOGITS: (0.0, 0.0)}
    problem = replace(problem, costs=problem.costs.with_passes(held_bytes=held))
    run = simulated_run("x", program("1f1b", problem))
    assert run.figures.peaks_bytes == (4e9, 3e9)
    (first,) = (box for box in run.boxes if label(box) == "0F0")
    assert (first.held, first.held_bytes) == (1, 2e9)


def test_lanes_of_messages_collectives_and_copies() -> None:
    def titles(sort: str, group: TrackGroup) -> set[str]:
        boxes = simulated_run("x", ALL_SORTS[sort]).boxes
        return {b.track.title for b in boxes if b.track.group is group and b.track.rank == 1}

    assert titles("line", TrackGroup.MESSAGES) == {"SEND_F to rank 2", "SEND_B to rank 0"}
    assert {"BCAST_S", "GATHER_S"} < titles("vocabulary", TrackGroup.MESSAGES)
    assert titles("offload", TrackGroup.COPIES) == {"copy to the host", "copy from the host"}


def test_several_steps() -> None:
    made = ALL_SORTS["line"]
    run = simulated_run("x", made, steps=3)
    assert Counter(box.step for box in run.boxes).keys() == {0, 1, 2}
    assert run.remarks == (f"3 steps, one every {run.figures.makespan:.4g}.",)
    overlapping = simulated_run("x", ALL_SORTS["post-validation"], steps=2)
    assert {"STEP", "SETTLE"} <= {box.kind for box in overlapping.boxes}
    assert overlapping.length < 2 * overlapping.figures.makespan
    assert overlapping.remarks[0].startswith("With post-validation: 2 steps, one every ")


def test_a_traced_step_is_beneath_its_prediction() -> None:
    step = traced_step(7, measured(1000.0), SIMULATED, 2e-5)
    predicted, ran = traced(step)
    assert (predicted.title, ran.title) == ("zb-h1, predicted", "zb-h1, measured in iteration 7")
    assert min(box.start for box in ran.boxes) == 0
    reductions = [box for box in ran.boxes if box.kind == "reduction"]
    assert [box.track.title for box in reductions] == [
        "reduction of stage 0 (at the latest)",
        "reduction of stage 1",
        "reduction of stage 2",
    ]
    costs = {label(box): box.end - box.start for box in predicted.boxes}
    passes = [box for box in ran.boxes if box.track.group is TrackGroup.PASSES]
    assert all(box.cost == pytest.approx(costs[label(box)]) for box in passes)
    assert critical_path(ran.boxes) == ran.critical


@pytest.mark.parametrize("most", [1, 60, 150, 400])
def test_what_is_too_large_is_cut_and_says_so(most: int) -> None:
    run = simulated_run("x", program_of("zb-h1", 4, 40))
    (small,) = cut_to_fit([run], most)
    kept = [box for box in small.boxes if box.kind != OMITTED]
    passes = [box for box in kept if box.track.group is TrackGroup.PASSES]
    assert len(passes) <= max(most, 3 * 12)
    microbatches = {box.microbatch for box in kept}
    assert {0, 39} < microbatches
    (remark,) = small.remarks
    assert "480 passes are too many for one page: microbatches 0" in remark
    # The page merges passes but loses none, and each rank is busy for as long as before.
    left_out = [box for box in small.boxes if box.kind == OMITTED]
    assert len(passes) + sum(box.passes for box in left_out) == 480
    assert sum(box.cost for box in (*passes, *left_out)) == pytest.approx(30 * 40 * 4 + 40 * 21)
    for box in small.boxes:
        assert all(small.boxes[other].end <= box.start + 1e-9 for other in box.needs)
        assert all(small.boxes[other].kind != OMITTED for other in box.needs)
    assert max(box.held or 0 for box in small.boxes) == max(run.figures.peaks)
    path = [small.boxes[place] for place in small.critical]
    assert path[-1].end == pytest.approx(run.figures.makespan)


def test_what_fits_is_not_cut() -> None:
    run = simulated_run("x", ALL_SORTS["line"])
    assert cut_to_fit([run, run], 2 * run.passes) == (run, run)


@pytest.mark.parametrize(
    ("passes", "room", "granted"),
    [
        ([10, 10], 20, [10, 10]),
        ([10, 100], 60, [10, 50]),
        ([100, 10, 100], 70, [30, 10, 30]),
        ([5], 9, [5]),
    ],
)
def test_space_that_one_run_does_not_need_goes_to_the_others(
    passes: list[int], room: int, granted: list[int]
) -> None:
    assert shares(passes, room) == granted


def test_first_middle_and_last_microbatches() -> None:
    assert kept_microbatches(100, 1000, 300) == (range(10), range(45, 55), range(90, 100))
    assert kept_microbatches(100, 1000, 1) == (range(1), range(49, 50), range(99, 100))
    assert kept_microbatches(3, 1000, 1) == (range(3),)
    assert kept_microbatches(8, 100, 100) == (range(8),)


def page_of(*runs: Run) -> Page:
    return Page("a <title>", runs, "megatron-ext simulate '</script>'")


def test_the_file_holds_the_data_and_needs_nothing_else(tmp_path: Path) -> None:
    page = page_of(simulated_run("1f1b", program_of("1f1b")), simulated_run("zb-v", ALL_SORTS["v"]))
    path = tmp_path / "x.html"
    write_page(page, path)
    text = path.read_text()
    assert data_in(text) == json.loads(json.dumps(data_of(page)))
    assert "{{" not in text and "<title>a &lt;title&gt;</title>" in text
    assert not re.search(r"https?://|src=|href=|@import|url\(", text)
    assert "default-src 'none'" in text


def test_the_data_are_the_boxes() -> None:
    run = simulated_run("zb-v", ALL_SORTS["v"])
    data = data_of(page_of(run))
    (told,) = data["runs"]
    names = [
        f"{stage}{data['kinds'][kind]['name']}{microbatch}"
        for stage, kind, microbatch in zip(
            told["stage"], told["kind"], told["microbatch"], strict=True
        )
    ]
    assert names == list(map(label, run.boxes))
    assert told["start"] == pytest.approx([box.start for box in run.boxes])
    assert told["end"] == pytest.approx([box.end for box in run.boxes])
    assert told["needs"] == [box.needs for box in run.boxes]
    assert told["step"] == 0 and told["held_bytes"] is None
    assert sum(track["boxes"] for track in told["tracks"]) == len(run.boxes)
    assert told["chunks"] == (0,) * 4 + (1,) * 4
    forward = next(kind for kind in data["kinds"] if kind["name"] == "F")
    assert forward["colour"] == COLOURS[Kind.FORWARD]


def test_times_have_as_many_digits_as_they_need() -> None:
    """Times on a page have enough digits for their unit. Passes may take microseconds, and with a
    fixed number of decimals they would have taken 0."""
    made = program("1f1b", line_problem(2, 3, 1e-6 / 3, 1e-6, 1e-6))
    (told,) = data_of(page_of(simulated_run("x", made)))["runs"]
    assert told["end"][0] == pytest.approx(1e-6 / 3, rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "microbatches"),
    [(4, 16), *at_night((16, 160))],  # at night more than 20,000 passes
)
def test_a_page_is_small(ranks: int, microbatches: int) -> None:
    """A page with 20,000 passes is smaller than 3 MB, so that it stays smooth and can be sent by
    mail."""
    runs = [simulated_run(name, program_of(name, ranks, microbatches)) for name in ("1f1b", "zb-v")]
    drawn = [
        box for run in cut_to_fit(runs, MOST_PASSES) for box in run.boxes if box.kind != OMITTED
    ]
    passes = sum(box.track.group is TrackGroup.PASSES for box in drawn)
    assert passes <= 20_000
    assert len(text_of(page_of(*runs))) < 35_000 + 145 * passes


@pytest.mark.parametrize("name", ["x.htm", "x", "html", "nowhere/x.html"])
def test_files_that_cannot_be_written_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is written as \.html|there is no folder"):
        check_page(tmp_path / name)


def test_the_scripts_are_all_there() -> None:
    assert {path.name for path in BROWSER.iterdir()} == {*SCRIPTS, "page.html", "page.css"}


_LABELS = """
const canvas = { clientWidth: WIDTH };
globalThis.redraw = () => {};
runs.forEach((run) => (run.canvas = canvas));
look.fills = look.texts = page.kinds.map(() => "#000000");
const rowsOfLabels = runs.flatMap((run) => rows(run).places
  .filter(({ track }) => track.group === "passes")
  .map((place) => {
    const labels = [];
    const pen = new Proxy({}, {
      get: (_, name) => (text) => name === "fillText" && labels.push(text),
      set: () => true,
    });
    drawTrack(pen, run, place);
    return labels;
  }));
console.log(JSON.stringify(rowsOfLabels));
"""


def labels_of(page: Page, width: int, folder: Path) -> list[list[str]]:
    """Return the labels that the page's scripts write on each row of passes in a window of
    ``width`` pixels."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no browser here: nor node, which runs the page's scripts")
    data = json.dumps({"textContent": json.dumps(data_of(page))})
    scripts = [(BROWSER / name).read_text() for name in ("data.js", "view.js", "passes.js")]
    path = folder / "labels.mjs"
    document = f"globalThis.document = {{ getElementById: () => ({data}) }};"
    path.write_text("\n".join([document, *scripts, _LABELS.replace("WIDTH", str(width))]))
    ended = subprocess.run([node, path], capture_output=True, text=True, check=True)
    told: list[list[str]] = json.loads(ended.stdout)
    return told


def test_labels_of_a_row_have_one_form(tmp_path: Path) -> None:
    """Each row of a page names its passes in full, such as 2F1, or numbers their microbatches. In
    one row long passes used to have names and short ones numbers, so that 10 next to 2F1 was
    ambiguous.
    """
    run = simulated_run("1f1b", program_of("1f1b", 4, 12))
    forms = set()
    for width in range(300, 2400, 50):
        for labels in labels_of(page_of(run), width, tmp_path):
            forms |= (named := {not label.isdigit() for label in labels})
            assert len(named) <= 1, (width, labels)
    assert forms == {True, False}


def run_of(*words: str, code: int = 0) -> str:
    result = runner.invoke(app, words)
    assert result.exit_code == code, result.output
    return result.output if code else result.stdout


def test_simulate_writes_a_page_beneath_1f1b(tmp_path: Path) -> None:
    path = tmp_path / "x.html"
    sizes = ("--pp", "3", "-m", "4", "--costs", "f=1,i=1,w=1,comm=0.1")
    said = run_of("simulate", "zb-h1", *sizes, "--html", str(path))
    assert f"page: {path}" in said
    data = data_in(path.read_text())
    assert [run["title"] for run in data["runs"]] == ["1f1b", "zb-h1"]
    assert data["title"] == "zb-h1 on 3 ranks, 4 microbatches"
    run_of("simulate", "1f1b", *sizes, "--html", str(path))
    assert [run["title"] for run in data_in(path.read_text())["runs"]] == ["1f1b"]
    words = ("--post-validation", "--steps", "2", "--html", str(path))
    run_of("simulate", "zb-h1", *sizes, *words)
    titles = [run["title"] for run in data_in(path.read_text())["runs"]]
    assert titles == ["zb-h1", "zb-h1, post-validation"]
    run_of("simulate", "1f1b", *sizes, "--slices", "2", "--html", str(path))
    titles = [run["title"] for run in data_in(path.read_text())["runs"]]
    assert titles == ["1f1b", "1f1b, division into 2 slices"]


def test_plan_writes_its_front(tmp_path: Path) -> None:
    path = tmp_path / "x.html"
    words = ("plan", "pp=2,m=2", "--html", str(path), "--json")
    report = json.loads(run_of(*words))
    data = data_in(path.read_text())
    titles = [run["title"] for run in data["runs"]]
    assert titles[0] == "1f1b"
    rows = report["plan"]["candidates"]
    steps = {made["schedule"]: made["makespan"] for made in rows}
    assert len(titles) > 1 and rows[0]["schedule"] in titles
    for run in data["runs"]:
        assert run["figures"]["makespan"] == pytest.approx(steps[run["title"]])


def test_trace_writes_the_median_step(tmp_path: Path) -> None:
    traced_steps = written(tmp_path)
    path = tmp_path / "x.html"
    said = run_of("trace", str(tmp_path / "new"), "--html", str(path))
    assert f"page: {path}" in said
    data = data_in(path.read_text())
    titles = [run["title"] for run in data["runs"]]
    assert titles == ["zb-h1, predicted", "zb-h1, measured in iteration 7"]
    assert data["unit"] == "s"
    figures = data["runs"][1]["figures"]
    assert figures["makespan"] == pytest.approx(traced_steps[0].measured.makespan)


@pytest.mark.parametrize(
    "words", [("simulate", "v-auto", "--pp", "64", "-m", "4096"), ("plan", "pp=64,m=4096")]
)
def test_a_page_that_cannot_be_written_is_refused_first(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    words = (*words, "--html", str(tmp_path / "x.pdf"))
    assert "a page of timelines is written as .html" in run_of(*words, code=2)
