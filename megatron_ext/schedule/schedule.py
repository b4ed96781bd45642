"""A schedule, the problem it solves, and its CSV form."""

from __future__ import annotations

import csv
import enum
import io
import re
from collections.abc import Callable
from dataclasses import dataclass

from megatron_ext.schedule.action import Action, Kind, parse
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.flip import (
    FlippedPlacement,
    flip_rows,
    flipped,
    opens_on_first_rank,
)
from megatron_ext.schedule.kinds import RULES, Lane, Where
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.placement import Placement


class P2P(enum.StrEnum):
    """How messages share communicators. On one, batches move one after the other (`graph`)."""

    ASYNC = "async"  # a communicator a channel, and every message by itself
    BATCHED = "batched"  # the pipeline's one communicator


class VocabularyParallel(enum.StrEnum):
    """How embedding and output layer are divided over the ranks (Yeung et al. 2024, section 4)."""

    NONE = "none"  # not: they are on the first and the last stage
    ONE = "1"  # over all ranks; the input gradient is made when all statistics are there
    TWO = "2"  # the same, but before: one exchange less between logits and input gradient


class Offload(enum.StrEnum):
    """Which activations leave for host memory until they are needed (Wan et al. 2025)."""

    NONE = "none"
    HALF = "half"  # the longer-lived half of a rank's chunks
    FULL = "full"  # all that host copies are quick enough for
    FIT = "fit"  # the fewest that bring each rank within the memory limit


@dataclass(frozen=True)
class Problem:
    """What a family has to solve.

    Attributes:
        placement: which rank holds which stage.
        microbatches: m >= 1 of one training step.
        costs: seconds per stage and kind, and per hop.
        memory_limit: what no rank may exceed; None is no limit.
        forward_only: evaluation, where nothing is differentiated and nothing is held.
        p2p: how messages share communicators.
        vocabulary: how embedding and output layer are divided over the ranks. (Families are asked
            without: `transforms.vocabulary` adds the passes.)
        offload: which activations leave for host memory. (Families are asked without it and
            without the memory limit: `transforms.offload` adds the copies.)
        post_validation: the optimizer steps before all ranks are done, and is taken back where that
            was wrong: steps overlap, and cost about their span. (Families see it, as another
            schedule may then be the best; `transforms.post_validation` adds the messages.)
    """

    placement: Placement
    microbatches: int
    costs: Costs
    memory_limit: MemoryLimit | None = None
    forward_only: bool = False
    p2p: P2P = P2P.ASYNC
    vocabulary: VocabularyParallel = VocabularyParallel.NONE
    offload: Offload = Offload.NONE
    post_validation: bool = False

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise ValueError(f"microbatches is {self.microbatches}; at least one is needed")
        if self.p2p is P2P.BATCHED and self.vocabulary is not VocabularyParallel.NONE:
            raise ValueError(
                f"vocabulary parallelism {self.vocabulary} with messages {self.p2p}: its "
                f"collectives need communicators of their own; write messages {P2P.ASYNC}"
            )
        if self.offload is not Offload.NONE and self.costs.host is None:
            raise ValueError(
                f"offload {self.offload}: the costs ({self.costs.origin}) do not say how long "
                f"copies to the host and back take: add d2h= and h2d=, seconds per microbatch of a "
                f"full rank"
            )
        if self.offload is Offload.FIT and self.memory_limit is None:
            raise ValueError(
                f"offload {self.offload} has no memory limit to fit into: give one, or write "
                f"{Offload.FULL} or {Offload.HALF}"
            )
        if self.post_validation:
            self._check_post_validation()
        assert self.costs.stages == self.placement.stages

    def _check_post_validation(self) -> None:
        beside = ""
        if self.vocabulary is not VocabularyParallel.NONE:
            beside = f"vocabulary parallelism {self.vocabulary}: its collectives hold all ranks up"
        elif self.offload is not Offload.NONE:
            beside = f"offload {self.offload}: what has left for the host cannot be undone"
        elif self.p2p is P2P.BATCHED:
            beside = f"messages {self.p2p}: a batch could be under way at the verdict"
        if beside:
            raise ValueError(f"post-validation does not go with {beside}; drop one")
        firsts = sorted(stages[0] for stages in self.placement.stages_of)
        if firsts != list(range(self.ranks)):
            raise ValueError(
                f"post-validation passes the optimizer's state from the rank of a stage to that of "
                f"the next: the first {self.ranks} stages have to be on {self.ranks} ranks, and "
                f"they are on ranks {self.placement.rank_of[: self.ranks]}; use another placement, "
                f"or drop it"
            )

    @property
    def ranks(self) -> int:
        return self.placement.ranks


