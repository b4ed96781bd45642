"""Hooks of the features whose part in a program is a transform, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import override

from megatron_ext.compile.build_hooks import BuildHooks, Construction
from megatron_ext.compile.program.memory import without_reserved
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.transforms.offload import offload
from megatron_ext.compile.transforms.post_validation import validate_afterwards
from megatron_ext.compile.transforms.vocabulary import INTERVALS, divide_vocabulary
from megatron_ext.compile.transforms.vocabulary_costs import share_vocabulary
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.problem import Offload, Problem, VocabularyParallel
from megatron_ext.schedule.schedule import Schedule, Transform


class VocabularyBuild(BuildHooks):
    """Passes and costs of a partitioned vocabulary."""

    @override
    def is_on(self, problem: Problem) -> bool:
        return problem.options.vocab_parallel is not VocabularyParallel.NONE

    @override
    def without(self, problem: Problem) -> Problem:
        return problem.with_options(vocab_parallel=VocabularyParallel.NONE)

    @override
    def with_own_costs(self, problem: Problem) -> Problem:
        how = problem.options.vocab_parallel
        return replace(problem, costs=share_vocabulary(problem.costs, problem.placement, how))

    @override
    def limit_of_passes(self, limit: MemoryLimit, problem: Problem) -> MemoryLimit:
        return without_reserved(limit, INTERVALS[problem.options.vocab_parallel], problem)

    @override
    def before_messages(self, problem: Problem) -> Sequence[Transform]:
        return (divide_vocabulary,)


class OffloadBuild(BuildHooks):
    """Copies of activations to the host."""

    inserts_by_limit = True

    @override
    def is_on(self, problem: Problem) -> bool:
        return problem.options.activation_offload is not Offload.NONE

    @override
    def without(self, problem: Problem) -> Problem:
        return problem.with_options(activation_offload=Offload.NONE)

    @override
    def after_messages(self, problem: Problem) -> Sequence[Transform]:
        return (offload,)

    @override
    def program(self, construction: Construction) -> Program | None:
        """Return the program of the first passes that fit into the memory limit with copies to the
        host. The family makes its passes within looser limits than the problem's, the loosest
        first, and at last those that fit without copies.

        Raises:
            OverLimit: none of them fits.
            ValueError: the family has none.
        """
        problem = construction.problem
        if problem.forward_only:
            return None
        limits = construction.looser_limits
        makers: list[Callable[[], Schedule]] = [partial(construction.passes, x) for x in limits]
        if problem.memory_limit is not None:
            without = construction.of(construction.resolved, self.without(problem))
            makers.append(without.passes_within_limit)
        tried: set[Schedule] = set()
        refusals: list[ValueError] = []
        for make in makers:
            try:
                passes = make()
                if passes not in tried:
                    tried.add(passes)
                    return construction.proved(passes)
            except ValueError as error:
                refusals.append(error)
        raise refusals[0]


class PostValidationBuild(BuildHooks):
    """Messages of the optimizer's post-validation."""

    @override
    def is_on(self, problem: Problem) -> bool:
        return problem.options.steps_overlap

    @override
    def after_messages(self, problem: Problem) -> Sequence[Transform]:
        return (validate_afterwards,)
