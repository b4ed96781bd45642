"""Schedules: a row of actions for each rank; and the types of functions that make and change them.
A schedule has no times: these follow from costs (`simulate`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from megatron_ext.schedule.action import Action, Kind, OverlappedPasses, whole_of
from megatron_ext.schedule.action_arrays import (
    IN_EVALUATION,
    IS_PASS,
    KINDS,
    ActionArrays,
    Ints,
    action_arrays_of,
)
from megatron_ext.schedule.kinds import RULES, Lane, Where
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import Problem


@dataclass(frozen=True)
class Schedule:
    """Schedule of a step: ``rows[r]`` are the actions of rank r, in order.

    A family, which generates schedules, makes only the compute actions.

    Attributes:
        pairs: forward and backward passes that run as one. In their row the two are adjacent, the
            forward pass first. Actions that one of the two needs come before both, and actions that
            need one of the two come after both.
    """

    name: str
    placement: Placement
    rows: tuple[tuple[Action, ...], ...]
    pairs: frozenset[OverlappedPasses] = frozenset()

    @property
    def compute_rows(self) -> tuple[tuple[Action, ...], ...]:
        return tuple(tuple(a for a in row if is_compute(a)) for row in self.rows)

    @property
    def microbatches(self) -> int:
        """Number of microbatches of the schedule's step."""
        return 1 + max(whole_of(action.microbatch) for row in self.rows for action in row)

    @cached_property
    def overlapped_with(self) -> Mapping[Action, Action]:
        """For each pass that overlaps another one of its rank, that other pass."""
        return {a: b for forward, back in self.pairs for a, b in ((forward, back), (back, forward))}

    @cached_property
    def paired(self) -> Ints:
        """Numbers of the forward passes that overlap a backward pass, which has the next number."""
        forwards = {overlapped.forward for overlapped in self.pairs}
        numbers = enumerate(chain.from_iterable(self.rows)) if forwards else ()
        return np.array([n for n, action in numbers if action in forwards], dtype=np.int32)

    def cells(self, row: Sequence[Action]) -> list[str]:
        """Return the text of each action of a rank's ``row``; two overlapped passes share one."""
        if not self.pairs:
            return list(map(str, row))
        seconds, others = {overlapped.backward for overlapped in self.pairs}, self.overlapped_with
        return [
            str(OverlappedPasses(action, others[action]) if action in others else action)
            for action in row
            if action not in seconds
        ]

    @cached_property
    def arrays(self) -> ActionArrays:
        """Actions of all ranks as numpy arrays. Stages and microbatches must fit into 32 bits."""
        return action_arrays_of(self.rows)


Family = Callable[[Problem], Schedule]
Transform = Callable[[Schedule, Problem], Schedule]


_PASSES = frozenset(kind for kind, rule in RULES.items() if rule.lane is Lane.COMPUTE)


def is_compute(action: Action) -> bool:
    return action.kind in _PASSES


def followed_by_own_w(row: Sequence[Action]) -> frozenset[tuple[int, int]]:
    """Return stage and microbatch of each I in a rank's ``row`` that its own W follows directly.

    I is the input gradient and W the weight gradient of a stage and microbatch.
    """
    return frozenset(
        (row[n].stage, row[n].microbatch) for n in right_behind_own_input(action_arrays_of([row]))
    )


def right_behind_own_input(arrays: ActionArrays) -> Ints:
    """Return the numbers of the W (weight gradients) that directly follow their own I."""
    passes = arrays.numbers[IS_PASS[arrays.kind]]
    before, after = passes[:-1], passes[1:]
    is_it = arrays.kind[before] == KINDS.index(Kind.BACKWARD_INPUT)
    is_it &= arrays.kind[after] == KINDS.index(Kind.BACKWARD_WEIGHT)
    for figures in (arrays.stage, arrays.microbatch):
        is_it &= figures[before] == figures[after]
    return after[is_it]


def recomputed(row: Sequence[Action]) -> frozenset[tuple[int, int]]:
    """Return stage and microbatch of each forward pass in a rank's ``row`` that R recomputes."""
    return frozenset(
        (action.stage, action.microbatch)
        for action in row
        if RULES[action.kind].repeats is Kind.FORWARD
    )


def bitwise_order(schedule: Schedule) -> bool:
    """Return whether results are stock Megatron's to the last bit.

    F, I (or B) and W of each stage must each run in microbatch order, so that gradients are summed
    in stock's order. (Not with vocabulary parallelism: the ranks' shards are summed in another
    order.) Slices of microbatches have to come in order in F, and in reverse order in I (or B) and
    in W: the results are then equal for all such schedules with these slices.
    """
    rules = (RULES[kind] for _, kind in schedule.arrays.stage_kinds)
    if any(rule.lane is Lane.COMPUTE and rule.where is not Where.STAGE for rule in rules):
        return False
    return in_microbatch_order(schedule)


def in_microbatch_order(schedule: Schedule) -> bool:
    """Return whether the passes of each kind on each stage run in microbatch order.

    The results are then bitwise those of any other schedule in this order with the same placement
    and options.
    """
    arrays = schedule.arrays
    _, work = arrays.work
    is_done = IS_PASS[arrays.kind][:, np.newaxis] & (work >= 0)
    turn = np.broadcast_to(_turns(arrays)[:, np.newaxis], work.shape)[is_done]
    of_work = work[is_done]
    order = np.argsort(of_work, kind="stable")
    goes_back = (np.diff(of_work[order]) == 0) & (np.diff(turn[order]) < 0)
    return not goes_back.any()


def _turns(arrays: ActionArrays) -> Ints:
    """Return for each action the place in its stage's passes of this kind that microbatch order
    requires."""
    back = arrays.microbatch + np.int32(arrays.slices - 1) - 2 * arrays.slice
    return np.where(IN_EVALUATION[arrays.kind], arrays.microbatch, back)
