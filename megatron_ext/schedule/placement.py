"""Which rank holds which stage.

A stage is a contiguous piece of the model, 0 to n-1 from input to loss. The stages of one rank
are its chunks, 0 to v-1 in stage order; Megatron calls a chunk's number its vp_stage.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True)
class Placement:
    """``rank_of[s]`` is the pipeline rank that holds stage s."""

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
        """Stages per rank (the largest number, should they differ)."""
        return max(len(stages) for stages in self.stages_of)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank, in order: entry c is the rank's chunk c."""
        rows: list[list[int]] = [[] for _ in range(self.ranks)]
        for stage, rank in enumerate(self.rank_of):
            rows[rank].append(stage)
        return tuple(tuple(row) for row in rows)

    def shard_beside(self, stage: int) -> int:
        """The first stage of the rank that holds ``stage``: with vocabulary parallelism the rank's
        shard lies beside it."""
        return self.stages_of[self.rank_of[stage]][0]

    @property
    def in_turn(self) -> bool:
        """Whether stage s is on rank s modulo p, where Megatron's own schedules have it."""
        return all(rank == stage % self.ranks for stage, rank in enumerate(self.rank_of))

    def is_remote(self, stage: int, neighbour: int) -> bool | None:
        """Whether stage ``stage + neighbour`` is on another rank; None at the pipeline's end."""
        other = stage + neighbour
        if not 0 <= other < self.stages:
            return None
        return self.rank_of[other] != self.rank_of[stage]


def line(ranks: int) -> Placement:
    """One stage a rank, in order."""
    _check(ranks, "pipeline ranks")
    return Placement("line", tuple(range(ranks)))


def loop(ranks: int, *, vpp: int = 2) -> Placement:
    """``vpp`` chunks a rank, Megatron's interleaving: chunk c of rank r is stage c*p + r."""
    _check(ranks, "pipeline ranks")
    _check(vpp, "chunks of a rank (vpp)")
    return Placement("loop", tuple(range(ranks)) * vpp)


def v(ranks: int) -> Placement:
    """Two chunks a rank, down and up again: stage s < p on rank p-1-s, stage p+k on rank k.

    The open end, first and last stage, is on the last rank, where Megatron looks for the loss.
    """
    return replace(wave(ranks, waves=1), name="v")


def wave(ranks: int, *, waves: int = 2) -> Placement:
    """``waves`` V's one after the other: 2*waves chunks a rank (Hanayo)."""
    _check(ranks, "pipeline ranks")
    _check(waves, "waves")
    there, back = tuple(reversed(range(ranks))), tuple(range(ranks))
    return Placement("wave", (there + back) * waves)


def is_line_or_v(placement: Placement) -> bool:
    """Whether stages lie as on a `line` or a `v`, where vocabulary parallelism can be trained."""
    return placement.rank_of in (line(placement.ranks).rank_of, v(placement.ranks).rank_of)


def _check(number: int, what: str) -> None:
    if number < 1:
        raise ValueError(f"the number of {what} is {number}; at least one is needed")
