"""Contents of a page: boxes on the tracks of ranks.

A browser draws boxes and knows no schedules. Everything that it can show of an action (time, memory
and waits) is therefore stored in the action's box.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

OMITTED = "omitted"  # replaces the kind of passes that `cut` has merged


class TrackGroup(enum.StrEnum):
    """Group of a rank's tracks on a page that fold away together."""

    PASSES = "passes"
    MESSAGES = "messages"  # track of messages, collectives, and gradient reductions
    COPIES = "copies"  # track of copies to the host and back


@dataclass(frozen=True)
class Track:
    """Track of a rank on a page: a row on which one action follows the other."""

    rank: int
    group: TrackGroup
    title: str

    @property
    def place(self) -> tuple[int, int, str]:
        """Sort key of tracks: rank by rank, passes first."""
        return self.rank, list(TrackGroup).index(self.group), self.title


@dataclass(frozen=True)
class Box:
    """Box on a page: an action of a rank, and when it ran.

    A mark, such as an optimizer step's, is a box that takes no time.

    Attributes:
        kind: an action's kind, "reduction", or `OMITTED`.
        step: number of the consecutive step, from 0.
        start, end: times after the start of the first step.
        cost: expected duration: by the costs, or for a measured action by the prediction.
        needs: numbers of the boxes whose end it had to wait for, in addition to the box before it
            on its track.
        held, held_bytes: activations that the rank holds while a pass runs, in microbatches and in
            bytes; None for other actions, or if bytes are not known.
        passes: number of passes that the box stands for.
        slice: number of the slice in its microbatch, if microbatches are cut.
        half: for an overlapped pass: 0 is the forward pass, 1 the backward pass, which is the next
            box. They are drawn above one another, each as long as both.
    """

    track: Track
    kind: str
    stage: int
    microbatch: int
    step: int
    start: float
    end: float
    cost: float
    needs: tuple[int, ...] = ()
    held: float | None = None
    held_bytes: float | None = None
    passes: int = 1
    slice: int | None = None
    half: int | None = None


def before(boxes: Sequence[Box], place: int) -> list[int]:
    """Return the numbers of the boxes for which the box with number ``place`` waited.

    The box before it on its track comes first.
    """
    is_first = place == 0 or boxes[place - 1].track != boxes[place].track
    return [*([] if is_first else [place - 1]), *boxes[place].needs]


def critical_path(boxes: Sequence[Box]) -> tuple[int, ...]:
    """Return the critical path through the boxes of a page, as their numbers in order of time.

    The path leads to the pass that ends last. Before each box comes the one that ended last among
    those it waited for. If a part of the path gets shorter, so does the whole, or another path
    takes its place.
    """
    passes = [place for place, box in enumerate(boxes) if box.track.group is TrackGroup.PASSES]
    path = [max(passes, key=lambda place: boxes[place].end)]
    while earlier := before(boxes, path[-1]):
        path.append(max(earlier, key=lambda place: boxes[place].end))
    return tuple(path[::-1])
