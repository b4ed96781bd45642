"""What a page shows: boxes on the tracks of ranks."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

LEFT_OUT = "left out"  # what stands where the kind does, for passes that `cut` has left out


class TrackGroup(enum.StrEnum):
    """Tracks that fold away together."""

    PASSES = "passes"
    MESSAGES = "messages"  # and collectives, and reductions of gradients
    COPIES = "copies"  # to the host and back


@dataclass(frozen=True)
class Track:
    """A row of a rank, on which one thing follows the other."""

    rank: int
    group: TrackGroup
    title: str

    @property
    def place(self) -> tuple[int, int, str]:
        """To sort by: rank by rank, passes first."""
        return self.rank, list(TrackGroup).index(self.group), self.title


@dataclass(frozen=True)
class Box:
    """An action, and when it ran. A mark, such as an optimizer step's, takes no time.

    Attributes:
        kind: an action's; "reduction"; or `LEFT_OUT`.
        step: which of the steps in a row, from 0.
        start, end: after the start of the first step.
        cost: what it is said to take: by the costs, or of a measured one by the prediction.
        needs: the places in the list of boxes of those whose end it had to wait for, beside the
            one before it on its track.
        held, held_bytes: what the rank holds of activations while a pass runs, in microbatches and
            in bytes; None of what is no pass, or where bytes are not known.
        passes: for how many it stands.
        slice: which of its microbatch's, where those are cut.
        half: of a pass that runs in a pair: 0 is its forward pass, 1 the backward pass, which is
            the next box. They are drawn above one another, each as long as both.
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
    """All that the box in that ``place`` had to wait for: the one before it on its track first."""
    is_first = place == 0 or boxes[place - 1].track != boxes[place].track
    return [*([] if is_first else [place - 1]), *boxes[place].needs]


def critical_path(boxes: Sequence[Box]) -> tuple[int, ...]:
    """From the pass that ends last back: each time what ended last of all that was waited for.

    No part of it can be shorter without the whole being so, or another path taking its place.
    """
    passes = [place for place, box in enumerate(boxes) if box.track.group is TrackGroup.PASSES]
    path = [max(passes, key=lambda place: boxes[place].end)]
    while earlier := before(boxes, path[-1]):
        path.append(max(earlier, key=lambda place: boxes[place].end))
    return tuple(path[::-1])
