"""Part of vocabulary parallelism in the construction of programs.

The passes of a partitioned vocabulary have costs and memory of their own, so a program is built
with both, and the passes are inserted before messages are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import override

from megatron_ext.compile.build_hooks import BuildHooks
from megatron_ext.compile.program.memory import without_reserved
from megatron_ext.compile.transforms.vocabulary_costs import share_vocabulary
from megatron_ext.features.vocabulary.schedule.vocabulary import INTERVALS, divide_vocabulary
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.problem import Problem, VocabularyParallel
from megatron_ext.schedule.schedule import Transform


class VocabularyBuild(BuildHooks):
    """Hooks that add passes and costs of a partitioned vocabulary when a program is built."""

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
