"""Folding of two copies onto one, and unfolding.

If rank p-1-r does the same as rank r with the copies exchanged, ranks r < p/2 alone are a schedule
of one copy: the stages that they hold of both copies are together all the stages of one copy. That
schedule runs half of the microbatches. The other ranks do the same for the other half, as a second
data-parallel replica does. The folded schedule thus uses the same GPUs, holds the same parameters
and activations on each, and runs the same passes at the same times, with one message between ranks
fewer at the turn.
"""

from __future__ import annotations

import itertools

from megatron_ext.compile.two_copies.two_copies import TwoCopies
from megatron_ext.schedule.action import Action
from megatron_ext.schedule.flip import flip_rows
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.schedule.timeline import Timeline


def fold(copies: TwoCopies) -> Schedule:
    """Return the schedule of one model copy that corresponds to a schedule of two copies.

    It has half as many ranks. The two-copy schedule runs it twice, in opposite directions.

    Raises:
        ValueError: a rank and its opposite do not run the same passes with the copies exchanged.
            The first two passes that differ are named.
    """
    half = copies.ranks // 2
    for rank in range(half):
        _check_opposite(copies, rank)
    folded_rank = tuple(min(rank, copies.ranks - 1 - rank) for rank in copies.rank_of)
    # The first stage is put on the last rank, as in the V and wave schedules of megatron_ext.
    placement = Placement(copies.name, tuple(half - 1 - rank for rank in folded_rank))
    return Schedule(copies.name, placement, flip_rows(copies.rows[:half]))


def unfold(schedule: Schedule) -> TwoCopies:
    """Return a one-copy schedule on a V or wave as a schedule of two model copies; inverse of
    `fold`.

    There are twice as many ranks, along which each V of ``schedule`` becomes a line of each copy.

    Args:
        schedule: a schedule of one copy, on p/2 ranks, with its open end on the last rank.
    """
    half = schedule.placement.ranks
    ranks = 2 * half
    once = (*range(ranks), *reversed(range(ranks)))
    stages = schedule.placement.stages
    rank_of = tuple(itertools.islice(itertools.cycle(once), stages))
    near = flip_rows(schedule.compute_rows)
    return TwoCopies(schedule.name, rank_of, (*near, *flip_rows(near)))


def _check_opposite(copies: TwoCopies, rank: int) -> None:
    opposite = copies.ranks - 1 - rank
    row, other = copies.rows[rank], copies.rows[opposite]
    for number in range(max(len(row), len(other))):
        if row[number : number + 1] != other[number : number + 1]:
            raise ValueError(
                f"{copies.name} has two copies of every stage, and the two are not symmetric, so "
                f"it cannot be run with one copy: pass {number + 1} of rank {rank} is "
                f"{_pass_at(copies, rank, number)}, but that of the opposite rank {opposite} is "
                f"{_pass_at(copies, opposite, number)}; opposite ranks have to run the same "
                "passes of different copies"
            )


def _pass_at(copies: TwoCopies, rank: int, number: int) -> str:
    row: tuple[Action, ...] = copies.rows[rank]
    if number >= len(row):
        return "none"
    return f"{row[number]} of copy {copies.copy_of(rank, row[number].stage)}"


def unfolded(timeline: Timeline) -> Timeline:
    """Return a folded schedule's ``timeline`` with both model copies, for drawing.

    Each pass is on its rank and on the opposite rank. The stages of copy 1 are numbered after those
    of copy 0. Two copies have one more message between ranks at the turn, which ``timeline`` does
    not have.
    """
    copies = unfold(timeline.schedule)
    stages, ranks = len(copies.rank_of), copies.ranks
    rank_of = tuple(copies.rank_with(copy, stage) for copy in (0, 1) for stage in range(stages))

    def on(rank: int, action: Action) -> Action:
        return action._replace(stage=action.stage + copies.copy_of(rank, action.stage) * stages)

    near = timeline.compute[::-1]
    events = tuple(
        event._replace(rank=rank, action=on(rank, event.action))
        for rank, row in enumerate((*near, *reversed(near)))
        for event in row
    )
    rows = tuple(tuple(e.action for e in events if e.rank == rank) for rank in range(ranks))
    return Timeline(
        Schedule(f"{copies.name}, two copies", Placement("two copies", rank_of), rows), events
    )
