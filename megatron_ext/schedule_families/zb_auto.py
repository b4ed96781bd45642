"""Families with one stage a rank and F, I and W placed by their costs (Qi et al. 2024,
arXiv:2401.10241, section 3).

Several numbers of microbatches by which a rank is ahead of the next rank are tried. Each trial
gives an order of F and I, which `fill_best` completes. The published schedules compete too.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from megatron_ext.compile.build import complete
from megatron_ext.compile.program.memory import peaks
from megatron_ext.compile.program.simulate import step_seconds
from megatron_ext.compile.registry import Maturity, entries, family
from megatron_ext.schedule.action import Action, Kind, token_share
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.search.improve import first_plans
from megatron_ext.search.job_shop import job_shop_of, rows_of, starts_of
from megatron_ext.search.weight_gradient_filling import (
    Memory,
    TimedOrder,
    fill_best,
    makespan,
    memory_of,
)
from megatron_ext.search.weight_gradient_filling import time as time_rows

_SOURCE = "Qi et al. 2024, arXiv:2401.10241, section 3"
# Leads to try: the number of microbatches by which a rank is ahead of the next rank.
_LEADS = (1, 2, 1.75, 1.5, 2.25, 1.25)
# Largest number of actions that all trials together place, which alone limits the number of trials.
_ACTIONS = 100_000


def line_at_once(problem: Problem) -> Schedule:
    """Return a good schedule with one stage a rank without a search, within `zb_auto`'s limit.

    It is the best of one trial and of the published schedules.

    Raises:
        ValueError: as `zb_auto`.
    """
    memory = memory_of(problem, math.inf if problem.memory_limit else 2 * problem.held_by_1f1b)
    return _best("zb-auto", problem, memory, _published(problem), by_span=False, trials=1)


@family(
    "zb-auto",
    line,
    source=_SOURCE,
    maturity=Maturity.STABLE,
    splits_backward=True,
    uses_costs=True,
    steps_overlap=True,
    takes_slices=True,
    at_once=line_at_once,
)
def zb_auto(problem: Problem) -> Schedule:
    """Zero-bubble schedule, one stage a rank: the least makespan found within the memory limit.

    Without a limit, memory is limited to 2p microbatches on p ranks, twice 1F1B's peak. With
    post-validation, it is the least makespan or the least span, whichever gives the shorter step.
    It never takes longer than any other schedule of this placement within the limit.

    With p = 3, m = 5:

    ::

        0  F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .  .
        1  .  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 .
        2  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4
    """
    memory = memory_of(problem, math.inf if problem.memory_limit else 2 * problem.held_by_1f1b)
    others = [name for name in _on_a_line(problem) if name != "zb-auto"]
    least_makespan = _best("zb-auto", problem, memory, others, by_span=False)
    if problem.slices.count > 1:
        return _packed(least_makespan, problem, memory)
    if not problem.options.steps_overlap:
        return least_makespan
    least_span = _best("zb-auto", problem, memory, others, by_span=True)
    return min(least_span, least_makespan, key=lambda schedule: _step(schedule, problem))


def _packed(best: Schedule, problem: Problem, memory: Memory) -> Schedule:
    """Return the shortest of ``best``, its packing, and the packings of the published schedules.

    The trials vary only how far ranks run ahead, which is far from optimal if slices have little
    memory.
    """
    limit = problem.memory_limit or MemoryLimit(microbatches=2 * problem.held_by_1f1b)
    unlimited, shop = (
        replace(problem, memory_limit=None),
        job_shop_of(replace(problem, memory_limit=limit)),
    )
    if not shop.fits:
        return best
    known = [best.rows, *(entries()[name].build(unlimited).rows for name in _published(problem))]
    for packed in first_plans(shop, [starts_of(rows, shop) for rows in known]):
        rows = rows_of(packed.starts, problem.placement, orders=problem.orders)
        made = replace(best, rows=rows)
        held = enumerate(peaks(made, memory.amount))
        is_within = all(memory.fits(rank, peak) for rank, peak in held)
        if is_within and makespan(made, problem) < makespan(best, problem):
            best = made
    return best


def _step(schedule: Schedule, problem: Problem) -> float:
    """Return the seconds of a training step under ``schedule``."""
    return step_seconds(complete(schedule, problem), problem.costs)


@family(
    "zb-1p",
    line,
    source=_SOURCE,
    maturity=Maturity.STABLE,
    splits_backward=True,
    uses_costs=True,
    takes_slices=True,
)
def zb_1p(problem: Problem) -> Schedule:
    """ZB-1p: as `zb_auto`, within p microbatches (1F1B's peak, also with slices); least span.

    With p = 3, m = 4:

    ::

        0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    """
    memory = memory_of(problem, problem.held_by_1f1b)
    return _best("zb-1p", problem, memory, _published(problem), by_span=True)


@family(
    "zb-2p",
    line,
    source=_SOURCE,
    maturity=Maturity.STABLE,
    splits_backward=True,
    uses_costs=True,
    steps_overlap=True,
    takes_slices=True,
)
def zb_2p(problem: Problem, *, paper_count: bool = False) -> Schedule:
    """ZB-2p: as `zb_auto`, within 2p microbatches on p ranks, for the least span.

    At nearly equal costs the bubble is near 0. The paper assumes that I frees about half of a
    microbatch's memory, and therefore allows an extra forward. ``zb-2p:paper_count=true`` counts in
    this way if the user gives no limit. The peak from F to W, as it is measured elsewhere, then
    exceeds 2p, up to the number of microbatches.

    With p = 3, m = 6:

    ::

        0  F0 F1 F2 F3 F4 I0 F5 I1 W0 I2 W1 I3 W2 I4 W3 I5 W4 W5 .  .
        1  .  F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 W0 I4 W1 I5 W2 W3 W4 W5 .
        2  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 W0 W1 W2 W3 W4 W5
    """
    limit = 2 * problem.held_by_1f1b
    if paper_count and problem.memory_limit is None:
        memory = Memory(_after_paper, (limit + 1.0,) * problem.ranks)
    else:
        memory = memory_of(problem, limit)
    return _best("zb-2p", problem, memory, _published(problem), by_span=True)


def _after_paper(held: Held, stage: int) -> float:
    return {Held.ACTIVATION: 1.0, Held.WEIGHT_INPUTS: 0.5}.get(held, 0.0)


def _on_a_line(problem: Problem) -> list[str]:
    is_cut = problem.slices.count > 1
    return [
        name
        for name, entry in entries().items()
        if entry.place is line and (entry.traits.takes_slices or not is_cut)
    ]


def _published(problem: Problem) -> list[str]:
    return [name for name in _on_a_line(problem) if not entries()[name].traits.uses_costs]


def _best(
    name: str,
    problem: Problem,
    memory: Memory,
    others: Sequence[str],
    *,
    by_span: bool,
    trials: int | None = None,
) -> Schedule:
    """Return the best schedule of a search's ``trials`` and of the families ``others`` that fit.

    All trials are made if ``trials`` is None.
    """
    need = [memory.of(stage) for stage in range(problem.ranks)]
    limit = problem.memory_limit
    for rank in range(problem.ranks):
        if limit is not None and not memory.fits(rank, need[rank]):
            raise ValueError(
                f"{name}: the memory limit is {limit}, less than the one microbatch that rank "
                f"{rank} must hold; the least feasible limit is {limit.at_least(max(need))}"
            )

    def schedule(filled: TimedOrder) -> Schedule:
        return Schedule(name, problem.placement, filled.rows)

    def seconds(filled: TimedOrder) -> tuple[float, float]:
        return filled.order(True) if by_span else (makespan(schedule(filled), problem), filled.span)

    # A family that ignores costs gets no memory limit; its peaks are compared with the limit below.
    unlimited = replace(problem, memory_limit=None)
    tried = itertools.islice(_trials(problem, memory, by_span), trials)
    best = min(tried, key=lambda filled: filled.order(by_span))
    figures = seconds(best)
    for other in others:
        entry = entries()[other]
        rows = entry.build(problem if entry.traits.uses_costs else unlimited).rows
        held = peaks(Schedule(other, problem.placement, rows), memory.amount)
        if all(memory.fits(rank, peak) for rank, peak in enumerate(held)):
            # `time_rows` gives times that are no longer than those of `makespan`, and is faster.
            filled = time_rows(rows, problem)
            if filled.order(by_span) < figures and seconds(filled) < figures:
                best, figures = filled, seconds(filled)
    return schedule(best)


def _trials(problem: Problem, memory: Memory, by_span: bool) -> Iterator[TimedOrder]:
    p, m, slices = problem.ranks, problem.pieces, problem.slices.count
    affordable = max(_ACTIONS // (3 * p * m), 2)
    seconds = problem.costs.seconds
    forward, gradient = max(seconds[Kind.FORWARD]), max(seconds[Kind.BACKWARD_INPUT])
    # A slice's message takes the latency and a share of the other seconds. The mean over all links
    # is enough here, since it only decides which leads are tried; each trial is timed with the
    # seconds of each link.
    p2p_seconds = slices * problem.costs.p2p_seconds_of(problem.forwards[0])
    # The first trials run as many forward passes as fit in before the first gradient comes back;
    # the following trials use the leads of the paper.
    there_and_back = (forward + gradient + 2 * p2p_seconds) / forward if forward else m
    trials = max(affordable // (2 * len(_LEADS)), 2)
    tried: set[tuple[int, ...]] = set()
    for extra in (0, 1):
        for lead in (there_and_back, *_LEADS):
            ahead = tuple(min(m, math.ceil(slices + extra + lead * (p - 1 - r))) for r in range(p))
            if ahead not in tried and len(tried) * trials < affordable:
                tried.add(ahead)
                order = _GreedyOrder(problem, memory, ahead).rows()
                yield fill_best(order, problem, memory, trials=min(trials, 16), by_span=by_span)


class _GreedyOrder:
    """F and I of each rank in the order in which they become possible, I before F.

    Rank r has at most ``ahead[r]`` microbatches, or slices, between F and I. W are done if the
    memory limit requires it, or if nothing else comes before they end. W take time, but are not in
    the result.
    """

    def __init__(self, problem: Problem, memory: Memory, ahead: Sequence[int]) -> None:
        self._placement, self._pieces = problem.placement, problem.pieces
        self._memory, self._ahead, self._slices = memory, ahead, problem.slices.count
        p, m, parts, of = problem.ranks, problem.pieces, problem.parts(0), problem.costs.of
        self._forwards, self._backwards = problem.forwards, problem.backwards
        kinds = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        # Seconds of passes by kind, rank and slice; seconds of messages by sending rank and slice;
        # and, for each number of pieces, the number of microbatches that they make up.
        self._seconds = {
            kind: [[of(Action(rank, kind, part)) for part in parts] for rank in range(p)]
            for kind in kinds
        }
        self._p2p_seconds = [
            [of(Action(rank, Kind.SEND_F, part)) for part in parts] for rank in range(p - 1)
        ]
        self._there, self._back = (
            list(accumulate(map(token_share, order), initial=0.0))
            for order in (self._forwards, self._backwards)
        )
        self._done = {kind: [0] * p for kind in kinds}
        self._forward_at = [[math.inf] * m for _ in range(p)]
        self._forward_at[0] = [0.0] * m
        self._gradient_at = [[math.inf] * m for _ in range(p)]
        self._left = [memory.amount(Held.WEIGHT_INPUTS, rank) for rank in range(p)]
        self._full = [memory.of(rank) for rank in range(p)]
        # Heap of the times at which a rank may have something to do.
        self._events = [(0.0, rank) for rank in range(p)]

    def rows(self) -> list[list[Action]]:
        rows: list[list[Action]] = [[] for _ in self._full]
        free = [0.0 for _ in self._full]
        while self._events:
            now, rank = heapq.heappop(self._events)
            if now < free[rank]:
                continue
            kind = self._next(rank, now)
            if kind is None:
                continue
            order = self._forwards if kind is Kind.FORWARD else self._backwards
            k = order[self._done[kind][rank]]
            self._done[kind][rank] += 1
            free[rank] = end = now + self._seconds[kind][rank][k % self._slices]
            heapq.heappush(self._events, (end, rank))
            if kind is not Kind.BACKWARD_WEIGHT:
                rows[rank].append(Action(rank, kind, k))
                self._send(rank, kind, k, end)
        return rows

    def _next(self, rank: int, now: float) -> Kind | None:
        """Return the kind of pass (F, I or W) that ``rank`` runs next; None if it waits."""
        f, i, w = (done[rank] for done in self._done.values())
        m, full = self._pieces, self._full[rank]
        there, back = self._there, self._back
        may_start = f < m and f - i < self._ahead[rank]
        fits_another = may_start and self._memory.fits(
            rank, (there[f + 1] - back[i]) * full + (back[i] - back[w]) * self._left[rank]
        )
        # Pieces (microbatches or their slices) run forward in their order.
        forward = self._forward_at[rank][f] if may_start else math.inf
        gradient = self._gradient_at[rank][self._backwards[i]] if i < m else math.inf
        coming = min(gradient, forward if fits_another else math.inf)
        # The rank runs I as soon as its gradient has come, otherwise F if the memory allows one
        # more.
        if gradient <= now:
            return Kind.BACKWARD_INPUT
        if forward <= now and fits_another:
            return Kind.FORWARD
        # The rank runs W if the memory is full, or if the gap before its next F or I is long
        # enough.
        if w < i:
            k = self._backwards[w]
            seconds = self._seconds[Kind.BACKWARD_WEIGHT][rank][k % self._slices]
            if forward <= now or coming - now >= seconds:
                return Kind.BACKWARD_WEIGHT
        if now < coming < math.inf:
            heapq.heappush(self._events, (coming, rank))
        return None

    def _send(self, rank: int, kind: Kind, k: int, end: float) -> None:
        """Deliver the output of a pass that ends at ``end`` to the rank that needs it."""
        is_forward = kind is Kind.FORWARD
        to = self._placement.next(rank) if is_forward else self._placement.previous(rank)
        if to is not None:
            arrival = end + self._p2p_seconds[min(rank, to)][k % self._slices]
            (self._forward_at if is_forward else self._gradient_at)[to][k] = arrival
            heapq.heappush(self._events, (arrival, to))
        elif is_forward:
            self._gradient_at[rank][k] = end
