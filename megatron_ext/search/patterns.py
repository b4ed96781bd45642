"""Patterns: times of one microbatch's passes on a V that can be repeated exactly every period.

A search needs good plans to begin with, and a bound tells it when to stop. On a V both come from
steady states. A pattern gives the time at which each rank starts the six passes of a microbatch.
Repeated every period it is a steady state if no two passes of a rank collide modulo the period, and
if the microbatches in progress together stay within the memory limit. `patterns` enumerates
patterns by a dynamic program over the ranks (`_PatternProgram`).
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

OPERATIONS = 6  # number of operations of a rank, in the order of a `JobShop`
F_OUTER, F_INNER, I_INNER, I_OUTER, W_INNER, W_OUTER = range(OPERATIONS)

# Pattern: start in ticks of each pass of the first microbatch, by rank and operation.
Pattern = tuple[tuple[int, ...], ...]
# Ticks of a message of the outer chunk, and of a message of the inner chunk.
MessageTicks = tuple[int, int]

_Ints = NDArray[np.int32]
_IMPOSSIBLE = -(1 << 20)  # stands for the number of periods of a pattern that does not exist
_UNLIMITED = 1 << 16  # more periods than any trip of a microbatch takes
_TINY = 1e-9


class Arrangements(enum.Enum):
    """Choices of how a rank's idle time is spread over the gaps between its passes.

    A rank that is idle in part of the period can distribute its idle time over the gaps before F
    and I in many ways. (A gap before W is useless: an earlier W frees memory earlier.) All of them
    are tried if they are few (`EACH`); otherwise all idle time is in one gap.
    """

    EACH = enum.auto()  # all distributions of the idle time in whole ticks are tried
    ONE_GAP = enum.auto()


@dataclass(frozen=True)
class RankWork:
    """Durations and memory of one microbatch's six passes on a rank of a V.

    Attributes:
        ticks: durations of the six passes, by operation; none is 0.
        activations: memory that the outer and the inner chunk hold from the start of F to the end
            of I.
        weight_inputs: memory that the two chunks hold from there to the end of W.
        limit: memory that the rank may hold.
    """

    ticks: tuple[int, ...]
    activations: tuple[float, float]
    weight_inputs: tuple[float, float]
    limit: float

    def __post_init__(self) -> None:
        assert len(self.ticks) == OPERATIONS and min(self.ticks) > 0


def patterns(
    ranks: Sequence[RankWork],
    p2p_ticks: Sequence[MessageTicks],
    period: int,
    most: int,
    idle: Arrangements,
) -> list[Pattern]:
    """Return at most ``most`` patterns of a V's passes that repeat every ``period`` ticks.

    A pattern gives the start of each pass of one microbatch. Patterns in which a microbatch takes
    longest come first, as they use the memory best.

    Args:
        ranks: the ranks from the turn of the V to its open end.
        p2p_ticks: for each rank but the first, ticks of its messages to and from the previous rank,
            for the outer chunk and for the inner chunk.
        idle: ways of spreading idle time that are tried.
    """
    if any(sum(rank.ticks) > period for rank in ranks):
        return []
    program = _PatternProgram(tuple(ranks), p2p_ticks, period, idle)
    chosen: dict[Pattern, None] = {}
    for end in program.ends():
        for variant in range(_VARIANTS):
            if len(chosen) == most:
                return list(chosen)
            chosen[program.pattern(end, variant)] = None
    return list(chosen)


# Number of patterns that are returned for each arrangement on the last rank, although many more may
# be equally good.
_VARIANTS = 3
_PRIME = 7919  # prime number that spreads the choice among equally good patterns


def exists(ranks: Sequence[RankWork], p2p_ticks: Sequence[MessageTicks], period: int) -> bool:
    """Return whether a V's passes have any pattern that repeats every ``period`` ticks.

    If not, none has a shorter period, because a pattern stretched in time is a pattern.
    """
    return bool(patterns(ranks, p2p_ticks, period, 1, Arrangements.EACH))


def arrangements_of(rank: RankWork, period: int) -> int:
    """Return roughly how many arrangements of a rank's passes in a period `Arrangements.EACH`
    tries."""
    idle = period - sum(rank.ticks)
    return 60 * (idle + 1) * (idle + 2) * (idle + 3) // 6


@dataclass(frozen=True)
class _RankArrangements:
    """Arrangements of a rank's six passes within a period, one in each column of the arrays.

    Attributes:
        starts: start of each operation on the circle; F of the outer chunk starts at 0.
        least: peak memory if no trip takes a period or more.
        turn_trip: ticks of the turn trip (`_PatternProgram`) modulo the period.
        end_trip: ticks of the end trip (`_PatternProgram`) modulo the period.
        carry: periods by which the two trips together exceed the time from F of the outer chunk to
            its I.
    """

    starts: _Ints
    least: NDArray[np.float64]
    turn_trip: _Ints
    end_trip: _Ints
    carry: _Ints


def _arrangements(rank: RankWork, period: int, spread: Arrangements) -> _RankArrangements:
    """Return the arrangements of a rank's passes in a period, one for each placing of F and I.

    W are placed so that the rank holds the least memory.
    """
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
    inner_to_outer = (starts[I_OUTER] - starts[I_INNER]) % period
    turn_trip = (starts[F_INNER] + inner_to_outer) % period
    end_trip = (starts[I_INNER] - starts[F_INNER]) % period
    carry = (turn_trip + end_trip - starts[I_OUTER]) // period
    return _RankArrangements(starts, least, turn_trip, end_trip, carry)


def _one_of(of_rank: _RankArrangements, arrangement: int) -> _RankArrangements:
    """Return only the arrangement number ``arrangement`` of ``of_rank``, in the same form."""
    figures = (np.asarray(getattr(of_rank, field.name)) for field in fields(of_rank))
    return _RankArrangements(*(figure[..., [arrangement]] for figure in figures))


def _placed(ticks: Sequence[int], period: int, spread: Arrangements) -> Iterator[_Ints]:
    """Yield the starts of a rank's passes within a period, in every order, with idle time spread.

    The idle time is before F and I.
    """
    idle = period - sum(ticks)
    if spread is Arrangements.EACH:
        cuts = itertools.combinations(range(idle + 3), 3)
        # Idle time that is in none of the three gaps comes at the end of the period.
        gaps = [(a, b - a - 1, c - b - 1) for a, b, c in cuts]
    else:
        gaps = list({(0, 0, 0), (idle, 0, 0), (0, idle, 0), (0, 0, idle)})
    before = np.array(gaps, dtype=np.int32).T
    for order in itertools.permutations(range(1, OPERATIONS)):
        starts = np.zeros((OPERATIONS, len(gaps)), dtype=np.int32)
        time, gap = np.full(len(gaps), ticks[F_OUTER], dtype=np.int32), 0
        for op in order:
            if op not in (W_INNER, W_OUTER):
                time, gap = time + before[gap], gap + 1
            starts[op] = time
            time = time + ticks[op]
        yield starts


_CHUNKS = ((F_OUTER, I_OUTER, W_OUTER), (F_INNER, I_INNER, W_INNER))


def _least_held(rank: RankWork, starts: _Ints, period: int) -> NDArray[np.float64]:
    """Return the peak memory of a rank for each arrangement of its passes (column of ``starts``).

    Each pass is assumed to come within a period of the pass it waits for.
    """
    # Start, duration and amount of each stored tensor.
    holds: list[tuple[_Ints, _Ints, float]] = []
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


# How a pattern goes on at the next rank: number of whole periods that the end trip does not use,
# arrangement of the next rank, and periods by which the turn trip is longer than there.
# `_PatternProgram` explains the two trips.
_Continuation = tuple[int, int, int]


@dataclass(frozen=True)
class _End:
    """Arrangement of a pattern's passes on the last rank of a V, with the periods of its turn trip.

    The turn trip is explained at `_PatternProgram`.
    """

    arrangement: int
    periods: int


class _PatternProgram:
    """Dynamic program that finds patterns of a V, from the rank at its turn to its open end.

    The *arrangement* of a rank is the position of its passes on a circle as long as the period.
    Whole periods between passes cause no collision, so each pass comes as soon after the pass it
    waits for as its position on the circle allows. Other ranks have to know only two figures of a
    rank, both in whole periods:

    - the *turn trip*, from F of the outer chunk to F of the inner one, plus from I of the inner
      chunk to I of the outer one. The ranks nearer to the turn determine it.
    - the *end trip*, from F of the inner chunk to its I. The ranks nearer to the open end determine
      it.

    The outer chunk is held for both trips, the inner one for the end trip. The program goes from
    the turn outwards, so it knows the turn trip. Of the end trip it records the longest for which
    all ranks so far have the memory: a pattern that fits with a longer end trip also fits with a
    shorter one.
    """

    def __init__(
        self,
        ranks: tuple[RankWork, ...],
        p2p_ticks: Sequence[MessageTicks],
        period: int,
        spread: Arrangements,
    ) -> None:
        self.ranks, self.p2p_ticks, self.period = ranks, p2p_ticks, period
        arrangements_by_rank = {rank: _arrangements(rank, period, spread) for rank in set(ranks)}
        self.arrangements = [arrangements_by_rank[rank] for rank in ranks]
        # Largest number of periods of the end trip, by rank, arrangement and periods of the turn
        # trip.
        self.most: list[_Ints] = [self._first_rank()]
        self.transitions: list[dict[int, _Ints]] = [{}]
        made: dict[tuple[RankWork, RankWork, MessageTicks], dict[int, _Ints]] = {}
        for rank, (inner, outer) in enumerate(itertools.pairwise(ranks), 1):
            key = outer, inner, p2p_ticks[rank - 1]
            if key not in made:
                circles = self.arrangements[rank], self.arrangements[rank - 1]
                made[key] = _transitions_between(*circles, self._shortest_legs(rank), period)
            self.transitions.append(made[key])
            self.most.append(self._next(rank))

    def _max_end_trip(self, rank: int, periods: int) -> _Ints:
        """Return, for each arrangement of ``rank``, the longest end trip that fits its memory.

        The end trip is from F of the inner chunk to its I, in whole periods.
        """
        work, of_rank = self.ranks[rank], self.arrangements[rank]
        outer, inner = (max(amount, _TINY) for amount in work.activations)
        left = work.limit + _TINY - of_rank.least - outer * (periods + of_rank.carry)
        periods_left = np.minimum(left // (outer + inner), _UNLIMITED)
        return np.where(periods_left < 0, _IMPOSSIBLE, periods_left).astype(np.int32)

    def _first_rank(self) -> _Ints:
        starts, period = self.arrangements[0].starts, self.period
        there_and_back = starts[F_INNER] + (starts[I_OUTER] - starts[I_INNER]) % period
        most = np.full((starts.shape[1], 2), _IMPOSSIBLE, dtype=np.int32)
        for periods in range(2):
            here = there_and_back // period == periods
            most[here, periods] = self._max_end_trip(0, periods)[here]
        return most

    def _next(self, rank: int) -> _Ints:
        """Return the table of longest end trips (`most`) for ``rank``, from that of the previous
        rank."""
        before, transitions = self.most[rank - 1], self.transitions[rank]
        arrangements = self.arrangements[rank].starts.shape[1]
        width = before.shape[1] + max(transitions, default=0)
        most = np.full((arrangements, width), _IMPOSSIBLE, dtype=np.int32)
        for more, transition in transitions.items():
            for periods in range(before.shape[1]):
                reached = (before[:, periods] - transition).max(axis=1)
                column = most[:, periods + more]
                np.maximum(column, reached, out=column)
        for periods in range(width):
            column = most[:, periods]
            np.minimum(column, self._max_end_trip(rank, periods), out=column)
            column[column < 0] = _IMPOSSIBLE
        used = np.flatnonzero((most >= 0).any(axis=0))
        return most[:, : used[-1] + 1 if used.size else 0]

    def ends(self) -> list[_End]:
        """Return all possible ends of a pattern on the last rank, longest microbatch time first."""
        of_rank = self.arrangements[-1]
        arrangements, periods = np.nonzero(self.most[-1] >= 0)
        time = of_rank.turn_trip[arrangements] + of_rank.end_trip[arrangements]
        time = time + periods * self.period
        return [_End(int(arrangements[n]), int(periods[n])) for n in (-time).argsort(kind="stable")]

    def pattern(self, end: _End, variant: int) -> Pattern:
        """Return a pattern with the given end on the last rank of the V.

        Variant 0 uses the most memory; other variants are arbitrary.
        """
        arrangement, turn_trip, end_trip = end.arrangement, end.periods, 0
        arrangements, legs = [arrangement], []
        for rank in range(len(self.ranks) - 1, 0, -1):
            before, choices = self.most[rank - 1], list[_Continuation]()
            for more, transition in self.transitions[rank].items():
                if 0 <= turn_trip - more < before.shape[1]:
                    spare = before[:, turn_trip - more] - transition[arrangement] - end_trip
                    choices += [(int(spare[n]), int(n), more) for n in np.flatnonzero(spare >= 0)]
            chosen = choices[variant * rank * _PRIME % len(choices)] if variant else min(choices)
            _, inner, more = chosen
            shorter = int(self.transitions[rank][more][arrangement, inner])
            legs.append(self._legs(rank, (arrangement, inner), (more, shorter)))
            arrangement, turn_trip, end_trip = inner, turn_trip - more, end_trip + shorter
            arrangements.append(arrangement)
        return self._unrolled(arrangements[::-1], legs[::-1])

    def _legs(
        self, rank: int, arrangements: tuple[int, int], periods: tuple[int, int]
    ) -> tuple[int, ...]:
        """Return the ticks of the four legs of a microbatch between ``rank`` and the previous rank.

        The turn trip gets longer, and the end trip shorter, by the numbers of ``periods``.
        """
        least = self._shortest_legs(rank)
        outer, inner = (_one_of(self.arrangements[rank - n], arrangements[n]) for n in range(2))
        for legs in _rotations(outer, inner, least, self.period):
            turn_trip, end_trip = _trip_changes(outer, inner, legs, self.period)
            if (turn_trip.item(), end_trip.item()) == periods:
                return tuple(int(leg.item()) for leg in legs)
        raise AssertionError(
            "no rotations of the repeating patterns of two neighbouring ranks make the messages "
            "between them as late as the transition table says"
        )

    def _shortest_legs(self, rank: int) -> _Legs:
        """Return the least ticks of the four legs of a microbatch between ``rank`` and the previous
        one.

        The legs are F down, F up, I down, I up the V.
        """
        outer, inner = self.ranks[rank].ticks, self.ranks[rank - 1].ticks
        outer_message, inner_message = self.p2p_ticks[rank - 1]
        return (
            outer[F_OUTER] + outer_message,
            inner[F_INNER] + inner_message,
            outer[I_INNER] + inner_message,
            inner[I_OUTER] + outer_message,
        )

    def _unrolled(self, arrangements: list[int], legs: list[tuple[int, ...]]) -> Pattern:
        """Return the pattern of start times with these arrangements of ranks and legs between
        them."""
        starts = [[0] * OPERATIONS for _ in self.ranks]
        places = [
            [int(start) for start in of_rank.starts[:, n]]
            for of_rank, n in zip(self.arrangements, arrangements, strict=True)
        ]
        last, period = len(starts) - 1, self.period

        def follow(rank: int, op: int, after: int, ticks: int = 0) -> None:
            """Start ``op`` at its position in the period, at least ``ticks`` after ``after``
            starts."""
            wait = (places[rank][op] - places[rank][after] - ticks) % period
            starts[rank][op] = starts[rank][after] + ticks + wait

        for rank in range(last, 0, -1):
            starts[rank - 1][F_OUTER] = starts[rank][F_OUTER] + legs[rank - 1][0]
        follow(0, F_INNER, F_OUTER)
        for rank in range(1, last + 1):
            starts[rank][F_INNER] = starts[rank - 1][F_INNER] + legs[rank - 1][1]
        follow(last, I_INNER, F_INNER)
        for rank in range(last, 0, -1):
            starts[rank - 1][I_INNER] = starts[rank][I_INNER] + legs[rank - 1][2]
        follow(0, I_OUTER, I_INNER)
        for rank in range(1, last + 1):
            starts[rank][I_OUTER] = starts[rank - 1][I_OUTER] + legs[rank - 1][3]
        for rank, work in enumerate(self.ranks):
            follow(rank, W_INNER, I_INNER, work.ticks[I_INNER])
            follow(rank, W_OUTER, I_OUTER, work.ticks[I_OUTER])
        return tuple(map(tuple, starts))


_Legs = tuple[int, int, int, int]


def _rotations(
    outer: _RankArrangements, inner: _RankArrangements, least: _Legs, period: int
) -> Iterator[tuple[_Ints, _Ints, _Ints, _Ints]]:
    """Yield the ticks of the four legs between two ranks of a V for each useful rotation.

    The circle of one rank (its passes in a period) can be rotated relative to that of the next. A
    microbatch takes four *legs* between the two ranks: F down, F up, I down, I up. A small rotation
    makes two legs longer and two shorter, and changes no number of whole periods unless one leg
    becomes shorter than it can be. So only the four rotations with one leg at its shortest have to
    be tried. No pattern is missed, whatever the length of a tick, as long as no rank is ever idle.
    The arrays have an entry for each two arrangements of the ranks.
    """

    def lead(op: int) -> _Ints:
        return outer.starts[op][:, None] - inner.starts[op][None, :]

    operations = (F_OUTER, F_INNER, I_INNER, I_OUTER)
    to_inner = (1, -1, 1, -1)
    for op, leg, sign in zip(operations, least, to_inner, strict=True):
        turn = lead(op) + sign * leg
        yield tuple(  # type: ignore[misc]
            leg + (sign * (turn - lead(op)) - leg) % period
            for op, leg, sign in zip(operations, least, to_inner, strict=True)
        )


def _trip_changes(
    outer: _RankArrangements, inner: _RankArrangements, legs: Sequence[_Ints], period: int
) -> tuple[_Ints, _Ints]:
    """Return by how many periods the turn trip gets longer, and the end trip shorter, on a rank.

    ``outer`` is compared with ``inner``, its neighbour towards the turn of the V.
    """
    turn_trip = sum(legs) + inner.turn_trip[None, :] - outer.turn_trip[:, None]
    end_trip = legs[1] + legs[2] + outer.end_trip[:, None] - inner.end_trip[None, :]
    return turn_trip // period, end_trip // period


def _transitions_between(
    outer: _RankArrangements, inner: _RankArrangements, least: _Legs, period: int
) -> dict[int, _Ints]:
    """Return the least periods by which the end trip shortens between two ranks' arrangements.

    The key is the number of periods by which the turn trip gets longer.
    """
    transitions: dict[int, _Ints] = {}
    shape = outer.starts.shape[1], inner.starts.shape[1]
    for legs in _rotations(outer, inner, least, period):
        turn_trip, end_trip = _trip_changes(outer, inner, legs, period)
        for more in np.unique(turn_trip):
            transition = transitions.setdefault(
                int(more), np.full(shape, -_IMPOSSIBLE, dtype=np.int32)
            )
            np.minimum(
                transition, np.where(turn_trip == more, end_trip, -_IMPOSSIBLE), out=transition
            )
    return transitions
