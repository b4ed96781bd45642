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

from megatron_ext.schedule.action import Action, Rows


@dataclass(frozen=True)
class TwoCopies:
    """Schedule of two copies of a model, which holds every stage on two ranks.

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
        """Number of microbatches of each of the two copies."""
        return 1 + max(action.microbatch for row in self.rows for action in row)

    def copy_of(self, rank: int, stage: int) -> int:
        """Return the number, 0 or 1, of the model copy whose ``stage`` is on ``rank``."""
        return int(self.rank_of[stage] != rank)

    def rank_with(self, copy: int, stage: int) -> int:
        """Return the rank that has ``stage`` of the model copy with number ``copy``."""
        rank = self.rank_of[stage]
        return self.ranks - 1 - rank if copy else rank


def holds_two_copies(rows: Sequence[Sequence[Action]]) -> bool:
    """Return whether a schedule table with p ranks has every stage on two ranks, r and p-1-r.

    With an odd p, stages may also be on the middle rank alone, its own opposite; `from_rows`
    refuses that.
    """
    ranks_of_stages = _ranks_of_stages(rows).values()
    opposite = all(ranks == {len(rows) - 1 - rank for rank in ranks} for ranks in ranks_of_stages)
    return opposite and any(len(ranks) == 2 for ranks in ranks_of_stages)


def copies_to_csv(copies: TwoCopies) -> str:
    """Return a schedule of two model copies as CSV in PyTorch's grammar, one line per rank.

    The microbatches of copy 1 are numbered after those of copy 0.
    """
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
    """Return the two-copy schedule in the rows of a table for which `holds_two_copies` is true.

    Its microbatches may be numbered from 0 in each copy, or through both copies.

    Raises:
        ValueError: the number of ranks is odd, or the copies differ in their number of
            microbatches.
    """
    if len(rows) % 2:
        raise ValueError(
            f"{name} has two copies of every stage on {len(rows)} ranks: the middle rank has no "
            "opposite rank that holds the other copy of its stages; write an even number of ranks"
        )
    rank_of = _ranks_of_first_copy(rows)
    copies = TwoCopies(name, rank_of, rows)
    # Microbatches that each of the two copies of the model processes.
    sent: list[set[int]] = [set(), set()]
    for rank, row in enumerate(rows):
        for action in row:
            sent[copies.copy_of(rank, action.stage)].add(action.microbatch)
    if len(sent[0]) != len(sent[1]):
        raise ValueError(
            f"{name} has two copies of every stage, and gives {len(sent[0])} microbatches to one "
            f"copy and {len(sent[1])} to the other, so they are no replicas of one schedule; give "
            "both copies the same number"
        )
    renumbered = [{number: k for k, number in enumerate(sorted(of_copy))} for of_copy in sent]
    return TwoCopies(
        name,
        rank_of,
        tuple(
            tuple(
                action._replace(
                    microbatch=renumbered[copies.copy_of(rank, action.stage)][action.microbatch]
                )
                for action in row
            )
            for rank, row in enumerate(rows)
        ),
    )


def _ranks_of_stages(rows: Sequence[Sequence[Action]]) -> dict[int, set[int]]:
    ranks_of: dict[int, set[int]] = {}
    for rank, row in enumerate(rows):
        for action in row:
            ranks_of.setdefault(action.stage, set()).add(rank)
    return ranks_of


def _ranks_of_first_copy(rows: Rows) -> tuple[int, ...]:
    """Return the rank of each stage of model copy 0, which begins on the lower rank.

    Each stage is on two ranks, one for each copy. If the next rank in the copy's direction is one
    of them, it has the copy's next stage. Otherwise the copy turns, and the one that is nearer to
    the rank of the stage before has it.
    """
    ranks_of = _ranks_of_stages(rows)
    rank, step = min(ranks_of[0]), 1
    of_copy = [rank]
    for stage in range(1, len(ranks_of)):
        if rank + step in ranks_of[stage]:
            rank += step
        else:
            step = -step
            rank = min(ranks_of[stage], key=lambda other: abs(other - of_copy[-1]))
        of_copy.append(rank)
    return tuple(of_copy)
