"""Periodic schedules: the passes of one microbatch are laid out once, and repeated every interval.

The framework is that of Qi et al. 2024, arXiv:2405.15362. A building block gives the time slot in
which each stage starts the passes of one microbatch; the next microbatch does the same an interval
later (`BuildingBlock.unroll`). Squeezing and reordering (`squeeze`) then remove the idle time that
the order allows to remove, and move passes of the warm-up and of the cool-down to earlier slots if
memory allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from megatron_ext.schedule.action import Action, Kind, Rows
from megatron_ext.schedule.kinds import RULES
from megatron_ext.schedule.placement import Placement

StartByAction = dict[Action, int]


@dataclass(frozen=True)
class BuildingBlock:
    """Time slots of one microbatch's passes, which repeat for each microbatch.

    ``starts`` has the first slot of each pass of microbatch 0; those of microbatch k are ``k *
    interval`` slots later. A chunk's F, I and W take one slot each, its B two. No two passes of a
    rank may share a slot modulo the interval.
    """

    interval: int
    starts: Mapping[Kind, tuple[int, ...]]  # start of each kind of pass, one per stage

    def with_weight_gradients(self, placement: Placement) -> BuildingBlock:
        """Return the building block with a W for each I, in the next free slot of the rank."""
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

    def unroll(self, microbatches: int) -> StartByAction:
        """Return the first slot of each pass of all ``microbatches``, by repeating the block."""
        return {
            Action(stage, kind, k): first + k * self.interval
            for kind, row in self.starts.items()
            for stage, first in enumerate(row)
            for k in range(microbatches)
        }


def squeeze(starts: StartByAction, placement: Placement, chunks_held: int, slices: int = 1) -> Rows:
    """Return the order of each rank's passes after moving them to earlier slots than ``starts``.

    F and backward passes move to the first slots in which their input is available and their rank
    is idle, F only while the rank holds less than ``chunks_held``. W keeps its place in the order,
    so that the steady rhythm of a rank does not change, until the rank's last F. From there on the
    backward passes go first, and W fills the remaining slots.

    Passes are numbered in the order in which they run. With several ``slices`` of each microbatch,
    the last slice of the forward order is the first of the backward order.
    """
    ranks = _Ranks(starts, placement, slices)
    order = _by_slot(starts)
    last_forward = {a.stage: slot for a, slot in order if a.kind is Kind.FORWARD}
    until = [max(last_forward[stage] for stage in stages) for stages in placement.stages_of]
    rank_of = placement.rank_of
    in_cool_down = [
        (action, slot)
        for action, slot in order
        if action.kind is Kind.BACKWARD_WEIGHT and slot > until[rank_of[action.stage]]
    ]
    for action, slot in in_cool_down:
        ranks.remove(action, slot)
    for action, slot in order:
        if action.kind is not Kind.BACKWARD_WEIGHT or slot <= until[rank_of[action.stage]]:
            ranks.advance(action, slot, chunks_held)
    for action, _ in in_cool_down:
        ranks.put(action, ranks.after_inputs(action))
    return ranks.rows()


def _by_slot(starts: StartByAction) -> list[tuple[Action, int]]:
    """Return the passes of ``starts`` with their time slots, sorted by slot, then by stage."""
    items, count = list(starts.items()), len(starts)
    slots = np.fromiter(starts.values(), np.int64, count)
    stages = np.fromiter((action.stage for action in starts), np.int64, count)
    return [items[n] for n in np.lexsort((stages, slots)).tolist()]


class _Operation(NamedTuple):
    """Passes of one kind on one stage, of all microbatches, with the data that moving them needs.

    Attributes:
        width: time slots that each pass takes.
        ends: for each microbatch, the slot after its pass; 0 until the pass is moved.
        needs: ``ends`` of the operation whose results these passes need.
        needs_last_slice: whether each pass needs the result of the microbatch's last slice, as the
            backward passes of the last stage do.
    """

    rank: int
    width: int
    ends: list[int]
    needs: list[int]
    needs_last_slice: bool


class _Ranks:
    """Time slots of all ranks while passes are moved to earlier slots."""

    def __init__(self, starts: StartByAction, placement: Placement, slices: int) -> None:
        self.operations, self.slices = _operations(starts, placement), slices
        self.moved: list[list[tuple[int, Action]]] = [[] for _ in range(placement.ranks)]
        self.latest = [-1] * placement.ranks  # slot of the latest moved pass, by rank
        # There are twice as many slots as necessary, so that every pass finds idle slots behind the
        # last pass.
        slots = 2 * (max(starts.values()) + 2)
        self.idle = [bytearray(_IDLE * slots) for _ in range(placement.ranks)]
        changes = [[0] * slots for _ in range(placement.ranks)]
        for action, slot in starts.items():
            stage, kind, _ = action
            rank, width, *_ = self.operations[stage, kind]
            assert self.idle[rank].startswith(_IDLE * width, slot), f"{action} collides"
            self.idle[rank][slot : slot + width] = bytes(width)
            changes[rank][slot] += kind in _ACQUIRES
            changes[rank][slot + width] -= kind in _RELEASES
        self.held = np.cumsum(changes, axis=1)  # chunks that each rank stores during each slot

    def remove(self, action: Action, slot: int) -> None:
        """Mark the time slots of a rank that ``action`` occupies, from ``slot`` on, as idle."""
        rank, width, *_ = self.operations[action.stage, action.kind]
        self.idle[rank][slot : slot + width] = _IDLE * width

    def advance(self, action: Action, slot: int, chunks_held: int) -> None:
        """Move ``action`` from time slot ``slot`` to the earliest slot that inputs and memory
        allow."""
        # The time of long steps is mostly spent in this function, so it calls few others.
        stage, kind, k = action
        rank, width, ends, needs, needs_last_slice = self.operations[stage, kind]
        idle, held = self.idle[rank], self.held[rank]
        earliest = needs[k - k % self.slices + self.slices - 1 if needs_last_slice else k]
        if k and ends[k - 1] > earliest:
            earliest = ends[k - 1]
        if kind is Kind.BACKWARD_WEIGHT:
            earliest = max(earliest, self.latest[rank] + 1)
        if kind in _ACQUIRES and earliest < slot:
            full = (held[earliest:slot] >= chunks_held).nonzero()[0]
            earliest += int(full[-1]) + 1 if full.size else 0
        idle[slot : slot + width] = _IDLE * width
        moved = idle.find(_IDLE * width, earliest)
        idle[moved : moved + width] = bytes(width)
        self.moved[rank].append((moved, action))
        ends[k] = moved + width
        if moved < slot and kind in _ACQUIRES:
            held[moved:slot] += 1
        if moved < slot and kind in _RELEASES:
            held[moved + width : slot + width] -= 1
        if moved > self.latest[rank]:
            self.latest[rank] = moved

    def put(self, action: Action, earliest: int) -> int:
        """Place ``action`` in its rank's first idle time slots from ``earliest`` on; return the
        first."""
        stage, kind, k = action
        rank, width, ends, *_ = self.operations[stage, kind]
        slot = self.idle[rank].find(_IDLE * width, earliest)
        self.idle[rank][slot : slot + width] = bytes(width)
        self.moved[rank].append((slot, action))
        ends[k] = slot + width
        return slot

    def after_inputs(self, action: Action) -> int:
        """Return the first time slot in which all inputs of the pass ``action`` are ready."""
        stage, kind, k = action
        _, _, ends, needs, needs_last_slice = self.operations[stage, kind]
        made = needs[k - k % self.slices + self.slices - 1 if needs_last_slice else k]
        return max(made, ends[k - 1]) if k else made

    def rows(self) -> Rows:
        return tuple(tuple(action for _, action in sorted(row)) for row in self.moved)


_IDLE = b"\1"  # marks an idle slot of a rank
_ACQUIRES = (Kind.FORWARD,)  # kinds of passes that allocate a chunk's activation
_RELEASES = (Kind.BACKWARD_WEIGHT, Kind.FULL_BACKWARD)
_BACKWARD = (Kind.BACKWARD_INPUT, Kind.FULL_BACKWARD)


def _operations(starts: StartByAction, placement: Placement) -> dict[tuple[int, Kind], _Operation]:
    """Return the passes of each stage and kind as an `_Operation`, before any pass is moved."""
    microbatches = 1 + max(k for _, _, k in starts)
    pairs = {(stage, kind) for stage, kind, _ in starts}
    ends: dict[tuple[int | None, Kind], list[int]] = {
        stage_kind: [0] * microbatches for stage_kind in pairs
    }
    nothing = [0] * microbatches

    def needs(stage: int, kind: Kind) -> tuple[int | None, Kind]:
        """Return the stage and kind of the pass whose result a pass needs; the stage may be
        None."""
        if kind is Kind.BACKWARD_WEIGHT:
            return stage, Kind.BACKWARD_INPUT
        if kind is Kind.FORWARD:
            return placement.previous(stage), kind
        after = placement.next(stage)
        return (stage, Kind.FORWARD) if after is None else (after, kind)

    return {
        (stage, kind): _Operation(
            placement.rank_of[stage],
            len(RULES[kind].covers),  # a B, which covers I and W, takes two slots
            ends[stage, kind],
            ends.get(needs(stage, kind), nothing),
            needs_last_slice=stage == placement.last and kind in _BACKWARD,
        )
        for stage, kind in pairs
    }
