"""Patterns: layouts of one microbatch's way through a V that can be repeated exactly every period.

A pattern gives the time at which each rank starts the six passes of a microbatch. Repeated every
period it is a steady state if no two passes of a rank collide modulo the period, and if the
microbatches under way together stay within the memory limit.

Patterns are enumerated by a dynamic program over the ranks, from the turn of the V to its open end.
The *arrangement* of a rank is the position of its passes on a circle as long as the period.
Collisions do not depend on the number of whole periods between passes, so each pass comes as soon
after the one it waits for as its position on the circle allows. Two figures, in whole periods, then
contain all of a rank that other ranks have to know:

- the way within, from F of the outer chunk to F of the inner one and from I of the inner chunk to I
  of the outer one: the ranks nearer to the turn determine it;
- the way without, from F of the inner chunk to its I: the ranks nearer to the open end determine
  it.

The outer chunk is held for both ways together, the inner one for the way without. On the way from
the turn outwards the way within is known. Of the way without, only the longest for which all ranks
so far have the memory is recorded: a pattern that fits with a longer one fits with a shorter one,
too.

The rotation of one rank's circle relative to the next one's is free. If it is rotated a little, two
of the four ways between them get longer and two get shorter, but none crosses a whole period unless
one of the four is as short as it can be. So only the four rotations with one of the ways at its
shortest matter. No pattern is missed, and fine ticks cost nothing, as long as no rank is ever idle.
A rank that is idle in part of the period may spread its idle time over the gaps before F and I in
many ways (a gap before W is of no use: W may come sooner, and frees memory). All of them are tried
if they are few (`Arrangements.EACH`); otherwise all idle time is in one gap.

A pattern stretched in time is a pattern. So if there is none at a period, there is none at any
shorter period either.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

LANES = 6  # of a rank, as a `Shop` has them
F_OUTER, F_INNER, I_INNER, I_OUTER, W_INNER, W_OUTER = range(LANES)

Pattern = tuple[tuple[int, ...], ...]  # by rank and lane, the first start in ticks
Hops = tuple[int, int]  # of the outer chunk and of the inner one, ticks of a message

_Ints = NDArray[np.int32]
_NEVER = -(1 << 20)  # periods
_UNLIMITED = 1 << 16  # periods: more than any way takes
_TINY = 1e-9


class Arrangements(enum.Enum):
    """Ways of spreading a rank's idle time that are tried."""

    EACH = enum.auto()  # in whole ticks
    ONE_GAP = enum.auto()


@dataclass(frozen=True)
class RankWork:
    """Work and memory of a rank for a microbatch.

    Attributes:
        ticks: duration of its six passes, by lane; none is 0.
        activations: memory that the outer and the inner chunk hold from the start of F to the end
            of I.
        weight_inputs: memory that they hold from there to the end of W.
        limit: memory that the rank may hold.
    """

    ticks: tuple[int, ...]
    activations: tuple[float, float]
    weight_inputs: tuple[float, float]
    limit: float

    def __post_init__(self) -> None:
        assert len(self.ticks) == LANES and min(self.ticks) > 0


def patterns(
    ranks: Sequence[RankWork], hops: Sequence[Hops], period: int, most: int, idle: Arrangements
) -> list[Pattern]:
    """Return at most ``most`` patterns in which a microbatch comes every ``period`` ticks. Patterns
    in which a microbatch takes longest come first, as they use the memory best.

    Args:
        ranks: the ranks from the turn of the V to its open end.
        hops: for each rank but the first, ticks of the messages between it and the previous one: of
            the outer chunk's, and of the inner chunk's.
        idle: how idle time is spread.
    """
    if any(sum(rank.ticks) > period for rank in ranks):
        return []
    line = _Line(tuple(ranks), hops, period, idle)
    chosen: dict[Pattern, None] = {}
    for end in line.ends():
        for variant in range(_VARIANTS):
            if len(chosen) == most:
                return list(chosen)
            chosen[line.pattern(end, variant)] = None
    return list(chosen)


_VARIANTS = 3  # patterns for each end, of possibly many that take equally long
_PRIME = 7919  # for the choice of variants


def exists(ranks: Sequence[RankWork], hops: Sequence[Hops], period: int) -> bool:
    """Return whether there is any pattern of ``period`` ticks. If not, there is none of a shorter
    period."""
    return bool(patterns(ranks, hops, period, 1, Arrangements.EACH))


def arrangements_of(rank: RankWork, period: int) -> int:
    """Return about the number of arrangements that `Arrangements.EACH` tries on ``rank``."""
    idle = period - sum(rank.ticks)
    return 60 * (idle + 1) * (idle + 2) * (idle + 3) // 6


