"""The actions of a schedule as numpy arrays, for code that processes all of them at once.

A long step has hundreds of thousands of actions, and a Python loop over them is slow in each of
many checks. Properties that all microbatches share are computed once for a stage and kind, and
looked up for all actions with numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_ext.schedule.action import Action, Kind, Slice, slices_of
from megatron_ext.schedule.kinds import RULES, Lane, Rule

Floats = NDArray[np.float64]
Ints = NDArray[np.int32]
Flags = NDArray[np.bool_]
_T = TypeVar("_T")

KINDS: tuple[Kind, ...] = tuple(RULES)
_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}


def by_kind(is_so: Callable[[Rule], bool]) -> Flags:
    """Return the values of the predicate ``is_so`` for the rules of all `KINDS`, in their order."""
    return np.array([is_so(rule) for rule in RULES.values()])


IS_PASS = by_kind(lambda rule: rule.lane is Lane.COMPUTE)
IS_SEND = by_kind(lambda rule: rule.lane is Lane.SEND)
IS_RECEIVE = by_kind(lambda rule: rule.lane is Lane.RECEIVE)
IS_COLLECTIVE = by_kind(lambda rule: rule.lane is Lane.COLLECTIVE)
IN_EVALUATION = by_kind(lambda rule: rule.in_evaluation)
IS_BLOCKING = by_kind(lambda rule: rule.is_blocking)


@dataclass(frozen=True, eq=False)
class ActionArrays:
    """Structure of arrays over the actions of a schedule: entry n of each array describes the n-th
    action, rank after rank.

    Attributes:
        rank, stage, microbatch: rank, stage and microbatch of the action.
        kind: the position of its kind in `KINDS`.
        first: the number of the first action of its rank.
        slice_ends: end of each slice of a microbatch, as shares of the sequence; (1.0,) if
            microbatches are not cut.
    """

    rank: Ints
    stage: Ints
    kind: Ints
    microbatch: Ints
    first: Ints
    slice_ends: tuple[float, ...] = (1.0,)

    def __len__(self) -> int:
        return len(self.rank)

    @cached_property
    def numbers(self) -> Ints:
        """Numbers of all actions: 0, 1, 2 and so on."""
        return np.arange(len(self), dtype=np.int32)

    @cached_property
    def stage_kinds(self) -> tuple[tuple[int, Kind], ...]:
        """Each combination of stage and kind (such as F on stage 3) in the schedule.

        Properties that all microbatches share are computed once for each combination.
        """
        codes = self._codes_in_use.tolist()
        return tuple((code // len(KINDS), KINDS[code % len(KINDS)]) for code in codes)

    @cached_property
    def stage_kind(self) -> Ints:
        """For each action, the position of its stage and kind in `stage_kinds`."""
        place = np.zeros(self._codes.max(initial=-1) + 1, dtype=np.int32)
        place[self._codes_in_use] = np.arange(len(self._codes_in_use))
        return place[self._codes]

    @cached_property
    def _codes(self) -> Ints:
        return self.stage * np.int32(len(KINDS)) + self.kind

    @cached_property
    def _codes_in_use(self) -> NDArray[np.intp]:
        return np.flatnonzero(np.bincount(self._codes))

    @cached_property
    def work(self) -> tuple[dict[tuple[int, Kind], int], Ints]:
        """Numbers of the stages' passes, and for each action the passes whose work it does.

        A full backward pass B does the work of two passes, I and W (`Rule.covers`); any other
        action does one. The first result maps (stage, kind) to a number. The second has two numbers
        for each action; the second number is -1 if the action does the work of only one pass.
        """
        numbers: dict[tuple[int, Kind], int] = {}
        numbers_of = np.full((len(self.stage_kinds), 2), -1, dtype=np.int32)
        for row, (stage, kind) in zip(numbers_of, self.stage_kinds, strict=True):
            for place, part in enumerate(RULES[kind].covers):
                row[place] = numbers.setdefault((stage, part), len(numbers))
        return numbers, numbers_of[self.stage_kind]

    @property
    def slices(self) -> int:
        """Number of slices of a microbatch; 1 if microbatches are not sliced."""
        return len(self.slice_ends)

    @cached_property
    def slice(self) -> Ints:
        """Slice of each action; 0 if microbatches are not sliced."""
        return self.microbatch % np.int32(self.slices)

    def of_each(self, of: Callable[[Action], _T], by_place: bool = False) -> list[_T]:
        """Return the result of the function ``of`` for each action, as a list.

        ``of`` is called once for all microbatches of a stage, kind and slice. If ``by_place`` is
        set, microbatches differ, and ``of`` is called for each action.
        """
        if by_place:
            kinds = map(self.stage_kinds.__getitem__, self.stage_kind.tolist())
            microbatches = self.microbatch.tolist()
            return [of(Action(*kind, k)) for kind, k in zip(kinds, microbatches, strict=True)]
        of_kinds = [[of(action) for action in row] for row in self.examples]
        if self.slices == 1:
            return [of_kinds[kind][0] for kind in self.stage_kind.tolist()]
        places = zip(self.stage_kind.tolist(), self.slice.tolist(), strict=True)
        return [of_kinds[kind][number] for kind, number in places]

    @cached_property
    def examples(self) -> list[list[Action]]:
        """Actions of microbatch 0 for each of `stage_kinds`: one action, or one for each slice."""
        parts = slices_of(0, self.slice_ends)
        return [[Action(stage, kind, part) for part in parts] for stage, kind in self.stage_kinds]

    def of_stage_kinds(self, others: Ints, shifts: Ints | None = None) -> Ints:
        """Return for each action the number of a related one, such as its forward pass.

        The number is -1 if there is no related action.

        Args:
            others: for each entry of `stage_kinds`, the entry of the related action, or -1.
            shifts: for each entry of `stage_kinds`, how many slices later in the sequence the
                related action is.
        """
        related, microbatch = others[self.stage_kind], self.microbatch
        if shifts is not None:
            shift = shifts[self.stage_kind]
            number = self.slice + shift
            is_there = (number >= 0) & (number < self.slices)
            related = np.where(is_there, related, np.int32(-1))
            microbatch = np.where(is_there, microbatch + shift, microbatch)
        return np.where(related < 0, np.int32(-1), self.table[related, microbatch])

    @cached_property
    def table(self) -> Ints:
        """Numbers of the actions, as an array of shape (entries of `stage_kinds`, microbatches).

        An entry is -1 if there is no action of this stage, kind and microbatch.
        """
        microbatches = self.microbatch.max(initial=0) + 1
        table = np.full((max(len(self.stage_kinds), 1), microbatches), -1, dtype=np.int32)
        table[self.stage_kind, self.microbatch] = self.numbers
        return table

    def latest(self, flags: Flags) -> Ints:
        """Return for each action the latest action so far on its rank that ``flags`` marks.

        ``flags`` has a boolean for each action. An action that is marked counts as its own latest
        one. The number is -1 if there is none.
        """
        latest = np.maximum.accumulate(np.where(flags, self.numbers, np.int32(-1)))
        return np.where(latest < self.first, np.int32(-1), latest)


def action_arrays_of(rows: Sequence[Sequence[Action]]) -> ActionArrays:
    """Return the `ActionArrays` of the actions of ``rows``, which have one row per rank."""
    lengths = [len(row) for row in rows]
    count = sum(lengths)

    def column(place: int) -> chain[Any]:
        return chain.from_iterable(map(itemgetter(place), row) for row in rows)

    kinds = map(_NUMBERS.__getitem__, column(1))
    a_part = next((action.microbatch for row in rows for action in row), 0)
    firsts = np.cumsum([0, *lengths[:-1]], dtype=np.int32)[: len(lengths)]
    return ActionArrays(
        rank=np.repeat(np.arange(len(rows), dtype=np.int32), lengths),
        stage=np.fromiter(column(0), np.int32, count),
        kind=np.fromiter(kinds, np.int32, count),
        microbatch=np.fromiter(column(2), np.int32, count),
        first=np.repeat(firsts, lengths),
        slice_ends=a_part.ends if isinstance(a_part, Slice) else (1.0,),
    )
