"""Schedules too large for a page, cut to their first, middle and last microbatches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from megatron_ext.viz.page.boxes import LEFT_OUT, Box, TrackGroup


def shares(passes: Sequence[int], room: int) -> list[int]:
    """Return how many passes of each schedule a page may show, ``room`` in all. Passes that one
    schedule does not need are given to the others."""
    granted = [0] * len(passes)
    left = room
    smallest_first = sorted(range(len(passes)), key=passes.__getitem__)
    for number, which in enumerate(smallest_first):
        granted[which] = min(passes[which], left // (len(passes) - number))
        left -= granted[which]
    return granted


def kept_microbatches(microbatches: int, passes: int, most: int) -> tuple[range, ...]:
    """Return the first, the middle and the last of ``microbatches``, with at most ``most`` of the
    ``passes`` together, but at least one microbatch each. Return all microbatches if that is no
    more."""
    third = max(most * microbatches // passes // 3, 1)
    if passes <= most or 3 * third >= microbatches:
        return (range(microbatches),)
    middle = (microbatches - third) // 2
    return (
        range(third),
        range(middle, middle + third),
        range(microbatches - third, microbatches),
    )


def cut(
    boxes: Sequence[Box], kept: Sequence[range], path: Sequence[int]
) -> tuple[tuple[Box, ...], tuple[int, ...]]:
    """Return ``boxes`` of the microbatches ``kept``, and the ``path`` through them.

    The other passes are merged: consecutive ones of a rank become one box, which no box needs.
    Other messages and copies are not shown.
    """
    numbers = {number for part in kept for number in part}
    left: list[Box] = []
    place: list[int | None] = []  # number of each box among the remaining ones
    for box in boxes:
        box = replace(box, half=None)  # the other box of the pair may not be shown
        before = left[-1] if left else None
        if box.microbatch in numbers or box.start == box.end:
            left.append(box)
        elif box.track.group is not TrackGroup.PASSES:
            place.append(None)
            continue
        elif before is not None and _continues(before, box):
            left[-1] = _joined(before, box)
        else:
            left.append(replace(box, kind=LEFT_OUT))
        place.append(len(left) - 1)

    def moved(places: Iterable[int]) -> tuple[int, ...]:
        there = (place[number] for number in places)
        return tuple(dict.fromkeys(number for number in there if number is not None))

    is_whole = [box.kind != LEFT_OUT for box in left]
    needs = (tuple(n for n in moved(box.needs) if is_whole[n]) for box in left)
    return tuple(
        replace(box, needs=needed if whole else ())
        for box, needed, whole in zip(left, needs, is_whole, strict=True)
    ), moved(path)


def _continues(before: Box, box: Box) -> bool:
    return before.kind == LEFT_OUT and (before.track, before.step) == (box.track, box.step)


def _joined(before: Box, box: Box) -> Box:
    """Return both boxes as one, with the larger of their memory."""
    return replace(
        before,
        end=box.end,
        cost=before.cost + box.cost,
        held=_larger(before.held, box.held),
        held_bytes=_larger(before.held_bytes, box.held_bytes),
        passes=before.passes + box.passes,
    )


def _larger(amount: float | None, other: float | None) -> float | None:
    return None if amount is None or other is None else max(amount, other)