@dataclass(frozen=True)
class Schedule:
    """``rows[r]`` is what rank r does, in order. A family makes the compute actions only."""

    name: str
    placement: Placement
    rows: tuple[tuple[Action, ...], ...]

    @property
    def compute_rows(self) -> tuple[tuple[Action, ...], ...]:
        return tuple(tuple(a for a in row if is_compute(a)) for row in self.rows)


Family = Callable[[Problem], Schedule]
Transform = Callable[[Schedule, Problem], Schedule]


def is_compute(action: Action) -> bool:
    return RULES[action.kind].lane is Lane.COMPUTE


def to_csv(schedule: Schedule) -> str:
    """The compute actions, one line per rank in rank order, PyTorch's grammar: ``0F0,0F1,0B0``.

    A table that `from_csv` has flipped is flipped back.
    """
    rows = schedule.compute_rows
    if isinstance(schedule.placement, FlippedPlacement):
        rows = flip_rows(rows)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def from_csv(text: str, name: str) -> Schedule:
    """The schedule that ``text`` holds: the inverse of `to_csv`. Empty cells are idle time.

    A compound such as ``(0F1;4B0)OVERLAP_F_B`` is its parts, one after the other. A V or wave that
    opens on rank 0 is flipped (`flip`).

    The placement is read off the table: a stage is on the rank that first names it. (That a stage
    stays there, and all else, is for `prove` to say.)

    Raises:
        ValueError: a cell is no compute action, a line is empty, or a stage is missing.
    """
    rows: list[tuple[Action, ...]] = []
    for number, cells in enumerate(csv.reader(io.StringIO(text)), start=1):
        try:
            row = tuple(parse(part) for cell in cells for part in _parts(cell))
        except ValueError as error:
            raise ValueError(f"{name}, line {number}: {error}") from None
        for action in row:
            if not is_compute(action):
                raise ValueError(
                    f"{name}, line {number}: {action} is no pass; messages and waits are inserted "
                    f"by us, leave them out"
                )
            if RULES[action.kind].where is not Where.STAGE:
                raise ValueError(
                    f"{name}, line {number}: {action} is a pass of vocabulary parallelism; those "
                    f"are inserted by us, leave them out"
                )
        if not row:
            raise ValueError(
                f"{name}, line {number} holds no action; there is one line per rank, and every "
                f"rank has a stage"
            )
        rows.append(row)
    rank_of: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            rank_of.setdefault(action.stage, rank)
    if not rank_of:
        raise ValueError(f"{name} holds no action")
    missing = sorted(set(range(max(rank_of) + 1)) - set(rank_of))
    if missing:
        raise ValueError(f"{name} names stage {max(rank_of)} but no action of stage {missing[0]}")
    placement = Placement("file", tuple(rank_of[stage] for stage in range(len(rank_of))))
    if placement.ranks == len(rows) and opens_on_first_rank(placement.rank_of):
        return Schedule(name, flipped(placement), flip_rows(tuple(rows)))
    return Schedule(name, placement, tuple(rows))


_COMPOUND = re.compile(r"\((.*)\)OVERLAP_F_B")


def _parts(cell: str) -> list[str]:
    """The actions in a cell: none, one, or those of a compound."""
    compound = _COMPOUND.fullmatch(cell.strip())
    if compound:
        return compound[1].split(";")
    return [cell] if cell.strip() else []


def bitwise_order(schedule: Schedule) -> bool:
    """Whether F, I (or B) and W of each stage each run in microbatch order, as in stock Megatron.

    Then gradients are summed in stock's order, and the results are stock's to the last bit. (Not
    with vocabulary parallelism: the ranks' shards are summed in another order.)
    """
    latest: dict[tuple[int, Kind], int] = {}
    for row in schedule.compute_rows:
        for action in row:
            if RULES[action.kind].where is not Where.STAGE:
                return False
            for kind in RULES[action.kind].covers:
                if latest.get((action.stage, kind), -1) > action.microbatch:
                    return False
                latest[action.stage, kind] = action.microbatch
    return True
