"""Search for the V schedule of least makespan, or where steps overlap of least span: many plans,
the best of them improved.

A plan (`double_justify`) that repeats one microbatch's way down and up the V at a fixed period
becomes a good schedule once it is packed from both sides: warm-up, steady state, cool-down and the
places of W need no rules of their own. Which period, and how much a backward pass counts against a
forward pass in the plan's order, depends on costs and memory, so a grid of both is tried. The best
is then improved step by step: shift some passes in its own start times at random, pack again, keep
what is not worse (late acceptance, Burke and Bykov 2017: not worse than twenty steps ago will do,
which leads out of plateaus).

The effort is counted in passes packed, never in seconds, and the dice have a fixed seed: every rank
and every run finds the same schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.placement import Neighbour
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.progress import Task, task
from megatron_ext.schedule.search.double_justification import (
    F_INNER,
    F_OUTER,
    I_INNER,
    I_OUTER,
    LANES,
    W_INNER,
    W_OUTER,
    Shop,
    Starts,
    double_justify,
    lane_of,
)
from megatron_ext.schedule.timeline import Timeline

PASSES = 33_000  # packed in improving the best, about, times the square of the ranks
_LEAST_PASSES, _MOST_PASSES = 1_500_000, 10_000_000
_PERIODS = (0.35, 0.42, 0.5, 0.57, 0.65, 0.73, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0)
_WEIGHTS = (1.0, 0.55, 0.75, 1.35, 1.8)
_PROMISING = 8  # plans that are packed more than once
_ROUNDS = 5
_STEPS = 100  # at least
_MEMORY = 20  # steps
_RESULTS = 4


def shop_of(
    problem: Problem, amounts: dict[Held, tuple[float, ...]], limit: float
) -> tuple[Shop, float]:
    """``problem`` in units of a rank's work for one microbatch, and that work in seconds."""
    seconds, ranks = problem.costs.seconds, problem.ranks
    placement = problem.placement
    work = sum(sum(seconds[kind]) for kind in _KINDS) / ranks
    durations = [0.0] * (LANES * ranks)
    gain = [0.0] * (LANES * ranks)
    nexts: list[list[tuple[int, float]]] = [[] for _ in durations]
    waits_for = [1] * len(durations)
    waits_for[lane_of(0, Kind.FORWARD, ranks)] = 0

    for stage in range(placement.stages):
        forward, backward, weight = (lane_of(stage, kind, ranks) for kind in _KINDS)
        for kind in _KINDS:
            # A pass that costs nothing still has its place in the order.
            durations[lane_of(stage, kind, ranks)] = max(seconds[kind][stage] / work, 1e-6)
        activation, rest = amounts[Held.ACTIVATION][stage], amounts[Held.WEIGHT_INPUTS][stage]
        gain[forward], gain[backward], gain[weight] = activation, rest - activation, -rest
        nexts[backward].append((weight, 0.0))
        after = placement.next(stage)
        if after is None:
            nexts[forward].append((backward, 0.0))
            continue
        hop = problem.costs.hop / work if placement.is_remote(stage, Neighbour.NEXT) else 0.0
        nexts[forward].append((lane_of(after, Kind.FORWARD, ranks), hop))
        nexts[lane_of(after, Kind.BACKWARD_INPUT, ranks)].append((backward, hop))
    most = list(map(max, amounts[Held.ACTIVATION], amounts[Held.WEIGHT_INPUTS]))
    shop = Shop(
        problem.microbatches,
        tuple(durations),
        tuple(map(tuple, nexts)),
        tuple(waits_for),
        tuple(gain),
        limit,
        F_OUTER,
        F_INNER,
        tuple((most[ranks - 1 - rank], most[ranks + rank]) for rank in range(ranks)),
        heads=(0.0,) * ranks,
        tails=_tails(problem, work) if problem.extras.post_validation else (0.0,) * ranks,
    )
    return shop, work


def _tails(problem: Problem, work: float) -> tuple[float, ...]:
    """How much sooner than the last each rank can begin, and so has to end, for steps to overlap.

    The largest end with its tail is then the largest own time, but for a constant.
    """
    before = [0.0]  # each rank's first F, in the order of the stages
    for forward in problem.costs.seconds[Kind.FORWARD][: problem.ranks - 1]:
        before.append(before[-1] + (forward + problem.costs.hop) / work)
    return tuple(before[-1] - start for start in reversed(before))


_KINDS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def plan_of(timeline: Timeline, work: float) -> Starts:
    """The plan that a schedule amounts to; a whole backward is I, then W."""
    placement, starts = timeline.schedule.placement, {}
    for row in timeline.compute:
        for event in row:
            stage, kind, k = event.action
            if kind is Kind.FULL_BACKWARD:
                starts[stage, Kind.BACKWARD_INPUT, k] = event.start
                starts[stage, Kind.BACKWARD_WEIGHT, k] = (event.start + event.end) / 2
            else:
                starts[stage, kind, k] = event.start
    m = max(k for _, _, k in starts) + 1
    plan = [[0.0] * m for _ in range(LANES * placement.ranks)]
    for (stage, kind, k), start in starts.items():
        plan[lane_of(stage, kind, placement.ranks)][k] = start / work
    return plan