@dataclass(frozen=True)
class _Circle:
    """The arrangements of a rank, as columns of equal length.

    Attributes:
        starts: start of each lane on the circle; F of the outer chunk starts at 0.
        least: peak memory if no way takes a period or more.
        within: length of the way within, less whole periods.
        without: length of the way without, less whole periods.
        carry: periods by which both ways together are longer than from F of the outer chunk to its
            I.
    """

    starts: _Ints
    least: NDArray[np.float64]
    within: _Ints
    without: _Ints
    carry: _Ints


def _circle(rank: RankWork, period: int, spread: Arrangements) -> _Circle:
    """Return the arrangements of ``rank`` that differ in F and I, each with the W that hold the
    least memory."""
    starts = np.concatenate(list(_placed(rank.ticks, period, spread)), axis=1)
    least = _least_held(rank, starts, period)
    order = np.lexsort((least, starts[I_OUTER], starts[I_INNER], starts[F_INNER]))
    key = starts[:, order][[F_INNER, I_INNER, I_OUTER]]
    is_first = np.ones(len(order), dtype=bool)
    is_first[1:] = (key[:, 1:] != key[:, :-1]).any(axis=0)
    order = order[is_first]
    starts, least = starts[:, order], least[order]
    fits = least <= rank.limit + _TINY
    starts, least = starts[:, fits], least[fits]
    return_way = (starts[I_OUTER] - starts[I_INNER]) % period
    within = (starts[F_INNER] + return_way) % period
    without = (starts[I_INNER] - starts[F_INNER]) % period
    carry = (within + without - starts[I_OUTER]) // period
    return _Circle(starts, least, within, without, carry)


def _only(circle: _Circle, arrangement: int) -> _Circle:
    """Return ``circle`` with only one of its arrangements."""
    figures = (np.asarray(getattr(circle, field.name)) for field in fields(circle))
    return _Circle(*(figure[..., [arrangement]] for figure in figures))


def _placed(ticks: Sequence[int], period: int, spread: Arrangements) -> Iterator[_Ints]:
    """Yield the passes on the circle, in each order, with idle time before F and I."""
    idle = period - sum(ticks)
    if spread is Arrangements.EACH:
        cuts = itertools.combinations(range(idle + 3), 3)
        gaps = [(a, b - a - 1, c - b - 1) for a, b, c in cuts]  # the rest comes at the end
    else:
        gaps = list({(0, 0, 0), (idle, 0, 0), (0, idle, 0), (0, 0, idle)})
    before = np.array(gaps, dtype=np.int32).T
    for order in itertools.permutations(range(1, LANES)):
        starts = np.zeros((LANES, len(gaps)), dtype=np.int32)
        time, gap = np.full(len(gaps), ticks[F_OUTER], dtype=np.int32), 0
        for lane in order:
            if lane not in (W_INNER, W_OUTER):
                time, gap = time + before[gap], gap + 1
            starts[lane] = time
            time = time + ticks[lane]
        yield starts


_CHUNKS = ((F_OUTER, I_OUTER, W_OUTER), (F_INNER, I_INNER, W_INNER))


