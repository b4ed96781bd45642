"""Weight gradients put into the gaps of an order of passes in which some run as pairs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.placement import Placement
from scripts.recipes.pairs.order import Rows, Walk


@dataclass(frozen=True)
class Room:
    """Bytes that each rank has for activations, and what a microbatch keeps of each stage from F to
    I, and from I to W."""

    of_rank: Sequence[float]
    kept: Sequence[float]
    left: Sequence[float]


def filled(
    rows: Rows,
    placement: Placement,
    seconds: Callable[[tuple[Action, ...]], float],
    hop: float,
    room: Room,
    with_pairs: bool,
) -> list[list[Action]]:
    """``rows``, which have no W, with theirs: where a rank waits as long, or nearly, and where it
    has no room for more.

    Args:
        seconds: of a pass, or of a pair.
        with_pairs: whether passes run as pairs where they can.
    """
    walk = Walk(rows, placement, with_pairs)
    ranks = [_Rank(rank, room) for rank in range(placement.ranks)]
    ends: list[float] = []
    for passes, rank, needed, far in zip(
        walk.passes, walk.ranks, walk.needed, walk.far, strict=True
    ):
        ready = max(
            (ends[n] + hop * is_far for n, is_far in zip(needed, far, strict=True) if n >= 0),
            default=0.0,
        )
        ranks[rank].run_until(ready, passes, seconds)
        ends.append(ranks[rank].run(passes, seconds))
    for of_rank in ranks:
        of_rank.end()
    return [of_rank.row for of_rank in ranks]


class _Rank:
    def __init__(self, number: int, room: Room) -> None:
        self.row: list[Action] = []
        self._room, self._left = room, room.of_rank[number]
        self._waiting: deque[Action] = deque()
        self._free = 0.0

    def run_until(
        self,
        ready: float,
        passes: tuple[Action, ...],
        seconds: Callable[[tuple[Action, ...]], float],
    ) -> None:
        needs = sum(self._room.kept[a.stage] for a in passes if a.kind is Kind.FORWARD)
        while self._waiting:
            lasts = seconds((self._waiting[0],))
            fits = self._free + lasts <= ready
            if not fits and needs <= self._left:
                break
            self._weights()
            self._free += lasts
        self._free = max(self._free, ready)

    def run(
        self, passes: tuple[Action, ...], seconds: Callable[[tuple[Action, ...]], float]
    ) -> float:
        self.row += passes
        for stage, kind, k in passes:
            if kind is Kind.FORWARD:
                self._left -= self._room.kept[stage]
            else:
                self._left += self._room.kept[stage] - self._room.left[stage]
                self._waiting.append(Action(stage, Kind.BACKWARD_WEIGHT, k))
        self._free += seconds(passes)
        return self._free

    def _weights(self) -> None:
        action = self._waiting.popleft()
        self._left += self._room.left[action.stage]
        self.row.append(action)

    def end(self) -> None:
        while self._waiting:
            self._weights()
