"""Schedules too large for a page, cut to their first, middle and last microbatches.

A browser gets slow with too many boxes. A step repeats itself, so its beginning, some of its middle
and its end show what there is to see; what lies between is marked as omitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from megatron_ext.viz.page.boxes import OMITTED, Box, TrackGroup


def shares(passes: Sequence[int], most: int) -> list[int]:
    """Return how many passes a page may show of each schedule, at most ``most`` in all.

    Args:
        passes: number of passes of each schedule. A schedule with fewer passes than its equal share
            leaves the rest to the others.
    """
    granted = [0] * len(passes)
    remaining = most
    smallest_first = sorted(range(len(passes)), key=passes.__getitem__)
    for number, schedule in enumerate(smallest_first):
        granted[schedule] = min(passes[schedule], remaining // (len(passes) - number))
        remaining -= granted[schedule]
    return granted


def kept_microbatches(microbatches: int, passes: int, most: int) -> tuple[range, ...]:
    """Return the microbatches that a page shows: at a step's start, in its middle, at its end.

    The three ranges are equally long. They contain at least one microbatch each, and otherwise at
    most ``most`` passes together. If all microbatches may be shown, one range contains them all.

    Args:
        microbatches, passes: numbers of these in the whole schedule.
    """
    length = max(most * microbatches // passes // 3, 1)
    if passes <= most or 3 * length >= microbatches:
        return (range(microbatches),)
    middle = (microbatches - length) // 2
    return (
        range(length),
        range(middle, middle + length),
        range(microbatches - length, microbatches),
    )


def cut_to_microbatches(
    boxes: Sequence[Box], kept: Sequence[range], path: Sequence[int]
) -> tuple[tuple[Box, ...], tuple[int, ...]]:
    """Return the ``boxes`` of the microbatches in ``kept``, and the part of ``path`` on them.

    ``path`` and the result are numbers of boxes. Consecutive passes of all other microbatches on a
    rank are merged into one box without dependencies. Their messages and copies are omitted. Marks,
    which take no time, remain.
    """
    shown = {number for part in kept for number in part}
    remaining: list[Box] = []
    # Number of each box in ``remaining``, None if the box was merged.
    new_number: list[int | None] = []
    for box in boxes:
        box = replace(box, half=None)  # the second of two overlapped passes may have been merged
        before = remaining[-1] if remaining else None
        is_mark = box.start == box.end
        if box.microbatch in shown or is_mark:
            remaining.append(box)
        elif box.track.group is not TrackGroup.PASSES:
            new_number.append(None)
            continue
        elif before is not None and _continues(before, box):
            remaining[-1] = _joined(before, box)
        else:
            remaining.append(replace(box, kind=OMITTED))
        new_number.append(len(remaining) - 1)

    def renumbered(numbers: Iterable[int]) -> tuple[int, ...]:
        """Return the new numbers of boxes, each once, without those of omitted boxes."""
        new = (new_number[number] for number in numbers)
        return tuple(dict.fromkeys(number for number in new if number is not None))

    is_unmerged = [box.kind != OMITTED for box in remaining]
    needs = (tuple(n for n in renumbered(box.needs) if is_unmerged[n]) for box in remaining)
    return tuple(
        replace(box, needs=needed if unmerged else ())
        for box, needed, unmerged in zip(remaining, needs, is_unmerged, strict=True)
    ), renumbered(path)


def _continues(before: Box, box: Box) -> bool:
    """Return whether ``box`` belongs to the merged box ``before``, on the same track and step."""
    return before.kind == OMITTED and (before.track, before.step) == (box.track, box.step)


def _joined(before: Box, box: Box) -> Box:
    """Return two boxes merged into one, with the larger of their memory."""
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
