"""Search for the schedule of least makespan in which some activations are recomputed.

The search chooses both the recomputed activations and the plan. `job_shop` defines packing problems
and plans, and `improve` searches for plans of one packing problem. Here each choice of
recomputed activations is a packing problem of its own, because the choice changes which passes run
and what memory they take. The first choices recompute a share of each rank's activations: first
those that wait longest for their backward pass, which are those of chunk 0, evenly spread over the
microbatches. The best choices are then changed at random, together with their plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megatron_ext.base.progress import Task, task
from megatron_ext.schedule.action import Rows
from megatron_ext.schedule.problem import Problem
from megatron_ext.search.effort import Effort
from megatron_ext.search.improve import (
    Packers,
    RandomIntegers,
    packers_of,
    patience_of,
    periodic_plans,
    shifted,
    steps_of,
)
from megatron_ext.search.job_shop import job_shop_of, recomputed_in, rows_of, starts_of
from megatron_ext.search.pack import Packed

# Flags of shape (stages, microbatches): whether each activation is recomputed.
Recomputed = npt.NDArray[np.bool_]

# The golden ratio. Its multiples modulo 1 are a low-discrepancy sequence: those of consecutive
# numbers are spread evenly between 0 and 1.
_GOLDEN = (5**0.5 - 1) / 2
# The first choices recompute none to all of a rank's chunks, in steps of one chunk divided by this
# number.
_SHARES_OF_CHUNK = 4
# Tried periods of the first plans, in % of a rank's work for a microbatch.
_PERIODS = (80, 90, 100, 110, 120, 140)
_WEIGHTS = (100, 55, 160)  # tried weights of backward passes relative to forward passes, in %
_PROMISING = 4  # number of choices of recomputed activations that are improved
_HISTORY = 20  # late acceptance compares a plan with the makespan of this many steps before
# In 100 steps of the search the first number changes the plan only, the second one the choice of
# recomputed activations only; the other 25 steps change both.
_PLAN_ONLY, _CHOICE_ONLY = 60, 15


@dataclass(frozen=True, eq=False)
class _Found:
    """Choice of activations to recompute, and the best packed schedule found for that choice."""

    recomputed: Recomputed
    packers: Packers
    packed: Packed

    @property
    def rows(self) -> Rows:
        shop = self.packers.shop
        return rows_of(self.packed.starts, shop.placement, shop.recompute_actions)


def search_with_recompute(
    problem: Problem, known: Sequence[Rows], least: float, how: Effort
) -> list[Rows]:
    """Search schedules in which activations may be recomputed; return the best ones, best first.

    Args:
        problem: a problem whose memory limit suffices for a microbatch (`JobShop.fits`).
        known: good schedules to begin with, with their passes of R (recompute). Some may need more
            memory than the limit.
        least: a lower bound in seconds; the search ends if it finds a schedule that reaches it.
    """
    choices = _Choices(problem, how)
    # A search with recompute has twice the effort of a search without: half goes to several choices
    # of recomputed activations, and half to the best of them.
    steps = steps_of(how, problem.ranks, choices.passes)
    shares = range(_SHARES_OF_CHUNK * problem.placement.chunks + 1)
    plans = len(known) + len(shares) * len(_PERIODS) * len(_WEIGHTS)
    with task(f"packing plans, {how.name} effort", plans + steps, equal_steps=True) as work:
        found = [choices.of_rows(rows, work) for rows in known]
        found += [choices.of_share(share / _SHARES_OF_CHUNK, work) for share in shares]
        best = sorted(found, key=_makespan)[:_PROMISING]
        rng = RandomIntegers()
        each = steps // 2 // len(best)
        enough = int(least / choices.shop.tick) + max(choices.shop.tails)
        best = [choices.improved(candidate, each, enough, rng, work) for candidate in best]
        first = min(best, key=_makespan)
        best.append(choices.improved(first, steps // 2, enough, rng, work))
    return [candidate.rows for candidate in sorted(best, key=_makespan)]


def _makespan(found: _Found) -> int:
    return found.packed.makespan


class _Choices:
    """Makes choices of the activations to recompute, and improves them together with their
    plans."""

    def __init__(self, problem: Problem, how: Effort) -> None:
        self.placement, self.m, self.how = problem.placement, problem.microbatches, how
        self.all = np.ones((self.placement.stages, self.m), dtype=bool)
        self.shop = job_shop_of(problem, self.all)
        self.stages = np.array([stage for stage, _ in self.shop.operations])
        self.passes = self.shop.operation_count * self.m

    def packers_for(self, recomputed: Recomputed) -> Packers:
        assert self.shop.recompute_deltas is not None
        shop = replace(
            self.shop, recompute_deltas=self.shop.recompute_deltas * recomputed[self.stages]
        )
        return packers_of(shop, self.how.packer)

    def of_rows(self, rows: Rows, work: Task) -> _Found:
        recomputed = recomputed_in(rows, *self.all.shape)
        recomputed = np.zeros_like(self.all) if recomputed is None else recomputed
        packers = self.packers_for(recomputed)
        work.done += 1
        return _Found(recomputed, packers, packers.justified(starts_of(rows, packers.shop)))

    def of_share(self, chunks: float, work: Task) -> _Found:
        """Return a choice that recomputes a share of each rank's activations, with its best first
        plan.

        On average ``chunks`` of a rank's chunks are recomputed for each microbatch. With 1.5, chunk
        0 is recomputed for all microbatches and chunk 1 for about every other one.
        """
        spread = np.arange(self.m) * _GOLDEN % 1
        recomputed = np.zeros_like(self.all)
        for stages in self.placement.stages_of:
            for chunk, stage in enumerate(stages):
                recomputed[stage] = spread < chunks - chunk
        packers = self.packers_for(recomputed)
        packed = []
        for plan in periodic_plans(packers.shop, _WEIGHTS, _PERIODS):
            packed.append(packers.justified(plan))
            work.done += 1
        return _Found(recomputed, packers, min(packed, key=lambda p: p.makespan))

    def improved(
        self, best: _Found, steps: int, enough: int, rng: RandomIntegers, work: Task
    ) -> _Found:
        """Return ``best`` after up to ``steps`` random changes of its plan or recomputed
        activations.

        The search is late-acceptance hill climbing (see `improve`): a change is accepted if its
        makespan is no longer than the current one or the one `_HISTORY` steps before. The search
        ends early if the makespan reaches ``enough`` ticks, or if changes no longer shorten the
        makespan.
        """
        current, recent = best, [_makespan(best)] * _HISTORY
        gained_at, patience = 0, patience_of(self.how, self.placement.ranks, 2 * self.passes)
        for step in range(steps):
            if _makespan(best) <= enough or step - gained_at > patience:
                break
            draw = rng.below(100)
            recomputed, packers, plan = current.recomputed, current.packers, current.packed.starts
            if draw >= _PLAN_ONLY:
                recomputed = self.changed(recomputed, rng)
                packers = self.packers_for(recomputed)
            if draw < _PLAN_ONLY or draw >= _PLAN_ONLY + _CHOICE_ONLY:
                plan = shifted(current.packed, packers.shop, rng)
            new = _Found(recomputed, packers, packers.justified(plan))
            work.done += 1
            slot = step % _HISTORY
            if _makespan(new) <= max(_makespan(current), recent[slot]):
                current = new
            recent[slot] = _makespan(current)
            if _makespan(current) < _makespan(best):
                best, gained_at = current, step
        return best

    def changed(self, recomputed: Recomputed, rng: RandomIntegers) -> Recomputed:
        """Return a choice of recomputed activations with a few microbatches added or removed at
        random.

        The microbatches are consecutive, for one stage, for one chunk of every rank, or for
        consecutive stages.
        """
        draw, stages = rng.below(100), self.placement.stages
        if draw < 30:
            changed_stages = [rng.below(stages)]
        elif draw < 60:
            chunk = rng.below(self.placement.chunks)
            changed_stages = [of_rank[chunk] for of_rank in self.placement.stages_of]
        else:
            first = rng.below(stages)
            changed_stages = list(range(first, min(first + rng.pick((2, 4)), stages)))
        k, count = rng.below(self.m), rng.pick((1, 1, 1, 2, 4))
        changed = recomputed.copy()
        changed[changed_stages, k : k + count] = bool(rng.below(2))
        return changed
