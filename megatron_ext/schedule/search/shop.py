"""What a search packs: passes in lanes, with whole ticks of time and whole units of memory.

A `Shop` is made of a problem by `shop_of`, for any placement whose ranks have equally many chunks.
A lane is one kind of pass on one stage, and runs its microbatches in order. The lanes of a rank
follow one another, in the order in which a microbatch runs through them there: F by chunk, I by
chunk backwards, W likewise; with c chunks, rank r has lanes 3cr to 3c(r+1)-1.

`Starts` are a time for each pass, a row a lane, a column a microbatch, in ticks. They are read in
two ways: as a *plan*, which says in which order one would like the passes to be taken and may be
impossible, and as the schedule that packing made of one. `starts_of` is a plan from the rows of a
schedule, `rows_of` the rows of what was packed. Whoever knows a good plan gives it to the search.

Memory never deadlocks. A *taking* lane is one whose passes take memory. Let k be the first
microbatch that lacks a pass of a taking lane of a rank. After each pass that takes memory there,
what microbatches behind k hold, and all that one microbatch may ever need, are within the limit
(`pack`). Then the oldest microbatch that is not done can always go on: those before it hold
nothing any more, so on each rank it either has all it needs or is the k of that rank, and finds
room beside what those behind it hold. And that it has gone on breaks nothing: the next k has fewer
behind it. Lanes run in order, so this is the banker's rule with the oldest served first.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.kinds import RULES, Held
from megatron_ext.schedule.limit import with_rounding
from megatron_ext.schedule.placement import Neighbour, Placement
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.program.memory import bytes_for
from megatron_ext.schedule.search.ticks import common_tick

Starts = npt.NDArray[np.int64]  # lanes x microbatches
Rows = tuple[tuple[Action, ...], ...]

KINDS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
_NOT_YET = -1
_FINEST = 1_000  # ticks of a rank's work for a microbatch, at least: passes are shifted by shares


@dataclass(frozen=True)
class Shop:
    """What has to be packed, in one direction of time.

    Attributes:
        placement: which rank holds which stage.
        microbatches: how many run through each lane.
        tick: seconds.
        durations: ticks, per lane.
        before: per lane, the lanes that it waits for and how long after their end.
        gains: memory that a pass takes at its start, or, if negative, gives back at its end; per
            lane.
        limit: the memory of a rank.
        rooms: per rank, what a microbatch may need at the most.
        heads: per rank, when it can start at the earliest.
        tails: per rank, how long after its end all has ended. (Where steps overlap, a rank that
            starts later may end later: by that, those that start sooner have a tail.)
    """

    placement: Placement
    microbatches: int
    tick: float
    durations: tuple[int, ...]
    before: tuple[tuple[tuple[int, int], ...], ...]
    gains: tuple[int, ...]
    limit: int
    rooms: tuple[int, ...]
    heads: tuple[int, ...]
    tails: tuple[int, ...]

    @property
    def lanes(self) -> int:
        return len(self.durations)

    @property
    def lanes_of_rank(self) -> int:
        return len(KINDS) * self.placement.chunks

    @property
    def work(self) -> int:
        """Ticks that a microbatch takes of a rank, on average."""
        return sum(self.durations) // self.placement.ranks

    @property
    def fits(self) -> bool:
        """Whether any plan can be packed: the limit leaves each rank room for a microbatch."""
        return max(self.rooms) <= self.limit

    @cached_property
    def after(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per lane, the lanes that wait for it and how long after its end."""
        rows: list[list[tuple[int, int]]] = [[] for _ in self.before]
        for lane, waits_for in enumerate(self.before):
            for other, hop in waits_for:
                rows[other].append((lane, hop))
        return tuple(map(tuple, rows))

    def mirrored(self) -> Shop:
        """The same work with time running backwards."""
        return Shop(
            self.placement,
            self.microbatches,
            self.tick,
            self.durations,
            self.after,
            tuple(-gain for gain in self.gains),
            self.limit,
            self.rooms,
            heads=self.tails,
            tails=self.heads,
        )


def passes_of(placement: Placement) -> list[tuple[int, Kind]]:
    """The stage and kind of each lane."""
    f, i, w = KINDS
    return [
        lane
        for stages in placement.stages_of
        for lane in (
            *((stage, f) for stage in stages),
            *((stage, i) for stage in reversed(stages)),
            *((stage, w) for stage in reversed(stages)),
        )
    ]


def lanes_of(placement: Placement) -> dict[tuple[int, Kind], int]:
    """The lane of each stage and kind."""
    return {key: lane for lane, key in enumerate(passes_of(placement))}


def shop_of(problem: Problem) -> Shop:
    """``problem``, whose ranks have equally many chunks.

    The tick is the common unit of the costs, or the largest fraction of it of which a rank's work
    for a microbatch has a thousand; without a common unit it is a share of that work
    (`common_tick`).

    Raises:
        ValueError: the limit is in bytes, and the costs have none.
    """
    placement, costs = problem.placement, problem.costs
    assert {len(stages) for stages in placement.stages_of} == {placement.chunks}
    lanes = passes_of(placement)
    seconds = [costs.seconds[kind][stage] for stage, kind in lanes]
    work = sum(seconds) / placement.ranks
    unit = common_tick([*seconds, costs.hop], work)
    tick = unit / math.ceil(_FINEST * unit / work)
    activation, rest, limit = _memory(problem)
    return Shop(
        placement,
        problem.microbatches,
        tick,
        # A pass that costs nothing still has its place in the order.
        tuple(max(round(figure / tick), 1) for figure in seconds),
        _before(placement, round(costs.hop / tick)),
        tuple(_gain(kind, activation[stage], rest[stage]) for stage, kind in lanes),
        limit,
        tuple(_rooms(placement, activation, rest)),
        heads=(0,) * placement.ranks,
        tails=_tails(problem, tick),
    )


