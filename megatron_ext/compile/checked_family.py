"""A family of a user's Python file, whose results are checked when it returns them.

A family is a function from a problem to a schedule, and everybody can write one. Mistakes in a
family would otherwise show much later, as an error deep in the proof or in the search. So what it
returns is checked at once, and the error names the user's file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any

from megatron_ext.base.words import counted, shown
from megatron_ext.compile.others_code import code_of
from megatron_ext.schedule.action import Action, Kind, OverlappedPasses
from megatron_ext.schedule.action_arrays import KINDS
from megatron_ext.schedule.kinds import RULES
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.schedule.schedule_csv import KINDS_IN_FILES

# Largest number of stages of a table, since stage and kind of an action share one 32-bit number.
_MOST = 2**31 // len(KINDS)
_SPLIT = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


@dataclass(frozen=True)
class CheckedFamily:
    """The schedule family ``name`` of a user's file at ``path``, with checks of what it returns.

    The file has two functions: one makes the placement, one the schedule. Both are wrapped in
    checks. ``splits_backward`` and ``searches`` are as the file declares them. The wrapped
    functions have the signatures of the originals, from which options are read.
    """

    name: str
    path: Path
    splits_backward: bool
    searches: bool = False

    def placement(self, place: Callable[..., Placement]) -> Callable[..., Placement]:
        """Wrap the user's function ``place`` in a check that its placement uses exactly all
        ranks."""

        @functools.wraps(place)
        def checked(ranks: int, **options: Any) -> Placement:
            what = f"the placement of {self.name}"
            with code_of(self.path, what, f": {what} fails for {counted(ranks, 'rank')}"):
                placement = place(ranks, **options)
            if not isinstance(placement, Placement):
                raise self._error(
                    f"the placement of {self.name} returned {type(placement).__name__}; return a "
                    f"Placement(name, rank_of)"
                )
            wrong = set(placement.rank_of) ^ set(range(ranks))
            if wrong:
                raise self._error(
                    f"the placement of {self.name} for {counted(ranks, 'rank')} is wrong about "
                    f"rank {min(wrong)}: each rank from 0 to {ranks - 1} needs a stage, and there "
                    "are no other ranks"
                )
            return placement

        return checked

    def schedule(self, build: Callable[..., Schedule]) -> Callable[..., Schedule]:
        """Wrap the user's function ``build`` in a check that it returns a schedule of passes.

        Separate input and weight gradients are accepted only if the family declares them. A family
        refuses a problem with ValueError. Any other exception is a mistake of the file.
        """

        @functools.wraps(build)
        def checked(problem: Problem, **options: Any) -> Schedule:
            failed = (
                f": {self.name} fails for {counted(problem.ranks, 'rank')} and "
                f"{counted(problem.microbatches, 'microbatch')}"
            )
            with code_of(self.path, self.name, failed, is_search=self.searches):
                schedule = build(problem, **options)
                if isinstance(schedule, Schedule):
                    schedule = self._checked(schedule)
            if not isinstance(schedule, Schedule):
                raise self._error(
                    f"{self.name} returned {type(schedule).__name__}; return a Schedule(name, "
                    f"problem.placement, rows)"
                )
            return schedule

        return checked

    def _checked(self, schedule: Schedule) -> Schedule:
        """Return a user's schedule in normal form: rows as tuples, and kinds of actions as
        `Kind`."""
        if not isinstance(schedule.placement, Placement):
            raise self._error(
                f"{self.name} has {shown(repr(schedule.placement))} for a placement; write "
                f"Schedule(name, problem.placement, rows)"
            )
        rows = tuple(map(tuple, schedule.rows))
        self._check_rows([action for row in rows for action in row])
        strangers = [entry for entry in schedule.pairs if not isinstance(entry, OverlappedPasses)]
        if strangers:
            raise self._error(
                f"{self.name} has {shown(repr(strangers[0]))} among its overlapped passes "
                "(pairs); each must be an OverlappedPasses"
            )
        if any(type(action.kind) is not Kind for row in rows for action in row):
            rows = tuple(tuple(a._replace(kind=Kind(a.kind)) for a in row) for row in rows)
        return replace(schedule, name=str(schedule.name), rows=rows)

    def _check_rows(self, actions: list[Action]) -> None:
        stranger = next((action for action in actions if not _is_pass(action)), None)
        if stranger is not None:
            raise self._error(
                f"{self.name} has {shown(repr(stranger))} in its rows, which is no Action(stage, "
                f"kind, microbatch) of kind {', '.join(KINDS_IN_FILES)}"
            )
        recompute = next((action for action in actions if RULES[action.kind].repeats), None)
        if recompute is not None:
            raise self._error(
                f"{self.name} makes {recompute}, a {RULES[recompute.kind].does}; drop recompute "
                "passes (R) from the schedule: --pipeline-recompute inserts them"
            )
        late = next((action for action in actions if action.kind in _SPLIT), None)
        if late is not None and not self.splits_backward:
            raise self._error(
                f"{self.name} makes {late}, a part of a split backward pass, but the model's "
                "layers split their backward passes only for a family that declares it; write "
                "@family(..., splits_backward=True)"
            )

    def _error(self, text: str) -> ValueError:
        return ValueError(f"schedule file {self.path}: {text}")


def _is_pass(action: object) -> bool:
    if not isinstance(action, Action) or action.kind not in KINDS_IN_FILES:
        return False
    numbers = action.stage, action.microbatch
    return all(isinstance(number, Integral) and abs(number) < _MOST for number in numbers)
