"""Pack the passes of a V as early as they go, from the left and from the right in turn.

A *plan* gives every pass a time at which one would like it to start. `pack` turns it into a
schedule: it takes the passes in the plan's order, each as soon as what it needs has been taken, and
puts each at the earliest time at which its rank is idle long enough and has the memory, in a gap
between passes taken before if there is one. (Serial schedule generation, Kolisch 1996.)

Time can run backwards: a schedule read from its end is a schedule of the mirrored problem, in which
dependencies point the other way, W takes memory and F gives it back. Packing the mirrored schedule
pushes every pass to the right, packing the result again pushes it to the left. Nothing is lost in
either step, and idle time wanders off to the ends (double justification, Valls et al. 2005).

Memory never deadlocks. A rank holds both chunks of a microbatch, first the outer one (``enters``),
then the inner one (``turns``). A microbatch may enter only if all those that have entered and not
yet turned could still turn, were nothing else held: then the oldest microbatch can always go on.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.schedule.action import Action, Kind

LANES = 6  # of a rank, in the order in which a microbatch runs through them
F_OUTER, F_INNER, I_INNER, I_OUTER, W_INNER, W_OUTER = range(LANES)

Starts = list[list[float]]  # by lane and microbatch, both as plan and as schedule
_TINY = 1e-9
_ANY = float("inf")


@dataclass(frozen=True)
class Shop:
    """What has to be packed, in one direction of time.

    A lane is one kind of pass on one stage; rank r has lanes 6r to 6r+5. A lane runs its
    microbatches in order.

    Attributes:
        microbatches: how many run through each lane.
        seconds: per lane.
        nexts: per lane, the lanes that wait for it and how long after its end.
        waits_for: per lane, the number of lanes it waits for.
        gain: memory a pass takes at its start, or, if negative, gives back at its end.
        limit: the memory of a rank.
        enters: the lane of a rank in which a microbatch takes memory first.
        turns: the lane in which it takes the rest.
        room: per rank, what a microbatch may need after entering, and after turning.
        heads: per rank, when it can start at the earliest.
        tails: per rank, how long after its end all has ended. (Where steps overlap, a rank that
            starts later may end later: by that, those that start sooner have a tail.)
    """

    microbatches: int
    seconds: tuple[float, ...]
    nexts: tuple[tuple[tuple[int, float], ...], ...]
    waits_for: tuple[int, ...]
    gain: tuple[float, ...]
    limit: float
    enters: int
    turns: int
    room: tuple[tuple[float, float], ...]
    heads: tuple[float, ...]
    tails: tuple[float, ...]

    def mirrored(self) -> Shop:
        """The same work with time running backwards."""
        nexts: list[list[tuple[int, float]]] = [[] for _ in self.seconds]
        waits_for = [0] * len(self.seconds)
        for lane, followers in enumerate(self.nexts):
            for follower, after in followers:
                nexts[follower].append((lane, after))
                waits_for[lane] += 1
        return Shop(
            self.microbatches,
            self.seconds,
            tuple(map(tuple, nexts)),
            tuple(waits_for),
            tuple(-gain for gain in self.gain),
            self.limit,
            W_OUTER,
            W_INNER,
            self.room,
            self.tails,
            self.heads,
        )


def lane_of(stage: int, kind: Kind, ranks: int) -> int:
    """The lane of a pass; the outer chunk of a rank is its first."""
    outer = stage < ranks
    rank = ranks - 1 - stage if outer else stage - ranks
    lanes = {
        Kind.FORWARD: (F_INNER, F_OUTER),
        Kind.BACKWARD_INPUT: (I_INNER, I_OUTER),
        Kind.BACKWARD_WEIGHT: (W_INNER, W_OUTER),
    }
    return rank * LANES + lanes[kind][outer]


_KINDS = (
    Kind.FORWARD,
    Kind.FORWARD,
    Kind.BACKWARD_INPUT,
    Kind.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT,
    Kind.BACKWARD_WEIGHT,
)


def rows_of(starts: Starts) -> tuple[tuple[Action, ...], ...]:
    """The actions of each rank in the order of their starts."""
    ranks = len(starts) // LANES
    rows = []
    for rank in range(ranks):
        timed = []
        for lane in range(LANES):
            outer = lane in (F_OUTER, I_OUTER, W_OUTER)
            stage = ranks - 1 - rank if outer else ranks + rank
            for k, start in enumerate(starts[rank * LANES + lane]):
                timed.append((start, lane, Action(stage, _KINDS[lane], k)))
        rows.append(tuple(action for _, _, action in sorted(timed)))
    return tuple(rows)


def mirror(shop: Shop, starts: Starts, makespan: float) -> Starts:
    """``starts`` read from the end."""
    return [
        [makespan - start - seconds for start in reversed(row)]
        for row, seconds in zip(starts, shop.seconds, strict=True)
    ]


def pack(shop: Shop, plan: Sequence[Sequence[float]]) -> tuple[float, Starts] | None:
    """Makespan, with heads and tails, and starts of ``plan`` packed to the left; None if memory got
    stuck.

    (That can happen where W needs less memory than I, with time running backwards: what W takes
    grows afterwards.)
    """
    # The search spends its time in this loop: it calls little and looks little up.
    lanes, m, ranks = len(shop.seconds), shop.microbatches, len(shop.room)
    gains, durations, nexts, limit = shop.gain, shop.seconds, shop.nexts, shop.limit
    count = [0] * lanes  # passes taken
    missing = [[number] * m for number in shop.waits_for]
    ready = [[0.0] * m for _ in range(lanes)]
    starts = [[0.0] * m for _ in range(lanes)]
    lane_end = [0.0] * lanes
    rank_end = list(shop.heads)
    held = [0.0] * ranks
    # A gap is [start, end, the most that is held from here to the rank's end].
    gaps: list[list[list[float]]] = [[] for _ in range(ranks)]
    refused: list[list[tuple[float, int]]] = [[] for _ in range(ranks)]
    heap = sorted((plan[lane][0], lane) for lane in range(lanes) if not shop.waits_for[lane])
    push, pop = heapq.heappush, heapq.heappop
    while heap:
        entry = pop(heap)
        lane = entry[1]
        rank, k, gain = lane // LANES, count[lane], gains[lane]
        if gain > 0 and not _may_take(shop, rank, lane, held[rank] + gain, count):
            refused[rank].append(entry)
            continue
        earliest, seconds = ready[lane][k], durations[lane]
        if lane_end[lane] > earliest:
            earliest = lane_end[lane]
        start, rank_end[rank] = _put(
            gaps[rank], rank_end[rank], earliest, seconds, gain, held[rank], limit
        )
        held[rank] += gain
        starts[lane][k] = start
        end = lane_end[lane] = start + seconds
        following = count[lane] = k + 1
        if following < m and not missing[lane][following]:
            push(heap, (plan[lane][following], lane))
        for follower, after in nexts[lane]:
            waits = missing[follower]
            waits[k] -= 1
            if end + after > ready[follower][k]:
                ready[follower][k] = end + after
            if not waits[k] and count[follower] == k:
                push(heap, (plan[follower][k], follower))
        while refused[rank]:
            push(heap, refused[rank].pop())
    if any(number < m for number in count):
        return None
    return max(map(float.__add__, rank_end, shop.tails)), starts


def _may_take(shop: Shop, rank: int, lane: int, held: float, count: list[int]) -> bool:
    """Whether ``rank`` may hold ``held`` to start the next pass of ``lane``."""
    if held > shop.limit:
        return False
    first = rank * LANES
    entered, turned = count[first + shop.enters], count[first + shop.turns]
    if lane == first + shop.enters:
        enter, turn = shop.room[rank]
        return (entered - turned + 1) * enter + turn <= shop.limit
    return lane != first + shop.turns or turned < entered


def _put(
    gaps: list[list[float]],
    rank_end: float,
    earliest: float,
    seconds: float,
    gain: float,
    held: float,
    limit: float,
) -> tuple[float, float]:
    """Put a pass into the first gap of its rank that takes it, or behind all others. Its start, and
    the rank's new end."""
    if gaps and earliest < rank_end:
        room = limit - gain if gain > 0 else _ANY
        in_gap = _fill_gap(gaps, earliest, seconds, gain, room)
        if in_gap is not None:
            return in_gap, rank_end
    start = earliest if earliest > rank_end else rank_end
    if gain > 0 or start > rank_end:
        _append(gaps, rank_end, start, held, gain)
    return start, start + seconds


