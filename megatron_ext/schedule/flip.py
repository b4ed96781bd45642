"""Conversion of V's and waves that open on rank 0 into ours, which open on the last rank.

torch.distributed.pipelining and the papers put the first and the last stage on rank 0. Here they
are on the last rank, where Megatron looks for the loss. Counting the ranks from the other end turns
one placement into the other and changes nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ext.schedule.action import Rows
from megatron_ext.schedule.placement import Placement


@dataclass(frozen=True)
class FlippedPlacement(Placement):
    """Placement read from a file in which the V or wave has its first and last stage on rank 0.

    Here the ranks are counted from the other end; a table written from this placement has the
    file's order.
    """


def opens_on_first_rank(rank_of: Sequence[int]) -> bool:
    """Return whether ``rank_of`` is a V or wave with stage 0 on rank 0.

    ``rank_of`` has the rank of each stage. A wave is several V's one after the other.
    """
    ranks = max(rank_of) + 1
    one_v = (*range(ranks), *reversed(range(ranks)))
    waves, rest = divmod(len(rank_of), len(one_v))
    return ranks > 1 and rest == 0 and tuple(rank_of) == one_v * waves


def opens_on_last_rank(rank_of: Sequence[int]) -> bool:
    """Return whether ``rank_of`` (rank by stage) is a V or wave with stage 0 on the last rank."""
    last = max(rank_of)
    return opens_on_first_rank([last - rank for rank in rank_of])


def flipped(placement: Placement) -> FlippedPlacement:
    """Return ``placement`` with its ranks counted from the other end."""
    last = placement.ranks - 1
    return FlippedPlacement(placement.name, tuple(last - rank for rank in placement.rank_of))


def flip_rows(rows: Rows) -> Rows:
    """Return the ranks' ``rows`` of actions in reverse order of the ranks.

    The function is its own inverse.
    """
    return rows[::-1]
