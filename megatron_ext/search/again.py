"""Search for the schedule of least makespan in which some activations are recomputed.

The choice of activations is part of the search: `improve` packs plans of one packing problem (a
`Shop`), and here each choice has its own. The first choices are shares of a rank's activations,
those of the longest-waiting chunk first, evenly spread over the microbatches. The most promising
ones are improved as plans are, and the choices with them: some microbatches are added or removed
for a stage, for consecutive stages, or for one chunk of every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megatron_ext.progress import Task, task
from megatron_ext.schedule.problem import Problem
from megatron_ext.search.effort import Effort
from megatron_ext.search.improve import (
    Dice,
    Sides,
    patience_of,
    periodic_plans,
    shifted,
    sides_of,
    steps_of,
)
from megatron_ext.search.pack import Packed
from megatron_ext.search.shop import Rows, again_in, rows_of, shop_of, starts_of

Again = npt.NDArray[np.bool_]  # stages x microbatches

_GOLDEN = (5**0.5 - 1) / 2
_QUARTERS = 4  # of a chunk
_PERIODS = (80, 90, 100, 110, 120, 140)  # % of a rank's work
_WEIGHTS = (100, 55, 160)  # %
_PROMISING = 4  # choices
_MEMORY = 20  # steps


@dataclass(frozen=True, eq=False)
class _Found:
    """A choice of activations, and the best of its plans."""

    again: Again
    sides: Sides
    packed: Packed

    @property
    def rows(self) -> Rows:
        shop = self.sides.shop
        return rows_of(self.packed.starts, shop.placement, shop.again)


def search_again(problem: Problem, known: Sequence[Rows], least: float, how: Effort) -> list[Rows]:
    """Return the best schedules found, best first.

    Args:
        problem: a problem whose memory limit suffices for a microbatch (`Shop.fits`).
        known: schedules that are known to be good, with R. Some may need more than the limit.
        least: a lower bound in seconds; the search ends if it finds a schedule that reaches it.
    """
    choices = _Choices(problem, how)
    # Twice the effort of a search without recompute: there is twice as much to choose.
    steps = steps_of(how, problem.ranks, choices.passes)
    shares = range(_QUARTERS * problem.placement.chunks + 1)
    plans = len(known) + len(shares) * len(_PERIODS) * len(_WEIGHTS)
    with task(f"packing plans, {how.name} effort", plans + steps, alike=True) as work:
        found = [choices.of_rows(rows, work) for rows in known]
        found += [choices.of_share(share / _QUARTERS, work) for share in shares]
        best = sorted(found, key=_makespan)[:_PROMISING]
        rng = Dice()
        each = steps // 2 // len(best)
        enough = int(least / choices.shop.tick) + max(choices.shop.tails)
        best = [choices.improved(candidate, each, enough, rng, work) for candidate in best]
        first = min(best, key=_makespan)
        best.append(choices.improved(first, steps // 2, enough, rng, work))
    return [candidate.rows for candidate in sorted(best, key=_makespan)]


def _makespan(found: _Found) -> int:
    return found.packed.makespan


class _Choices:
    """Maker and improver of choices of the activations to recompute for ``problem``."""

    def __init__(self, problem: Problem, how: Effort) -> None:
        self.placement, self.m, self.how = problem.placement, problem.microbatches, how
        self.all = np.ones((self.placement.stages, self.m), dtype=bool)
        self.shop = shop_of(problem, self.all)
        self.stages = np.array([stage for stage, _ in self.shop.passes])
        self.passes = self.shop.lanes * self.m

    def sides(self, again: Again) -> Sides:
        assert self.shop.given_up is not None
        shop = replace(self.shop, given_up=self.shop.given_up * again[self.stages])
        return sides_of(shop, self.how.packer)

    def of_rows(self, rows: Rows, work: Task) -> _Found:
        again = again_in(rows, *self.all.shape)
        again = np.zeros_like(self.all) if again is None else again
        sides = self.sides(again)
        work.done += 1
        return _Found(again, sides, sides.justified(starts_of(rows, sides.shop)))

    def of_share(self, chunks: float, work: Task) -> _Found:
        """Return the best of some plans in which each rank recomputes ``chunks`` chunks of a
        microbatch on average."""
        spread = np.arange(self.m) * _GOLDEN % 1
        again = np.zeros_like(self.all)
        for stages in self.placement.stages_of:
            for chunk, stage in enumerate(stages):
                again[stage] = spread < chunks - chunk
        sides = self.sides(again)
        packed = []
        for plan in periodic_plans(sides.shop, _WEIGHTS, _PERIODS):
            packed.append(sides.justified(plan))
            work.done += 1
        return _Found(again, sides, min(packed, key=lambda p: p.makespan))

    def improved(self, best: _Found, steps: int, enough: int, rng: Dice, work: Task) -> _Found:
        """Return ``best`` after up to ``steps`` random changes (late acceptance, as in `improve`).
        It ends early if the makespan reaches ``enough``, or if changes no longer improve it."""
        current, recent = best, [_makespan(best)] * _MEMORY
        gained_at, patience = 0, patience_of(self.how, self.placement.ranks, 2 * self.passes)
        for step in range(steps):
            if _makespan(best) <= enough or step - gained_at > patience:
                break
            draw = rng.below(100)
            again, sides, plan = current.again, current.sides, current.packed.starts
            if draw >= 60:
                again = self.changed(again, rng)
                sides = self.sides(again)
            if draw < 60 or draw >= 75:
                plan = shifted(current.packed, sides.shop, rng)
            new = _Found(again, sides, sides.justified(plan))
            work.done += 1
            slot = step % _MEMORY
            if _makespan(new) <= max(_makespan(current), recent[slot]):
                current = new
            recent[slot] = _makespan(current)
            if _makespan(current) < _makespan(best):
                best, gained_at = current, step
        return best

    def changed(self, again: Again, rng: Dice) -> Again:
        """Return ``again`` with some microbatches added or removed."""
        draw, stages = rng.below(100), self.placement.stages
        if draw < 30:
            which = [rng.below(stages)]
        elif draw < 60:
            chunk = rng.below(self.placement.chunks)
            which = [of_rank[chunk] for of_rank in self.placement.stages_of]
        else:
            first = rng.below(stages)
            which = list(range(first, min(first + rng.choice((2, 4)), stages)))
        k, count = rng.below(self.m), rng.choice((1, 1, 1, 2, 4))
        changed = again.copy()
        changed[which, k : k + count] = bool(rng.below(2))
        return changed