def _least_held(rank: RankWork, starts: _Ints, period: int) -> NDArray[np.float64]:
    """Return the peak memory of ``rank``, per column of ``starts``, if each pass comes within a
    period of the one it waits for."""
    holds: list[tuple[_Ints, _Ints, float]] = []  # from, for how long, how much
    for chunk, (forward, backward, weight) in enumerate(_CHUNKS):
        active = (starts[backward] - starts[forward]) % period + rank.ticks[backward]
        end = starts[forward] + active
        rest = (starts[weight] - end) % period + rank.ticks[weight]
        holds.append((starts[forward], active, rank.activations[chunk]))
        holds.append((end, rest, rank.weight_inputs[chunk]))
    most = np.zeros(starts.shape[1])
    for taken, _, _ in holds:
        held = np.zeros(starts.shape[1])
        for start, length, amount in holds:
            since = (taken - start) % period
            held += amount * np.maximum(-((since - length) // period), 0)
        most = np.maximum(most, held)
    return most


# The spare whole periods, the next rank's arrangement, and the periods by which the way within is
# longer than on that rank.
_Choice = tuple[int, int, int]


@dataclass(frozen=True)
class _End:
    """The arrangement of a pattern on the last rank, and the periods of its way within."""

    arrangement: int
    periods: int


class _Line:
    """The dynamic program, rank by rank."""

    def __init__(
        self,
        ranks: tuple[RankWork, ...],
        hops: Sequence[Hops],
        period: int,
        spread: Arrangements,
    ) -> None:
        self.ranks, self.hops, self.period = ranks, hops, period
        circle_of = {rank: _circle(rank, period, spread) for rank in set(ranks)}
        self.circles = [circle_of[rank] for rank in ranks]
        # By rank, arrangement and periods of the way within: the largest number of periods of the
        # way without.
        self.most: list[_Ints] = [self._at_turn()]
        self.joints: list[dict[int, _Ints]] = [{}]
        made: dict[tuple[RankWork, RankWork, Hops], dict[int, _Ints]] = {}
        for rank, (inner, outer) in enumerate(itertools.pairwise(ranks), 1):
            key = outer, inner, hops[rank - 1]
            if key not in made:
                circles = self.circles[rank], self.circles[rank - 1]
                made[key] = _joint(*circles, self._between(rank), period)
            self.joints.append(made[key])
            self.most.append(self._next(rank))

    def _room(self, rank: int, periods: int) -> _Ints:
        """Return the largest number of periods of the way without for which each arrangement of
        ``rank`` has memory."""
        work, circle = self.ranks[rank], self.circles[rank]
        outer, inner = (max(amount, _TINY) for amount in work.activations)
        left = work.limit + _TINY - circle.least - outer * (periods + circle.carry)
        room = np.minimum(left // (outer + inner), _UNLIMITED)
        return np.where(room < 0, _NEVER, room).astype(np.int32)

    def _at_turn(self) -> _Ints:
        starts, period = self.circles[0].starts, self.period
        there_and_back = starts[F_INNER] + (starts[I_OUTER] - starts[I_INNER]) % period
        most = np.full((starts.shape[1], 2), _NEVER, dtype=np.int32)
        for periods in range(2):
            here = there_and_back // period == periods
            most[here, periods] = self._room(0, periods)[here]
        return most

    def _next(self, rank: int) -> _Ints:
        """Return `most` of ``rank``, computed from that of the previous rank."""
        before, joints = self.most[rank - 1], self.joints[rank]
        arrangements = self.circles[rank].starts.shape[1]
        width = before.shape[1] + max(joints, default=0)
        most = np.full((arrangements, width), _NEVER, dtype=np.int32)
        for more, joint in joints.items():
            for periods in range(before.shape[1]):
                reached = (before[:, periods] - joint).max(axis=1)
                column = most[:, periods + more]
                np.maximum(column, reached, out=column)
        for periods in range(width):
            column = most[:, periods]
            np.minimum(column, self._room(rank, periods), out=column)
            column[column < 0] = _NEVER
        used = np.flatnonzero((most >= 0).any(axis=0))
        return most[:, : used[-1] + 1 if used.size else 0]

    def ends(self) -> list[_End]:
        """Return all possible ends on the last rank; those in which a microbatch takes longest come
        first."""
        circle = self.circles[-1]
        arrangements, periods = np.nonzero(self.most[-1] >= 0)
        way = circle.within[arrangements] + circle.without[arrangements] + periods * self.period
        return [_End(int(arrangements[n]), int(periods[n])) for n in (-way).argsort(kind="stable")]

    def pattern(self, end: _End, variant: int) -> Pattern:
        """Return a pattern with this end: variant 0 leaves the least memory unused, other variants
        are arbitrary."""
        arrangement, within, without = end.arrangement, end.periods, 0
        arrangements, ways = [arrangement], []
        for rank in range(len(self.ranks) - 1, 0, -1):
            before, choices = self.most[rank - 1], list[_Choice]()
            for more, joint in self.joints[rank].items():
                if 0 <= within - more < before.shape[1]:
                    spare = before[:, within - more] - joint[arrangement] - without
                    choices += [(int(spare[n]), int(n), more) for n in np.flatnonzero(spare >= 0)]
            chosen = choices[variant * rank * _PRIME % len(choices)] if variant else min(choices)
            _, inner, more = chosen
            further = int(self.joints[rank][more][arrangement, inner])
            ways.append(self._ways(rank, (arrangement, inner), (more, further)))
            arrangement, within, without = inner, within - more, without + further
            arrangements.append(arrangement)
        return self._unrolled(arrangements[::-1], ways[::-1])

    def _ways(self, rank: int, pair: tuple[int, int], periods: tuple[int, int]) -> tuple[int, ...]:
        """Return the lengths of the four ways between ``rank`` and the previous one that make the
        ways of ``rank`` longer by these ``periods``."""
        least = self._between(rank)
        outer, inner = (_only(self.circles[rank - n], pair[n]) for n in range(2))
        for ways in _turned(outer, inner, least, self.period):
            within, without = _longer(outer, inner, ways, self.period)
            if (within.item(), without.item()) == periods:
                return tuple(int(way.item()) for way in ways)
        raise AssertionError("a joint that no turn has made")

    def _between(self, rank: int) -> _Between:
        """Return the least lengths of the four ways between ``rank`` and the previous one: F down,
        F up, I down, I up."""
        outer, inner = self.ranks[rank].ticks, self.ranks[rank - 1].ticks
        hop_outer, hop_inner = self.hops[rank - 1]
        return (
            outer[F_OUTER] + hop_outer,
            inner[F_INNER] + hop_inner,
            outer[I_INNER] + hop_inner,
            inner[I_OUTER] + hop_outer,
        )

    def _unrolled(self, arrangements: list[int], ways: list[tuple[int, ...]]) -> Pattern:
        """Return the starts, from the arrangements by rank and the ways between ranks."""
        starts = [[0] * LANES for _ in self.ranks]
        places = [
            [int(start) for start in circle.starts[:, n]]
            for circle, n in zip(self.circles, arrangements, strict=True)
        ]
        last, period = len(starts) - 1, self.period

        def follow(rank: int, lane: int, after: int, ticks: int = 0) -> None:
            """Start ``lane`` at its position on the circle, at least ``ticks`` after the start of
            ``after``."""
            wait = (places[rank][lane] - places[rank][after] - ticks) % period
            starts[rank][lane] = starts[rank][after] + ticks + wait

        for rank in range(last, 0, -1):
            starts[rank - 1][F_OUTER] = starts[rank][F_OUTER] + ways[rank - 1][0]
        follow(0, F_INNER, F_OUTER)
        for rank in range(1, last + 1):
            starts[rank][F_INNER] = starts[rank - 1][F_INNER] + ways[rank - 1][1]
        follow(last, I_INNER, F_INNER)
        for rank in range(last, 0, -1):
            starts[rank - 1][I_INNER] = starts[rank][I_INNER] + ways[rank - 1][2]
        follow(0, I_OUTER, I_INNER)
        for rank in range(1, last + 1):
            starts[rank][I_OUTER] = starts[rank - 1][I_OUTER] + ways[rank - 1][3]
        for rank, work in enumerate(self.ranks):
            follow(rank, W_INNER, I_INNER, work.ticks[I_INNER])
            follow(rank, W_OUTER, I_OUTER, work.ticks[I_OUTER])
        return tuple(map(tuple, starts))


_Between = tuple[int, int, int, int]


def _turned(
    outer: _Circle, inner: _Circle, least: _Between, period: int
) -> Iterator[tuple[_Ints, _Ints, _Ints, _Ints]]:
    """Yield the lengths of the four ways, by both arrangements, for each rotation of the inner
    circle at which one of them is shortest."""

    def apart(lane: int) -> _Ints:
        return outer.starts[lane][:, None] - inner.starts[lane][None, :]

    lanes = (F_OUTER, F_INNER, I_INNER, I_OUTER)
    to_inner = (1, -1, 1, -1)
    for lane, way, sign in zip(lanes, least, to_inner, strict=True):
        turn = apart(lane) + sign * way
        yield tuple(  # type: ignore[misc]
            way + (sign * (turn - apart(lane)) - way) % period
            for lane, way, sign in zip(lanes, least, to_inner, strict=True)
        )


def _longer(
    outer: _Circle, inner: _Circle, ways: Sequence[_Ints], period: int
) -> tuple[_Ints, _Ints]:
    """Return by how many periods the way within of ``outer`` is longer than that of ``inner``, and
    by how many its way without is shorter."""
    within = sum(ways) + inner.within[None, :] - outer.within[:, None]
    without = ways[1] + ways[2] + outer.without[:, None] - inner.without[None, :]
    return within // period, without // period


def _joint(outer: _Circle, inner: _Circle, least: _Between, period: int) -> dict[int, _Ints]:
    """Return, by the number of periods by which the way within gets longer, the least number of
    periods by which the way without gets shorter, by both arrangements."""
    joints: dict[int, _Ints] = {}
    shape = outer.starts.shape[1], inner.starts.shape[1]
    for ways in _turned(outer, inner, least, period):
        within, without = _longer(outer, inner, ways, period)
        for more in np.unique(within):
            joint = joints.setdefault(int(more), np.full(shape, -_NEVER, dtype=np.int32))
            np.minimum(joint, np.where(within == more, without, -_NEVER), out=joint)
    return joints
