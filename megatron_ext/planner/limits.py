"""The memory that a model leaves free on a rank, and lower bounds on the time of schedules.

A search takes seconds to minutes. If a bound shows that it could gain almost nothing, it is not
begun.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.compile.transforms.vocabulary_costs import share_vocabulary
from megatron_ext.planner.candidate import Candidate, Variant
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.problem import Problem, Recompute, VocabularyParallel
from megatron_ext.search.bounds import lower_bound

# A long step is not searched for if it exceeds the lower bound by no more than this share, since
# little could be gained.
CLOSE = 0.02


def limit_left(variant: Variant, allowed_bytes: float | None) -> MemoryLimit | None:
    """Return the bytes that the model leaves for activations on its fullest rank, as a limit.

    They are part of ``allowed_bytes``. None if they are not known, or none are left.
    """
    if allowed_bytes is None or variant.model is None:
        return None
    left = allowed_bytes - max(rank.total for rank in variant.model)
    return MemoryLimit(bytes=int(left)).as_written() if left > 0 else None


def least_step(variant: Variant, allowed_bytes: float | None = None) -> float:
    """Return a lower bound on the step time of all schedules like ``variant``, without recompute.

    They may use the memory limit of ``variant`` or, without one, the memory that the model leaves
    of ``allowed_bytes``.
    """
    limit = variant.problem.memory_limit or limit_left(variant, allowed_bytes)
    problem = replace(variant.problem, memory_limit=limit)
    return least_time(problem, variant.resolved.traits.splits_backward)


def is_close(made: Candidate) -> bool:
    """Return whether no search can find a step that is shorter by `CLOSE` in the same memory."""
    return made.step <= (1 + CLOSE) * least_step(made.variant)


def least_time(problem: Problem, splits_backward: bool) -> float:
    """Return a lower bound on the step time of all schedules for ``problem``, whatever their order.

    ``splits_backward`` says whether the backward pass may be split into I and W.
    """
    # Recompute may free as much memory as the limit requires, so the bound ignores the limit and
    # recompute.
    if problem.options.recompute != Recompute():
        options = replace(problem.options, recompute=Recompute())
        problem = replace(problem, memory_limit=None, options=options)
    costs = problem.costs
    if problem.options.vocab_parallel is VocabularyParallel.NONE:
        return lower_bound(problem, splits_backward)
    shared = share_vocabulary(costs, problem.placement, problem.options.vocab_parallel)
    work = [problem.microbatches * shared.least_on(row) for row in problem.placement.stages_of]
    layers = replace(problem, costs=costs.without_vocabulary()).with_options(
        vocab_parallel=VocabularyParallel.NONE
    )
    return max(lower_bound(layers, splits_backward), *work)
