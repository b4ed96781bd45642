"""Put weight gradients into the gaps of an order of passes, and time one as it is.

A family that splits the backward pass has to say in which order each rank does its F and I; where
the W go follows from costs and memory. They are placed greedily, each rank's oldest first:

- in a gap that is long enough, always;
- before a pass that would exceed the memory limit, as many as must;
- in a gap that is too short, delaying what follows, only if the rank cannot afford to idle. A
  rank that is to end by a deadline may idle for as long as its start and its work leave over, and
  no other rank gains if it idles less.

Time is that of `simulate` except that a receive is always posted in time, so that an order takes
no less than what is said here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from megatron_ext.compile.program.memory import Amount, bytes_for, in_bytes
from megatron_ext.compile.program.pass_graph import with_messages
from megatron_ext.compile.program.simulate import simulate_unproved
from megatron_ext.schedule.action import Action, Kind, tokens_of
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.limit import fits
from megatron_ext.schedule.placement import Neighbour
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule

_TOLERANCE = 1e-9  # of a sum of costs


class DoesNotFit(ValueError):
    """An order of F and I that exceeds the memory limit wherever the W are put."""


class Hangs(ValueError):
    """An order in which ranks wait for one another for ever."""


@dataclass(frozen=True)
class TimedOrder:
    """Rows of compute actions and how long they take.

    Attributes:
        rows: what each rank does.
        makespan: first start to last end over all ranks.
        span: the longest own start to own end.
    """

    rows: tuple[tuple[Action, ...], ...]
    makespan: float
    span: float

    def order(self, by_span: bool) -> tuple[float, float]:
        """The key by which two orders are compared."""
        return (self.span, self.makespan) if by_span else (self.makespan, self.span)


@dataclass(frozen=True)
class Memory:
    """Memory that each rank may hold, in the unit of ``amount``."""

    amount: Amount
    allowed: tuple[float, ...]

    def fits(self, rank: int, held: float) -> bool:
        """Whether ``rank`` may hold ``held``."""
        return fits(held, self.allowed[rank])

    def of(self, stage: int) -> float:
        """The memory a microbatch takes on ``stage`` from F to I."""
        # If W needs more than the activations, that much memory must be free when I comes.
        return max(self.amount(held, stage) for held in (Held.ACTIVATION, Held.WEIGHT_INPUTS))


def memory_of(problem: Problem, microbatches: float = math.inf) -> Memory:
    """The limit of ``problem`` as `Memory`; no more than ``microbatches`` where that is less."""
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
    """Return the least memory that `fill_once` needs on each rank for ``orders``: W right behind
    its I."""
    least = []
    for order in orders:
        held = most = 0.0
        for stage, kind, k in order:
            change = memory.of(stage) * tokens_of(k)
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
    """Return ``orders``, a row per rank, with a W for each I placed as soon as the rules allow.

    Args:
        orders: F and I (or B) of each rank on any placement.
        memory: what no rank may exceed; None is no limit.
        deadline: when the last rank should have ended. Less than can be reached means: never idle
            while a W is there to do.
        span: the same for what each rank takes from its own start.

    Raises:
        DoesNotFit: ``orders`` need more memory.
        Hangs: ``orders`` cannot run, with whatever memory.
    """
    return _Filling(orders, problem, memory, deadline, span).run()


def time(rows: Sequence[Sequence[Action]], problem: Problem) -> TimedOrder:
    """Return the timing of complete ``rows``, unchanged.

    Raises:
        Hangs: they cannot run.
    """
    schedule = Schedule("timed", problem.placement, tuple(map(tuple, rows)))
    columns = schedule.columns
    graph, seconds = with_messages(schedule, problem.costs)
    if graph.stuck:
        is_stuck = np.isin(columns.numbers, graph.stuck)
        _, firsts = np.unique(columns.rank[is_stuck], return_index=True)
        actions = list(chain.from_iterable(rows))
        stuck = [str(actions[node]) for node in columns.numbers[is_stuck][firsts].tolist()]
        raise Hangs(f"the order would hang at {', '.join(stuck)}")
    starts, ends = graph.longest_paths(seconds)
    firsts = np.unique(columns.first)
    lasts = np.append(firsts[1:], len(columns)) - 1
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
    """The best `fill_once` of ``trials`` deadlines: least makespan, then span; or the reverse.

    Raises:
        DoesNotFit, Hangs: as `fill_once`.
    """
    quick = fill_once(orders, problem, memory)
    work, start = max(_work(problem)), _last_start(problem)
    fills = [quick]
    for step in range(trials // 2):
        share = (step / (trials // 2)) ** 2
        deadline = work + start + share * max(quick.makespan - work - start, 0)
        fills.append(fill_once(orders, problem, memory, deadline=deadline))
        span = work + share * max(quick.span - work, 0)
        fills.append(fill_once(orders, problem, memory, span=span))
    return min(fills, key=lambda filled: filled.order(by_span))


def makespan(schedule: Schedule, problem: Problem) -> float:
    """The makespan that `simulate` gives ``schedule``, unproved and without messages as it is."""
    if not problem.costs.links.hop:
        return time(schedule.rows, problem).makespan
    return simulate_unproved(schedule, problem).makespan


def _work(problem: Problem) -> list[float]:
    """Compute seconds of each rank."""
    costs, m = problem.costs, problem.microbatches
    means = [(costs.mean_factor(kind), row) for kind, row in costs.seconds.items()]
    stages_of = problem.placement.stages_of
    return [m * sum(row[s] * mean for mean, row in means for s in stages) for stages in stages_of]


def _last_start(problem: Problem) -> float:
    """When the last rank can start at the earliest."""
    placement, at = problem.placement, 0.0
    seen: dict[int, float] = {}
    for stage, rank in enumerate(placement.rank_of):
        if placement.is_remote(stage, Neighbour.PREVIOUS):
            at += problem.costs.of(Action(stage - 1, Kind.SEND_F, problem.forwards[0]))
        seen.setdefault(rank, at)
        at += problem.costs.of(Action(stage, Kind.FORWARD, problem.forwards[0]))
    return max(seen.values())


class _Filling:
    """The state of one call. A pass is placed once its input has been; so W see the true gap."""

    def __init__(
        self,
        orders: Sequence[Sequence[Action]],
        problem: Problem,
        memory: Memory | None,
        deadline: float,
        span: float,
    ) -> None:
        placement, costs, m = problem.placement, problem.costs, problem.pieces
        stages, ranks = range(placement.stages), placement.ranks
        parts = problem.examples
        self.orders, self.placement, self.period = orders, placement, len(parts)
        self.memory, self.deadline, self.span = memory, deadline, span
        # By kind, stage and example; by the stage before the link, and example.
        self.seconds = {
            kind: [[costs.of(Action(s, kind, part)) for part in parts] for s in stages]
            for kind in _COMPUTE
        }
        self.hops = [
            [costs.of(Action(s, Kind.SEND_F, part)) for part in parts] for s in stages[:-1]
        ]
        self.tokens = [tokens_of(part) for part in parts]
        self.work = _work(problem)
        self.forward_at: list[list[float | None]] = [[None] * m for _ in stages]
        self.forward_at[0] = [0.0] * m
        self.gradient_at: list[list[float | None]] = [[None] * m for _ in stages]
        self.gradient_at[-1] = [0.0] * m
        self.arrived: dict[tuple[int, int, Kind], float] = {}  # from rank, to rank, sent after
        self.rows: list[list[Action]] = [[] for _ in range(ranks)]
        self.pending: list[deque[Action]] = [deque() for _ in range(ranks)]
        self.free = [0.0] * ranks
        self.started: list[float | None] = [None] * ranks
        self.idle = [0.0] * ranks
        self.held = [0.0] * ranks
        if memory is not None:
            self.share = [memory.of(stage) for stage in stages]
            self.left_for_w = [memory.amount(Held.WEIGHT_INPUTS, stage) for stage in stages]

    def run(self) -> TimedOrder:
        at = [0] * len(self.orders)
        todo, queued = deque(range(len(at))), [True] * len(at)
        while todo:
            rank = todo.popleft()
            queued[rank] = False
            order = self.orders[rank]
            while at[rank] < len(order):
                woken = self.place(rank, order[at[rank]])
                if woken is None:
                    break
                at[rank] += 1
                if woken >= 0 and not queued[woken]:
                    queued[woken] = True
                    todo.append(woken)
        stuck = [order[n] for n, order in zip(at, self.orders, strict=True) if n < len(order)]
        if stuck:
            raise Hangs(f"the order would hang at {', '.join(map(str, stuck))}")
        for rank, waiting in enumerate(self.pending):
            while waiting:
                self.do_w(rank)
        starts = [start or 0.0 for start in self.started]
        spans = [end - start for end, start in zip(self.free, starts, strict=True)]
        rows = tuple(map(tuple, self.rows))
        return TimedOrder(rows, max(self.free) - min(starts), max(spans))

    def place(self, rank: int, action: Action) -> int | None:
        """Do ``action``. The rank that may go on for it (-1: none), or None: its input is not
        there yet."""
        stage, kind, k = action
        is_forward = kind is Kind.FORWARD
        ready = (self.forward_at if is_forward else self.gradient_at)[stage][k]
        if ready is None:
            return None
        if self.started[rank] is not None:
            self.fill_gap(rank, ready)
        if is_forward:
            self.make_room(rank, action)
        start = max(self.free[rank], ready)
        if self.started[rank] is None:
            self.started[rank] = start
        else:
            self.idle[rank] += start - self.free[rank]
        self.do(rank, action, start)
        if self.memory is not None:
            self.account(rank, action)
        if kind is Kind.BACKWARD_INPUT:
            self.pending[rank].append(Action(stage, Kind.BACKWARD_WEIGHT, k))
        return self.pass_on(rank, action)

    def fill_gap(self, rank: int, ready: float) -> None:
        waiting = self.pending[rank]
        start = self.started[rank] or 0.0
        may_idle = min(self.deadline - start, self.span) - self.work[rank]
        slack = _TOLERANCE * (1 + self.work[rank])
        while waiting and (gap := ready - self.free[rank]) > slack:
            stage, kind, k = waiting[0]
            fits = self.seconds[kind][stage][k % self.period] <= gap + slack
            if not fits and self.idle[rank] + gap <= may_idle + slack:
                return
            self.do_w(rank)

    def make_room(self, rank: int, action: Action) -> None:
        if self.memory is None:
            return
        more = self.share[action.stage] * self.tokens[action.microbatch % self.period]
        while not self.memory.fits(rank, self.held[rank] + more):
            if not self.pending[rank]:
                raise DoesNotFit(f"{action} exceeds the memory of rank {rank}")
            self.do_w(rank)

    def account(self, rank: int, action: Action) -> None:
        stage, kind, k = action
        tokens = self.tokens[k % self.period]
        match kind:
            case Kind.FORWARD:
                self.held[rank] += self.share[stage] * tokens
            case Kind.BACKWARD_INPUT:
                self.held[rank] -= (self.share[stage] - self.left_for_w[stage]) * tokens
            case Kind.FULL_BACKWARD:
                self.held[rank] -= self.share[stage] * tokens

    def do_w(self, rank: int) -> None:
        action = self.pending[rank].popleft()
        self.do(rank, action, self.free[rank])
        if self.memory is not None:
            tokens = self.tokens[action.microbatch % self.period]
            self.held[rank] -= self.left_for_w[action.stage] * tokens

    def do(self, rank: int, action: Action, start: float) -> None:
        self.rows[rank].append(action)
        stage, kind, k = action
        self.free[rank] = start + self.seconds[kind][stage][k % self.period]

    def pass_on(self, rank: int, action: Action) -> int:
        """Send what ``action`` made to the neighbouring stage; the rank of that, -1: no stage."""
        stage, kind, k = action
        is_forward = kind is Kind.FORWARD
        other = self.placement.next(stage) if is_forward else self.placement.previous(stage)
        if other is None:
            return -1
        to, at = self.placement.rank_of[other], self.free[rank]
        if to != rank:
            hop = self.hops[min(stage, other)][k % self.period]
            at = max(at, self.arrived.get((rank, to, kind), 0.0)) + hop
            self.arrived[rank, to, kind] = at
        (self.forward_at if is_forward else self.gradient_at)[other][k] = at
        return to


_COMPUTE: tuple[Kind, ...] = (
    Kind.FORWARD,
    Kind.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT,
    Kind.FULL_BACKWARD,
)
