"""Overlap of passes: a forward pass and a backward pass of a rank run as one, side by side.

This is DualPipe's compound (DeepSeek-AI 2024, arXiv:2412.19437), and Megatron's
--overlap-moe-expert-parallel-comm: while one of the two waits for an all-to-all, the other computes
(`OverlapCosts`). A forward and a backward pass that a rank runs one after the other, with nothing
but W between them, can overlap if neither needs the other. The price is that the output of F is
sent only after the backward pass has ended too. Which passes overlap is decided by playing the
schedule through in time (`overlap_passes`).
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import NamedTuple

from megatron_ext.compile.program.memory import Amount, in_microbatches, limited_amount, peaks
from megatron_ext.compile.program.simulate import simulate_unproved
from megatron_ext.schedule.action import Action, Kind, OverlappedPasses, Row
from megatron_ext.schedule.costs import Costs, OverlapCosts
from megatron_ext.schedule.kinds import RULES
from megatron_ext.schedule.limit import fits
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule

_F, _I, _W, _B = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT, Kind.FULL_BACKWARD
# Share of the shorter of two overlapped passes that the overlap saves, if the costs do not give it.
_ASSUMED = 0.25
_TOLERANCE = 1e-9  # relative rounding error of a sum of costs
_TOLD_BY = 4  # least number of microbatches per rank with which a step has all its phases


class _Policy(NamedTuple):
    """Rules by which a play through a schedule decides which passes overlap.

    Attributes:
        patience: longest wait for the second of two passes, as a multiple of the time that
            overlapping the two saves.
        moves_w: whether W (weight gradients) move to where their rank has time; otherwise they stay
            about where they were.
        full_backward: whether the backward pass of two overlapped passes is B (I and W together).
    """

    patience: float
    moves_w: bool
    full_backward: bool


def overlap_passes(schedule: Schedule, problem: Problem) -> Schedule:
    """Return ``schedule``, which has passes only, with some forward and backward passes overlapped.

    A schedule that has overlapped passes already is returned unchanged. The passes are played
    through in the order of time, on each rank in the rank's own order. If the next two passes of a
    rank could overlap, the rank waits for the second for a limited time; then the first runs alone.
    The result can run, since no pass has waited for a later one. Several waiting times and places
    of W are tried, each with W inside the overlapped passes (B instead of I and W) and without. The
    fastest result is used.

    Raises:
        ValueError: no F can run as one with a backward pass.
    """
    if schedule.pairs:
        return schedule
    problem = replace(problem, costs=_with_assumed(problem.costs))
    policy = _best_policy(*_first_of(schedule, problem))
    paired = None if policy is None else _Playing(schedule, problem, policy).run()
    if paired is None or not paired.pairs:
        raise ValueError(
            f"schedule {schedule.name} has no forward pass that could overlap a backward pass, "
            f"with {problem.microbatches} microbatches on {problem.ranks} ranks; take another "
            "schedule or more microbatches, or drop --overlap-moe-expert-parallel-comm"
        )
    return paired


def _best_policy(schedule: Schedule, problem: Problem) -> _Policy | None:
    """Return the rules of overlapping whose schedule takes the least time.

    None if no rules overlap any passes.
    """
    splits = any(action.kind is _W for row in schedule.rows for action in row)
    choices = (False, True) if splits else (False,)
    policies = map(_Policy._make, product((0.0, 1.0, math.inf), choices, choices))
    played = [(_Playing(schedule, problem, policy).run(), policy) for policy in policies]
    makespans = {
        policy: simulate_unproved(paired, problem).makespan
        for paired, policy in played
        if paired.pairs
    }
    return min(makespans, key=makespans.__getitem__, default=None)


def _first_of(schedule: Schedule, problem: Problem) -> tuple[Schedule, Problem]:
    """Return a step of fewer microbatches, enough to find the best rules of overlapping."""
    count = _TOLD_BY * problem.ranks
    if problem.microbatches <= 2 * count:
        return schedule, problem
    rows = tuple(tuple(a for a in row if a.microbatch < count) for row in schedule.rows)
    return replace(schedule, rows=rows), replace(problem, microbatches=count)


def _with_assumed(costs: Costs) -> Costs:
    """Return ``costs`` with an assumed saving of overlapped passes if they give none.

    The search needs a gain, even if its size is unknown.
    """
    if costs.overlap.savings:
        return costs
    forwards, backwards = costs.seconds[_F], costs.seconds[_I]
    return replace(
        costs,
        overlap=OverlapCosts(
            {_I: tuple(tuple(_ASSUMED * min(f, i) for i in backwards) for f in forwards)}
        ),
    )


@dataclass
class _Rank:
    """State of one rank while the passes of a schedule are played through in time.

    Attributes:
        order: the rank's passes without W.
        due: for each W, the number of passes of ``order`` before it, and its own position among W.
        allowed: the memory that the rank may hold.
        row: the actions that the rank has done.
        done: the number of passes of ``order`` that the rank has done.
        free: the time since which the rank is free.
        held: the memory that the rank holds.
        pending: W whose I is done, ordered by ``due``.
    """

    order: Row
    due: dict[Action, tuple[float, int]]
    allowed: float
    row: list[Action] = field(default_factory=list)
    done: int = 0
    free: float = 0.0
    held: float = 0.0
    pending: list[Action] = field(default_factory=list)

    @property
    def next_two(self) -> Row:
        """The rank's next two passes, F first, if they could overlap; otherwise the next pass
        alone."""
        first, *others = self.order[self.done : self.done + 2]
        if not others or (first.kind is _F) is (others[0].kind is _F):
            return (first,)
        forward, backward = (first, others[0]) if first.kind is _F else (others[0], first)
        is_dependent = (forward.stage, forward.microbatch) == (backward.stage, backward.microbatch)
        return (first,) if is_dependent else (forward, backward)


class _Playing:
    """One simulated run through a schedule's passes, which decides which of them overlap."""

    def __init__(self, schedule: Schedule, problem: Problem, policy: _Policy) -> None:
        self.schedule, self.placement, self.policy = schedule, problem.placement, policy
        self.costs = costs = problem.costs
        self.slack = _TOLERANCE * problem.microbatches * sum(map(sum, costs.seconds.values()))
        self.seconds = cache(lambda stage, kind: costs.of(Action(stage, kind, 0)))
        self.saved = cache(
            lambda stage, other, kind: costs.overlap_saving(
                Action(stage, _F, 0), Action(other, kind, 0)
            )
        )
        amount, allowed = _allowed_memory(schedule, problem, policy)
        # Memory that a pass of a stage and kind allocates, and memory that it frees.
        self.held_by = cache(
            lambda stage, kind: (
                sum(amount(held, stage) for held in RULES[kind].acquires),
                sum(amount(held, stage) for held in RULES[kind].releases),
            )
        )
        self.ranks = [
            _Rank(*_order_of(row, policy), most)
            for row, most in zip(schedule.rows, allowed, strict=True)
        ]
        self.pairs: set[OverlappedPasses] = set()
        # Times when the inputs of passes have arrived from other stages, by pass. A full backward
        # pass (B) is listed as I, too.
        self.there = {Action(0, _F, k): 0.0 for k in problem.forwards}
        self.there |= {Action(self.placement.last, _I, k): 0.0 for k in problem.forwards}
        self.turns: list[tuple[float, int]] = []

    def run(self) -> Schedule:
        """Return the schedule with overlapped passes; unchanged if the schedule would deadlock
        anyway."""
        for number in range(len(self.ranks)):
            self.offer(number)
        while any(rank.done < len(rank.order) for rank in self.ranks):
            if not self.turns:
                alone = self.first_that_waits()
                if alone is None:
                    return self.schedule
                self.play(*alone)
                continue
            at, number = heapq.heappop(self.turns)
            start, passes = self.turn_of(number)
            # A queue entry with another start is outdated: the rank's turn was queued anew at that
            # other time.
            if start == at:
                self.play(number, start, passes)
        for rank in self.ranks:
            while rank.pending:
                self.do_w(rank)
        rows = tuple(tuple(rank.row) for rank in self.ranks)
        return replace(self.schedule, rows=rows, pairs=frozenset(self.pairs))

    def offer(self, number: int) -> None:
        start, _ = self.turn_of(number)
        if start < math.inf:
            heapq.heappush(self.turns, (start, number))

    def first_that_waits(self) -> tuple[int, float, Row] | None:
        """Return the rank, start and pass to run alone if every rank waits for a second pass.

        A rank may wait for the second of two passes to overlap them. The rank whose next pass can
        start first goes on. Return None if none can start.
        """
        starts = [
            (self.start_of(rank, rank.order[rank.done]), number)
            for number, rank in enumerate(self.ranks)
            if rank.done < len(rank.order)
        ]
        start, number = min(starts)
        rank = self.ranks[number]
        return None if start == math.inf else (number, start, (rank.order[rank.done],))

    def turn_of(self, number: int) -> tuple[float, Row]:
        """Return when rank ``number`` can start its next pass, and that pass or the overlapped two.

        The time is inf if it is not known yet.
        """
        rank = self.ranks[number]
        if rank.done == len(rank.order):
            return math.inf, ()
        alone, two = (rank.order[rank.done],), rank.next_two
        start = self.start_of(rank, *alone)
        if len(two) == 1 or start == math.inf:
            return start, alone
        forward, backward = two
        backward = self.as_overlapped(rank, backward)
        saved = self.saved(forward.stage, backward.stage, backward.kind)
        if not saved or not self.has_memory_for(rank, forward):
            return start, alone
        both = max(self.start_of(rank, action) for action in two)
        if (
            self.policy.patience < math.inf
            and both > start + self.policy.patience * saved + self.slack
        ):
            return start, alone
        return both, (forward, backward)

    def as_overlapped(self, rank: _Rank, backward: Action) -> Action:
        if self.policy.full_backward and _as(_W, backward) in rank.due:
            return _as(_B, backward)
        return backward

    def start_of(self, rank: _Rank, action: Action) -> float:
        """Return the earliest start of ``action`` on its rank; inf if it is not known yet."""
        key = _as(_I, action) if action.kind is _B else action
        return max(rank.free, self.there.get(key, math.inf))

    def play(self, number: int, start: float, passes: Row) -> None:
        """Run the next one or two (overlapped) ``passes`` of a rank, with W before and after."""
        rank = self.ranks[number]
        while rank.pending and self.is_time_for_w(rank, start, passes):
            self.do_w(rank)
        seconds = sum(self.seconds(action.stage, action.kind) for action in passes)
        if len(passes) == 2:
            forward, backward = passes
            self.pairs.add(OverlappedPasses(forward, backward))
            seconds -= self.saved(forward.stage, backward.stage, backward.kind)
        rank.free = end = max(start, rank.free) + seconds
        rank.done += len(passes)
        for action in passes:
            rank.row.append(action)
            rank.held += self.more_held(action)
            if action.kind is _I and (w := _as(_W, action)) in rank.due:
                insort(rank.pending, w, key=rank.due.__getitem__)
        while rank.pending and rank.due[rank.pending[0]][0] <= rank.done:
            self.do_w(rank)
        for other in {number, *(self.pass_on(number, action, end) for action in passes)}:
            self.offer(other)

    def is_time_for_w(self, rank: _Rank, start: float, passes: Row) -> bool:
        """Return whether a rank's next W comes before its next ``passes``.

        W comes first if there is time for it, if memory does not suffice otherwise, or if one of
        the passes is a B, which would overtake a deferred W of its stage.
        """
        w = rank.pending[0]
        if rank.free + self.seconds(w.stage, _W) <= start + self.slack:
            return True
        stages = {action.stage for action in passes if action.kind is _B}
        if any(later.stage in stages for later in rank.pending):
            return True
        if rank.allowed == math.inf:
            return False
        more = sum(self.taken(action) for action in passes if action.kind is _F)
        return more > 0 and not fits(rank.held + more, rank.allowed)

    def do_w(self, rank: _Rank) -> None:
        w = rank.pending.pop(0)
        rank.row.append(w)
        rank.free += self.seconds(w.stage, _W)
        rank.held += self.more_held(w)

    def pass_on(self, number: int, action: Action, end: float) -> int:
        """Pass the output of ``action`` to the neighbouring stage, and return that stage's rank.

        If there is no such stage, return the action's own rank.
        """
        stage, kind, k = action
        is_forward = kind is _F
        other = self.placement.next(stage) if is_forward else self.placement.previous(stage)
        if other is None:
            return number
        to = self.placement.rank_of[other]
        send = Kind.SEND_F if is_forward else Kind.SEND_B
        p2p_seconds = self.seconds(stage, send) if to != number else 0.0
        self.there[Action(other, _F if is_forward else _I, k)] = end + p2p_seconds
        return to

    def has_memory_for(self, rank: _Rank, forward: Action) -> bool:
        """Return whether a rank has memory for the pass ``forward`` once its deferred W are
        done."""
        if rank.allowed == math.inf:
            return True
        back = sum(map(self.given_back, rank.pending))
        return fits(rank.held - back + self.taken(forward), rank.allowed)

    def taken(self, action: Action) -> float:
        return self.held_by(action.stage, action.kind)[0]

    def given_back(self, action: Action) -> float:
        return self.held_by(action.stage, action.kind)[1]

    def more_held(self, action: Action) -> float:
        taken, given_back = self.held_by(action.stage, action.kind)
        return taken - given_back


