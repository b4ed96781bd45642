"""Curves of a plan for its picture: its schedules by memory limit and by microbatches.

The best schedule for the memory of one GPU may not be the best for another. The picture shows each
schedule within several limits and for several numbers of microbatches, so that one sees how far a
recommendation holds.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_ext.base.progress import task
from megatron_ext.compile.auto_spec import SEARCHES
from megatron_ext.planner.candidate import Candidate, Plan, Variant
from megatron_ext.planner.fitting import consider
from megatron_ext.planner.limits import limit_left
from megatron_ext.planner.planner import VariantOf
from megatron_ext.schedule.limit import MemoryLimit

LIMITS = 12  # largest number of memory limits on a curve
MICROBATCHES_PER_RANK = (0.5, 1, 2, 4, 8)
MOST_LINES = 6  # largest number of schedules in the picture of time by number of microbatches


@dataclass(frozen=True)
class Curves:
    """Data of a plan's picture: step times by memory limit and by number of microbatches.

    Attributes:
        by_limit: for each schedule that searches, the best within each memory limit, least memory
            first, as long as more memory shortens the step.
        by_microbatches: for the best schedules and 1F1B, the time of a step by the number of
            microbatches. In place of a schedule that searches, the schedule is taken that is used
            where no search is possible.
    """

    by_limit: Mapping[str, Sequence[Candidate]]
    by_microbatches: Mapping[str, Mapping[int, float]]


def curves_of(plan: Plan, variant_of: VariantOf, allowed_bytes: float | None = None) -> Curves:
    """Return the step times of the schedules in ``plan`` by memory limit and by microbatches.

    ``variant_of`` and ``allowed_bytes`` are those with which `make_plan` made the plan.
    """
    searches = {search.spec for search in SEARCHES}
    searched = [candidate for candidate in plan.best_of_each if candidate.schedule in searches]
    compared = _compared(plan)
    steps = LIMITS * len(searched) + len(compared)
    with task("drawing curves", steps, equal_steps=True) as work:
        by_limit: dict[str, list[Candidate]] = {}
        for candidate in searched:
            front = by_limit.setdefault(candidate.schedule, [])
            for within in _limited(_variant(candidate, variant_of), allowed_bytes):
                # A limit below the memory of a single microbatch is skipped.
                with contextlib.suppress(ValueError):
                    made = consider(within, candidate.method, allowed_bytes)
                    if not front or made.step < front[-1].step:
                        # A lower limit may give a schedule that stores no less memory.
                        while front and front[-1].holds >= made.holds:
                            front.pop()
                        front.append(made)
                work.done += 1
        by_microbatches = {}
        for candidate in compared:
            variant = _variant(candidate, variant_of)
            by_microbatches[candidate.schedule] = dict(
                _by_microbatches(variant, candidate, allowed_bytes)
            )
            work.done += 1
    return Curves(by_limit, by_microbatches)


def _variant(candidate: Candidate, variant_of: VariantOf) -> Variant:
    variant = variant_of(candidate.schedule, candidate.method)
    assert variant is not None  # every candidate was made from a variant
    return replace(variant, may_recompute=False)


def _limited(variant: Variant, allowed_bytes: float | None) -> Iterator[Variant]:
    """Yield ``variant`` within up to `LIMITS` memory limits, the tightest first.

    Limits are fractions of the available bytes, or whole microbatches if bytes are not known.
    """
    for limit in _limits(variant, allowed_bytes):
        yield replace(variant, problem=replace(variant.problem, memory_limit=limit))


def _limits(variant: Variant, allowed_bytes: float | None) -> list[MemoryLimit]:
    problem = variant.problem
    given = problem.memory_limit or limit_left(variant, allowed_bytes)
    parts = range(1, LIMITS + 1)
    if given is not None and given.bytes is not None:
        return [MemoryLimit(bytes=given.bytes * part // LIMITS) for part in parts]
    most = min(2 * problem.ranks, problem.microbatches) if given is None else given.microbatches
    assert most is not None
    numbers = {math.floor(most * part / LIMITS) for part in parts} - {0}
    return [MemoryLimit(microbatches=number) for number in sorted(numbers)]


def _compared(plan: Plan) -> list[Candidate]:
    """Return the best candidate of 1F1B, and of each schedule on the front of time and memory."""
    best = {candidate.schedule: candidate for candidate in plan.best_of_each}
    names = dict.fromkeys(candidate.schedule for candidate in plan.front)
    first = [name for name in names if name != "1f1b"][: MOST_LINES - 1]
    return [best[name] for name in (*first, "1f1b") if name in best]


def _by_microbatches(
    variant: Variant, candidate: Candidate, allowed_bytes: float | None
) -> Iterator[tuple[int, float]]:
    ranks, microbatches = variant.problem.ranks, variant.problem.microbatches
    resolved = variant.resolved.without_search
    for number in sorted(
        {math.ceil(times * ranks) for times in MICROBATCHES_PER_RANK} | {microbatches}
    ):
        problem = replace(variant.problem, microbatches=number)
        # A schedule that refuses this number of microbatches, or exceeds the memory, has no point
        # on the curve.
        with contextlib.suppress(ValueError):
            other = replace(variant, resolved=resolved, problem=problem)
            yield number, consider(other, candidate.method, allowed_bytes).step
