"""Placements: the rank of each stage.

A stage is a contiguous piece of the model, 0 to n-1 from input to loss. The stages of one rank
are its chunks, 0 to v-1 in stage order; Megatron calls a chunk's number its vp_stage.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from functools import cached_property


class Neighbour(enum.IntEnum):
    """Neighbours of a stage: activations go to the next stage, gradients to the previous one."""

    PREVIOUS = -1
    NEXT = +1


@dataclass(frozen=True)
class Placement:
    """Assignment of stages to pipeline ranks: ``rank_of[s]`` is the rank that holds stage s."""

    name: str
    rank_of: tuple[int, ...]

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    @cached_property
    def ranks(self) -> int:
        return max(self.rank_of) + 1

    @cached_property
    def chunks(self) -> int:
        """Number of stages (model chunks) on a rank; the largest number, if ranks differ."""
        return max(len(stages) for stages in self.stages_of)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each pipeline rank, in order: entry c of a rank's tuple is its chunk c."""
        rows: list[list[int]] = [[] for _ in range(self.ranks)]
        for stage, rank in enumerate(self.rank_of):
            rows[rank].append(stage)
        return tuple(tuple(row) for row in rows)

    def shard_stage(self, stage: int) -> int:
        """Return the first stage of the rank that holds ``stage``.

        With vocabulary parallelism, this stage stands for the rank's shard of the vocabulary.
        """
        return self.stages_of[self.rank_of[stage]][0]

    @property
    def last(self) -> int:
        """Number of the last stage, which computes the loss."""
        return self.stages - 1

    def is_first(self, stage: int) -> bool:
        return stage == 0

    def is_last(self, stage: int) -> bool:
        return stage == self.last

    def next(self, stage: int) -> int | None:
        """Return the stage whose input is the output of ``stage``; None for the last stage."""
        return None if self.is_last(stage) else stage + 1

    def previous(self, stage: int) -> int | None:
        """Return the stage whose output is the input of ``stage``; None for the first stage."""
        return None if self.is_first(stage) else stage - 1

    def neighbour(self, stage: int, which: Neighbour) -> int | None:
        """Return the next or the previous stage of ``stage``; None if there is none."""
        return self.next(stage) if which == Neighbour.NEXT else self.previous(stage)

    def is_remote(self, stage: int, which: Neighbour) -> bool | None:
        """Return whether a neighbour of ``stage`` is on another rank; None if it does not exist."""
        other = self.neighbour(stage, which)
        return None if other is None else self.rank_of[other] != self.rank_of[stage]

    @property
    def in_turn(self) -> bool:
        """Whether stage s is on rank s modulo the number of ranks, as in Megatron's schedules."""
        return all(rank == stage % self.ranks for stage, rank in enumerate(self.rank_of))


def line(ranks: int) -> Placement:
    """Return the placement with one stage on each pipeline rank, in order."""
    _check(ranks, "pipeline ranks")
    return Placement("line", tuple(range(ranks)))


def loop(ranks: int, *, vpp: int = 2) -> Placement:
    """Return the placement of Megatron's interleaving, with ``vpp`` chunks a rank.

    With p ranks, chunk c of rank r is stage c*p + r.
    """
    _check(ranks, "pipeline ranks")
    _check(vpp, "chunks of a rank (vpp)", ranks)
    return Placement("loop", tuple(range(ranks)) * vpp)


def v(ranks: int) -> Placement:
    """Return the V placement, two chunks a rank. With p ranks, stage s < p is on rank p-1-s.

    Stage p+k is on rank k. The open end, first and last stage, is on the last rank, where Megatron
    looks for the loss.
    """
    return replace(wave(ranks, waves=1), name="v")


def wave(ranks: int, *, waves: int = 2) -> Placement:
    """Return the placement of ``waves`` V's one after the other (Hanayo), 2*waves chunks a rank."""
    _check(ranks, "pipeline ranks")
    _check(waves, "waves", 2 * ranks)
    there, back = tuple(reversed(range(ranks))), tuple(range(ranks))
    return Placement("wave", (there + back) * waves)


def is_line_or_v(placement: Placement) -> bool:
    """Return whether ``placement`` is a `line` or `v`, the placements that allow vocabulary
    parallelism."""
    return placement.rank_of in (line(placement.ranks).rank_of, v(placement.ranks).rank_of)


_MOST_STAGES = 10**6  # a larger number of stages is a mistake, since no model has so many layers


def _check(number: int, what: str, stages: int = 1) -> None:
    """Raise ValueError if ``number`` is below 1 or so large that there would be too many stages.

    Each of the things counted, which errors call ``what``, has ``stages`` stages.
    """
    if number < 1:
        raise ValueError(f"the number of {what} is {number}; write 1 or more")
    if number * stages > _MOST_STAGES:
        raise ValueError(f"the number of {what} is {number}; no model has {number * stages} stages")