def _as(kind: Kind, action: Action) -> Action:
    """Return the pass of another ``kind`` for the stage and microbatch of ``action``."""
    return Action(action.stage, kind, action.microbatch)


def _order_of(row: Row, policy: _Policy) -> tuple[Row, dict[Action, tuple[float, int]]]:
    """Return the passes of a rank's ``row`` without W, and the position at which each W is due."""
    order: list[Action] = []
    due: dict[Action, tuple[float, int]] = {}
    for action in row:
        if action.kind is _W:
            due[action] = math.inf if policy.moves_w else len(order), len(due)
        else:
            order.append(action)
    return tuple(order), due


def _allowed_memory(
    schedule: Schedule, problem: Problem, policy: _Policy
) -> tuple[Amount, list[float]]:
    """Return the unit of memory, and how much of it each rank may hold while passes are overlapped.

    Without a limit, deferred W may hold as much as the schedule's peak, and a chunk more for the
    second of two overlapped passes.
    """
    if problem.memory_limit is not None:
        amount, allowed = limited_amount(problem.memory_limit, schedule, problem.costs)
        return amount, [allowed] * problem.ranks
    amount, most = in_microbatches(schedule), math.inf
    if policy.moves_w:
        most = max(peaks(schedule, amount)) + 1 / problem.placement.chunks
    return amount, [most] * problem.ranks
