"""How far the clocks of ranks are apart."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

ROUNDS = 20


@dataclass(frozen=True)
class Offset:
    """What a rank's `time.perf_counter` is ahead of rank 0's: ``seconds``, give or take ``error``.

    The error is a bound and no estimate, as long as both clocks run at one speed meanwhile.
    """

    seconds: float
    error: float


def clock_offsets(group: dist.ProcessGroup, device: torch.device) -> list[Offset]:
    """The offset of each rank of ``group``, the same list on every rank. Collective over it.

    Nobody leaves an all-reduce before everybody has entered it. So what rank 0's clock shows when
    it leaves is later than what another's shows when it enters, and the other way round; the best
    of some rounds is taken. The error comes to about as long as one all-reduce takes.
    """
    token = torch.zeros(1, device=device)
    entered, left = [], []
    for _ in range(ROUNDS):
        entered.append(time.perf_counter())
        dist.all_reduce(token, group=group)
        token.item()  # a GPU's host has not waited yet
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
