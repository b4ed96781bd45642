"""The repeating part of a schedule with equal microbatches, from which a longer step's time
follows.

A step of a thousand microbatches takes long to build and to simulate, and most of it is repetition.
Cut a schedule into three on every rank, with a period of L microbatches between the two cuts:

    beginning | period | ending

If the ranks wait across both cuts in the same way, each further period lengthens the step by the
same seconds (`RepeatingPart`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron_ext.compile.program.simulate import links_of, times
from megatron_ext.compile.program.verify import Program
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.action_arrays import IS_PASS, KINDS, Flags, Ints

SAME = 1e-9  # largest difference that counts as rounding, as a share of the step's seconds
_FORWARD = KINDS.index(Kind.FORWARD)


@dataclass(frozen=True, eq=False)
class RepeatingPart:
    """The part of a step's schedule that more microbatches only repeat.

    A longer step's schedule has the period once more, for microbatches L later, and its ending for
    microbatches L later. Each further period takes the same seconds d under two conditions. The
    actions of the beginning that the period and the ending wait for happen again exactly d later
    before the second cut. The actions of the ending that the beginning and the period wait for
    happened exactly d earlier behind the first cut. Start times are a maximum of sums, so all
    starts behind the cuts are d later (Baccelli et al., Synchronization and Linearity, 1992,
    section 3.7). The peak of a rank does not change if the rank holds the same memory at both cuts.

    Attributes:
        microbatches: number of microbatches in the period: L.
        seconds: seconds by which one more period lengthens the step: d.
        cuts: for each rank, the positions in its row of `Program.as_run` at which the period begins
            and ends.
        is_in_period: for each action, whether it is in the period.
        work: seconds of the passes in the period, summed over all ranks.
    """

    microbatches: int
    seconds: float
    cuts: tuple[tuple[int, int], ...]
    is_in_period: Flags
    work: float


def repeating_part(program: Program, periods: Sequence[int]) -> RepeatingPart | None:
    """Return the repeating part of ``program``, with the first of the possible ``periods`` that
    fits.

    A period is a number of microbatches. Return None if none fits, or if steps overlap or several
    ranks share a link to the host, to which this account does not apply.
    """
    problem = program.problem
    if problem.options.steps_overlap or links_of(program.graph, problem.costs):
        return None
    cuts = _Cuts(program)
    last = problem.microbatches - 1
    for period in periods:
        for second in (last, last - (period + 1) // 2):
            found = cuts.at(second - period, period) if second > period else None
            if found is not None:
                return found
    return None


class _Cuts:
    """Start and end times of a program's actions, in which a repeating part is looked for."""

    def __init__(self, program: Program) -> None:
        schedule, self._graph = program.as_run
        self._problem, self._arrays = program.problem, schedule.arrays
        starts, ends = times(self._graph, schedule, program.problem.costs)
        self._starts, self._ends = np.array(starts), np.array(ends)
        self._rounding = SAME * float(self._ends.max())
        place = {stage_kind: number for number, stage_kind in enumerate(self._arrays.stage_kinds)}
        self._first_forwards = [
            place[min(row), Kind.FORWARD] for row in self._problem.placement.stages_of
        ]

    def at(self, microbatch: int, period: int) -> RepeatingPart | None:
        """Return the repeating part between F of ``microbatch`` and F of the one ``period`` later.

        None if the actions between these two cuts do not repeat.
        """
        arrays, numbers = self._arrays, self._arrays.table
        microbatches, first = period, microbatch * arrays.slices
        # From here on `period` is a number of slices. A microbatch has one or more slices.
        period = microbatches * arrays.slices
        begins = numbers[self._first_forwards, first]
        ends = numbers[self._first_forwards, first + period]
        is_early = arrays.numbers < begins[arrays.rank]
        is_late = arrays.numbers >= ends[arrays.rank]
        if not (
            self._is_done_alike(is_early, ~is_late, period)
            and self._follows_the_same(begins, ends, period)
        ):
            return None
        moved = self._moved(period)
        of_beginning = self._crossing(is_early, ~is_early)
        of_ending = self._crossing(is_late, ~is_late)
        earlier = np.concatenate([of_beginning, self._moved(-period)[of_ending]])
        later = np.concatenate([moved[of_beginning], of_ending])
        if min(earlier.min(), later.min()) < 0:
            return None
        is_placed = ~is_late[later[: len(of_beginning)]], ~is_early[earlier[len(of_beginning) :]]
        if not all(flags.all() for flags in is_placed):
            return None
        differences = self._ends[later] - self._ends[earlier]
        if np.ptp(differences) > self._rounding:
            return None
        is_in_period = ~is_early & ~is_late
        passes = is_in_period & IS_PASS[arrays.kind]
        rows = zip(begins - arrays.first[begins], ends - arrays.first[ends], strict=True)
        return RepeatingPart(
            microbatches,
            float(differences.mean()),
            tuple((int(begin), int(end)) for begin, end in rows),
            is_in_period,
            float((self._ends - self._starts)[passes].sum()),
        )

    def _is_done_alike(self, is_early: Flags, is_done: Flags, period: int) -> bool:
        """Return whether the actions before the second cut repeat those before the first cut.

        The actions before the second cut must be those before the first cut, each for the
        microbatch a ``period`` later, and all actions of the first ``period`` microbatches.
        ``is_early`` flags the actions before the first cut, ``is_done`` those before the second.
        """
        numbers = self._arrays.table
        is_there = numbers >= 0
        early, done = (flags[numbers] & is_there for flags in (is_early, is_done))
        is_twice = is_there[:, period:] & is_there[:, :-period]
        is_alike = (done[:, period:] == early[:, :-period]) | ~is_twice
        return bool(is_alike.all() and (done | ~is_there)[:, :period].all())

    def _follows_the_same(self, begins: Ints, ends: Ints, period: int) -> bool:
        """Return whether each rank runs the same actions right before both cuts of the schedule.

        As many actions are compared as one microbatch, or slice, of the ``period`` has.
        """
        arrays = self._arrays
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            length = min(-((begin - end) // period), begin - int(arrays.first[begin]))
            here, there = slice(begin - length, begin), slice(end - length, end)
            is_same = (arrays.stage_kind[here] == arrays.stage_kind[there]) & (
                arrays.microbatch[here] + period == arrays.microbatch[there]
            )
            if not is_same.all():
                return False
        return True

    def _crossing(self, is_source: Flags, is_waiting: Flags) -> Ints:
        """Return the actions flagged by ``is_source`` for which actions of ``is_waiting`` wait."""
        sources, waiting = self._graph.before.nodes, self._owners
        return np.unique(sources[is_source[sources] & is_waiting[waiting]])

    @cached_property
    def _owners(self) -> Ints:
        return self._graph.before.owners

    def _moved(self, period: int) -> Ints:
        """Return for each action the number of the same action ``period`` microbatches later, else
        -1."""
        arrays = self._arrays
        microbatch = arrays.microbatch + np.int32(period)
        is_there = (microbatch >= 0) & (microbatch < arrays.table.shape[1])
        found = arrays.table[arrays.stage_kind, np.where(is_there, microbatch, 0)]
        return np.where(is_there, found, np.int32(-1))
