"""Search for the schedule of least makespan, or of least span if steps overlap, on any placement:
many plans are packed, and the best ones improved.

A plan that repeats one microbatch's way through all stages and back at a fixed period becomes a
good schedule once it is packed from both sides: warm-up, steady state, cool-down and the places of
W need no rules. The best period, and the weight of a backward pass relative to a forward pass in
the plan's order, depend on costs and memory, so a grid of both is tried. On a V, plans that already
are a steady state (`pattern_plans`) come first. The best plans are then improved step by step:
random passes are shifted in the start times, everything is repacked, and the result is accepted if
it is not worse than twenty steps ago, which leads out of plateaus (late acceptance, Burke and Bykov
2017).

Packing from both sides: a schedule read from its end is a schedule of the mirrored problem, in
which dependencies are reversed, W takes memory and F frees it. Packing the mirrored schedule pushes
every pass to the right, packing the result pushes it back to the left. Neither step makes the
schedule longer, and idle time moves to the ends (double justification, Valls et al. 2005).

The effort is counted in passes packed, never in seconds, times are whole numbers, and the random
generator has a fixed seed: every machine with the same effort finds the same schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ext.progress import Task, task
from megatron_ext.schedule.action import Kind
from megatron_ext.search import pack
from megatron_ext.search.effort import Effort, effort
from megatron_ext.search.job_shop import F, I, R, Shop, Starts, W
from megatron_ext.search.pack import Pack, Packed
from megatron_ext.search.v_patterns import pattern_plans

_PERIODS = (35, 42, 50, 57, 65, 73, 80, 90, 100, 120, 150, 200)  # % of a rank's work
_WEIGHTS = (100, 55, 75, 135, 180)  # %
_OF_GRID = 15_000_000  # most passes packed for periods and weights
_PROMISING = 8  # plans that are packed more than once
_ROUNDS = 5
_STEPS = 100  # at least
_MEMORY = 20  # steps
_RESULTS = 4
_AT_ONCE = 100_000  # about the passes packed without a search
_FEWEST = 4  # plans
_SLACK = 8  # 1 / _SLACK of a microbatch's work: apparent idle time of busy ranks in the middle


@dataclass(frozen=True)
class Packers:
    """Packers of a problem to the left (as early as possible) and to the right (as late as
    possible)."""

    shop: Shop
    left: Pack
    right: Pack  # for the mirrored problem

    def justified(self, plan: Starts, rounds: int = 1) -> Packed:
        """Return ``plan`` packed to the left and then to the right (double justification), at most
        ``rounds`` times, until that gains nothing."""
        best = self._justified_once(plan)
        for _ in range(rounds - 1):
            packed = self._justified_once(best.starts)
            if packed.makespan >= best.makespan:
                break
            best = packed
        return best

    def _justified_once(self, plan: Starts) -> Packed:
        there = self.left(plan)
        durations = self.shop.durations_of_all
        back = self.right(_mirrored(there, durations))
        if back.makespan > there.makespan:
            return there
        return Packed(back.makespan, _mirrored(back, durations[:, ::-1]))


def _mirrored(packed: Packed, durations: Starts) -> Starts:
    """Return the starts of ``packed``, read from the end."""
    return np.ascontiguousarray((packed.makespan - packed.starts - durations)[:, ::-1])


def packers_of(shop: Shop, packer: Callable[[Shop], Pack]) -> Packers:
    return Packers(shop, packer(shop), packer(shop.mirrored()))


def search(
    shop: Shop,
    known: Sequence[Starts] = (),
    least: int = 0,
    how: Effort | None = None,
    of_shorter: Callable[[], Iterable[Starts]] | None = None,
) -> list[Packed]:
    """Return the best schedules found, best first.

    Several are returned, because messages, which are ignored here, may cost one of them more than
    another.

    Args:
        shop: a packing problem whose limit suffices for a microbatch (`Shop.fits`).
        known: plans to begin with, from schedules that are known to be good.
        least: a lower bound of the makespan, with tails; the search ends if it is reached.
        how: the effort; by default the largest of this machine (`effort`).
        of_shorter: makes plans from a shorter step, if this one is long. It is called only if ranks
            idle in the middle of the best of all other plans; otherwise there is little to gain.
    """
    how = how or effort()
    packers = packers_of(shop, how.packer)
    passes = 2 * shop.lanes * shop.pieces
    steps = steps_of(how, shop.placement.ranks, passes)
    grid = list(periodic_plans(shop, _WEIGHTS, _PERIODS))
    grid = grid[:: 1 + passes * len(grid) // _OF_GRID]
    plans = (*known, *pattern_plans(shop), *grid)
    packings = len(plans) + _PROMISING * _ROUNDS + steps
    with task(f"packing plans, {how.name} effort", packings, equal_steps=True) as work:
        packed = _packed(packers, plans, work)
        if of_shorter is not None and not _is_busy(min(packed, key=_makespan), shop):
            packed = [*_packed(packers, of_shorter(), work), *packed]
        best = _promising(packers, packed, work)
        patience = patience_of(how, shop.placement.ranks, passes)
        return _improved(packers, best, least, steps, patience, work)


def steps_of(how: Effort, ranks: int, passes: int) -> int:
    """Return how often a plan is improved if each step packs ``passes`` passes."""
    return max(min(how.passes(ranks) // passes, how.steps), _STEPS)


def patience_of(how: Effort, ranks: int, passes: int) -> int:
    """Return the number of steps without a gain after which a search ends, if each step packs
    ``passes`` passes."""
    return max(how.passes_without_gain(ranks) // passes, _MEMORY)


def first_plans(shop: Shop, known: Sequence[Starts] = ()) -> list[Packed]:
    """Return the schedules made by packing the ``known`` plans and a few more, in no order."""
    packers = packers_of(shop, pack.packer)
    affordable = max(_AT_ONCE // (2 * shop.lanes * shop.pieces), _FEWEST)
    plans = (*known, *periodic_plans(shop, (75, 100), (80, 100, 65, 50)))
    return [packers.justified(plan) for plan in plans[:affordable]]


def periodic_plans(shop: Shop, weights: Sequence[int], periods: Sequence[int]) -> Iterator[Starts]:
    """Yield plans that repeat one microbatch's way through all stages and back. With slices, a
    slice's way is repeated, and its way back is delayed by the slices behind it in the microbatch.

    Args:
        weights: weights of backward passes relative to forward passes, in %.
        periods: periods in % of a rank's work for a microbatch, or a slice.
    """
    turns = shop.turns
    for weight in weights:
        way = np.array(_first_starts(shop, weight))[:, None]
        for period in periods:
            yield way + turns * (period * shop.work // 100)


def _first_starts(shop: Shop, weight: int) -> list[int]:
    """Return the start of the first microbatch on each lane, in ticks, if I and R take ``weight`` %
    of their time. R ends right before its activation is used."""
    passes, durations = shop.passes, shop.durations_of_all.max(axis=1).tolist()
    recompute_lane = {stage: lane for lane, (stage, kind) in enumerate(passes) if kind is R}
    starts = [0] * shop.lanes
    lanes = (lane for lane in range(shop.lanes) if passes[lane][1] is not R)
    for lane in sorted(lanes, key=lambda lane: _place(*passes[lane])):
        stage, kind = passes[lane]
        for other, hop in shop.before[lane]:
            maker = shop.before[other][0][0] if passes[other][1] is R else other
            after = durations[maker] + hop
            if passes[maker][1] is not F:
                after = after * weight // 100
            starts[lane] = max(starts[lane], starts[maker] + after)
        if kind is I and stage in recompute_lane:
            starts[lane] += durations[recompute_lane[stage]] * weight // 100
            starts[recompute_lane[stage]] = starts[lane] - durations[recompute_lane[stage]]
    return starts


def _place(stage: int, kind: Kind) -> tuple[int, int]:
    """Return a sort key of a lane: each lane sorts behind those that it waits for."""
    order = (F, I, W).index(kind)
    return order, -stage if order else stage


def _packed(packers: Packers, plans: Iterable[Starts], work: Task) -> list[Packed]:
    schedules = []
    for plan in plans:
        schedules.append(packers.justified(plan))
        work.done += 1
    return schedules


def _is_busy(packed: Packed, shop: Shop) -> bool:
    """Return whether microbatches follow one another, in the middle half of a step, as fast as the
    busiest rank can run them."""
    begin, end = shop.pieces // 4, shop.pieces * 3 // 4
    work = shop.durations_of_all[:, begin:end].sum(axis=1)
    busiest = work.reshape(shop.placement.ranks, shop.lanes_of_rank).sum(axis=1).max()
    takes = np.median(packed.starts[:, end] - packed.starts[:, begin])
    return bool(takes <= busiest + shop.work // _SLACK)


def _promising(packers: Packers, schedules: Sequence[Packed], work: Task) -> list[Packed]:
    """Return the best of ``schedules``, repacked until that gains nothing; best first."""
    repacked = []
    for packed in sorted(schedules, key=_makespan)[:_PROMISING]:
        repacked.append(packers.justified(packed.starts, _ROUNDS))
        work.done += _ROUNDS
    return sorted(repacked, key=_makespan)[:_RESULTS]


def _improved(
    packers: Packers, best: list[Packed], least: int, steps: int, patience: int, work: Task
) -> list[Packed]:
    """Return ``best`` improved by up to ``steps`` random shifts of passes, best first. It ends
    early if the last ``patience`` steps have gained nothing."""
    shop, rng = packers.shop, Dice()
    current, recent = best[0], [best[0].makespan] * _MEMORY
    gained_at = 0
    work.found = _found(shop, best[0], least)
    for step in range(steps):
        if best[0].makespan <= least or step - gained_at > patience:
            break
        new = packers.justified(shifted(current, shop, rng))
        work.done += 1
        slot = step % _MEMORY
        if new.makespan <= max(current.makespan, recent[slot]):
            current = new
        recent[slot] = current.makespan
        if current.makespan < best[0].makespan:
            best, gained_at = [current, *best[: _RESULTS - 1]], step
            work.found = _found(shop, current, least)
    return best


def _found(shop: Shop, best: Packed, least: int) -> str:
    """Return the distance of the best from ``least``, in words."""
    if not least:
        return ""
    own = least - max(shop.tails)
    return f"the best is {max(best.makespan - least, 0) / own:.1%} above the bound"


def _makespan(packed: Packed) -> int:
    return packed.makespan


class Dice:
    """Generator of random whole numbers, the same on every machine: numpy guarantees the stream of
    this generator, but not the numbers that it draws from it."""

    def __init__(self) -> None:
        self.source = np.random.PCG64(0)

    def below(self, number: int) -> int:
        return int(self.source.random_raw()) % number

    def choice[T](self, among: Sequence[T]) -> T:
        return among[self.below(len(among))]

    def around(self, far: int) -> int:
        """Return a random number from -``far`` to ``far``."""
        return self.below(2 * far + 1) - far

    def many_around(self, far: int, size: int) -> Starts:
        raw = self.source.random_raw(size)
        return (raw % np.uint64(2 * far + 1)).astype(np.int64) - far


def shifted(packed: Packed, shop: Shop, rng: Dice) -> Starts:
    """Return the start times of ``packed`` with some passes moved: all passes of a period, on all
    ranks or a few; a microbatch; or consecutive microbatches on one lane, or on one lane of every
    rank."""
    makespan, plan = packed.makespan, packed.starts.copy()
    lanes, m = plan.shape
    far = max(shop.work * rng.choice((1, 2, 4, 8)) // 10, 1)
    draw = rng.below(100)
    if draw < 35:
        opens = rng.around(makespan * 11 // 20) + makespan * 9 // 20  # from -0.1 to 1 of it
        closes = opens + makespan * rng.choice((1, 2, 4)) // 10
        inside = (opens < plan) & (plan < closes)
        if rng.below(2):  # on a few neighbouring ranks alone
            ranks, size = shop.placement.ranks, shop.lanes_of_rank
            lowest, number = rng.below(ranks), max(ranks // rng.choice((2, 4, 8)), 1)
            inside[: lowest * size] = False
            inside[(lowest + number) * size :] = False
        plan[inside] += rng.many_around(far, int(np.count_nonzero(inside)))
    elif draw < 80:
        moved: list[int] | slice
        if draw < 60:
            moved = [rng.below(lanes) for _ in range(rng.choice((1, 2, 4)))]
        else:
            moved = slice(rng.below(shop.lanes_of_rank), lanes, shop.lanes_of_rank)
        first, length = rng.below(m), rng.choice((1, 2, 4, 8, m))
        plan[moved, first : first + length] += rng.around(2 * far)
    else:
        plan[:, rng.below(m)] += rng.around(2 * far)
    return plan