def _before(placement: Placement, hop: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    lane_of = lanes_of(placement)
    f, i, _ = KINDS

    def waits_for(stage: int, kind: Kind) -> tuple[tuple[int, int], ...]:
        which = Neighbour.PREVIOUS if kind is f else Neighbour.NEXT
        other = placement.neighbour(stage, which)
        if kind not in (f, i):
            return ((lane_of[stage, i], 0),)
        if other is None:
            return () if kind is f else ((lane_of[stage, f], 0),)
        return ((lane_of[other, kind], hop if placement.is_remote(stage, which) else 0),)

    return tuple(waits_for(stage, kind) for stage, kind in lane_of)


def _gain(kind: Kind, activation: int, rest: int) -> int:
    f, i, _ = KINDS
    if kind is f:
        return activation
    return rest - activation if kind is i else -rest


def _memory(problem: Problem) -> tuple[list[int], list[int], int]:
    """What each stage holds from F, and from I on, and what a rank may hold: in chunks, or in
    bytes. The limit is rounded down; it is never more than all microbatches need."""
    limit, placement = problem.memory_limit, problem.placement
    if limit is not None and limit.bytes is not None:
        held = bytes_for(limit, problem.costs)
        activation, rest = (
            list(map(math.ceil, held[what])) for what in (Held.ACTIVATION, Held.WEIGHT_INPUTS)
        )
        allowed: float = limit.bytes
    else:
        activation = rest = [1] * placement.stages
        allowed = math.inf
        if limit is not None:
            assert limit.microbatches is not None
            allowed = with_rounding(limit.microbatches * placement.chunks)
    most = problem.microbatches * max(_rooms(placement, activation, rest))
    return activation, rest, most if allowed >= most else int(allowed)


def _rooms(placement: Placement, activation: Sequence[int], rest: Sequence[int]) -> list[int]:
    """Per rank, what a microbatch may need at the most."""
    return [
        sum(max(activation[stage], rest[stage]) for stage in stages)
        for stages in placement.stages_of
    ]


def _tails(problem: Problem, tick: float) -> tuple[int, ...]:
    """How much sooner than the last each rank can begin, and so has to end, for steps to overlap.

    The largest end with its tail is then the largest own time, but for a constant.
    """
    placement, costs = problem.placement, problem.costs
    if not problem.extras.post_validation:
        return (0,) * placement.ranks
    begins = [0.0]
    for stage, forward in enumerate(costs.seconds[Kind.FORWARD][:-1]):
        hop = costs.hop if placement.is_remote(stage, Neighbour.NEXT) else 0.0
        begins.append(begins[-1] + forward + hop)
    first = [begins[stages[0]] for stages in placement.stages_of]
    return tuple(round((max(first) - begin) / tick) for begin in first)


def rows_of(starts: Starts, placement: Placement) -> Rows:
    """The actions of each rank in the order of their starts."""
    passes, m = passes_of(placement), starts.shape[1]
    rows = []
    for lanes in np.split(np.arange(len(passes)), placement.ranks):
        order = np.argsort(starts[lanes], axis=None, kind="stable")  # by lane, then by microbatch
        row = []
        for place in order.tolist():
            stage, kind = passes[lanes[0] + place // m]
            row.append(Action(stage, kind, place % m))
        rows.append(tuple(row))
    return tuple(rows)


def starts_of(rows: Sequence[Sequence[Action]], shop: Shop) -> Starts:
    """When the passes of ``rows`` start, each as soon as it can; a whole backward is I, then W.

    The limit is not looked at: a plan may be of a schedule that needs more.
    """
    lane_of = lanes_of(shop.placement)
    orders = [
        [(lane_of[a.stage, kind], a.microbatch) for a in row for kind in RULES[a.kind].covers]
        for row in rows
    ]
    starts = [[_NOT_YET] * shop.microbatches for _ in shop.before]
    at, free = [0] * len(orders), list(shop.heads)
    todo, queued = deque(range(len(orders))), [True] * len(orders)
    while todo:
        rank = todo.popleft()
        queued[rank] = False
        order = orders[rank]
        while at[rank] < len(order):
            lane, k = order[at[rank]]
            ready = [(starts[o][k], shop.durations[o] + hop) for o, hop in shop.before[lane]]
            if any(start == _NOT_YET for start, _ in ready):
                break
            start = max([free[rank], *(start + later for start, later in ready)])
            starts[lane][k], free[rank] = start, start + shop.durations[lane]
            at[rank] += 1
            for other, _ in shop.after[lane]:
                waiting = other // shop.lanes_of_rank
                if not queued[waiting]:
                    queued[waiting] = True
                    todo.append(waiting)
    assert all(n == len(order) for n, order in zip(at, orders, strict=True)), "rows would hang"
    return np.array(starts, dtype=np.int64)


def end_of(starts: Starts, shop: Shop) -> int:
    """When all of ``starts`` has ended, with tails."""
    ends = starts.max(axis=1) + np.array(shop.durations)
    of_ranks = ends.reshape(shop.placement.ranks, shop.lanes_of_rank).max(axis=1)
    return int((of_ranks + np.array(shop.tails)).max())
