"""Part of activation offload in the construction of programs.

The memory that copies free is known only once they are inserted. So the family makes its passes
within looser memory limits first, and the first passes that meet the problem's own limit with
copies are taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import override

from megatron_ext.compile.build_hooks import BuildHooks, Construction
from megatron_ext.compile.program.verify import Program
from megatron_ext.features.offload.schedule.inserted_copies import offload
from megatron_ext.schedule.problem import Offload, Problem
from megatron_ext.schedule.schedule import Schedule, Transform


class OffloadBuild(BuildHooks):
    """Part of the construction of programs that inserts copies of activations to the host."""

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
        """Return the first program that meets the memory limit with copies to the host.

        The schedule's generator makes its passes within looser limits than the problem's, the
        loosest first, and at last those that meet the limit without copies.

        Raises:
            OverLimit: no schedule meets the limit.
            ValueError: the generator has no schedule.
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
