"""Estimate of a schedule that balances attention between pipeline ranks (SlimPipe, Li et al. 2025),
for comparison with slices of balanced lengths, which need no messages for it. No training does
this.

Call a slice's queries with a slice's keys a tile. If all slices have one length, slice j, from 0,
has j + 1/2 tiles to attend to. Ranks that run different slices at a time can balance that: a rank
with more tiles than the mean sends queries, and keys and values for the excess tiles, to a rank
with fewer, and adds up the outputs that come back. In the backward pass, queries and the gradients
of outputs are sent, and the gradients of queries, keys and values come back. (Sums of softmax, one
figure a head, do not count.)

In the steady state rank r runs slice t - r of a sequence of slices, forward or backward. All ranks
are busy only there; with fewer busy ranks there is less to balance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.registry import Choice
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.slices import Lengths

_QUERIES = 5  # tensors as wide as queries: 2 forward (queries, outputs), 3 backward
_KEYS = 3  # tensors as wide as keys and values: 1 forward, 2 backward (with gradients)


@dataclass(frozen=True)
class AttentionExchange:
    """Best case of an exchange, and the amount that it sends.

    Attributes:
        makespan: time in the unit of the costs if every pass attends to the mean number of tiles
            and no pass waits for these messages.
        sent: amount that each rank sends in a step, in bytes, or as a multiple of the keys and
            values of one microbatch on a rank if bytes are not known.
        in_bytes: whether ``sent`` is in bytes.
        seconds: time to send the largest of ``sent`` on a link with the speed of the hops; None if
            it is not known.
    """

    makespan: float
    sent: tuple[float, ...]
    in_bytes: bool
    seconds: float | None


def exchange(choice: Choice, problem: Problem, group: int) -> AttentionExchange:
    """Return the exchange of ``choice``, whose slices are of one length.

    Args:
        group: query heads that share a head of keys and values.

    Raises:
        ValueError: there are no slices of one length, or the costs have no attention.
    """
    costs, slices = problem.costs, problem.slices
    if slices.count == 1 or slices.lengths is not Lengths.EVEN:
        raise ValueError(
            f"attention is exchanged between slices of one length, and there are {slices.count}, "
            f"{slices}: give several, even ones"
        )
    if not any(costs.slices.attention):
        raise ValueError(
            "there is no attention to exchange: say in the costs what share of passes it is, as "
            "in attention=0.3"
        )
    evened = costs.with_slices(attention=())
    program = build_program(choice, replace(problem, costs=evened))
    times = _times_keys_values(problem.ranks, slices.count, group) * problem.microbatches
    placement = problem.placement
    of_stages = costs.slices.keys_values or (1 / placement.chunks,) * placement.stages
    sent = tuple(times * sum(of_stages[s] for s in stages) for stages in placement.stages_of)
    seconds = None
    if costs.slices.keys_values and costs.links.message_bytes:
        seconds = max(sent) / costs.links.message_bytes * (costs.links.hop - costs.links.latency)
    return AttentionExchange(
        simulate(program, evened).makespan, sent, bool(costs.slices.keys_values), seconds
    )


def _times_keys_values(ranks: int, slices: int, group: int) -> float:
    """Return the mean amount that a rank sends for a microbatch, as a multiple of the keys and
    values of that microbatch there."""
    tiles, pairs = 0.0, 0
    for slot in range(slices):
        loads = [(slot - rank) % slices for rank in range(ranks)]
        of_slot, pairs_of_slot = _evened(loads)
        tiles += of_slot
        pairs += pairs_of_slot
    of_keys, of_queries = tiles / ranks / slices, pairs / ranks / slices
    return _KEYS * of_keys + _QUERIES * of_queries * group / 2  # queries are group / 2 as wide


def _evened(loads: Sequence[int]) -> tuple[float, int]:
    """Return the amount of ``loads`` that moves from ranks above the mean to ranks below, and the
    number of transfers: the largest excess goes to the largest shortfall first."""
    mean = sum(loads) / len(loads)
    above = sorted((load - mean for load in loads if load > mean), reverse=True)
    below = sorted((mean - load for load in loads if load < mean), reverse=True)
    moved, pairs = sum(above), 0
    while above and below:
        goes = min(above[0], below[0])
        pairs += 1
        for side in (above, below):
            side[0] -= goes
            if side[0] < _TINY:
                side.pop(0)
    return moved, pairs


_TINY = 1e-9
