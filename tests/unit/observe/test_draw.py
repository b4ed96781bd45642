"""Tests of pictures of timelines: every pass is drawn, where and as long as it ran."""

import itertools
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.program.verify import prove
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.timeline import Event, Timeline
from megatron_ext.viz.draw import BUBBLE, COLOURS, draw, draw_steps
from tests.helpers.schedules import F, line_problem, program, with_messages, written
from tests.helpers.svg import texts_of

pytest.importorskip("matplotlib")

_HATCHED = "every second chunk of a rank"


def timeline_of(name: str, p: int, m: int) -> Timeline:
    problem = line_problem(p, m, comm=0.25)
    return simulate(program(name, problem), problem.costs)


def two_chunks() -> Timeline:
    placement = Placement("loop", (0, 1, 0, 1))
    problem = Problem(placement, 1, uniform(placement, 2, 2, 2))
    schedule = written("0F0 2F0 2B0 0B0\n1F0 3F0 3B0 1B0", placement.rank_of, name="loop")
    return simulate(prove(with_messages(schedule, problem), problem), problem.costs)


def test_svg_of_two_timelines(tmp_path: Path) -> None:
    """An SVG of two timelines contains a text for each pass with its microbatch, besides the texts
    of axes and titles."""
    timelines = [timeline_of("1f1b", 3, 4), timeline_of("zb-h1", 3, 4)]
    path = tmp_path / "picture.svg"
    draw(timelines, path)
    texts = texts_of(path.read_text())
    passes = [event for timeline in timelines for row in timeline.compute for event in row]
    assert len(passes) == 3 * 4 * (2 + 3)
    drawn, wanted = Counter(texts), Counter(str(event.action.microbatch) for event in passes)
    assert all(drawn[label] >= count for label, count in wanted.items())
    for timeline in timelines:
        (title,) = [text for text in texts if text.startswith(timeline.schedule.name)]
        assert f"bubble {timeline.bubble_share_makespan:.1%} of the makespan" in title
        assert "peak 3 microbatches" in title
    assert {"rank 0", "rank 1", "rank 2", "time"} <= drawn.keys()
    legend = {
        "F forward",
        "I input gradient",
        "W weight gradient",
        "B backward (I and W)",
        "bubble",
        "memory of rank 0",
        "memory of the last rank",
    }
    shown = {" ".join(text.split()) for text in texts}
    assert legend <= shown and _HATCHED not in shown


def test_hatching_and_the_greys_of_memory_have_keys(tmp_path: Path) -> None:
    """The legend of a picture explains hatched boxes, and which ranks' memory the grey curves show.
    No legend used to explain them."""
    path = tmp_path / "picture.svg"
    draw([timeline_of("1f1b", 4, 4), two_chunks()], path)
    assert {_HATCHED, "memory of rank 0", "memory of the last rank"} <= {
        *texts_of(path.read_text())
    }