def _periodic_plans(shop: Shop) -> Iterator[Starts]:
    """One microbatch's way through the V, repeated."""
    for weight in _WEIGHTS:
        offset, time = [0.0] * len(shop.seconds), 0.0
        lane: int | None = shop.waits_for.index(0)
        while lane is not None:
            backward = lane % LANES in (I_INNER, I_OUTER)
            offset[lane] = time
            chain = None
            time += shop.seconds[lane] * (weight if backward else 1)
            for follower, after in shop.nexts[lane]:
                if follower % LANES in (W_INNER, W_OUTER):
                    offset[follower] = time
                else:
                    chain = follower
                    time += after * (weight if backward else 1)
            lane = chain
        for period in _PERIODS:
            yield [[start + k * period for k in range(shop.microbatches)] for start in offset]


def search(
    shop: Shop, known: Sequence[Starts], least: float = 0.0, passes: int | None = None
) -> list[Starts]:
    """The starts of the best schedules found, best first; none if memory got stuck in all of them.

    Several, because messages may cost one of them more than another, which is not looked at here.

    Args:
        known: plans of schedules that are known to be good.
        least: a makespan that none can be below; who has found it need not go on.
        passes: how many to pack in improving the best, about; by default so many that sixteen
            ranks and 64 microbatches take less than a minute.
    """
    if passes is None:
        passes = PASSES * len(shop.room) ** 2
        passes = min(max(passes, _LEAST_PASSES), _MOST_PASSES)
    steps = max(passes // (2 * len(shop.seconds) * shop.microbatches), _STEPS)
    plans = (*known, *_periodic_plans(shop))
    packings = len(plans) + _PROMISING * _ROUNDS + steps
    with task("packing plans", packings, alike=True) as work:
        best = _best_of(shop, plans, work)
        if best:
            best = _improved(shop, best, least, steps, work)
    return [starts for _, starts in best]


_Packed = tuple[float, Starts]  # a makespan, and the schedule that has it


def _best_of(shop: Shop, plans: Sequence[Starts], work: Task) -> list[_Packed]:
    """The best schedules that ``plans`` become, best first."""
    mirrored, schedules = shop.mirrored(), []
    for plan in plans:
        packed = double_justify(shop, mirrored, plan, rounds=1)
        work.done += 1
        if packed is not None:
            schedules.append(packed)
    again = []
    for packed in sorted(schedules, key=_makespan)[:_PROMISING]:
        again.append(double_justify(shop, mirrored, packed[1], _ROUNDS) or packed)
        work.done += _ROUNDS
    return sorted(again, key=_makespan)[:_RESULTS]


def _improved(
    shop: Shop, best: list[_Packed], least: float, steps: int, work: Task
) -> list[_Packed]:
    """``best`` and what shifting its passes ``steps`` times makes of it, best first."""
    mirrored, random = shop.mirrored(), Random(0)
    current, recent = best[0], [best[0][0]] * _MEMORY
    work.found = _found(shop, best, least)
    for step in range(steps):
        if best[0][0] <= least:
            break
        new = double_justify(shop, mirrored, _shifted(current, random), rounds=1)
        work.done += 1
        slot = step % _MEMORY
        if new is not None and new[0] <= max(current[0], recent[slot]):
            current = new
        recent[slot] = current[0]
        if current[0] < best[0][0]:
            best = [current, *best[: _RESULTS - 1]]
            work.found = _found(shop, best, least)
    return best


def _found(shop: Shop, best: list[_Packed], least: float) -> str:
    """How far the best is from ``least``, in words."""
    if not least:
        return ""
    own = least - max(shop.tails)
    return f"the best is {max(best[0][0] - least, 0.0) / own:.1%} above the bound"


def _makespan(packed: _Packed) -> float:
    return packed[0]


def _shifted(packed: _Packed, random: Random) -> Starts:
    """Start times with some of them moved: all passes of a time or of a microbatch, or a run of
    microbatches on one lane or on one lane of every rank."""
    makespan, starts = packed
    plan = [list(row) for row in starts]
    m, lanes = len(plan[0]), len(plan)
    far = random.choice((0.1, 0.2, 0.4, 0.8))
    draw = random.random()
    if draw < 0.35:
        opens = random.uniform(-0.1, 1) * makespan
        closes = opens + random.choice((0.1, 0.2, 0.4)) * makespan
        for row in plan:
            for k, start in enumerate(row):
                if opens < start < closes:
                    row[k] += random.uniform(-far, far)
    elif draw < 0.8:
        moved_lanes = (
            [random.randrange(lanes) for _ in range(random.choice((1, 2, 4)))]
            if draw < 0.6
            else range(random.randrange(LANES), lanes, LANES)
        )
        first, length = random.randrange(m), random.choice((1, 2, 4, 8, m))
        shift = random.uniform(-2 * far, 2 * far)
        for lane in moved_lanes:
            for k in range(first, min(first + length, m)):
                plan[lane][k] += shift
    else:
        k, shift = random.randrange(m), random.uniform(-2 * far, 2 * far)
        for row in plan:
            row[k] += shift
    return plan
