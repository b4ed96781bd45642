"""Tests of the picture of a plan: everything is drawn, readable, and in the right place."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.planner import curves as planner_curves
from megatron_ext.planner.candidate import Candidate, Plan, VocabMethod
from megatron_ext.planner.curves import Curves, curves_of
from megatron_ext.planner.planner import VariantOf, make_plan
from megatron_ext.planner.training import Training
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.placement import Placement
from megatron_ext.search import best
from megatron_ext.viz.labels import label_points
from megatron_ext.viz.plan_picture import draw_plan
from tests.helpers.short_search import little_effort, shorten_search
from tests.helpers.svg import texts_of

pytest.importorskip("matplotlib")
pytestmark = pytest.mark.search

NO_CURVES = Curves({}, {})


def problems(limit: float | None = None) -> VariantOf:
    memory = None if limit is None else MemoryLimit(microbatches=limit)

    def costs(placement: Placement) -> Any:
        return uniform(placement, 10, 12, 8, 1)

    return Training(4, 8, costs, limit=memory).variant


@functools.cache
def plan() -> Plan:
    with short_search():
        return make_plan(problems())


@functools.cache
def curves() -> Curves:
    with short_search(), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(planner_curves, "LIMITS", 4)
        monkeypatch.setattr(planner_curves, "MICROBATCHES_PER_RANK", (0.5, 1, 2))
        return curves_of(plan(), problems())


@contextlib.contextmanager
def short_search() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        shorten_search(monkeypatch)
        monkeypatch.setattr(best, "effort", lambda: little_effort(2_000))
        yield


def extent_of(label: Any) -> Any:
    """Return the extent of the label's letters, without the line to its point."""
    from matplotlib.text import Text

    return Text.get_window_extent(label)


def names_on(text: str) -> set[str]:
    """Return the schedules that a label names. A schedule beyond an axis has its value in
    parentheses."""
    return {name.split(" (")[0] for name in text.split(", ")}


def test_the_picture_names_every_schedule(tmp_path: Path) -> None:
    draw_plan(plan(), curves(), tmp_path / "plan.svg")
    texts = texts_of((tmp_path / "plan.svg").read_text())
    names = {candidate.schedule for candidate in plan().candidates}
    assert set().union(*map(names_on, texts)) >= names


def test_an_alternative_without_a_point_is_drawn(tmp_path: Path) -> None:
    """The legend of a plan's picture names only treatments of the vocabulary that have a point. A
    split vocabulary makes every schedule slower here, so it has none."""
    naive = plan().candidates[0]
    slower = replace(naive.report, step=2 * naive.step)
    made = Plan((naive, replace(naive, method=VocabMethod.TWO, report=slower)), {})
    draw_plan(made, NO_CURVES, tmp_path / "plan.svg")
    texts = texts_of((tmp_path / "plan.svg").read_text())
    assert naive.schedule in texts and "vocabulary parallelism 2" not in texts


def test_an_axis_of_seconds_has_its_unit(tmp_path: Path) -> None:
    """The axes of a plan's picture name the unit if times are seconds. They used to say "makespan
    of a step" both for seconds and for a unit of the costs' own."""
    (best, *_) = plan().candidates
    for in_seconds, unit in ((True, ", s"), (False, "")):
        made = Plan((replace(best, variant=replace(best.variant, in_seconds=in_seconds)),), {})
        draw_plan(made, NO_CURVES, tmp_path / "plan.svg")
        texts = texts_of((tmp_path / "plan.svg").read_text())
        labels = {f"makespan of a step{unit}", f"makespan of a step over its microbatches{unit}"}
        assert labels <= set(texts)


def test_no_label_lies_upon_another(tmp_path: Path, figures: list[Any]) -> None:
    """No label of a plan's picture covers another. The names of a dozen schedules within a few
    percent of each other used to be an unreadable black spot."""
    draw_plan(plan(), curves(), tmp_path / "plan.png")
    figures[0].draw_without_rendering()  # at the figure's own resolution again
    axes = figures[0].axes[0]
    labels = {text.get_text(): extent_of(text) for text in axes.texts}
    for (name, box), (other_name, other) in combinations(labels.items(), 2):
        assert not box.padded(-1).overlaps(other.padded(-1)), (name, other_name)
    frame = axes.get_window_extent().padded(1)
    assert all(frame.contains(*corner) for box in labels.values() for corner in box.get_points())
    marks = [
        axes.transData.transform(point)
        for line in axes.lines
        for point in line.get_xydata()
        if len(line.get_xydata()) == 1
    ]
    assert len(marks) >= len(labels) > 8
    for name, box in labels.items():
        assert not [mark for mark in marks if box.contains(*mark)], name


