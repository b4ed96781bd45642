"""Schedules that repeat: one microbatch's passes, laid out once, started again every interval.

The framework of Qi et al. 2024, arXiv:2405.15362: a building block says in which time slot each
stage starts the passes of one microbatch; the next microbatch does the same an interval later
(`BuildingBlock.unroll`). Squeezing and reordering (`squeeze`) then take out what idle time the
order leaves, and bring passes of the warm-up and of the cool-down forward where memory allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.kinds import RULES
from megatron_ext.schedule.placement import Placement

Starts = dict[Action, int]
Rows = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True)
class BuildingBlock:
    """The first slot of each pass of microbatch 0; microbatch k is ``k * interval`` slots later.

    A chunk's F, I and W take one slot each, its B two. No two passes of a rank may share a slot
    modulo the interval.
    """

    interval: int
    starts: Mapping[Kind, tuple[int, ...]]  # per stage

    def with_weight_gradients(self, placement: Placement) -> BuildingBlock:
        """The block with a W for each I, in its rank's next free slot."""
        weight = [0] * placement.stages
        inputs = self.starts[Kind.BACKWARD_INPUT]
        for stages in placement.stages_of:
            taken = {row[stage] % self.interval for row in self.starts.values() for stage in stages}
            for stage in sorted(stages, key=inputs.__getitem__):
                weight[stage] = inputs[stage] + 1
                while weight[stage] % self.interval in taken:
                    weight[stage] += 1
                taken.add(weight[stage] % self.interval)
        return replace(self, starts={**self.starts, Kind.BACKWARD_WEIGHT: tuple(weight)})

    def unroll(self, microbatches: int) -> Starts:
        """The first slot of each pass of all microbatches."""
        return {
            Action(stage, kind, k): first + k * self.interval
            for kind, row in self.starts.items()
            for stage, first in enumerate(row)
            for k in range(microbatches)
        }


def squeeze(starts: Starts, placement: Placement, chunks_held: int, slices: int = 1) -> Rows:
    """The order of each rank's passes, none later than in ``starts``.

    F and backward passes move to the first slots where their input is there and their rank is
    idle, F only as far as the rank holds less than ``chunks_held``. W keeps its place in the order,
    so that a rank's steady rhythm stays what it was, until the last F of its rank: from there on
    the backward passes go first and W fills what they leave.

    Passes are numbered as they come. With ``slices`` of each microbatch, the first to go back is
    the last that went forward.
    """
    ranks = _Ranks(starts, placement, slices)
    order = sorted(starts, key=lambda action: (starts[action], action.stage))
    last_forward = {placement.rank_of[a.stage]: starts[a] for a in order if a.kind is Kind.FORWARD}
    in_cool_down = [
        action
        for action in order
        if action.kind is Kind.BACKWARD_WEIGHT
        and starts[action] > last_forward[placement.rank_of[action.stage]]
    ]
    for action in in_cool_down:
        ranks.take_away(action)
    put_off = set(in_cool_down)
    for action in order:
        if action not in put_off:
            ranks.advance(action, chunks_held)
    for action in in_cool_down:
        ranks.put(action, ranks.after_inputs(action))
    return ranks.rows()


class _Ranks:
    """The time slots of all ranks while passes are moved."""

    def __init__(self, starts: Starts, placement: Placement, slices: int) -> None:
        self.placement, self.slices = placement, slices
        self.starts = starts
        self.moved: Starts = {}
        self.latest = [-1] * placement.ranks  # slot of the latest moved pass, by rank
        # Twice the time: room for every pass behind the last.
        self.idle = np.ones((placement.ranks, 2 * (max(starts.values()) + 2)), dtype=bool)
        changes = np.zeros(self.idle.shape, dtype=int)
        for action, slot in starts.items():
            rank, width = placement.rank_of[action.stage], _width(action)
            assert self.idle[rank, slot : slot + width].all(), f"{action} collides"
            self.idle[rank, slot : slot + width] = False
            rule = RULES[action.kind]
            if rule.acquires and not rule.releases:
                changes[rank, slot] += 1
            if rule.releases and not rule.acquires:
                changes[rank, slot + width] -= 1
        self.held = changes.cumsum(axis=1)  # chunks, during each slot

    def take_away(self, action: Action) -> None:
        rank, slot = self.placement.rank_of[action.stage], self.starts[action]
        self.idle[rank, slot : slot + _width(action)] = True

    def advance(self, action: Action, chunks_held: int) -> None:
        """Move ``action`` forward as far as it can and may go."""
        rank, slot = self.placement.rank_of[action.stage], self.starts[action]
        earliest = self.after_inputs(action)
        if action.kind is Kind.BACKWARD_WEIGHT:
            earliest = max(earliest, self.latest[rank] + 1)
        if action.kind is Kind.FORWARD:
            full = np.flatnonzero(self.held[rank, earliest:slot] >= chunks_held)
            earliest += int(full[-1]) + 1 if full.size else 0
        self.take_away(action)
        self.put(action, earliest)
        if action.kind is Kind.FORWARD:
            self.held[rank, self.moved[action] : slot] += 1
        if action.kind in (Kind.BACKWARD_WEIGHT, Kind.FULL_BACKWARD):
            width = _width(action)
            self.held[rank, self.moved[action] + width : slot + width] -= 1
        self.latest[rank] = max(self.latest[rank], self.moved[action])

    def put(self, action: Action, earliest: int) -> None:
        """Give ``action`` its rank's first idle time from ``earliest`` on."""
        rank, width = self.placement.rank_of[action.stage], _width(action)
        idle = self.idle[rank]
        slot = earliest + int(idle[earliest:].argmax())
        while not idle[slot : slot + width].all():
            slot += 1 + int(idle[slot + 1 :].argmax())
        idle[slot : slot + width] = False
        self.moved[action] = slot

    def after_inputs(self, action: Action) -> int:
        """The first slot in which all that ``action`` needs is done."""
        stage, kind, k = action
        earlier = [Action(stage, kind, k - 1)] if k else []
        if kind is Kind.BACKWARD_WEIGHT:
            earlier.append(Action(stage, Kind.BACKWARD_INPUT, k))
        elif kind is not Kind.FORWARD:
            after = self.placement.next(stage)
            at_end = Action(stage, Kind.FORWARD, k - k % self.slices + self.slices - 1)
            earlier.append(at_end if after is None else Action(after, kind, k))
        elif (before := self.placement.previous(stage)) is not None:
            earlier.append(Action(before, kind, k))
        return max((self.moved[a] + _width(a) for a in earlier if a in self.moved), default=0)

    def rows(self) -> Rows:
        rows: list[list[Action]] = [[] for _ in range(self.placement.ranks)]
        for action in sorted(self.moved, key=self.moved.__getitem__):
            rows[self.placement.rank_of[action.stage]].append(action)
        return tuple(map(tuple, rows))


def _width(action: Action) -> int:
    """Slots that ``action`` takes: one for each kind it covers."""
    return len(RULES[action.kind].covers)
