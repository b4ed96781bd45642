"""Labels next to the points of a picture, without overlaps.

Points of similar schedules lie close together, and their names would cover one another. Each label
is put at the nearest free place of a few, with a line to its point if it had to move away.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = tuple[float, float]
Frame = tuple[float, float, float, float]  # frame of a text in pixels: left, low, right, high

SIZE = 8  # size of letters in points
# Distances between a point and its label that are tried, in points.
_DISTANCES = (5, 12, 20, 30, 42, 56, 72)
_NEAR = 12  # distance in points beyond which a line connects a label with its point
_MARKER = 4  # pixels around a point that stay free
# Text alignment of a label by its direction from the point: 1, 0, -1.
_SIDES = ("left", "center", "right")
_ENDS = ("bottom", "center", "top")


def label_points(axes: Axes, labels: Mapping[Point, str], lines: Sequence[Sequence[Point]]) -> None:
    """Write each label as near to its point in a picture as it fits.

    A line joins the two if the label is not next to the point. Labels keep clear of other labels
    and points, and of ``lines`` if possible. Call this last: a later change of the axes' place
    moves the points, and labels may then overlap.
    """
    axes.get_figure().draw_without_rendering()  # type: ignore[union-attr]
    markers = [_around(point) for point in axes.transData.transform(list(labels))]
    on_lines = [point for line in lines for point in _along(axes.transData.transform(list(line)))]
    written: list[Frame] = []
    for point, label in sorted(labels.items()):
        width, height = _size_of(axes, label)
        places = [(_box(axes, point, place, width, height), place) for place in _places()]
        box, place = min(
            places,
            key=lambda position: (
                _outside(axes, position[0]),
                sum(_overlap(position[0], other) for other in (*written, *markers)),
                sum(_holds(position[0], other) for other in on_lines),
                _distance(position[1]),
            ),
        )
        written.append(box)
        _write(axes, point, label, place)


def _places() -> Iterator[Point]:
    """Return positions to try for a label, in typographic points from the point that it names."""
    for distance in _DISTANCES:
        for right, up in ((1, 0), (1, 1), (0, 1), (1, -1), (0, -1), (-1, 0), (-1, 1), (-1, -1)):
            yield distance * right, distance * up


def _write(axes: Axes, point: Point, label: str, place: Point) -> None:
    is_far = _distance(place) > _NEAR
    text = axes.annotate(
        label,
        point,
        xytext=place,
        textcoords="offset points",
        size=SIZE,
        ha=_SIDES[1 - int(np.sign(place[0]))],
        va=_ENDS[1 - int(np.sign(place[1]))],
        arrowprops={"arrowstyle": "-", "color": "#999999", "linewidth": 0.5} if is_far else None,
    )
    text.set_in_layout(False)


def _size_of(axes: Axes, label: str) -> Point:
    text = axes.text(0, 0, label, size=SIZE)
    extent = text.get_window_extent()
    text.remove()
    return extent.width, extent.height


def _box(axes: Axes, point: Point, place: Point, width: float, height: float) -> Frame:
    """Return the frame of a label in pixels; ``place`` is in typographic points from ``point``."""
    pixels = axes.get_figure().dpi / 72  # type: ignore[union-attr]
    x, y = axes.transData.transform(point) + np.array(place) * pixels
    left = x - (1 - np.sign(place[0])) / 2 * width
    low = y - (1 - np.sign(place[1])) / 2 * height
    return left, low, left + width, low + height


def _around(point: Sequence[float]) -> Frame:
    x, y = point
    return x - _MARKER, y - _MARKER, x + _MARKER, y + _MARKER


def _along(line: np.ndarray) -> list[Point]:
    """Return points on ``line``, a few pixels apart."""
    step = 3.0
    return [
        tuple(start + (end - start) * share)
        for start, end in pairwise(line)
        for share in np.linspace(0, 1, 2 + int(np.hypot(*(end - start)) / step))
    ]


def _overlap(box: Frame, other: Frame) -> float:
    """Return the area of the intersection of two frames of text, in square pixels."""
    width = min(box[2], other[2]) - max(box[0], other[0])
    height = min(box[3], other[3]) - max(box[1], other[1])
    return max(width, 0.0) * max(height, 0.0)


def _holds(box: Frame, point: Sequence[float]) -> bool:
    return box[0] <= point[0] <= box[2] and box[1] <= point[1] <= box[3]


def _outside(axes: Axes, box: Frame) -> bool:
    frame = axes.get_window_extent()
    return box[0] < frame.x0 or box[1] < frame.y0 or box[2] > frame.x1 or box[3] > frame.y1


def _distance(place: Point) -> float:
    return max(map(abs, place))
