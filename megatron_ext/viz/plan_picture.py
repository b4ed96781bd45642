"""Picture of a plan: step time against memory, and seconds per microbatch by their number.

A recommendation is a point among others. The picture shows all schedules of a plan by time and
memory, with the Pareto front, and the step time of each with more or fewer microbatches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from megatron_ext.planner.candidate import Candidate, Plan, VocabMethod, pareto_front
from megatron_ext.planner.curves import Curves
from megatron_ext.viz.draw import new_figure
from megatron_ext.viz.labels import Point, label_points
from megatron_ext.viz.svg import save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FRONT = "#D55E00"
OTHERS = "#999999"
# Colours of lines, from Okabe and Ito's palette (2008), each with a marker for readers who do not
# see colours.
LINES = ("#0072B2", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#8C6D31", "#7F3C8D")
MARKERS = "osD^vPX*"

# Marker of each vocabulary method's points, and its words in the legend.
_METHODS = {
    VocabMethod.NAIVE: ("o", "output layer on its stage"),
    VocabMethod.REDISTRIBUTED: ("s", "layers moved away from it"),
    VocabMethod.ONE: ("^", "vocabulary parallelism 1"),
    VocabMethod.TWO: ("v", "vocabulary parallelism 2"),
}
_ALIKE = 0.01  # points closer than this share of an axis have one common label
_FAR = 1.5  # a point beyond this multiple of an axis' end is drawn at that end
_SLOW = 2.5  # end of the second panel, as a multiple of the least seconds per microbatch


def draw_plan(plan: Plan, curves: Curves, path: Path) -> None:
    """Write a picture of a plan: step time of its schedules against their memory.

    Each schedule has its best vocabulary method; the Pareto front and the results of searches in
    less memory are drawn as lines. A second panel shows the step's time per microbatch, by the
    number of microbatches.

    Raises:
        ValueError: another file type, or matplotlib is not installed.
    """
    figure = new_figure(path, width=12, height=5.5)
    by_memory, by_microbatches = figure.subplots(1, 2, width_ratios=(3, 2))
    looks = _looks((*curves.by_limit, *curves.by_microbatches))
    in_bytes = any(candidate.fullest is not None for candidate in plan.candidates)
    labels, lines = _draw_by_memory(by_memory, plan, curves, looks, in_bytes)
    _draw_by_microbatches(by_microbatches, curves, looks)
    overlap = any(candidate.overlaps for candidate in plan.candidates)
    time = "what a step costs" if overlap else "makespan of a step"
    unit = ", s" if all(candidate.variant.in_seconds for candidate in plan.candidates) else ""
    by_memory.set_ylabel(f"{time}{unit}")
    by_microbatches.set_ylabel(f"{time} over its microbatches{unit}")
    figure.legend(
        handles=_legend(plan, looks), loc="outside lower center", ncols=4, frameon=False, fontsize=8
    )
    label_points(by_memory, labels, lines)
    save(figure, path)


def _looks(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the colour and marker of each schedule's line in a plan's picture, for both panels."""
    return {
        name: {"color": LINES[number % len(LINES)], "marker": MARKERS[number % len(MARKERS)]}
        for number, name in enumerate(dict.fromkeys(names))
    }


def _draw_by_memory(
    axes: Axes,
    plan: Plan,
    curves: Curves,
    looks: Mapping[str, Mapping[str, Any]],
    in_bytes: bool,
) -> tuple[dict[Point, str], list[list[Point]]]:
    """Draw the panel of step time by memory. Return its labels, by their points, and its lines."""
    unit = 2**30 if in_bytes else 1
    shown = tuple(dict.fromkeys((*plan.best_of_each, *plan.front)))

    def place(candidate: Candidate) -> Point:
        return candidate.holds / unit, candidate.step

    ends = [_end(figures) for figures in zip(*map(place, shown), strict=True)]
    for candidate in shown:
        is_front, is_tried = candidate in plan.front, candidate in plan.recommendable
        colour = FRONT if is_front else OTHERS
        axes.plot(
            *_clipped(place(candidate), ends),
            _METHODS[candidate.method][0],
            color=colour,
            markerfacecolor=colour if is_tried else "none",
            clip_on=False,
            zorder=3,
        )
    front = [place(candidate) for candidate in _front(plan, curves)[::-1]]
    axes.step(*zip(*front, strict=True), where="post", color=FRONT, linewidth=1)
    lines = [front]
    for name, candidates in curves.by_limit.items():
        if candidates:
            line = [place(candidate) for candidate in candidates]
            axes.plot(*zip(*line, strict=True), **looks[name], markersize=3, linewidth=1)
            lines.append(line)
    axes.set_xlabel(
        "memory of the fullest rank, GiB" if in_bytes else "peak activation, microbatches of a rank"
    )
    _set_ends(axes, lines, [_clipped(place(candidate), ends) for candidate in shown])
    if not in_bytes:
        axes.locator_params("x", integer=True)
    axes.spines[["top", "right"]].set_visible(False)
    return _labels({candidate: place(candidate) for candidate in shown}, ends), lines


