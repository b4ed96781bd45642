"""Pictures: timelines (ranks as rows, kinds by colour, bubbles shaded, memory), plans, bars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.choose import Plan, peak
from megatron_ext.schedule.kinds import RULES, Lane
from megatron_ext.schedule.memory import in_microbatches, memory_curve
from megatron_ext.schedule.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette (2008): told apart with any colour vision.
COLOURS = {
    Kind.FORWARD: "#56B4E9",
    Kind.BACKWARD_INPUT: "#E69F00",
    Kind.BACKWARD_WEIGHT: "#009E73",
    Kind.FULL_BACKWARD: "#F0A860",
    Kind.LOGITS: "#CC79A7",
    Kind.LOGITS_INPUT: "#D55E00",
    Kind.LOGITS_WEIGHT: "#0072B2",
    Kind.LOSS: "#000000",
    Kind.EMBEDDING: "#F0E442",
    Kind.EMBEDDING_WEIGHT: "#A6A044",
}
NAMES = {
    Kind.FORWARD: "F  forward",
    Kind.BACKWARD_INPUT: "I  input gradient",
    Kind.BACKWARD_WEIGHT: "W  weight gradient",
    Kind.FULL_BACKWARD: "B  backward (I and W)",
    Kind.LOGITS: "S  logits of a shard",
    Kind.LOGITS_INPUT: "SI  their input gradient",
    Kind.LOGITS_WEIGHT: "SW  their weight gradient",
    Kind.LOSS: "L  loss",
    Kind.EMBEDDING: "E  embedding shard",
    Kind.EMBEDDING_WEIGHT: "EW  its gradient",
}
assert COLOURS.keys() == {kind for kind, rule in RULES.items() if rule.lane is Lane.COMPUTE}
BUBBLE = "#E8E8E8"

Pair = tuple[float, float]


def draw(timelines: Sequence[Timeline], path: Path) -> None:
    """Write ``timelines`` one above the other, on one time axis, as SVG or PNG by ``path``'s name.

    Later chunks of a rank are drawn hatched. Beneath each, the microbatches a rank holds.

    Raises:
        ValueError: another file type, or matplotlib is not installed.
    """
    heights = [size for line in timelines for size in (len(line.compute) * 0.38 + 0.3, 1.1)]
    figure = _figure(path, width=12, height=sum(heights) + 1.1)
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for index, timeline in enumerate(timelines):
        _draw_passes(axes[2 * index], timeline)
        _draw_memory(axes[2 * index + 1], timeline)
    axes[-1].set_xlabel("time")
    events = (event for line in timelines for row in line.compute for event in row)
    used = {event.action.kind for event in events if event.end > event.start}
    figure.legend(handles=_legend(used), loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(path, dpi=150)


def draw_plan(plan: Plan, path: Path) -> None:
    """Write step time against peak memory of the schedules of ``plan``, and their Pareto front.

    Raises:
        ValueError: as `draw`.
    """
    figure = _figure(path, width=8, height=5)
    axes = figure.subplots()
    for row in plan.reports:
        name = row["schedule"]
        colour = "#D55E00" if name in plan.pareto else "#999999"
        axes.plot(peak(row), row["makespan"], "o", color=colour)
    for point, names in _labels(plan).items():
        axes.annotate(names, point, xytext=(5, 4), textcoords="offset points", size=8)
    front = [row for row in plan.reports if row["schedule"] in plan.pareto]
    axes.step(
        [peak(row) for row in reversed(front)],
        [row["makespan"] for row in reversed(front)],
        where="post",
        color="#D55E00",
        linewidth=1,
    )
    axes.set_xlabel("peak activation, microbatches of a rank")
    axes.set_ylabel("makespan of a step")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _labels(plan: Plan) -> dict[tuple[float, float], str]:
    """What to write at the last of the points that are too close for a label each."""
    points = {row["schedule"]: (peak(row), row["makespan"]) for row in plan.reports}
    peaks, makespans = zip(*points.values(), strict=True)
    width = 0.06 * (max(peaks) - min(peaks))
    height = 0.03 * (max(makespans) - min(makespans))

    def close(one: str, other: str) -> bool:
        (x, y), (others_x, others_y) = points[one], points[other]
        return abs(x - others_x) <= width and abs(y - others_y) <= height

    groups: list[list[str]] = []
    for name in sorted(points, key=points.__getitem__):
        group = next((group for group in groups if any(close(name, n) for n in group)), None)
        if group is None:
            groups.append([name])
        else:
            group.append(name)
    return {points[group[-1]]: ", ".join(group) for group in groups}


def draw_bars(names: Sequence[str], ideal_and_measured: Sequence[Pair], path: Path) -> None:
    """Write a bar of measured seconds for each of ``names``, and how long the ideal step is.

    Raises:
        ValueError: as `draw`.
    """
    figure = _figure(path, width=8, height=0.3 * len(names) + 1)
    axes = figure.subplots()
    places = range(len(names))
    ideal, measured = zip(*ideal_and_measured, strict=True)
    axes.barh(places, measured, color="#E69F00", label="measured")
    axes.barh(places, ideal, color="#56B4E9", label="ideal")
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a step")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=150)


def _figure(path: Path, width: float, height: float) -> Figure:
    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"{path}: pictures are written as .svg or .png")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "pictures need matplotlib: pip install 'megatron_ext[plot]', or leave --plot out"
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def _draw_passes(axes: Axes, timeline: Timeline) -> None:
    schedule = timeline.schedule
    first = min(row[0].start for row in timeline.compute if row)
    chunk = {s: c for stages in schedule.placement.stages_of for c, s in enumerate(stages)}
    width = timeline.makespan
    for rank, row in enumerate(timeline.compute):
        axes.barh(rank, width, left=0, height=0.86, color=BUBBLE, zorder=0)
        for event in row:
            seconds = event.end - event.start
            if not seconds:
                continue  # an edge without an inside
            axes.barh(
                rank,
                seconds,
                left=event.start - first,
                height=0.86,
                color=COLOURS[event.action.kind],
                edgecolor="white",
                linewidth=0.6,
                hatch="///" if chunk[event.action.stage] % 2 else None,
            )
            if seconds > width / 110:
                axes.text(
                    event.start - first + seconds / 2,
                    rank,
                    str(event.action.microbatch),
                    ha="center",
                    va="center",
                    fontsize=7,
                )
    axes.set_yticks(range(len(timeline.compute)), [f"rank {r}" for r in range(len(schedule.rows))])
    axes.invert_yaxis()
    axes.set_xlim(0, None)
    axes.spines[:].set_visible(False)
    peak = max(max(memory_curve(row, in_microbatches(schedule))) for row in schedule.rows)
    axes.set_title(
        f"{schedule.name}: bubble {timeline.bubble_share_makespan:.1%} of the makespan, "
        f"peak {peak:g} microbatches",
        loc="left",
        fontsize=10,
    )


def _draw_memory(axes: Axes, timeline: Timeline) -> None:
    schedule = timeline.schedule
    first = min(row[0].start for row in timeline.compute if row)
    for rank, row in enumerate(timeline.compute):
        curve = memory_curve(schedule.rows[rank], in_microbatches(schedule))
        axes.step(
            [event.start - first for event in row] + [row[-1].end - first],
            [*curve, 0],
            where="post",
            linewidth=1,
            color=str(0.7 * rank / max(len(timeline.compute) - 1, 1)),
        )
    axes.set_ylabel("microbatches\nheld", fontsize=8)
    axes.set_ylim(0, None)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(used: set[Kind]) -> list[Any]:
    from matplotlib.patches import Patch

    kinds = [Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in COLOURS if kind in used]
    return [*kinds, Patch(color=BUBBLE, label="bubble")]
