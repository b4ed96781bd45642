"""Schedules of two copies of the model, and their text form.

Microbatches enter from both ends of the pipeline: copy 1 has a stage on rank p-1-r if copy 0 has it
on rank r. The copy of a pass therefore follows from its rank and its stage, and is not written. The
halves of the microbatches meet only in the sum of their gradients.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_ext.schedule.action import Action

Rows = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True)
class TwoCopies:
    """A schedule that holds every stage twice.

    Attributes:
        name: name of the schedule.
        rank_of: the rank of each stage of copy 0. The number of ranks is even.
        rows: actions of each rank, in order. Each copy counts its microbatches from 0.
    """

    name: str
    rank_of: tuple[int, ...]
    rows: Rows

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @cached_property
    def microbatches(self) -> int:
        """Number of microbatches of each copy."""
        return 1 + max(action.microbatch for row in self.rows for action in row)

    def copy_of(self, rank: int, stage: int) -> int:
        """Return the number of the copy whose ``stage`` is on ``rank``."""
        return int(self.rank_of[stage] != rank)

    def rank_with(self, copy: int, stage: int) -> int:
        """Return the rank that has ``stage`` of ``copy``."""
        rank = self.rank_of[stage]
        return self.ranks - 1 - rank if copy else rank


def holds_two_copies(rows: Sequence[Sequence[Action]]) -> bool:
    """Return whether a table has every stage on a rank and on its opposite, which is as far from
    the other end."""
    on = _ranks_of_stages(rows).values()
    opposite = all(ranks == {len(rows) - 1 - rank for rank in ranks} for ranks in on)
    return opposite and any(len(ranks) == 2 for ranks in on)


def to_csv(copies: TwoCopies) -> str:
    """Return ``copies`` as CSV in PyTorch's grammar, one line per rank. The microbatches of copy 1
    are numbered after those of copy 0."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(
        [
            action._replace(
                microbatch=action.microbatch
                + copies.copy_of(rank, action.stage) * copies.microbatches
            )
            for action in row
        ]
        for rank, row in enumerate(copies.rows)
    )
    return text.getvalue()


def from_rows(rows: Rows, name: str) -> TwoCopies:
    """Return the schedule in a table that `holds_two_copies`. Its microbatches may be numbered from
    0 in each copy, or through both copies.

    Raises:
        ValueError: the number of ranks is odd, or the copies differ in their number of
            microbatches.
    """
    if len(rows) % 2:
        raise ValueError(
            f"{name} holds every stage twice on {len(rows)} ranks: the one in the middle is its "
            f"own opposite, so that they are no two replicas of one schedule; write an even number"
        )
    rank_of = _places_of_first_copy(rows)
    copies = TwoCopies(name, rank_of, rows)
    numbers: list[set[int]] = [set(), set()]
    for rank, row in enumerate(rows):
        for action in row:
            numbers[copies.copy_of(rank, action.stage)].add(action.microbatch)
    if len(numbers[0]) != len(numbers[1]):
        total = len(numbers[0]) + len(numbers[1])
        raise ValueError(
            f"{name} holds every stage twice, and sends {len(numbers[0])} microbatches from one "
            f"end and {len(numbers[1])} from the other: with {total} in all they cannot be two "
            f"replicas of one schedule; write an even number, half of them for each copy"
        )
    place = [{number: k for k, number in enumerate(sorted(of_copy))} for of_copy in numbers]
    return TwoCopies(
        name,
        rank_of,
        tuple(
            tuple(
                action._replace(
                    microbatch=place[copies.copy_of(rank, action.stage)][action.microbatch]
                )
                for action in row
            )
            for rank, row in enumerate(rows)
        ),
    )


def _ranks_of_stages(rows: Sequence[Sequence[Action]]) -> dict[int, set[int]]:
    on: dict[int, set[int]] = {}
    for rank, row in enumerate(rows):
        for action in row:
            on.setdefault(action.stage, set()).add(rank)
    return on


def _places_of_first_copy(rows: Rows) -> tuple[int, ...]:
    """Return the rank of each stage of copy 0, which begins on the lower rank. From stage to stage
    it continues in its direction, and turns at an end of the pipeline."""
    on = _ranks_of_stages(rows)
    rank, way = min(on[0]), 1
    places = [rank]
    for stage in range(1, len(on)):
        if rank + way in on[stage]:
            rank += way
        else:
            way = -way
            rank = min(on[stage], key=lambda other: abs(other - places[-1]))
        places.append(rank)
    return tuple(places)
