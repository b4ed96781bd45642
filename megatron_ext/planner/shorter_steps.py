"""What a long step takes, told by a shorter one: to make it takes long."""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.compile.output_layer import with_input_gradient
from megatron_ext.compile.transforms.vocabulary_costs import share_vocabulary
from megatron_ext.planner.candidate import Variant, VocabMethod
from megatron_ext.planner.fitting import consider
from megatron_ext.schedule.problem import Problem, VocabularyParallel

_PERIODS = 2  # microbatches a rank, of a shorter step


def seconds_by_shorter(variant: Variant, method: VocabMethod, room: float | None = None) -> float:
    """About what a step takes at least: a shorter one, and what the busiest rank does for each
    microbatch more. 0 where that is not told so.

    Raises:
        TooFull: not even the shorter one fits, with offload or recompute.
        ValueError: it cannot be made.
    """
    problem = variant.problem
    number = _PERIODS * problem.ranks + problem.microbatches % problem.ranks
    more = problem.microbatches - number
    if more < number or problem.extras.pairs:
        return 0.0
    costs = problem.costs  # the output layer's W, which little depends on, is not placed
    if problem.extras.vocab_parallel is VocabularyParallel.NONE:
        costs = with_input_gradient(costs)
    short = replace(
        variant,
        choice=variant.choice.without_search,
        problem=replace(problem, microbatches=number, costs=costs),
    )
    step = consider(short, method, room, may_offload=True).step
    return step + more * max(_work_of_ranks(problem))


def _work_of_ranks(problem: Problem) -> list[float]:
    """Seconds of a microbatch on each rank, at the least."""
    costs = problem.costs
    if problem.extras.vocab_parallel is not VocabularyParallel.NONE:
        costs = share_vocabulary(costs, problem.placement, problem.extras.vocab_parallel)
    return [costs.least_on(stages) for stages in problem.placement.stages_of]
