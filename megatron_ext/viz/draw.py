"""Pictures: timelines (ranks as rows, kinds by colour, bubbles shaded, memory).

A schedule is understood by looking at it. Predictions, measurements and the schedules of the
documentation are drawn alike: the same colours, the bubbles shaded, and below each rank the memory
that it holds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megatron_ext.base.words import bytes_text, counted
from megatron_ext.compile.program.memory import Amount, in_bytes, in_microbatches, memory_curve
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.kinds import RULES, Lane
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.schedule.timeline import Timeline
from megatron_ext.viz.svg import save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {kind: RULES[kind].colour for kind in Kind if RULES[kind].lane is Lane.COMPUTE}
MARKERS = {kind: rule.marker for kind, rule in RULES.items() if rule.marker}
PALER = 0.45
BUBBLE = "#E8E8E8"

WIDTH = 12  # width of the figure with the timelines, in inches
LABEL = 7  # size of a pass' label in points

# Box of a pass in the picture: its middle (a rank), half of its height, its start and its end.
PassBox = tuple[float, float, float, float]
_HALF = 0.43  # half of a box's height


def draw(timelines: Sequence[Timeline], path: Path) -> None:
    """Draw ``timelines`` one above the other, on one time axis, as an SVG or PNG file.

    The suffix of ``path`` decides which. Every second chunk of a rank is drawn hatched. Beneath
    each timeline is the memory of each rank, in microbatches.

    Raises:
        ValueError: another file type, or matplotlib is not installed.
    """
    draw_steps([[timeline] for timeline in timelines], path)


def draw_steps(
    runs: Sequence[Sequence[Timeline]],
    path: Path,
    costs: Sequence[Costs] | None = None,
    titles: Sequence[str] | None = None,
) -> None:
    """Draw runs of one or more consecutive steps each, as `draw` does.

    Every second step is paler, and the optimizer's steps and the waits for their verdicts
    (post-validation) are marked.

    Args:
        costs: costs of each run; if they have bytes, memory is drawn in GiB.
        titles: title of each run; None: the names of the schedules.
    """
    titles = [run[0].schedule.name for run in runs] if titles is None else titles
    heights = [size for run in runs for size in (len(run[0].compute) * 0.38 + 0.3, 1.1)]
    figure = new_figure(path, width=WIDTH, height=sum(heights) + 1.1)
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    longest = max(_length(run) for run in runs)
    readable = LABEL / (72 * WIDTH) * longest
    for index, run in enumerate(runs):
        measure = _measure(run[0].schedule, None if costs is None else costs[index])
        _draw_passes(axes[2 * index], run, readable, measure, titles[index])
        _draw_memory(axes[2 * index + 1], run, measure)
    axes[-1].set_xlim(0, longest)
    axes[-1].set_xlabel("time")
    events = [event for run in runs for timeline in run for event in timeline.events]
    used = {e.action.kind for e in events if e.end > e.start or e.action.kind in MARKERS}
    schedules = [run[0].schedule for run in runs]
    figure.legend(
        handles=_legend(used, schedules), loc="outside lower center", ncols=5, frameon=False
    )
    save(figure, path)


def check_picture(path: Path) -> None:
    """Raise ValueError if no picture can be written to ``path``, before any work for it."""
    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"{path}: pictures are written as .svg or .png")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")
    try:
        import matplotlib.figure  # noqa: F401 (only whether it is there)
    except ImportError:
        raise ValueError(
            "--plot needs matplotlib to draw a picture: pip install 'megatron_ext[plot]', or "
            "drop --plot"
        ) from None


def new_figure(path: Path, width: float, height: float) -> Figure:
    check_picture(path)
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


@dataclass(frozen=True)
class _Measure:
    """Unit in which a picture of a schedule counts memory: microbatches or GiB."""

    amount: Amount
    unit: float
    name: str

    def curve(self, row: tuple[Action, ...]) -> list[float]:
        return [held / self.unit for held in memory_curve(row, self.amount)]

    def text(self, held: float) -> str:
        return bytes_text(held * self.unit) if self.unit > 1 else counted(held, "microbatch")


def _measure(schedule: Schedule, costs: Costs | None) -> _Measure:
    if costs is None or costs.held_bytes is None:
        return _Measure(in_microbatches(schedule), 1, "microbatches")
    return _Measure(in_bytes(costs), 2**30, "GiB")


def _length(run: Sequence[Timeline]) -> float:
    return max(row[-1].end for row in run[-1].compute if row) - run[0].start


def _draw_passes(
    axes: Axes, run: Sequence[Timeline], readable: float, measure: _Measure, title: str
) -> None:
    """Draw the passes of a run as boxes, those of one kind as one shape, below ``title``.

    ``readable`` is the length of a box, in time, that a digit needs.
    """
    schedule, first = run[0].schedule, run[0].start
    chunk = {s: c for stages in schedule.placement.stages_of for c, s in enumerate(stages)}
    digits = len(str(max(event.action.microbatch for event in run[0].events)))
    boxes: dict[tuple[Kind, bool, bool], list[PassBox]] = defaultdict(list)
    markers: dict[Kind, list[tuple[float, float]]] = defaultdict(list)
    for number, timeline in enumerate(run):
        in_pairs = _places_in_pairs(timeline)
        for event in timeline.events:
            place = in_pairs.get(event.action, (event.rank, _HALF, event.start, event.end))
            kind, middle, half = event.action.kind, place[0], place[1]
            start, end = place[2] - first, place[3] - first
            if kind in MARKERS:
                markers[kind].append((end, event.rank - _HALF))
            if kind not in COLOURS or start == end:
                continue
            in_later_chunk = bool(chunk[event.action.stage] % 2)
            boxes[kind, bool(number % 2), in_later_chunk].append((middle, half, start, end))
            if end - start >= digits * readable:
                axes.text(
                    (start + end) / 2,
                    middle,
                    str(event.action.microbatch),
                    ha="center",
                    va="center",
                    fontsize=LABEL,
                )
    background = [(rank, _HALF, 0, _length(run)) for rank in range(len(schedule.rows))]
    _add_boxes(axes, background, facecolor=BUBBLE, edgecolor="none")
    for (kind, in_later_step, in_later_chunk), places in boxes.items():
        _add_boxes(
            axes,
            places,
            facecolor=COLOURS[kind],
            alpha=PALER if in_later_step else None,
            edgecolor="white",
            linewidth=0.6,
            hatch="///" if in_later_chunk else None,
        )
    for kind, points in markers.items():
        marker = MARKERS[kind]
        axes.plot(*np.transpose(points), marker, color="black", markersize=4, clip_on=False)
    axes.set_yticks(range(len(schedule.rows)), [f"rank {r}" for r in range(len(schedule.rows))])
    axes.set_ylim(len(schedule.rows) - 0.5, -0.5)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure = f"bubble {run[0].bubble_share_makespan:.1%} of the makespan"
    if len(run) > 1:
        interval = (_length(run) - _length(run[:1])) / (len(run) - 1)
        figure = f"{len(run)} steps, one every {interval:.4g}"
    peak = measure.text(max(max(measure.curve(row)) for row in schedule.rows))
    axes.set_title(f"{title}: {figure}, peak {peak}", loc="left", fontsize=10)


def _places_in_pairs(timeline: Timeline) -> dict[Action, PassBox]:
    """Return the box of each overlapped pass: as long as both passes, with F in the upper half."""
    in_pairs = timeline.schedule.overlapped_with
    events = {event.action: event for event in timeline.events if event.action in in_pairs}
    quarter = _HALF / 2
    places: dict[Action, PassBox] = {}
    for forward, backward in timeline.schedule.pairs:
        rank, _, start, _ = events[forward]
        end = events[backward].end
        places[forward] = rank - quarter, quarter, start, end
        places[backward] = rank + quarter, quarter, start, end
    return places


def _add_boxes(axes: Axes, boxes: Sequence[PassBox], **look: Any) -> None:
    """Add ``boxes`` to the picture as one shape."""
    import matplotlib
    from matplotlib import patches, path

    corners = [
        [(start, y - half), (end, y - half), (end, y + half), (start, y + half)]
        for y, half, start, end in boxes
    ]
    shape = path.Path.make_compound_path_from_polys(np.array(corners))
    # The hatching has thin lines, since numbers stand on it.
    with matplotlib.rc_context({"hatch.linewidth": 0.5}):
        axes.add_patch(patches.PathPatch(shape, clip_on=False, **look))


def _draw_memory(axes: Axes, run: Sequence[Timeline], measure: _Measure) -> None:
    schedule, first = run[0].schedule, run[0].start
    curves = [measure.curve(row) for row in schedule.rows]
    for rank, curve in enumerate(curves):
        times, held = [], []
        for row in (timeline.compute[rank] for timeline in run):
            times += [event.start - first for event in row] + [row[-1].end - first]
            held += [*curve, 0]
        axes.step(
            times,
            held,
            where="post",
            linewidth=1,
            color=_grey(rank, len(curves)),
            clip_on=False,
        )
    axes.set_ylabel(f"{measure.name}\nheld", fontsize=8)
    axes.set_ylim(0, None)
    axes.spines[["top", "right"]].set_visible(False)


def _grey(rank: int, ranks: int) -> str:
    return str(0.7 * rank / max(ranks - 1, 1))


def _legend(used: set[Kind], schedules: Sequence[Schedule]) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    kinds = [
        Patch(color=colour, label=f"{kind}  {RULES[kind].label}")
        for kind, colour in COLOURS.items()
        if kind in used
    ]
    markers = [
        Line2D(
            [],
            [],
            marker=marker,
            label=RULES[kind].label,
            color="black",
            linestyle="none",
            markersize=4,
        )
        for kind, marker in MARKERS.items()
        if kind in used
    ]
    chunks = Patch(
        facecolor="white", edgecolor="grey", hatch="///", label="every second chunk of a rank"
    )
    is_hatched = any(schedule.placement.chunks > 1 for schedule in schedules)
    ends = {"rank 0": _grey(0, 2), "the last rank": _grey(1, 2)}
    memory = [
        Line2D([], [], linewidth=1, color=grey, label=f"memory of {rank}")
        for rank, grey in ends.items()
    ]
    bubble = Patch(color=BUBBLE, label="bubble")
    return [*kinds, bubble, *([chunks] if is_hatched else []), *markers, *memory]
