"""Placement of weight gradients in the gaps of an order of passes, and the timing of an order.

A family that splits the backward pass gives the order in which each rank does its F and I. The
places of W follow from costs and memory (`fill_once`). Times are those of `simulate`, except that
receives are always posted in time. An order therefore never takes less time than computed here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from megatron_ext.compile.program.memory import Amount, bytes_for, in_bytes
from megatron_ext.compile.program.pass_graph import with_messages
from megatron_ext.compile.program.simulate import simulate_unproved
from megatron_ext.schedule.action import Action, Kind, token_share
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.limit import fits, with_rounding
from megatron_ext.schedule.placement import Neighbour
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule

_TOLERANCE = 1e-9  # relative rounding error of a sum of costs


class ExceedsMemory(ValueError):
    """Error: an order of F and I exceeds the memory limit wherever the W are placed."""


class Deadlock(ValueError):
    """Error: an order of passes in which ranks wait for one another in a cycle, so it cannot
    run."""


@dataclass(frozen=True)
class TimedOrder:
    """Rows of compute actions with the makespan and the span of a step that runs them.

    Attributes:
        rows: the actions of each rank.
        makespan: time from the first start to the last end over all ranks.
        span: longest time from a rank's own start to its own end.
    """

    rows: tuple[tuple[Action, ...], ...]
    makespan: float
    span: float

    def order(self, by_span: bool) -> tuple[float, float]:
        """Return the sort key of this order: makespan, then span; ``by_span`` the reverse."""
        return (self.span, self.makespan) if by_span else (self.makespan, self.span)


@dataclass(frozen=True)
class Memory:
    """Memory limit of each rank, and the function ``amount`` that counts memory in its unit."""

    amount: Amount
    allowed: tuple[float, ...]

    def fits(self, rank: int, held: float) -> bool:
        """Return whether ``held`` memory is within the limit of ``rank``."""
        return fits(held, self.allowed[rank])

    def of(self, stage: int) -> float:
        """Return the memory of a microbatch on ``stage`` from F to I, or from I to W if that is
        more."""
        # If the inputs of W take more memory than the activation, that memory must be free when I
        # runs.
        return max(self.amount(held, stage) for held in (Held.ACTIVATION, Held.WEIGHT_INPUTS))


def memory_of(problem: Problem, microbatches: float = math.inf) -> Memory:
    """Return the memory limit of each rank, at most what ``microbatches`` microbatches take."""
    limit, share = problem.memory_limit, 1 / problem.placement.chunks
    if limit is not None and limit.bytes is not None:
        bytes_for(limit, problem.costs)
        amount = in_bytes(problem.costs)
        stages_of = problem.placement.stages_of
        of_stages = Memory(amount, ())
        full = [sum(of_stages.of(stage) for stage in stages) for stages in stages_of]
        return Memory(
            amount,
            tuple(
                min(limit.bytes, microbatches * need) if need else float(limit.bytes)
                for need in full
            ),
        )
    if limit is not None:
        assert limit.microbatches is not None
        microbatches = min(limit.microbatches, microbatches)
    held_by_passes = (Held.ACTIVATION, Held.WEIGHT_INPUTS)
    return Memory(
        lambda held, stage: share if held in held_by_passes else 0.0,
        (microbatches,) * problem.ranks,
    )


def least_memory(orders: Sequence[Sequence[Action]], memory: Memory) -> list[float]:
    """Return the least memory that each rank needs for its order of F and I, with W right
    behind I."""
    least = []
    for order in orders:
        held = most = 0.0
        for stage, kind, k in order:
            change = memory.of(stage) * token_share(k)
            held += change if kind is Kind.FORWARD else -change
            most = max(most, held)
        least.append(most)
    return least


def fill_once(
    orders: Sequence[Sequence[Action]],
    problem: Problem,
    memory: Memory | None = None,
    *,
    deadline: float = math.inf,
    span: float = math.inf,
) -> TimedOrder:
    """Return the ranks' ``orders`` of F and I with a W for each I, as soon as the rules allow.

    W are placed greedily, each rank's oldest first:

    - in a gap that is long enough, always;
    - before a pass that would exceed the memory limit, as many as necessary;
    - in a gap that is too short, delaying later passes, only if the rank cannot afford to idle. A
      rank that has to end by a deadline may idle for the time that its start and its work leave
      over, and no other rank gains if it idles less.

    Args:
        orders: F and I (or B) of each rank on any placement.
        memory: the limit of each rank; None is no limit.
        deadline: time by which the last rank should have ended. With an unreachable deadline, ranks
            never idle while a W is pending.
        span: the longest time that each rank should take from its own start to its own end.

    Raises:
        ExceedsMemory: ``orders`` need more memory.
        Deadlock: ``orders`` cannot run with any memory.
    """
    return _Orders(orders, problem, memory).fill(deadline, span).timed


def time(rows: Sequence[Sequence[Action]], problem: Problem) -> TimedOrder:
    """Return makespan and span of the ranks' complete ``rows`` of passes, in their given order.

    Raises:
        Deadlock: the rows cannot run.
    """
    schedule = Schedule("timed", problem.placement, tuple(map(tuple, rows)))
    arrays = schedule.arrays
    graph, seconds = with_messages(schedule, problem.costs)
    if graph.stuck:
        is_stuck = np.isin(arrays.numbers, graph.stuck)
        _, firsts = np.unique(arrays.rank[is_stuck], return_index=True)
        actions = list(chain.from_iterable(rows))
        stuck = [str(actions[node]) for node in arrays.numbers[is_stuck][firsts].tolist()]
        raise Deadlock(f"the order of passes would deadlock at {', '.join(stuck)}")
    starts, ends = graph.longest_paths(seconds)
    firsts = np.unique(arrays.first)
    lasts = np.append(firsts[1:], len(arrays)) - 1
    begins, free = np.array(starts)[firsts], np.array(ends)[lasts]
    return TimedOrder(schedule.rows, float(free.max() - begins.min()), float((free - begins).max()))


def fill_best(
    orders: Sequence[Sequence[Action]],
    problem: Problem,
    memory: Memory | None = None,
    *,
    trials: int = 12,
    by_span: bool = False,
) -> TimedOrder:
    """Return the best result of `fill_once` for several deadlines, by makespan, then span.

    ``by_span`` compares by span, then makespan. ``trials`` is the number of deadlines.

    Raises:
        ExceedsMemory, Deadlock: as `fill_once`.
    """
    prepared = _Orders(orders, problem, memory)
    fills = [prepared.fill(math.inf, math.inf)]
    quick = fills[0].timed
    work, start = max(prepared.work), _last_start(problem)
    for step in range(trials // 2):
        share = (step / (trials // 2)) ** 2
        deadline = work + start + share * max(quick.makespan - work - start, 0)
        if not any(fill.ends.covers(deadline) for fill in fills):
            fills.append(prepared.fill(deadline, math.inf))
        span = work + share * max(quick.span - work, 0)
        if not any(fill.spans.covers(span) for fill in fills):
            fills.append(prepared.fill(math.inf, span))
    return min((fill.timed for fill in fills), key=lambda timed: timed.order(by_span))


def makespan(schedule: Schedule, problem: Problem) -> float:
    """Return the makespan that `simulate` gives a ``schedule`` without messages, once these are
    added.

    The schedule is not proved.
    """
    if not problem.costs.links.p2p_seconds:
        return time(schedule.rows, problem).makespan
    return simulate_unproved(schedule, problem).makespan


def _work(problem: Problem) -> list[float]:
    """Return the compute seconds of each rank in a step of ``problem``."""
    costs, m = problem.costs, problem.microbatches
    means = [(costs.mean_factor(kind), row) for kind, row in costs.seconds.items()]
    stages_of = problem.placement.stages_of
    return [m * sum(row[s] * mean for mean, row in means for s in stages) for stages in stages_of]


def _last_start(problem: Problem) -> float:
    """Return the earliest time, in seconds, at which the last rank to start can start."""
    placement, at = problem.placement, 0.0
    first_starts: dict[int, float] = {}
    for stage, rank in enumerate(placement.rank_of):
        if placement.is_remote(stage, Neighbour.PREVIOUS):
            at += problem.costs.of(Action(stage - 1, Kind.SEND_F, problem.forwards[0]))
        first_starts.setdefault(rank, at)
        at += problem.costs.of(Action(stage, Kind.FORWARD, problem.forwards[0]))
    return max(first_starts.values())


@dataclass
class _Bounds:
    """Interval of deadlines, or of spans, that all lead to the same filling of W.

    A deadline decides only whether a rank may idle, so all deadlines between two neighbouring
    decisions lead to the same places of W.

    Attributes:
        least: the latest deadline that some idling of this filling required.
        most: the earliest deadline that would have allowed one more idling.
    """

    least: float = -math.inf
    most: float = math.inf

    def note(self, required: float, idles: bool) -> None:
        """Narrow the interval of deadlines by a decision to idle, or not to idle.

        ``required`` is the deadline, or span, that would just allow the rank to idle.
        """
        if idles:
            self.least = max(self.least, required)
        else:
            self.most = min(self.most, required)

    def covers(self, limit: float) -> bool:
        """Return whether the deadline (or span) ``limit`` leads to this filling of W.

        False if it is within rounding of a bound.
        """
        margin = _TOLERANCE * (1 + limit)
        return self.least + margin < limit < self.most - margin


@dataclass(frozen=True)
class _Filled:
    """Order of passes with W filled in, with the deadlines and the spans that lead to it."""

    timed: TimedOrder
    ends: _Bounds
    spans: _Bounds


class _WeightGradient(NamedTuple):
    action: Action
    seconds: float
    memory: float  # memory that stays allocated until the weight gradient has run


class _Pass(NamedTuple):
    """A pass of the order of F and I, with all values that do not depend on when it runs.

    Inputs are numbered over the whole step; ``output`` is the number of the input that the pass
    makes for a neighbouring stage, or -1.
    """

    action: Action
    seconds: float
    input: int
    output: int
    to: int  # rank of the neighbouring stage; -1 if there is none
    # Channel to the neighbouring stage; None if that stage is on the same rank.
    link: tuple[int, int, Kind] | None
    p2p_seconds: float  # seconds of the message to the neighbouring stage
    needs: float  # memory that must be free when the pass starts
    change: float  # memory allocated after the pass, less the memory allocated before it
    weight_gradient: _WeightGradient | None  # the weight gradient that the pass leaves to a later W


class _Orders:
    """F and I of each rank, prepared once to fill W into the gaps under several deadlines."""

    def __init__(
        self, orders: Sequence[Sequence[Action]], problem: Problem, memory: Memory | None
    ) -> None:
        self.problem, self.memory = problem, memory
        self.work = _work(problem)
        self.passes = self._prepare(orders)

    def _prepare(self, orders: Sequence[Sequence[Action]]) -> list[list[_Pass]]:
        placement, of = self.problem.placement, self.problem.costs.of
        parts, stages = self.problem.examples, range(placement.stages)
        # Seconds of passes by kind, stage and slice of an example microbatch; seconds of messages
        # by the sending stage and slice.
        seconds = {
            kind: [[of(Action(s, kind, part)) for part in parts] for s in stages]
            for kind in _COMPUTE
        }
        link_seconds = [[of(Action(s, Kind.SEND_F, part)) for part in parts] for s in stages[:-1]]
        tokens = [token_share(part) for part in parts]
        memory, pieces = self.memory, self.problem.pieces
        share = [memory.of(stage) if memory else 0.0 for stage in stages]
        left_for_w = [
            memory.amount(Held.WEIGHT_INPUTS, stage) if memory else 0.0 for stage in stages
        ]

        def prepared(action: Action) -> _Pass:
            stage, kind, k = action
            part, is_forward = k % len(parts), kind is Kind.FORWARD
            other = placement.next(stage) if is_forward else placement.previous(stage)
            output, to, link, p2p_seconds = -1, -1, None, 0.0
            if other is not None:
                output = (other if is_forward else len(stages) + other) * pieces + k
                rank, to = placement.rank_of[stage], placement.rank_of[other]
                if to != rank:
                    link, p2p_seconds = (rank, to, kind), link_seconds[min(stage, other)][part]
            taken = share[stage] * tokens[part]
            change, weight_gradient = taken if is_forward else -taken, None
            if kind is Kind.BACKWARD_INPUT:
                change = -(share[stage] - left_for_w[stage]) * tokens[part]
                w, kept = Action(stage, Kind.BACKWARD_WEIGHT, k), left_for_w[stage] * tokens[part]
                weight_gradient = _WeightGradient(w, seconds[w.kind][stage][part], kept)
            return _Pass(
                action=action,
                seconds=seconds[kind][stage][part],
                input=(stage if is_forward else len(stages) + stage) * pieces + k,
                output=output,
                to=to,
                link=link,
                p2p_seconds=p2p_seconds,
                needs=taken if is_forward else 0.0,
                change=change,
                weight_gradient=weight_gradient,
            )

        return [[prepared(action) for action in order] for order in orders]

    def fill(self, deadline: float, span: float) -> _Filled:
        """Return the order with its W filled in, for one ``deadline`` and ``span``.

        Raises:
            ExceedsMemory, Deadlock: as `fill_once`.
        """
        return _Filling(self, deadline, span).run()


class _Rank:
    """State of one rank while W are filled in: its actions so far, its times, and its memory."""

    def __init__(self, work: float, allowed: float) -> None:
        self.work = work
        self.slack = _TOLERANCE * (1 + work)
        self.most = with_rounding(allowed)
        self.row: list[Action] = []
        self.pending: deque[_WeightGradient] = deque()
        self.started: float | None = None
        self.free = self.idle = self.held = 0.0

    def do_weight_gradient(self) -> None:
        action, seconds, memory = self.pending.popleft()
        self.row.append(action)
        self.free += seconds
        self.held -= memory

    def free_for(self, needs: float) -> bool:
        """Run pending W of the rank until the memory ``needs`` is free; return whether it is."""
        while self.held + needs > self.most:
            if not self.pending:
                return False
            self.do_weight_gradient()
        return True


class _Filling:
    """State of one placement of W into the gaps of all ranks.

    A pass is placed once its input has been placed, so the true length of a gap is known.
    """

    def __init__(self, orders: _Orders, deadline: float, span: float) -> None:
        self.passes, self.deadline, self.span = orders.passes, deadline, span
        memory = orders.memory
        allowed = memory.allowed if memory else (math.inf,) * len(orders.work)
        self.ranks = list(map(_Rank, orders.work, allowed))
        # Times when the inputs of passes are ready: microbatches, and the gradients of their
        # losses, are ready at the start.
        stages, pieces = orders.problem.placement.stages, orders.problem.pieces
        self.ready: list[float | None] = [None] * (2 * stages * pieces)
        self.ready[:pieces] = self.ready[-pieces:] = [0.0] * pieces
        # Arrival of the latest message of each channel.
        self.arrived: dict[tuple[int, int, Kind], float] = {}
        self.ends, self.spans = _Bounds(), _Bounds()

    def run(self) -> _Filled:
        at = [0] * len(self.passes)
        todo, queued = deque(range(len(at))), [True] * len(at)
        while todo:
            number = todo.popleft()
            queued[number] = False
            rank, passes = self.ranks[number], self.passes[number]
            while at[number] < len(passes):
                placed = passes[at[number]]
                ready = self.ready[placed.input]
                if ready is None:
                    break
                self.place(rank, placed, ready)
                at[number] += 1
                if placed.to >= 0 and not queued[placed.to]:
                    queued[placed.to] = True
                    todo.append(placed.to)
        stuck = [row[n].action for n, row in zip(at, self.passes, strict=True) if n < len(row)]
        if stuck:
            raise Deadlock(f"the order of passes would deadlock at {', '.join(map(str, stuck))}")
        for rank in self.ranks:
            while rank.pending:
                rank.do_weight_gradient()
        starts = [rank.started or 0.0 for rank in self.ranks]
        ends = [rank.free for rank in self.ranks]
        spans = [end - start for end, start in zip(ends, starts, strict=True)]
        rows = tuple(tuple(rank.row) for rank in self.ranks)
        timed = TimedOrder(rows, max(ends) - min(starts), max(spans))
        return _Filled(timed, self.ends, self.spans)

    def place(self, rank: _Rank, placed: _Pass, ready: float) -> None:
        """Run the pass ``placed`` on ``rank``, whose input comes at ``ready``; deliver its
        output."""
        action, seconds, _, output, to, link, p2p_seconds, needs, change, weight_gradient = placed
        if rank.pending and ready - rank.free > rank.slack:
            self.fill_gap(rank, ready)
        if needs and not rank.free_for(needs):
            number = self.ranks.index(rank)
            raise ExceedsMemory(f"{action} exceeds the memory limit of rank {number}")
        start = max(rank.free, ready)
        if rank.started is None:
            rank.started = start
        else:
            rank.idle += start - rank.free
        rank.row.append(action)
        rank.free = end = start + seconds
        rank.held += change
        if weight_gradient is not None:
            rank.pending.append(weight_gradient)
        if to >= 0:
            if link is not None:
                end = max(end, self.arrived.get(link, 0.0)) + p2p_seconds
                self.arrived[link] = end
            self.ready[output] = end

    def fill_gap(self, rank: _Rank, ready: float) -> None:
        waiting, slack, work = rank.pending, rank.slack, rank.work
        start = rank.started or 0.0
        may_idle = min(self.deadline - start, self.span) - work
        while waiting and (gap := ready - rank.free) > slack:
            if waiting[0].seconds > gap + slack:
                idle = rank.idle + gap - slack
                may_wait = rank.idle + gap <= may_idle + slack
                self.ends.note(idle + work + start, may_wait)
                self.spans.note(idle + work, may_wait)
                if may_wait:
                    return
            rank.do_weight_gradient()


_COMPUTE: tuple[Kind, ...] = (
    Kind.FORWARD,
    Kind.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT,
    Kind.FULL_BACKWARD,
)