def test_png_of_two_timelines(tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    draw([timeline_of("1f1b", 2, 2), timeline_of("zb-h1", 2, 2)], path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(data[n : n + 4]) for n in (16, 20))
    assert width > height > 100


def shapes_of(axes: Any, timeline: Timeline) -> list[tuple[Any, list[tuple[int, float, float]]]]:
    """Return the shapes on ``axes``, one for each kind of pass, with their boxes; the shape of the
    bubbles is not among them."""
    shapes = []
    for shape in axes.patches:
        boxes = []
        for corners in shape.get_path().to_polygons(closed_only=False):
            (left, low), (right, high) = corners.min(axis=0), corners.max(axis=0)
            assert high - low == pytest.approx(0.86)
            boxes.append((round((low + high) / 2), float(left), float(right)))
        shapes.append((shape, boxes))
    (bubbles, whole), *kinds = shapes
    assert colour_of(bubbles) == BUBBLE
    assert whole == [(rank, 0, timeline.makespan) for rank in range(len(timeline.compute))]
    return kinds


def colour_of(shape: Any) -> str:
    from matplotlib.colors import to_hex

    return to_hex(shape.get_facecolor()).upper()


def boxes_of(axes: Any, timeline: Timeline) -> list[tuple[int, float, float, str]]:
    """Return the rank, start, end and colour of each box on ``axes``, sorted by rank and time."""
    return sorted(
        (*box, colour_of(shape)) for shape, boxes in shapes_of(axes, timeline) for box in boxes
    )


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_every_pass_has_its_box(name: str, tmp_path: Path, figures: list[Any]) -> None:
    timeline = timeline_of(name, 3, 5)
    draw([timeline], tmp_path / "picture.png")
    (figure,) = figures
    passes, memory = figure.axes
    events = [event for row in timeline.compute for event in row]
    wanted = [(e.rank, e.start, e.end, COLOURS[e.action.kind].upper()) for e in events]
    boxes = boxes_of(passes, timeline)
    assert [box[3] for box in boxes] == [box[3] for box in wanted]
    for box, event in zip(boxes, wanted, strict=True):
        assert box[:3] == pytest.approx(event[:3])
    kinds = {event.action.kind for event in events}
    assert len(passes.patches) == len(kinds) + 1, "a shape a kind, and the bubbles'"
    assert [text.get_text() for text in passes.texts] == [str(e.action.microbatch) for e in events]
    for line, row in zip(memory.lines, timeline.compute, strict=True):
        assert max(line.get_ydata()) <= 3
        assert line.get_xdata()[-1] == row[-1].end
        assert line.get_ydata()[-1] == 0


def test_a_measured_timeline_begins_at_zero(tmp_path: Path, figures: list[Any]) -> None:
    """A measured timeline is drawn from time zero, because a recorder's clock begins at an
    arbitrary time."""
    predicted = timeline_of("1f1b", 2, 2)
    events = tuple(Event(e.rank, e.action, e.start + 1e6, e.end + 1e6) for e in predicted.events)
    measured = Timeline(predicted.schedule, events)
    draw([predicted, measured], tmp_path / "picture.png")
    axes, _, other, _ = figures[0].axes
    for box, same in zip(boxes_of(axes, predicted), boxes_of(other, measured), strict=True):
        assert box[:3] == pytest.approx(same[:3])


def test_later_chunks_are_hatched(tmp_path: Path, figures: list[Any]) -> None:
    timeline = two_chunks()
    draw([timeline], tmp_path / "picture.svg")
    hatched = {
        (rank, start): bool(shape.get_hatch())
        for shape, boxes in shapes_of(figures[0].axes[0], timeline)
        for rank, start, _ in boxes
    }
    assert [hatched[box] for box in sorted(hatched)] == [False, True, True, False] * 2


def test_passes_that_are_too_short_go_without_a_number(tmp_path: Path, figures: list[Any]) -> None:
    """Passes that are drawn too short for their microbatch number have none. In a picture of
    hundreds of passes, numbers would cover the boxes; two digits need more space than one."""
    draw([timeline_of("gpipe", 2, 30)], tmp_path / "picture.png")
    assert len(figures[0].axes[0].texts) == 2 * 30, "B has one, F has none"
    draw([timeline_of("gpipe", 2, 80)], tmp_path / "picture.png")
    assert not figures[1].axes[0].texts


def test_numbers_stand_within_their_boxes(tmp_path: Path, figures: list[Any]) -> None:
    timelines = [timeline_of("zb-h1", 2, m) for m in (3, 9, 18)]
    draw(timelines, tmp_path / "picture.png")
    for passes, timeline in zip(figures[0].axes[::2], timelines, strict=True):
        assert passes.texts
        boxes = [box for _, boxes in shapes_of(passes, timeline) for box in boxes]
        for text in passes.texts:
            time, rank = text.get_position()
            (box,) = (box for box in boxes if box[0] == rank and box[1] < time < box[2])
            left, right = (passes.transData.transform((x, rank))[0] for x in box[1:])
            extent = text.get_window_extent()
            assert left < extent.x0 and extent.x1 < right


def test_an_evaluation_is_drawn(tmp_path: Path, figures: list[Any]) -> None:
    problem = line_problem(2, 3, forward_only=True)
    timeline = simulate(program("1f1b", problem), problem.costs)
    draw([timeline], tmp_path / "picture.png")
    assert len(figures[0].axes[0].texts) == 6
    assert len(boxes_of(figures[0].axes[0], timeline)) == 6


@pytest.mark.parametrize("name", ["picture.pdf", "picture", "picture.SVG.txt", "png"])
def test_other_suffixes_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"pictures are written as \.svg or \.png") as refusal:
        draw([timeline_of("1f1b", 2, 2)], tmp_path / name)
    assert str(tmp_path / name) in str(refusal.value)
    assert not (tmp_path / name).exists()


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install 'megatron_ext\[plot\]', or drop --plot"):
        draw([timeline_of("1f1b", 2, 2)], tmp_path / "picture.svg")


# Linear sRGB as seen by people who lack one of the three kinds of cones: Machado, Oliveira and
# Fernandes 2009, "A physiologically-based model for simulation of color vision deficiency", table
# 1, severity 1.0.
VISIONS = {
    "all cones": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
# distance in CIELAB; people can just tell two colours apart at about 2, side by side
LEAST_DIFFERENCE = 15.0


def lab(colour: str, vision: object) -> np.ndarray:
    """Return the CIELAB coordinates (CIE 1976, D65) of ``colour`` (#RRGGBB) as seen with
    ``vision``."""
    srgb = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.asarray(vision) @ linear, 0, 1)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.asarray(to_xyz) @ seen / [0.9505, 1.0, 1.0890]
    x, y, z = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_all_visions_tell_the_kinds_of_passes_apart() -> None:
    """People with any kind of colour vision can tell the kinds of passes apart by colour. The input
    gradient and the whole backward pass used to be two similar oranges."""
    assert F in COLOURS
    colours = {**{kind.name: colour for kind, colour in COLOURS.items()}, "bubble": BUBBLE}
    for name, vision in VISIONS.items():
        for (kind, colour), (other, its) in itertools.combinations(colours.items(), 2):
            difference = np.linalg.norm(lab(colour, vision) - lab(its, vision))
            assert difference > LEAST_DIFFERENCE, f"{kind}, {other}: {difference:.1f}, {name}"


def test_memory_is_drawn_in_bytes_where_costs_have_them(tmp_path: Path, figures: list[Any]) -> None:
    problem = line_problem(3, 4)
    held = {Held.ACTIVATION: (2.0**30,) * 3, Held.WEIGHT_INPUTS: (2.0**29,) * 3}
    costs = problem.costs.with_passes(held_bytes=held)
    timeline = simulate(program("zb-h1", problem), problem.costs)
    draw_steps([[timeline], [timeline]], tmp_path / "picture.png", [costs, problem.costs])
    passes, memory, others, in_microbatches = figures[0].axes
    assert memory.get_ylabel() == "GiB\nheld" and "peak 3 GiB" in passes.get_title("left")
    assert in_microbatches.get_ylabel() == "microbatches\nheld"
    assert "peak 3 microbatches" in others.get_title("left")
    first, other = (axes.lines[2].get_ydata() for axes in (memory, in_microbatches))
    assert 0.5 in first and 0.5 not in other, "W holds half of what F does"
