"""Offsets between the clocks of ranks.

Ranks on different hosts have clocks that differ by more than a message takes. Their times can be
put on one axis only with these offsets, each of which has a known error.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

ROUNDS = 20


@dataclass(frozen=True)
class Offset:
    """Offset of a rank's `time.perf_counter` from that of pipeline rank 0.

    The clock is ``seconds`` ahead, give or take ``error``. The error is a bound, not an estimate,
    as long as both clocks run at the same speed.
    """

    seconds: float
    error: float


def clock_offsets(group: dist.ProcessGroup, device: torch.device) -> list[Offset]:
    """Return the clock offset of each rank of ``group`` from its first, equal on all ranks.

    No rank leaves an all-reduce before every rank has entered it. So rank 0's time of leaving is
    later than another rank's time of entering, and vice versa. The tightest bounds of `ROUNDS`
    rounds are used. The error is about the duration of one all-reduce. Collective over ``group``.
    """
    token = torch.zeros(1, device=device)
    entered, left = [], []
    for _ in range(ROUNDS):
        entered.append(time.perf_counter())
        dist.all_reduce(token, group=group)
        token.item()  # waits until the GPU has finished the all-reduce
        left.append(time.perf_counter())
    rounds: list[tuple[list[float], list[float]]] = [([], [])] * group.size()
    dist.all_gather_object(rounds, (entered, left), group=group)
    return [_offset(rounds[0], other) for other in rounds]


def _offset(
    first: tuple[list[float], list[float]], other: tuple[list[float], list[float]]
) -> Offset:
    if other is first:
        return Offset(0.0, 0.0)
    least = max(theirs - ours for theirs, ours in zip(other[0], first[1], strict=True))
    most = min(theirs - ours for theirs, ours in zip(other[1], first[0], strict=True))
    return Offset((least + most) / 2, (most - least) / 2)
