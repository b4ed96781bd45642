"""Search for the schedule of least makespan, or of least span if steps overlap, on any placement:
many plans are packed, and the best ones improved.

The best place of each pass depends on costs and memory, and no rule of a family holds for all of
them. A periodic plan, packed from both sides, becomes a good schedule: warm-up, steady state,
cool-down and the places of W need no rules. Every machine with the same effort finds the same
schedule: the effort is a number of packed passes rather than seconds, times are whole numbers, and
the random generator has a fixed seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ext.base.progress import Task, task
from megatron_ext.schedule.action import Kind
from megatron_ext.search import pack
from megatron_ext.search.effort import Effort, effort
from megatron_ext.search.job_shop import F, I, JobShop, R, Starts, W
from megatron_ext.search.pack import Pack, Packed
from megatron_ext.search.v_patterns import pattern_plans

# Tried periods of plans, in % of a rank's work for a microbatch.
_PERIODS = (35, 42, 50, 57, 65, 73, 80, 90, 100, 120, 150, 200)
# Tried weights of backward passes relative to forward passes, in %.
_WEIGHTS = (100, 55, 75, 135, 180)
# Largest number of passes that are packed for all periods and weights together.
_MAX_GRID_PASSES = 15_000_000
_PROMISING = 8  # number of plans that are packed more than once
_ROUNDS = 5  # largest number of times that a promising plan is packed
_MIN_STEPS = 100
_HISTORY = 20  # late acceptance compares a plan with the makespan of this many steps before
_RESULTS = 4  # number of schedules that a search returns
_FIRST_PASSES = 100_000  # approximate number of passes that `first_plans` packs
_MIN_FIRST_PLANS = 4
_SLACK = 8  # a rank counts as busy if it idles for less than 1 / _SLACK of a microbatch's work


@dataclass(frozen=True)
class Packers:
    """Packers that place passes as early as possible (left) and as late as possible (right).

    Packing from both sides is double justification (Valls et al. 2005): a schedule read from its
    end is a schedule of the mirrored problem, in which dependencies are reversed, W acquires memory
    and F frees it. Packing the mirrored schedule moves every pass to the right, and packing the
    result moves it back to the left. Neither makes the schedule longer, and idle time moves to the
    ends.
    """

    shop: JobShop
    left: Pack
    right: Pack  # packer of the mirrored problem, in which time runs backwards

    def justified(self, plan: Starts, rounds: int = 1) -> Packed:
        """Return ``plan`` packed to the left, then to the right (double justification).

        This is repeated up to ``rounds`` times while the makespan falls.
        """
        best = self._justified_once(plan)
        for _ in range(rounds - 1):
            packed = self._justified_once(best.starts)
            if packed.makespan >= best.makespan:
                break
            best = packed
        return best

    def _justified_once(self, plan: Starts) -> Packed:
        early = self.left(plan)
        durations = self.shop.pass_durations
        late = self.right(_mirrored(early, durations))
        if late.makespan > early.makespan:
            return early
        return Packed(late.makespan, _mirrored(late, durations[:, ::-1]))


def _mirrored(packed: Packed, durations: Starts) -> Starts:
    """Return the starts of the plan ``packed`` with time running backwards."""
    return np.ascontiguousarray((packed.makespan - packed.starts - durations)[:, ::-1])


def packers_of(shop: JobShop, packer: Callable[[JobShop], Pack]) -> Packers:
    return Packers(shop, packer(shop), packer(shop.mirrored()))


def search(
    shop: JobShop,
    known: Sequence[Starts] = (),
    least: int = 0,
    how: Effort | None = None,
    plans_of_shorter_step: Callable[[], Iterable[Starts]] | None = None,
) -> list[Packed]:
    """Search schedules for a packing problem; return the best ones found, best first.

    The best period of a plan, and the best weight of backward relative to forward passes, depend on
    costs and memory, so a grid of both is packed (`periodic_plans`). On a V, plans that already are
    a steady state (`pattern_plans`) come first. The best plans are then improved step by step: some
    start times are shifted at random, all passes are packed anew, and the result is accepted if it
    is no longer than the result of twenty steps before, which leads out of plateaus (late
    acceptance, Burke and Bykov 2017).

    Several are returned, because the search ignores how messages block ranks, which may cost one
    schedule more than another.

    Args:
        shop: a packing problem whose limit suffices for a microbatch (`JobShop.fits`).
        known: plans to begin with, from schedules that are known to be good.
        least: a lower bound of the makespan in ticks, tails included; the search ends if a schedule
            reaches it.
        how: the effort; by default the largest of this machine (`effort`).
        plans_of_shorter_step: function that makes plans from a schedule of fewer microbatches; None
            for short steps. It is called only if ranks idle in the middle of the best schedule so
            far; otherwise there is little to gain.
    """
    how = how or effort()
    packers = packers_of(shop, how.packer)
    passes = 2 * shop.operation_count * shop.columns
    steps = steps_of(how, shop.placement.ranks, passes)
    grid = list(periodic_plans(shop, _WEIGHTS, _PERIODS))
    grid = grid[:: 1 + passes * len(grid) // _MAX_GRID_PASSES]
    plans = (*known, *pattern_plans(shop), *grid)
    packings = len(plans) + _PROMISING * _ROUNDS + steps
    with task(f"packing plans, {how.name} effort", packings, equal_steps=True) as work:
        packed = _packed(packers, plans, work)
        if plans_of_shorter_step is not None and not _is_busy(min(packed, key=_makespan), shop):
            packed = [*_packed(packers, plans_of_shorter_step(), work), *packed]
        best = _promising(packers, packed, work)
        patience = patience_of(how, shop.placement.ranks, passes)
        return _improved(packers, best, least, steps, patience, work)


def steps_of(how: Effort, ranks: int, passes: int) -> int:
    """Return the number of steps of a search with effort ``how``, if each packs ``passes``
    passes."""
    return max(min(how.passes(ranks) // passes, how.steps), _MIN_STEPS)


def patience_of(how: Effort, ranks: int, passes: int) -> int:
    """Return after how many steps without a gain a search ends, if each packs ``passes`` passes."""
    return max(how.passes_without_gain(ranks) // passes, _HISTORY)


def first_plans(shop: JobShop, known: Sequence[Starts] = ()) -> list[Packed]:
    """Return the schedules from packing the ``known`` plans and a few periodic plans, unsorted."""
    packers = packers_of(shop, pack.packer)
    affordable = max(_FIRST_PASSES // (2 * shop.operation_count * shop.columns), _MIN_FIRST_PLANS)
    plans = (*known, *periodic_plans(shop, (75, 100), (80, 100, 65, 50)))
    return [packers.justified(plan) for plan in plans[:affordable]]


def periodic_plans(
    shop: JobShop, weights: Sequence[int], periods: Sequence[int]
) -> Iterator[Starts]:
    """Yield plans in which each microbatch runs one period later than the one before.

    With slices, each slice is one period later, and its backward passes wait for the later slices
    of the microbatch.

    Args:
        weights: weights of backward passes relative to forward passes, in %.
        periods: periods in % of a rank's work for a microbatch, or a slice.
    """
    for weight in weights:
        first = np.array(_first_starts(shop, weight))[:, None]
        for period in periods:
            yield first + shop.period_offsets * (period * shop.work // 100)


def _first_starts(shop: JobShop, weight: int) -> list[int]:
    """Return the start, in ticks, of each pass of the first microbatch in a periodic plan.

    Backward passes I and R take ``weight`` % of their time there. R ends right before its
    activation is used.
    """
    operations, durations = shop.operations, shop.pass_durations.max(axis=1).tolist()
    recompute_op = {stage: op for op, (stage, kind) in enumerate(operations) if kind is R}
    starts = [0] * shop.operation_count
    planned = (op for op in range(shop.operation_count) if operations[op][1] is not R)
    for op in sorted(planned, key=lambda op: _dependency_order(*operations[op])):
        stage, kind = operations[op]
        for other, p2p_ticks in shop.predecessors[op]:
            maker = shop.predecessors[other][0][0] if operations[other][1] is R else other
            after = durations[maker] + p2p_ticks
            if operations[maker][1] is not F:
                after = after * weight // 100
            starts[op] = max(starts[op], starts[maker] + after)
        if kind is I and stage in recompute_op:
            starts[op] += durations[recompute_op[stage]] * weight // 100
            starts[recompute_op[stage]] = starts[op] - durations[recompute_op[stage]]
    return starts


def _dependency_order(stage: int, kind: Kind) -> tuple[int, int]:
    """Return a sort key that puts each pass of a microbatch after the passes it depends on."""
    order = (F, I, W).index(kind)
    return order, -stage if order else stage


def _packed(packers: Packers, plans: Iterable[Starts], work: Task) -> list[Packed]:
    schedules = []
    for plan in plans:
        schedules.append(packers.justified(plan))
        work.done += 1
    return schedules


def _is_busy(packed: Packed, shop: JobShop) -> bool:
    """Return whether the busiest rank hardly idles in the middle half of the packed step.

    Microbatches then follow one another as fast as that rank can run them.
    """
    begin, end = shop.columns // 4, shop.columns * 3 // 4
    work = shop.pass_durations[:, begin:end].sum(axis=1)
    busiest = work.reshape(shop.placement.ranks, shop.operations_per_rank).sum(axis=1).max()
    takes = np.median(packed.starts[:, end] - packed.starts[:, begin])
    return bool(takes <= busiest + shop.work // _SLACK)


def _promising(packers: Packers, schedules: Sequence[Packed], work: Task) -> list[Packed]:
    """Return the best of ``schedules``, each packed repeatedly while its makespan falls."""
    repacked = []
    for packed in sorted(schedules, key=_makespan)[:_PROMISING]:
        repacked.append(packers.justified(packed.starts, _ROUNDS))
        work.done += _ROUNDS
    return sorted(repacked, key=_makespan)[:_RESULTS]


def _improved(
    packers: Packers, best: list[Packed], least: int, steps: int, patience: int, work: Task
) -> list[Packed]:
    """Return the schedules ``best`` improved by up to ``steps`` random shifts of passes, best
    first.

    The search ends early if the last ``patience`` steps have gained nothing.
    """
    shop, rng = packers.shop, RandomIntegers()
    current, recent = best[0], [best[0].makespan] * _HISTORY
    gained_at = 0
    work.found = _found(shop, best[0], least)
    for step in range(steps):
        if best[0].makespan <= least or step - gained_at > patience:
            break
        new = packers.justified(shifted(current, shop, rng))
        work.done += 1
        slot = step % _HISTORY
        if new.makespan <= max(current.makespan, recent[slot]):
            current = new
        recent[slot] = current.makespan
        if current.makespan < best[0].makespan:
            best, gained_at = [current, *best[: _RESULTS - 1]], step
            work.found = _found(shop, current, least)
    return best


def _found(shop: JobShop, best: Packed, least: int) -> str:
    """Return text on how far the best makespan so far is above the lower bound ``least``."""
    if not least:
        return ""
    bound = least - max(shop.tails)
    return f"the best is {max(best.makespan - least, 0) / bound:.1%} above the bound"


def _makespan(packed: Packed) -> int:
    return packed.makespan


class RandomIntegers:
    """Generator of random whole numbers that are the same on every machine.

    It uses the raw stream of a bit generator, which numpy guarantees, unlike the numbers that numpy
    draws from the stream.
    """

    def __init__(self) -> None:
        self.source = np.random.PCG64(0)

    def below(self, number: int) -> int:
        return int(self.source.random_raw()) % number

    def pick[T](self, among: Sequence[T]) -> T:
        return among[self.below(len(among))]

    def around(self, far: int) -> int:
        """Return a random whole number from -``far`` to ``far``."""
        return self.below(2 * far + 1) - far

    def many_around(self, far: int, size: int) -> Starts:
        raw = self.source.random_raw(size)
        return (raw % np.uint64(2 * far + 1)).astype(np.int64) - far


def shifted(packed: Packed, shop: JobShop, rng: RandomIntegers) -> Starts:
    """Return the start times of a packed schedule with some passes shifted at random.

    The passes are those in an interval of time, on all ranks or on a few neighbours; those of a
    microbatch; or those of consecutive microbatches in a few operations, or in one operation of
    every rank.
    """
    makespan, plan = packed.makespan, packed.starts.copy()
    operations, m = plan.shape
    far = max(shop.work * rng.pick((1, 2, 4, 8)) // 10, 1)
    draw = rng.below(100)
    if draw < 35:
        # The time window of moved passes opens at a random time between -0.1 and 1 makespan.
        opens = rng.around(makespan * 11 // 20) + makespan * 9 // 20
        closes = opens + makespan * rng.pick((1, 2, 4)) // 10
        inside = (opens < plan) & (plan < closes)
        if rng.below(2):  # half of the changes concern only a few neighbouring ranks
            ranks, size = shop.placement.ranks, shop.operations_per_rank
            lowest, number = rng.below(ranks), max(ranks // rng.pick((2, 4, 8)), 1)
            inside[: lowest * size] = False
            inside[(lowest + number) * size :] = False
        plan[inside] += rng.many_around(far, int(np.count_nonzero(inside)))
    elif draw < 80:
        moved: list[int] | slice
        if draw < 60:
            moved = [rng.below(operations) for _ in range(rng.pick((1, 2, 4)))]
        else:
            moved = slice(rng.below(shop.operations_per_rank), operations, shop.operations_per_rank)
        first, length = rng.below(m), rng.pick((1, 2, 4, 8, m))
        plan[moved, first : first + length] += rng.around(2 * far)
    else:
        plan[:, rng.below(m)] += rng.around(2 * far)
    return plan