def test_a_search_has_a_curve_over_memory() -> None:
    """A searching family has a curve over memory in a plan's picture, because it trades time for
    memory. It used to be a single point."""
    searched = {c.schedule for c in plan().best_of_each if c.schedule.endswith("-auto")}
    assert curves().by_limit.keys() >= searched and searched
    for candidates in curves().by_limit.values():
        steps = [candidate.step for candidate in candidates]
        held = [candidate.holds for candidate in candidates]
        assert len(steps) >= 3 and steps == sorted(steps, reverse=True)
        assert held == sorted(held) and max(held) <= 8
        assert all(
            c.limit and c.limit.microbatches == int(str(c.limit).split()[0]) for c in candidates
        )


def test_a_curve_has_what_more_memory_makes_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    (searched,) = (c for c in plan().best_of_each if c.schedule == "v-auto")
    steps = {1: 10.0, 2: 12.0, 3: 9.0, 4: 8.0, 5: 8.0, 6: 7.0}  # step times by memory limit
    peaks = {1: 1.0, 2: 1.5, 3: 2.0, 4: 2.0, 5: 4.0, 6: 6.0}

    def consider(variant: Any, *_: object) -> Candidate:
        limit = variant.problem.memory_limit.microbatches
        peak = (peaks[limit],)
        report = replace(searched.report, step=steps[limit], peak_activation_microbatches=peak)
        return replace(searched, variant=variant, report=report)

    monkeypatch.setattr(planner_curves, "LIMITS", 6)
    monkeypatch.setattr(planner_curves, "consider", consider)
    (curve,) = curves_of(Plan((searched,), {}), problems(limit=6)).by_limit.values()
    assert [(c.holds, c.step) for c in curve] == [(1.0, 10.0), (2.0, 8.0), (6.0, 7.0)]


def test_limits_of_bytes_are_parts_of_what_there_is() -> None:
    variant_of = problems(limit=3)
    made = curves_of(make_plan(variant_of, specs=["v-half"]), variant_of)
    assert not made.by_limit and made.by_microbatches.keys() == {"v-half"}
    numbers = made.by_microbatches["v-half"]
    assert list(numbers) == [2, 4, 8, 16, 32]
    shares = [step / number for number, step in numbers.items()]
    assert shares == sorted(shares, reverse=True), "the bubble is shared by more microbatches"


def test_the_legend_names_the_curves(tmp_path: Path, figures: list[Any]) -> None:
    draw_plan(plan(), curves(), tmp_path / "plan.png")
    (legend,) = figures[0].legends
    names = {text.get_text() for text in legend.get_texts()}
    assert names >= {*curves().by_limit, *curves().by_microbatches}
    by_memory, by_microbatches = figures[0].axes
    assert len(by_microbatches.lines) == len(curves().by_microbatches) > 3
    assert by_memory.get_xlabel() == "peak activation, microbatches of a rank"
    low, high = by_memory.get_xlim()
    ticks = [tick for tick in by_memory.get_xticks() if low <= tick <= high]
    assert ticks and all(float(tick).is_integer() for tick in ticks)


def test_what_lies_far_away_does_not_squash_the_rest(tmp_path: Path, figures: list[Any]) -> None:
    """A schedule with far more memory than the other schedules does not compress their part of a
    plan's picture: its label has its bytes instead. GPipe stores four times as much, and the other
    schedules used to fill only a quarter of the picture."""
    *others, last = plan().candidates
    far = replace(last, report=replace(last.report, peak_activation_microbatches=(40.0,)))
    draw_plan(Plan((*others, far), {}), NO_CURVES, tmp_path / "plan.png")
    axes = figures[0].axes[0]
    assert axes.get_xlim()[1] < 12
    assert f"{last.schedule} (→ 40)" in {text.get_text() for text in axes.texts}


def test_labels_leave_a_heap_of_points(figures: list[Any], tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    points = {(1 + 0.01 * number, 1.0): f"schedule {number}" for number in range(8)}
    axes.plot(*zip(*points, strict=True), "o")
    axes.set_xlim(0, 2)
    label_points(axes, points, [])
    figure.savefig(tmp_path / "heap.png")
    figure.draw_without_rendering()
    boxes = [extent_of(text).padded(-1) for text in axes.texts]
    assert len(boxes) == 8
    assert not any(box.overlaps(other) for box, other in combinations(boxes, 2))


def test_no_search_lies_below_the_line_of_the_best(figures: list[Any], tmp_path: Path) -> None:
    """The curve of a searching family is nowhere below the line of the best schedules, whose legend
    says that no other schedule is faster in as little memory. Results of searches in less memory
    used to be below it."""
    draw_plan(plan(), curves(), tmp_path / "plan.svg")
    axes = figures[0].axes[0]
    (front,) = (line for line in axes.lines if line.get_drawstyle() == "steps-post")
    steps = list(zip(*map(list, front.get_data()), strict=True))
    found = [made for line in curves().by_limit.values() for made in line]
    assert min(made.holds for made in found) < min(made.holds for made in plan().front)
    for made in found:
        if made.schedule in {one.schedule for one in plan().recommendable}:
            assert min(step for holds, step in steps if holds <= made.holds) <= made.step
