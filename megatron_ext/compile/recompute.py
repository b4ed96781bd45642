"""Programs that recompute activations: the family's passes, made within several limits.

A family does not know that activations will be recomputed, and would refuse a limit that
recomputation meets. It therefore makes its passes within looser limits than the problem's, and the
shortest program that fits is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import override

from megatron_ext.compile.build_hooks import BuildHooks, Construction
from megatron_ext.compile.program.memory import bytes_for, in_bytes, peaks
from megatron_ext.compile.program.simulate import step_seconds
from megatron_ext.compile.program.verify import OverLimit, Program, prove
from megatron_ext.compile.registry import ResolvedSpec
from megatron_ext.compile.transforms.recompute import recompute
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.problem import Problem, Recompute
from megatron_ext.schedule.schedule import Schedule, Transform

# Number of memory limits that are tried between a sufficient limit and an insufficient one.
_TRIES = 4
# Least amount by which the limit is lowered at a time, as a share of the passes' memory.
_STEP = 0.05
# Lowest limit that is tried, as a share of the memory that a schedule requires.
_NOT_MUCH_LESS = 0.8


class RecomputeBuild(BuildHooks):
    """Feature that recomputes activations; a transform or the family itself chooses which."""

    inserts_by_limit = True

    @override
    def is_on(self, problem: Problem) -> bool:
        return problem.options.recompute != Recompute()

    @override
    def without(self, problem: Problem) -> Problem:
        return problem.with_options(recompute=Recompute())

    @override
    def for_family(self, resolved: ResolvedSpec, problem: Problem) -> Problem:
        return problem if _is_placed_by(resolved, problem) else self.without(problem)

    @override
    def before_messages(self, problem: Problem) -> Sequence[Transform]:
        return () if problem.forward_only else (recompute,)

    @override
    def program(self, construction: Construction) -> Program | None:
        resolved, problem = construction.resolved, construction.problem
        if problem.forward_only or _is_placed_by(resolved, problem):
            return None
        return _shortest(construction)


def _is_placed_by(resolved: ResolvedSpec, problem: Problem) -> bool:
    """Return whether the schedule family itself chooses the activations to recompute."""
    # Families with a search choose no recomputed activations if microbatches are sliced.
    if problem.forward_only or problem.slices.count > 1:
        return False
    return resolved.traits.fits_recompute and problem.options.recompute.fit


def _shortest(construction: Construction) -> Program:
    """Return the fastest program with recomputed activations that fits into the memory limit.

    Raises:
        OverLimit: none of them fits. The error names a sufficient limit.
    """
    resolved, problem = construction.resolved, construction.problem
    if resolved.traits.searches and problem.slices.count > 1:
        # The family's search is switched off here, since otherwise each tried limit would start a
        # search.
        resolved = resolved.without_search
    programs, refusals = _programs(construction.of(resolved, problem))
    if programs:
        return min(programs, key=lambda program: step_seconds(program, problem.costs))
    # A family that knows nothing of recompute may refuse a memory limit that recompute would meet.
    over = [error for error in refusals if isinstance(error, OverLimit)]
    if problem.memory_limit is None or not over:
        raise refusals[-1]
    if construction.is_one_of_many:
        raise over[0]
    without_search = construction.of(resolved.without_search, problem)
    least = _least_that_is_enough(without_search, problem.memory_limit, over)
    raise over[0].naming(least, problem.memory_limit)


def _programs(construction: Construction) -> tuple[list[Program], list[ValueError]]:
    """Build the family's passes within several looser memory limits, each with recomputation.

    Return the programs and the refusals. If passes can be made without a limit, they are the first
    that are tried.
    """
    tried: set[Schedule] = set()
    programs: list[Program] = []
    refusals: list[ValueError] = []
    for limit in construction.looser_limits:
        try:
            passes = construction.passes(limit)
            if passes not in tried:
                tried.add(passes)
                programs.append(_proved_in_bytes(passes, construction))
        except ValueError as error:
            refusals.append(error)
    return programs, refusals


def _least_that_is_enough(
    construction: Construction, limit: MemoryLimit, over: Sequence[OverLimit]
) -> float:
    """Return the least memory limit that a few tries find to be sufficient; ``limit`` itself is not
    sufficient.

    A limit that the passes made without any limit can meet is sufficient, because these passes are
    tried within each limit. A lower limit may be sufficient too: within it the family makes another
    order, and other passes are recomputed.
    """
    enough = over[0].least
    too_little = max(limit.amount, _NOT_MUCH_LESS * min(error.least for error in over))
    next_try = min(error.least for error in over)
    for _ in range(_TRIES):
        if not too_little < next_try < enough:
            next_try = (too_little + enough) / 2
        candidate = limit.of(math.ceil(next_try) if limit.bytes is not None else next_try)
        within = replace(construction.problem, memory_limit=candidate)
        programs, _ = _programs(construction.of(construction.resolved, within))
        if programs:
            enough = candidate.amount
        else:
            too_little = candidate.amount
    return enough


def _proved_in_bytes(passes: Schedule, construction: Construction) -> Program:
    """Return the proved program of ``passes`` with as much recomputation as a limit in bytes needs.

    If messages bring the program over the limit, recomputation gets a limit that is smaller by the
    excess.

    Raises:
        InvalidSchedule: as `prove`.
    """
    problem, limit = construction.problem, construction.problem.memory_limit
    schedule = construction.transformed(passes, limit)
    if limit is None or limit.bytes is None:
        return prove(schedule, problem)
    bytes_for(limit, problem.costs)
    allowed = limit.bytes
    for _ in range(2 * _TRIES):
        over = max(peaks(schedule, in_bytes(problem.costs))) - limit.bytes
        if over <= 0:
            break
        # The limit is lowered in large steps, since each recomputed activation frees much memory.
        allowed -= math.ceil(max(over, _STEP * allowed))
        if allowed <= 0:
            break
        schedule = construction.transformed(passes, MemoryLimit(bytes=allowed))
    return prove(schedule, problem)
