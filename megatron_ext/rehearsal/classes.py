"""Classes of pipeline ranks with equal stages, of which one rank each is rehearsed.

Ranks 1 to 6 of a linear pipeline of 8 ranks have equal layers, so their passes take equally long:
rank 1 stands for them, because it stores the most activations. The ends of the model make classes
of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.schedule import Schedule, is_compute


@dataclass(frozen=True)
class RankClass:
    """Pipeline ranks with equal stages, of which a rehearsal runs one for all.

    Attributes:
        rank: pipeline rank that runs, the one with the largest predicted peak of the class.
        members: all pipeline ranks of the class, in order.
        sends_both: whether ``rank`` sends both activations and gradients.
    """

    rank: int
    members: tuple[int, ...]
    sends_both: bool


def classes_of(
    schedule: Schedule, stages: Sequence[Hashable], peaks: Sequence[float]
) -> tuple[RankClass, ...]:
    """Return the classes of ranks of ``schedule``, in the order in which a rehearsal runs them.

    Ranks of a class have equal stages and run passes of the same kinds. Classes whose rank sends
    both activations and gradients come first: a later rank that sends none in a direction receives
    values there that are as large as those that the first ones sent.

    Args:
        stages: description of each stage; stages with equal descriptions take equally long.
        peaks: predicted peak of each pipeline rank, in bytes or in microbatches.
    """
    placement = schedule.placement
    members: dict[Hashable, list[int]] = defaultdict(list)
    for rank, on_rank in enumerate(placement.stages_of):
        passes = filter(is_compute, schedule.rows[rank])
        kinds = frozenset((on_rank.index(action.stage), action.kind) for action in passes)
        members[tuple(stages[stage] for stage in on_rank), kinds].append(rank)
    made = []
    for ranks in members.values():
        # The rank with the highest peak represents its class; if several ranks have that peak, the
        # first one does.
        fullest = max(ranks, key=lambda rank: peaks[rank])
        made.append(RankClass(fullest, tuple(ranks), all(sends(placement, fullest))))
    return tuple(sorted(made, key=lambda one: (not one.sends_both, one.rank)))


def sending_ranks(placement: Placement, rank: int) -> tuple[frozenset[int], frozenset[int]]:
    """Return the ranks that send ``rank`` activations, and the ranks that send it gradients."""
    on_rank = placement.stages_of[rank]

    def at(distance: int) -> frozenset[int]:
        stages = (stage + distance for stage in on_rank)
        ranks = (placement.rank_of[stage] for stage in stages if 0 <= stage <= placement.last)
        return frozenset(ranks) - {rank}

    return at(-1), at(1)


def sends(placement: Placement, rank: int) -> tuple[bool, bool]:
    """Return two answers: whether ``rank`` sends activations, and whether it sends gradients."""
    on_rank = placement.stages_of[rank]

    def is_elsewhere(stage: int) -> bool:
        return 0 <= stage <= placement.last and placement.rank_of[stage] != rank

    return (
        any(is_elsewhere(stage + 1) for stage in on_rank),
        any(is_elsewhere(stage - 1) for stage in on_rank),
    )
