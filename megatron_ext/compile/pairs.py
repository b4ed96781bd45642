"""Pairs of passes that run as one, added to schedules that can have them if they are requested.

A pair is a forward and a backward pass of a rank, run side by side so that one computes while the
other waits for experts' messages. Families and searches need not know of pairs, as these are added
to finished passes. With a search the other families of its placement compete, since the order that
is best without pairs need not be the best with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import override

from megatron_ext.compile.build_hooks import BuildHooks
from megatron_ext.compile.program.memory import in_microbatches, limited_amount, peaks
from megatron_ext.compile.program.simulate import simulate_unproved
from megatron_ext.compile.registry import ResolvedSpec, entries, on_placement
from megatron_ext.compile.transforms.pairs import overlap_passes
from megatron_ext.schedule.limit import fits
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Family, Schedule


class OverlapBuild(BuildHooks):
    """Feature that overlaps a forward and a backward pass of a rank, when programs are built."""

    @override
    def is_on(self, problem: Problem) -> bool:
        # This feature is on for every problem, as it also removes overlapped passes that are not
        # requested.
        return True

    @override
    def check(self, resolved: ResolvedSpec, problem: Problem) -> None:
        if problem.options.pairs and problem.placement.chunks < 2:
            others = [name for name, entry in entries().items() if entry.traits.keeps_pairs]
            raise ValueError(
                f"schedule {resolved.spec} has one stage on each rank, and overlapping a forward "
                "with a backward pass needs several (Megatron too requires virtual stages): "
                f"choose one of the schedules {', '.join(others)}, or drop "
                "--overlap-moe-expert-parallel-comm"
            )

    @override
    def made(self, resolved: ResolvedSpec, family: Family, problem: Problem) -> Schedule:
        """Return the passes of ``family``, with overlapped passes if these are requested.

        A search does not know of overlapped passes. With them the result is therefore the fastest
        of its schedule and of the other families' on its placement, each with overlapped passes,
        within the memory limit. Without a limit, the other families may hold no more than 1F1B's
        memory plus one chunk, which overlapped passes take.
        """
        alone = problem.with_options(pairs=False)
        schedule = with_pairs(family(alone), problem)
        if not resolved.traits.searches or not schedule.pairs:
            return schedule
        candidates = [schedule, *_others(alone, problem)]
        best = min(candidates, key=lambda other: simulate_unproved(other, problem).makespan)
        return replace(best, name=schedule.name)

    @override
    def completed(self, passes: Schedule, problem: Problem) -> Schedule:
        return with_pairs(passes, problem)


def with_pairs(schedule: Schedule, problem: Problem) -> Schedule:
    """Return a schedule of compute actions with overlapped passes, if ``problem`` requests them."""
    if not problem.options.pairs or problem.forward_only:
        return replace(schedule, pairs=frozenset()) if schedule.pairs else schedule
    return overlap_passes(schedule, problem)


def _others(alone: Problem, problem: Problem) -> Iterator[Schedule]:
    for resolved in on_placement(problem.placement):
        try:
            schedule = with_pairs(resolved.build(alone), problem)
        except ValueError:  # the schedule has no passes to overlap, or does not fit
            continue
        amount, allowed = in_microbatches(schedule), problem.held_by_1f1b
        allowed += 1 / problem.placement.chunks
        if problem.memory_limit is not None:
            amount, allowed = limited_amount(problem.memory_limit, schedule, problem.costs)
        if all(fits(held, allowed) for held in peaks(schedule, amount)):
            yield schedule
