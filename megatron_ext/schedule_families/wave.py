"""Families on several V's, one after the other.

With the model cut into more stages than a V has, a microbatch runs down and up the ranks several
times. Passes are shorter, so ranks wait less at the ends of a step, and send more messages.
"""

from __future__ import annotations

import heapq
from functools import partial

from megatron_ext.compile.registry import Maturity, family
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.placement import wave
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.search.best import best_known, best_schedule

_SLOTS = {Kind.FORWARD: 1, Kind.FULL_BACKWARD: 2}


@family(
    "hanayo",
    wave,
    source="Liu et al. 2023, arXiv:2308.15762",
    maturity=Maturity.LABORATORY,
    takes_slices=True,
)
def hanayo(problem: Problem) -> Schedule:
    """Hanayo: 1F1B along a snake of ``waves`` V's, with unsplit backward passes.

    Forward and backward passes alternate, those of the oldest microbatch first. If a rank has no
    pass of the kind whose turn it is, it runs the other kind. At most 2p microbatches are under way
    on p ranks, as fewer would not keep all ranks busy. The peak memory is well below that of 2p
    microbatches. Passes are laid out as if a chunk's F took one slot and its B two.

    With p = 2, m = 3, waves = 1:

    ::

        0  .   1F0 2F0 1F1 2F1 1F2 2B0 =   2F2 1B0 =   2B1 =   1B1 =   2B2 =   1B2 =   .   .
        1  0F0 0F1 0F2 3F0 3B0 =   3F1 3B1 =   3F2 3B2 =   0B0 =   .   0B1 =   .   .   0B2 =
    """
    placement, (there, back) = problem.placement, problem.orders
    rank_of = placement.rank_of
    rows: list[list[Action]] = [[] for _ in range(placement.ranks)]
    ready: list[dict[Kind, list[tuple[int, int]]]] = [{kind: [] for kind in _SLOTS} for _ in rows]
    turn = [Kind.FORWARD for _ in rows]
    # Heap of the running passes: the end, the action, and its number among the passes of its kind.
    running: list[tuple[int, Action, int]] = []
    now, idle = 0, set(range(placement.ranks))

    def make_ready(stage: int, kind: Kind, n: int) -> None:
        heapq.heappush(ready[rank_of[stage]][kind], (n, stage))

    # The first microbatches are ready to start on stage 0.
    slices = problem.slices.count
    in_flight = 2 * placement.ranks + slices - 1
    for n in range(min(in_flight, problem.pieces)):
        make_ready(0, Kind.FORWARD, n)
    while True:
        # Forward and backward passes take turns on a rank. An idle rank runs its oldest possible
        # pass of the kind whose turn it is; if there is none, of the other kind.
        for rank in sorted(idle):
            other = _other_kind(turn[rank])
            kind = turn[rank] if ready[rank][turn[rank]] else other
            if ready[rank][kind]:
                n, stage = heapq.heappop(ready[rank][kind])
                order = there if kind is Kind.FORWARD else back
                rows[rank].append(Action(stage, kind, order[n]))
                heapq.heappush(running, (now + _SLOTS[kind], rows[rank][-1], n))
                idle.remove(rank)
                turn[rank] = _other_kind(kind)
        if not running:
            return Schedule("hanayo", placement, tuple(map(tuple, rows)))
        # Each pass that ends now makes the pass possible that needs its output.
        now = running[0][0]
        while running and running[0][0] == now:
            _, (stage, kind, _), n = heapq.heappop(running)
            idle.add(rank_of[stage])
            is_forward = kind is Kind.FORWARD
            to = placement.next(stage) if is_forward else placement.previous(stage)
            if to is not None:
                make_ready(to, kind, n)
            # All slices of the microbatch have ended their forward passes on the last stage, so the
            # slices start their backward passes.
            elif is_forward and n % slices == slices - 1:
                for turned in range(n - slices + 1, n + 1):
                    make_ready(stage, Kind.FULL_BACKWARD, turned)
            # A microbatch has left the pipeline, so the next one starts.
            elif not is_forward and n + in_flight < problem.pieces:
                make_ready(0, Kind.FORWARD, n + in_flight)


def _other_kind(kind: Kind) -> Kind:
    return Kind.FULL_BACKWARD if kind is Kind.FORWARD else Kind.FORWARD


@family(
    "wave-auto",
    wave,
    source="ours; waves are those of Liu et al. 2023, arXiv:2308.15762",
    maturity=Maturity.STABLE,
    splits_backward=True,
    uses_costs=True,
    searches=True,
    steps_overlap=True,
    fits_recompute=True,
    takes_slices=True,
    at_once=partial(best_known, "wave-auto"),
)
def wave_auto(problem: Problem) -> Schedule:
    """Searched schedule on several V's: the least makespan within the memory limit, with W split
    off.

    Without a limit, memory is limited to p microbatches on p ranks. With post-validation the least
    span is searched.

    Raises:
        ValueError: nothing on this placement fits into the limit.
    """
    return best_schedule("wave-auto", problem)