def _fill_gap(
    gaps: list[list[float]], earliest: float, seconds: float, gain: float, room: float
) -> float | None:
    """Put a pass into the first gap that takes it; its start, or None."""
    for index, (opens, closes, most) in enumerate(gaps):
        if most > room or earliest + seconds > closes + _TINY:
            continue
        start = opens if opens > earliest else earliest
        if start + seconds > closes + _TINY:
            continue
        end = start + seconds
        left = [[opens, start, most + max(gain, 0.0)]] if start - opens > _TINY else []
        right = [[end, closes, most + gain]] if closes - end > _TINY else []
        for gap in gaps[:index]:
            gap[2] = max(gap[2], most + gain)
        for gap in gaps[index + 1 :]:
            gap[2] += gain
        gaps[index : index + 1] = left + right
        return start
    return None


_GAPS = 12  # kept for a rank; older ones have rarely anything left that fits


def _append(
    gaps: list[list[float]], rank_end: float, start: float, held: float, gain: float
) -> None:
    """Keep the gaps of a rank when a pass is put behind all others, at ``start``."""
    if start - rank_end > _TINY:
        gaps.append([rank_end, start, held])
        del gaps[:-_GAPS]
    if gain > 0:
        for gap in gaps:
            gap[2] = max(gap[2], held + gain)


def double_justify(
    shop: Shop, mirrored: Shop, plan: Sequence[Sequence[float]], rounds: int
) -> tuple[float, Starts] | None:
    """``plan`` packed to the left and to the right until that gains no more."""
    best: tuple[float, Starts] | None = None
    for _ in range(rounds):
        there = pack(shop, plan)
        if there is None:
            break
        back = pack(mirrored, mirror(shop, there[1], there[0]))
        packed = there
        if back is not None and back[0] <= there[0]:
            packed = back[0], mirror(shop, back[1], back[0])
        if best is not None and packed[0] >= best[0] * (1 - _TINY):
            break
        best = packed
        plan = packed[1]
    return best