def _front(plan: Plan, curves: Curves) -> tuple[Candidate, ...]:
    """Return the points of a plan's picture that no other beats in both time and memory.

    Results of searches in less memory are included. The shortest step comes first.
    """
    permitted = {candidate.schedule for candidate in plan.recommendable}
    of_curves = (
        candidate
        for name, line in curves.by_limit.items()
        if name in permitted
        for candidate in line
    )
    shortest_first = sorted((*plan.front, *of_curves), key=lambda one: (one.step, one.holds))
    return pareto_front(shortest_first, lambda one: one.holds)


def _end(figures: Sequence[float]) -> float:
    """Return the end of an axis that shows most ``figures`` without squeezing them to a corner."""
    least = min(figures)
    end = least + 3 * (median(figures) - least)
    return end if max(figures) > _FAR * end else max(figures)


def _clipped(point: Point, ends: Sequence[float]) -> Point:
    return min(point[0], ends[0]), min(point[1], ends[1])


def _set_ends(axes: Axes, lines: Sequence[Sequence[Point]], points: Sequence[Point]) -> None:
    """Set the ends of both axes of a plan's picture so that all points are on the panel.

    Lines are on the panel as far as they are no higher and no further right than the points.
    """
    furthest, highest = (max(figures) for figures in zip(*points, strict=True))
    near = [(x, y) for line in lines for x, y in line if x <= furthest and y <= highest]
    x, y = zip(*points, *near, strict=True)
    axes.set_xlim(*_with_margin(x))
    axes.set_ylim(*_with_margin(y))


def _with_margin(values: Sequence[float]) -> Point:
    least, most = min(values), max(values)
    margin = 0.06 * (most - least) or 0.06 * most
    return least - margin, most + margin


def _labels(points: Mapping[Candidate, Point], ends: Sequence[float]) -> dict[Point, str]:
    """Return the labels of points in a plan's picture, one for all points that coincide.

    A point beyond the end of an axis has its position in the label.
    """
    sizes = [
        max(figures) - min(figures)
        for figures in zip(*(_clipped(point, ends) for point in points.values()), strict=True)
    ]
    groups: dict[Point, list[str]] = {}
    for candidate in sorted(points, key=points.__getitem__):
        point = _clipped(points[candidate], ends)
        text = _with_figures(candidate.schedule, points[candidate], ends)
        near = (
            other
            for other in groups
            if all(
                abs(a - b) <= _ALIKE * size for a, b, size in zip(point, other, sizes, strict=True)
            )
        )
        groups.setdefault(next(near, point), []).append(text)
    return {point: ", ".join(dict.fromkeys(names)) for point, names in groups.items()}


def _with_figures(name: str, point: Point, ends: Sequence[float]) -> str:
    beyond = [f"{value:.4g}" for value, end in zip(point, ends, strict=True) if value > end]
    arrows = [arrow for arrow, value, end in zip("→↑", point, ends, strict=True) if value > end]
    return (
        f"{name} ({', '.join(map(' '.join, zip(arrows, beyond, strict=True)))})" if beyond else name
    )


def _draw_by_microbatches(
    axes: Axes, curves: Curves, looks: Mapping[str, Mapping[str, Any]]
) -> None:
    """Draw the panel of step time against the number of microbatches."""
    numbers = sorted({number for line in curves.by_microbatches.values() for number in line})
    shares = []
    for name, steps in curves.by_microbatches.items():
        line = [(number, step / number) for number, step in steps.items()]
        if line:
            axes.plot(*zip(*line, strict=True), **looks[name], markersize=4, linewidth=1)
        shares += [share for _, share in line]
    axes.set_xscale("log", base=2)
    axes.set_xticks(numbers, map(str, numbers))
    axes.minorticks_off()
    axes.set_xlabel("microbatches of a step (of searches, what is known without one)", fontsize=8)
    if shares:
        least, most = min(shares), min(max(shares), _SLOW * min(shares))
        axes.set_ylim(least - 0.06 * (most - least), most + 0.06 * (most - least))
    axes.spines[["top", "right"]].set_visible(False)


def _legend(plan: Plan, looks: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    from matplotlib.lines import Line2D

    def legend_entry(label: str, **look: Any) -> Line2D:
        return Line2D([], [], linestyle="none", label=label, **look)

    drawn = {candidate.method for candidate in (*plan.best_of_each, *plan.front)}
    methods = [
        legend_entry(label, marker=marker, color=OTHERS)
        for method, (marker, label) in _METHODS.items()
        if method in drawn and len(plan.methods) > 1
    ]
    less_tried = legend_entry(
        "less tested schedule", marker="o", color=OTHERS, markerfacecolor="none"
    )
    front = Line2D([], [], color=FRONT, label="Pareto front of time and memory")
    lines = [Line2D([], [], label=name, **look) for name, look in looks.items()]
    return [front, *methods, less_tried, *lines]
