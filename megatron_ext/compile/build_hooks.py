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

# Factors by which the memory limit for families is raised at first.
_LOOSER = (3.0, 2.0, 1.5, 1.25, 1.0)


@dataclass(frozen=True)
class Construction(ABC):
    """Construction of the program of ``resolved`` for ``problem``, whose parts a feature may
    repeat.

    Attributes:
        is_one_of_many: whether many schedules are compared, and an error need not name a limit that
            is enough.
    """

    resolved: ResolvedSpec
    problem: Problem
    is_one_of_many: bool

    @abstractmethod
    def passes(self, limit: MemoryLimit | None) -> Schedule:
        """Return the compute actions that the family makes within ``limit``.

        Raises:
            ValueError: it makes none.
        """

    @abstractmethod
    def passes_within_limit(self) -> Schedule:
        """Return the compute actions that the family makes within the problem's memory limit, with
        enough left for their messages.

        Raises:
            ValueError: it makes none.
        """

    @abstractmethod
    def transformed(self, passes: Schedule, limit: MemoryLimit | None) -> Schedule:
        """Return ``passes`` with all inserted actions, if these fit into ``limit``."""

    @abstractmethod
    def proved(self, passes: Schedule) -> Program:
        """Return the proved program of ``passes``.

        Raises:
            InvalidSchedule: it does not solve the problem, or not within its memory limit.
        """

    @abstractmethod
    def of(self, resolved: ResolvedSpec, problem: Problem) -> Construction:
        """Return the construction of the program of another schedule or problem."""

    @property
    def looser_limits(self) -> list[MemoryLimit | None]:
        """Memory limits to give the family if a feature then reduces what its passes hold, the
        loosest first."""
        limit = self.problem.memory_limit
        return [None, *map(limit.scaled, _LOOSER)] if limit is not None else [None]


class BuildHooks:
    """Part that one feature takes in the construction of programs. It has no state.

    Attributes:
        inserts_by_limit: whether the inserted actions depend on the memory limit.
    """

    inserts_by_limit = False

    def is_on(self, problem: Problem) -> bool:
        """Return whether the program of ``problem`` has the feature."""
        raise NotImplementedError

    def check(self, resolved: ResolvedSpec, problem: Problem) -> None:
        """Refuse a schedule that does not go with this feature."""

    def with_own_costs(self, problem: Problem) -> Problem:
        """Return ``problem`` with the costs that its passes have under this feature."""
        return problem

    def without(self, problem: Problem) -> Problem:
        """Return ``problem`` as a family sees it that does not know of this feature."""
        return problem

    def for_family(self, resolved: ResolvedSpec, problem: Problem) -> Problem:
        """Return ``problem`` as the family of ``resolved`` sees it."""
        return self.without(problem)

    def made(self, resolved: ResolvedSpec, family: Family, problem: Problem) -> Schedule:
        """Return the compute actions of ``resolved`` for ``problem``, as its family sees it.
        ``family`` makes them without this feature."""
        return family(problem)

    def completed(self, passes: Schedule, problem: Problem) -> Schedule:
        """Return given ``passes`` with the actions that the family would have made for this
        feature."""
        return passes

    def limit_of_passes(self, limit: MemoryLimit, problem: Problem) -> MemoryLimit:
        """Return the memory ``limit`` less what this feature's inserted actions hold."""
        return limit

    def before_messages(self, problem: Problem) -> Sequence[Transform]:
        """Return the transform that inserts this feature's passes into a schedule without
        messages."""
        return ()

    def after_messages(self, problem: Problem) -> Sequence[Transform]:
        """Return the transform that inserts this feature's actions into a schedule with its
        messages."""
        return ()

    def program(self, construction: Construction) -> Program | None:
        """Return the proved program if this feature constructs it in a way of its own."""
        return None
