"""Packing problem of a search: passes in lanes, in whole ticks of time and units of memory.

`shop_of` makes a `Shop` of a problem, for any placement whose ranks have equally many chunks. A
lane is one kind of pass on one stage, and runs its microbatches in order. The lanes of a rank are
adjacent, in the order in which a microbatch runs through them there: F by chunk, I by chunk
backwards, W likewise; with c chunks, rank r has lanes 3cr to 3c(r+1)-1. With recompute there are
also lanes of R, before those of I. For a microbatch whose activation is stored, a pass of R takes
no time and no memory, and no action is made of it (`Shop.recompute_actions`).

If microbatches are cut into slices, a column is a slice: for F in order, for I and W the slices of
each microbatch in reverse, as the last goes back first (`Shop.turned`). Each lane thus runs its
columns in order, and a microbatch has the same columns in all lanes.

`Starts` have a time for each pass, a row a lane, a column a microbatch, in ticks. They are read in
two ways: as a *plan*, which gives the desired order of the passes and may be impossible, and as the
schedule that packing made of one. `starts_of` makes a plan from the rows of a schedule, `rows_of`
the rows of packed starts. Code that knows a good plan gives it to the search.

Memory never deadlocks. A *taking* lane is one whose passes take memory. Let k be the first
microbatch that lacks a pass of a taking lane of a rank. After each pass that takes memory there,
the memory that microbatches behind k hold, plus all that one microbatch may ever need, is within
the limit (`pack`). Then the oldest microbatch that is not done can always continue. Earlier
microbatches hold nothing any more, so on each rank it either has all the memory it needs or is the
k of that rank, and finds enough memory next to that of the microbatches behind it. Its progress
preserves the rule: the next k has fewer microbatches behind it. Lanes run in order, so this is the
banker's rule with the oldest served first.

For slices the same holds of whole microbatches: the k-th lacks a pass if it lacks one of a slice.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from statistics import fmean

import numpy as np
import numpy.typing as npt

from megatron_ext.compile.program.memory import INPUT_SHARE, bytes_for, in_bytes
from megatron_ext.schedule.action import Action, Kind, tokens_of
from megatron_ext.schedule.columns import columns_of
from megatron_ext.schedule.kinds import RULES, Held
from megatron_ext.schedule.limit import with_rounding
from megatron_ext.schedule.placement import Neighbour, Placement
from megatron_ext.schedule.problem import Problem
from megatron_ext.search.ticks import common_tick

Starts = npt.NDArray[np.int64]  # lanes x microbatches
Rows = tuple[tuple[Action, ...], ...]
Lanes = tuple[tuple[int, Kind], ...]
Waits = tuple[tuple[tuple[int, int], ...], ...]  # per lane: other lanes, with a hop
Edges = list[list[tuple[int, list[int], list[int]]]]  # the same by column: hops, columns there

F, R, I, W = (  # noqa: E741 (the field's letters)
    Kind.FORWARD,
    Kind.RECOMPUTE,
    Kind.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT,
)
KINDS = (F, I, W)
_NOT_YET = _NONE = -1
_FINEST = 1_000  # ticks of a rank's work for a microbatch, at least: passes are shifted by shares
_OF_SLICES = 1 << 40  # shares of a chunk: slices may be of any length


@dataclass(frozen=True)
class Cut:
    """Differences between the passes of a lane: of the slices of a microbatch, which repeat in the
    next one, or of all microbatches of a step.

    Attributes:
        slices: number of slices of a microbatch; 1: microbatches are whole, and differ.
        durations: ticks, by lane and pass, in the order in which the lane takes them.
        gains: `Shop.gains`, likewise.
        hops: ticks of the messages from other ranks that passes wait for, likewise.
    """

    slices: int
    durations: Starts
    gains: Starts
    hops: Starts

    @property
    def period(self) -> int:
        """The columns after which the passes of a lane repeat."""
        return self.durations.shape[1]

    def mirrored(self, receivers: Sequence[int]) -> Cut:
        """Return the slices with time running backwards.

        Args:
            receivers: by lane, the lane that its messages go to.
        """
        hops = self.hops[list(receivers), ::-1]
        return Cut(self.slices, self.durations[:, ::-1], -self.gains[:, ::-1], hops)


@dataclass(frozen=True)
class Shop:
    """Packing problem, in one direction of time.

    Attributes:
        placement: which rank holds which stage.
        pieces: number of passes of each lane: microbatches, or slices of them.
        tick: seconds of a tick.
        durations: ticks of a pass, per lane; the mean if they differ.
        before: per lane, the lanes that it waits for, and the ticks from their end; the mean if
            they differ.
        gains: memory that a pass takes at its start, or, if negative, frees at its end; per lane;
            with slices the mean.
        limit: the memory of a rank.
        rooms: per rank, the largest memory that a microbatch may need.
        heads: per rank, its earliest start.
        tails: per rank, the time from its end until everything has ended. (If steps overlap, a rank
            that starts later may end later; ranks that start sooner have a tail of the difference.)
        recompute_gains: memory that a pass takes in addition to ``gains``, because its activation
            is recomputed: F takes less, and R the difference. Shape (lanes, microbatches). None:
            there are no lanes of R.
        cut: differences between the passes of a lane; None if all are alike.
        is_mirrored: whether time runs backwards.
    """

    placement: Placement
    pieces: int
    tick: float
    durations: tuple[int, ...]
    before: Waits
    gains: tuple[int, ...]
    limit: int
    rooms: tuple[int, ...]
    heads: tuple[int, ...]
    tails: tuple[int, ...]
    recompute_gains: Starts | None = None
    cut: Cut | None = None
    is_mirrored: bool = False

    @property
    def lanes(self) -> int:
        return len(self.durations)

    @property
    def slices(self) -> int:
        """Number of slices of a microbatch; 1: microbatches are whole."""
        return 1 if self.cut is None else self.cut.slices

    @property
    def period(self) -> int:
        """The columns after which the passes of a lane repeat, without recompute."""
        return 1 if self.cut is None else self.cut.period

    @property
    def lanes_of_rank(self) -> int:
        return self.lanes // self.placement.ranks

    @cached_property
    def work(self) -> int:
        """Average ticks that a microbatch, or a slice, takes of a rank."""
        return int(self.durations_of_all.sum()) // (self.placement.ranks * self.pieces)

    @cached_property
    def passes(self) -> Lanes:
        """The stage and kind of each lane."""
        return passes_of(self.placement, self.recompute_gains is not None)

    @cached_property
    def recompute_actions(self) -> npt.NDArray[np.bool_]:
        """Whether a pass is an R that becomes an action. Shape (lanes, microbatches)."""
        if self.recompute_gains is None:
            return np.zeros((self.lanes, self.pieces), dtype=bool)
        is_lane = np.array([kind is R for _, kind in self.passes])
        return is_lane[:, None] & (self.recompute_gains != 0)

    @cached_property
    def durations_of_all(self) -> Starts:
        """Ticks of passes, by lane and microbatch."""
        durations = self._of_all(self.durations, None if self.cut is None else self.cut.durations)
        if self.recompute_gains is not None:
            is_lane = np.array([kind is R for _, kind in self.passes])
            durations[is_lane[:, None] & (self.recompute_gains == 0)] = 0
        return durations

    @cached_property
    def gains_of_all(self) -> Starts:
        """``gains``, by lane and microbatch."""
        gains = self._of_all(self.gains, None if self.cut is None else self.cut.gains)
        return gains if self.recompute_gains is None else gains + self.recompute_gains

    @cached_property
    def hops(self) -> tuple[int, ...]:
        """Ticks of the message from another rank that a pass waits for, per lane; the mean if they
        differ. No pass waits for two."""
        return tuple(max((hop for _, hop in row), default=0) for row in self.before)

    @cached_property
    def hops_of_all(self) -> Starts:
        """Hops of the messages that passes wait for, in ticks: lanes x columns."""
        return self._of_all(self.hops, None if self.cut is None else self.cut.hops)

    def _of_all(self, per_lane: tuple[int, ...], differing: Starts | None) -> Starts:
        """Return the figures as an array of lanes x columns."""
        if differing is not None:
            return np.tile(differing, (1, self.pieces // self.period))
        return np.repeat(np.array(per_lane, np.int64)[:, None], self.pieces, 1)

    @cached_property
    def held_after(self) -> Starts:
        """Memory that the first n passes of a lane take together, by lane and n from 0 to the
        number of columns. Shape (lanes, columns + 1)."""
        held = np.zeros((self.lanes, self.pieces + 1), np.int64)
        np.cumsum(self.gains_of_all, axis=1, out=held[:, 1:])
        return held

    @cached_property
    def next_taking(self) -> Starts:
        """Next column in which a pass of a lane takes memory, by lane and column n: the first such
        column that is n or later, or the number of columns if there is none. Shape (lanes, columns
        + 1), as n may also be the number of columns."""
        m = self.pieces
        first = np.full((self.lanes, m + 1), m, np.int64)
        taking = np.where(self.gains_of_all > 0, np.arange(m), m)
        first[:, :m] = np.minimum.accumulate(taking[:, ::-1], axis=1)[:, ::-1]
        return first

    @property
    def way(self) -> tuple[int, ...]:
        """The lanes of a rank, counted from its first, in the order in which a microbatch alone
        would run through them: it frees an activation before it recomputes the next. () without
        R."""
        if self.recompute_gains is None:
            return ()
        way = _way(self.placement)
        return way[::-1] if self.is_mirrored else way

    @property
    def fits(self) -> bool:
        """Whether any plan can be packed, because the limit suffices for a microbatch on each
        rank."""
        return max(self.rooms) <= self.limit

    @cached_property
    def turned(self) -> list[int]:
        """For each column of F the column of I and W with the same slice, and the other way
        round."""
        columns = np.arange(self.pieces)
        return (columns - 2 * (columns % self.slices) + self.slices - 1).tolist()

    @cached_property
    def turns(self) -> Starts:
        """Periods from the first column to each column in a plan that repeats: lanes x columns."""
        later = [0 if forward else self.slices - 1 for forward in self.is_forward]
        return np.array(later, np.int64)[:, None] + np.arange(self.pieces)

    @cached_property
    def is_forward(self) -> list[bool]:
        """For each lane, whether it is one of F."""
        return [kind is F for _, kind in self.passes]

    @cached_property
    def after(self) -> Waits:
        """Per lane, the lanes that wait for it, and the ticks from its end."""
        return _turned(self.before)

    @cached_property
    def before_by_column(self) -> Edges:
        """`before` with figures by column: the other lane, the hops, and the columns there."""
        return self._by_column(self.before, lambda lane, other: lane)

    @cached_property
    def after_by_column(self) -> Edges:
        """`after` with figures by column: the other lane, the hops, and the columns there."""
        return self._by_column(self.after, lambda lane, other: other)

    def _by_column(self, waits: Waits, receiver: Callable[[int, int], int]) -> Edges:
        none, straight = [0] * self.pieces, list(range(self.pieces))
        hops = self.hops_of_all.tolist()
        return [
            [
                (
                    other,
                    hops[receiver(lane, other)] if hop else none,
                    straight if self.is_forward[lane] == self.is_forward[other] else self.turned,
                )
                for other, hop in row
            ]
            for lane, row in enumerate(waits)
        ]

    def mirrored(self) -> Shop:
        """Return the same packing problem with time running backwards."""
        receivers = [
            next((other for other, hop in row if hop), lane) for lane, row in enumerate(self.after)
        ]
        return Shop(
            self.placement,
            self.pieces,
            self.tick,
            self.durations,
            self.after,
            tuple(-gain for gain in self.gains),
            self.limit,
            self.rooms,
            heads=self.tails,
            tails=self.heads,
            recompute_gains=None
            if self.recompute_gains is None
            else -self.recompute_gains[:, ::-1],
            cut=None if self.cut is None else self.cut.mirrored(receivers),
            is_mirrored=not self.is_mirrored,
        )


# Cached, as it depends on the placement alone: a search makes many shops that differ in what is
# recomputed.
@lru_cache(maxsize=8)
def _way(placement: Placement) -> tuple[int, ...]:
    """Return `Shop.way` for time that runs forwards."""
    kinds = {F: 0, R: 1, I: 2, W: 3}
    stages = placement.stages_of[0]
    chunks = {stage: chunk for chunk, stage in enumerate(stages)}
    passes = passes_of(placement, with_recompute=True)[: len(kinds) * len(stages)]
    return tuple(
        sorted(
            range(len(passes)),
            key=lambda lane: (
                (0, chunks[passes[lane][0]], 0)
                if passes[lane][1] is F
                else (1, -chunks[passes[lane][0]], kinds[passes[lane][1]])
            ),
        )
    )


@lru_cache(maxsize=8)
def _turned(before: Waits) -> Waits:
    """Return, per lane, the lanes that wait for it, and the ticks from its end."""
    rows: list[list[tuple[int, int]]] = [[] for _ in before]
    for lane, waits_for in enumerate(before):
        for other, hop in waits_for:
            rows[other].append((lane, hop))
    return tuple(map(tuple, rows))


@lru_cache(maxsize=8)
def passes_of(placement: Placement, with_recompute: bool = False) -> Lanes:
    """Return the stage and kind of each lane; ``with_recompute`` includes lanes of R."""
    kinds = (R, I, W) if with_recompute else (I, W)
    return tuple(
        lane
        for stages in placement.stages_of
        for lane in (
            *((stage, F) for stage in stages),
            *((stage, kind) for kind in kinds for stage in reversed(stages)),
        )
    )


def shop_of(problem: Problem, recomputed: npt.NDArray[np.bool_] | None = None) -> Shop:
    """Return the packing problem of ``problem``, whose ranks have equally many chunks.

    Args:
        recomputed: whether an activation is recomputed, of shape (stages, microbatches). None: no
            activation is recomputed, and there are no lanes of R. With slices it has to be None.

    The tick is the common unit of the costs, or the largest fraction of it of which a rank's work
    for a mean microbatch, or a slice, has a thousand; without a common unit it is a share of that
    work (`common_tick`).

    Raises:
        ValueError: the limit is in bytes, and the costs have none.
    """
    placement, costs, parts = problem.placement, problem.costs, problem.examples
    assert {len(stages) for stages in placement.stages_of} == {placement.chunks}
    lanes = passes_of(placement, recomputed is not None)
    seconds = [
        [costs.of(Action(stage, kind, part)) for part in _in_order(kind, parts, problem)]
        for stage, kind in lanes
    ]
    work = sum(fmean(row) for row, (_, kind) in zip(seconds, lanes, strict=True) if kind is not R)
    work /= placement.ranks
    hops = _hops(problem)
    means = {link: fmean(row) for link, row in hops.items()}
    unit = common_tick([*chain(*seconds), *(means.values() or [costs.links.hop])], work)
    tick = unit / math.ceil(_FINEST * unit / work)
    # A pass that costs nothing still has its place in the order.
    durations = [[max(round(figure / tick), 1) for figure in row] for row in seconds]
    activation, rest, kept, limit = _memory(problem, recomputed is not None)
    slices = problem.slices.count
    recompute_gains = None
    if recomputed is not None:
        recompute_gains = np.zeros((len(lanes), problem.microbatches), np.int64)
        for lane, (stage, kind) in enumerate(lanes):
            if kind in _SIGN:
                recompute_gains[lane] = (
                    _SIGN[kind] * (activation[stage] - kept[stage]) * recomputed[stage]
                )
    return Shop(
        placement,
        problem.pieces,
        tick,
        tuple(round(fmean(row)) for row in durations),
        _before(placement, {link: round(hop / tick) for link, hop in means.items()}, lanes),
        tuple(
            _gain(kind, activation[stage] // slices, rest[stage] // slices) for stage, kind in lanes
        ),
        limit,
        tuple(_rooms(problem, activation, rest)),
        heads=(0,) * placement.ranks,
        tails=_tails(problem, tick),
        recompute_gains=recompute_gains,
        cut=_cut(problem, lanes, tick, durations, hops, activation, rest)
        if len(parts) > 1
        else None,
    )


def _hops(problem: Problem) -> dict[int, list[float]]:
    """Return the seconds of a message of each of `Problem.examples` for each link between two
    ranks, by the stage before it."""
    placement, costs, parts = problem.placement, problem.costs, problem.examples
    links = [s for s in range(placement.last) if placement.is_remote(s, Neighbour.NEXT)]
    if len(parts) == 1:
        return {stage: [costs.hop_behind(stage)] for stage in links}
    return {
        stage: [costs.of(Action(stage, Kind.SEND_F, part)) for part in parts] for stage in links
    }


def _in_order[T](kind: Kind, parts: Sequence[T], problem: Problem) -> Sequence[T]:
    """Return the `Problem.examples`, or their figures, in the order of the passes of ``kind``."""
    return parts if kind is F or problem.slices.count == 1 else parts[::-1]


def _cut(
    problem: Problem,
    lanes: Sequence[tuple[int, Kind]],
    tick: float,
    durations: Sequence[Sequence[int]],
    seconds_of_hops: Mapping[int, Sequence[float]],
    activation: Sequence[int],
    rest: Sequence[int],
) -> Cut:
    parts = problem.examples
    gains = [
        [
            _gain(kind, math.ceil(share * activation[stage]), math.ceil(share * rest[stage]))
            for share in map(tokens_of, _in_order(kind, parts, problem))
        ]
        for stage, kind in lanes
    ]
    none = [0.0] * len(parts)
    hops = [
        [
            round(hop / tick)
            for hop in _in_order(kind, seconds_of_hops.get(stage - (kind is F), none), problem)
        ]
        for stage, kind in lanes
    ]
    tables = (np.array(table, np.int64) for table in (durations, gains, hops))
    return Cut(problem.slices.count, *tables)


_SIGN = {F: -1, R: 1}  # of the memory that a pass takes in addition if it is recomputed


def _before(
    placement: Placement, hops: Mapping[int, int], lanes: Sequence[tuple[int, Kind]]
) -> Waits:
    """Return `Shop.before`. ``hops`` are by the stage before each link between two ranks."""
    lane_of = {key: lane for lane, key in enumerate(lanes)}

    def own(stage: int, *kinds: Kind) -> tuple[tuple[int, int], ...]:
        """Return the first of ``kinds`` for which ``stage`` has a lane."""
        return ((next(lane_of[stage, kind] for kind in kinds if (stage, kind) in lane_of), 0),)

    def waits_for(stage: int, kind: Kind) -> tuple[tuple[int, int], ...]:
        if kind is W:
            return own(stage, I)
        if kind is R:
            return own(stage, F)
        which = Neighbour.PREVIOUS if kind is F else Neighbour.NEXT
        other = placement.neighbour(stage, which)
        if other is None:
            return () if kind is F else own(stage, R, F)
        hop = hops[min(stage, other)] if placement.is_remote(stage, which) else 0
        there = (lane_of[other, kind], hop)
        return (there, *own(stage, R)) if kind is I and (stage, R) in lane_of else (there,)

    return tuple(waits_for(stage, kind) for stage, kind in lanes)


def _gain(kind: Kind, activation: int, rest: int) -> int:
    """Return the memory that a pass takes (negative: frees) of a microbatch without recompute."""
    return {F: activation, R: 0, I: rest - activation, W: -rest}[kind]


def _memory(problem: Problem, with_recompute: bool) -> tuple[list[int], list[int], list[int], int]:
    """Return the memory of a microbatch, per stage: from F on, from I on, and the part that is
    stored if it is recomputed; and the limit of a rank. All are in shares of a chunk, or in bytes.

    The limit is rounded down, and at most the need of all microbatches. It is reduced by the
    gradients of keys and values, which a stage holds for one sliced microbatch at a time.
    """
    limit, placement = problem.memory_limit, problem.placement
    chunk = (
        round(1 / INPUT_SHARE) if with_recompute else 1 if problem.slices.count == 1 else _OF_SLICES
    )
    kept = [1] * placement.stages
    if limit is not None and limit.bytes is not None:
        held = bytes_for(limit, problem.costs)
        activation, rest = (
            list(map(math.ceil, held[what])) for what in (Held.ACTIVATION, Held.WEIGHT_INPUTS)
        )
        amount = in_bytes(problem.costs)
        kept = [math.ceil(amount(Held.INPUT, stage)) for stage in range(placement.stages)]
        allowed: float = limit.bytes
        if problem.slices.count > 1:
            given_back = [amount(Held.KEYS_VALUES, stage) for stage in range(placement.stages)]
            allowed -= max(sum(given_back[s] for s in row) for row in placement.stages_of)
    else:
        activation = rest = [chunk] * placement.stages
        allowed = math.inf
        if limit is not None:
            assert limit.microbatches is not None
            allowed = with_rounding(limit.microbatches * placement.chunks * chunk)
    most = problem.microbatches * max(_rooms(problem, activation, rest))
    return activation, rest, kept, most if allowed >= most else int(allowed)


def _rooms(problem: Problem, activation: Sequence[int], rest: Sequence[int]) -> list[int]:
    """Return, per rank, the largest memory that a microbatch may need, with each slice rounded
    up."""
    more = problem.slices.count - 1
    return [
        sum(max(activation[stage], rest[stage]) + more for stage in stages)
        for stages in problem.placement.stages_of
    ]


def _tails(problem: Problem, tick: float) -> tuple[int, ...]:
    """Return, per rank, how much sooner than the last one it can begin, and so has to end, for
    steps to overlap.

    The largest end including its tail is then the largest own time plus a constant.
    """
    placement, costs = problem.placement, problem.costs
    if not problem.extras.post_validation:
        return (0,) * placement.ranks
    begins = [0.0]
    for stage, forward in enumerate(costs.seconds[Kind.FORWARD][:-1]):
        hop = costs.hop_behind(stage) if placement.is_remote(stage, Neighbour.NEXT) else 0.0
        begins.append(begins[-1] + forward + hop)
    first = [begins[stages[0]] for stages in placement.stages_of]
    return tuple(round((max(first) - begin) / tick) for begin in first)


def rows_of(
    starts: Starts,
    placement: Placement,
    recompute_actions: npt.NDArray[np.bool_] | None = None,
    orders: tuple[Sequence[int], Sequence[int]] | None = None,
) -> Rows:
    """Return the actions of each rank in the order of their starts.

    Args:
        recompute_actions: as `Shop.recompute_actions`; None: there are no lanes of R.
        orders: the microbatches or slices of the columns of F, and of those of other lanes
            (`Problem.orders`); None: whole microbatches.
    """
    passes, m = passes_of(placement, recompute_actions is not None), starts.shape[1]
    there, back = orders or (range(m), range(m))
    rows = []
    for lanes in np.split(np.arange(len(passes)), placement.ranks):
        row = []
        for place in _in_turn(starts[lanes]).tolist():
            lane, k = lanes[0] + place // m, place % m
            stage, kind = passes[lane]
            if kind is not R or (recompute_actions is not None and recompute_actions[lane, k]):
                row.append(Action(stage, kind, there[k] if kind is F else back[k]))
        rows.append(tuple(row))
    return tuple(rows)


def recomputed_in(rows: Rows, stages: int, microbatches: int) -> npt.NDArray[np.bool_] | None:
    """Return, by stage and microbatch, whether ``rows`` recompute the activation; None if there is
    no R."""
    recomputed = np.zeros((stages, microbatches), dtype=bool)
    for stage, kind, k in (action for row in rows for action in row):
        if kind is R:
            recomputed[stage, k] = True
    return recomputed if recomputed.any() else None


def starts_of(rows: Sequence[Sequence[Action]], shop: Shop) -> Starts:
    """Return the starts of the passes of ``rows``, each as soon as it can; B counts as I, then W.

    The limit is ignored, as a plan may come from a schedule that needs more.
    """
    return _timed(_orders_in(rows, shop), shop)


def timed(starts: Starts, shop: Shop) -> Starts:
    """Return the starts of passes that keep the order of ``starts`` on their rank, each as soon as
    it can: `starts_of` applied to `rows_of`."""
    assert shop.recompute_gains is None
    orders = []
    for first in range(0, shop.lanes, shop.lanes_of_rank):
        order = _in_turn(starts[first : first + shop.lanes_of_rank])
        lanes, columns = np.divmod(order, shop.pieces)
        orders.append(list(zip((lanes + first).tolist(), columns.tolist(), strict=True)))
    return _timed(orders, shop)


def _in_turn(starts: Starts) -> npt.NDArray[np.intp]:
    """Return the positions of passes, counted by lane, then by column, in the order of their
    ``starts``."""
    return np.argsort(starts, axis=None, kind="stable")


Orders = list[list[tuple[int, int]]]  # per rank, lane and column of each of its passes


def _timed(orders: Orders, shop: Shop) -> Starts:
    durations: list[list[int]] = shop.durations_of_all.tolist()
    starts = [[_NOT_YET] * shop.pieces for _ in shop.before]
    before, size = shop.before_by_column, shop.lanes_of_rank
    woken = [{other // size for other, _ in row} - {n // size} for n, row in enumerate(shop.after)]
    at, free = [0] * len(orders), list(shop.heads)
    todo, queued = deque(range(len(orders))), [True] * len(orders)
    while todo:
        rank = todo.popleft()
        queued[rank] = False
        order = orders[rank]
        while at[rank] < len(order):
            lane, k = order[at[rank]]
            start = free[rank]
            for other, hops, columns in before[lane]:
                begun = starts[other][columns[k]]
                if begun == _NOT_YET:
                    start = _NOT_YET
                    break
                start = max(start, begun + durations[other][columns[k]] + hops[k])
            if start == _NOT_YET:
                break
            starts[lane][k], free[rank] = start, start + durations[lane][k]
            at[rank] += 1
            for waiting in woken[lane]:
                if not queued[waiting]:
                    queued[waiting] = True
                    todo.append(waiting)
    assert all(n == len(order) for n, order in zip(at, orders, strict=True)), "rows would hang"
    return np.array(starts, dtype=np.int64)


def _orders_in(rows: Sequence[Sequence[Action]], shop: Shop) -> Orders:
    """Return the passes of ``rows``. With lanes of R, each pass of R that is no action follows
    directly behind its F."""
    lane_of = {key: lane for lane, key in enumerate(shop.passes)}
    actions = columns_of(rows)
    of_pairs = np.full((len(actions.pairs), 2), _NONE)
    for row, (stage, kind) in zip(of_pairs, actions.pairs, strict=True):
        parts = RULES[kind].covers
        if shop.recompute_gains is not None and kind is F:
            parts = (F, R)
        row[: len(parts)] = [lane_of[stage, part] for part in parts]
    lanes, pieces = of_pairs[actions.pair], actions.microbatch[:, None]
    columns = np.where(np.array(shop.is_forward)[lanes], pieces, np.array(shop.turned)[pieces])
    is_there = lanes != _NONE
    if shop.recompute_gains is not None:
        there = np.zeros((shop.lanes, shop.pieces), dtype=bool)
        there[lanes[:, 0], columns[:, 0]] = True
        is_again = np.array([kind is R for _, kind in shop.passes])
        behind_f = is_there[:, 1] & is_again[lanes[:, 1]]
        is_there[behind_f, 1] = ~there[lanes[behind_f, 1], columns[behind_f, 1]]
    passes = list(zip(lanes[is_there].tolist(), columns[is_there].tolist(), strict=True))
    lengths = np.bincount(actions.rank, is_there.sum(axis=1), len(rows))
    bounds = np.cumsum([0, *lengths], dtype=int).tolist()
    return [passes[begin:end] for begin, end in pairwise(bounds)]


def end_of(starts: Starts, shop: Shop) -> int:
    """Return the tick at which all passes of ``starts`` have ended, with tails."""
    ends = (starts + shop.durations_of_all).max(axis=1)
    of_ranks = ends.reshape(shop.placement.ranks, shop.lanes_of_rank).max(axis=1)
    return int((of_ranks + np.array(shop.tails)).max())
