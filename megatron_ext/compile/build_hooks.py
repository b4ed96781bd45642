"""Hooks by which a feature takes part in the construction of programs.

`build` names no feature: it calls the hooks of those that are on, in the order of
`compile.features`. Methods do nothing unless a feature overrides them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import ResolvedSpec
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Family, Schedule, Transform

# Factors by which the memory limit is raised for a family, tried in this order, if transforms lower
# the memory later.
_LOOSER = (3.0, 2.0, 1.5, 1.25, 1.0)


@dataclass(frozen=True)
class Construction(ABC):
    """Construction of the program of schedule ``resolved`` for ``problem``, in steps.

    A feature may repeat the steps, each of which is a method.

    Attributes:
        is_one_of_many: whether many schedules are compared, so that an error need not name a
            sufficient memory limit.
    """

    resolved: ResolvedSpec
    problem: Problem
    is_one_of_many: bool

    @abstractmethod
    def passes(self, limit: MemoryLimit | None) -> Schedule:
        """Return the compute actions that the family makes within the memory ``limit``.

        Raises:
            ValueError: the family has no schedule within the limit.
        """

    @abstractmethod
    def passes_within_limit(self) -> Schedule:
        """Return the compute actions that the family makes within the problem's memory limit.

        Enough of the limit is left for the messages.

        Raises:
            ValueError: the family has no such schedule.
        """

    @abstractmethod
    def transformed(self, passes: Schedule, limit: MemoryLimit | None) -> Schedule:
        """Return ``passes`` with messages and inserted actions, chosen to fit the memory
        ``limit``."""

    @abstractmethod
    def proved(self, passes: Schedule) -> Program:
        """Return the proved program of the compute actions ``passes``.

        Raises:
            InvalidSchedule: the schedule does not solve the problem, or not within its memory
                limit.
        """

    @abstractmethod
    def of(self, resolved: ResolvedSpec, problem: Problem) -> Construction:
        """Return a construction like this one, for another schedule or problem."""

    @property
    def looser_limits(self) -> list[MemoryLimit | None]:
        """Memory limits looser than the problem's, the loosest first; None is no limit.

        A feature such as recompute lets the family make its passes within one of them, and then
        reduces their memory until it is within the problem's own limit.
        """
        limit = self.problem.memory_limit
        return [None, *map(limit.scaled, _LOOSER)] if limit is not None else [None]


class BuildHooks:
    """Functions by which one feature, such as offload, takes part in building a program.

    An instance has no state.

    Attributes:
        inserts_by_limit: whether the actions that the feature inserts depend on the memory limit.
    """

    inserts_by_limit = False

    def is_on(self, problem: Problem) -> bool:
        """Return whether the program of ``problem`` uses this feature."""
        raise NotImplementedError

    def check(self, resolved: ResolvedSpec, problem: Problem) -> None:
        """Raise ValueError if the schedule ``resolved`` does not work with this feature."""

    def with_own_costs(self, problem: Problem) -> Problem:
        """Return ``problem`` with the costs that passes have when this feature is on."""
        return problem

    def without(self, problem: Problem) -> Problem:
        """Return ``problem`` without this feature, for families that do not know the feature."""
        return problem

    def for_family(self, resolved: ResolvedSpec, problem: Problem) -> Problem:
        """Return the problem that the schedule family of ``resolved`` gets when this feature
        is on."""
        return self.without(problem)

    def made(self, resolved: ResolvedSpec, family: Family, problem: Problem) -> Schedule:
        """Return the compute actions of schedule ``resolved`` when this feature is on.

        ``family`` makes the passes without this feature; ``problem`` is the one for the family.
        """
        return family(problem)

    def completed(self, passes: Schedule, problem: Problem) -> Schedule:
        """Return given compute ``passes`` with what the family would have added for this
        feature."""
        return passes

    def limit_of_passes(self, limit: MemoryLimit, problem: Problem) -> MemoryLimit:
        """Return the memory ``limit`` less the memory of the actions that this feature inserts."""
        return limit

    def before_messages(self, problem: Problem) -> Sequence[Transform]:
        """Return transforms that insert this feature's passes, before messages are inserted."""
        return ()

    def after_messages(self, problem: Problem) -> Sequence[Transform]:
        """Return transforms that insert this feature's actions, after messages were inserted."""
        return ()

    def program(self, construction: Construction) -> Program | None:
        """Return the proved program if this feature builds it in a special way, else None."""
        return None
