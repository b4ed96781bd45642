"""Packer of plans: it runs every pass of a plan as early as possible.

`pack` places the passes in the plan's order, each once its predecessors have been placed. The place
of a pass is the earliest time at which its rank is idle long enough and has the memory, also in a
gap between passes that were placed before. (Serial schedule generation, Kolisch 1996.)

`compiled` is the same algorithm for numba, about thirty times faster. There are two sources because
numba requires arrays, with which plain Python is slower than with lists (10.8 ms for a plan instead
of 5.8 ms). `tests/unit/search/test_packing.py` runs both on random problems and compares all start
times.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from megatron_ext.search.job_shop import JobShop, Starts

MAX_GAPS = 12  # number of gaps that are remembered for each rank; older gaps rarely fit a pass


class Packed(NamedTuple):
    """Result of packing a plan: the start ticks of its passes, and its makespan in ticks.

    The makespan includes the tails of the ranks (`JobShop.tails`).
    """

    makespan: int
    starts: Starts


Pack = Callable[[Starts], Packed]
# A gap: its start, its end, and the rank's peak memory from its start to the end of the row.
Gap = list[int]


def packer(shop: JobShop) -> Pack:
    """Return a function that packs plans of the job shop ``shop``, in plain Python."""
    return lambda plan: pack(shop, plan)


def pack(shop: JobShop, plan: Starts) -> Packed:
    """Return ``plan`` packed to the left: each pass starts as early as possible, in plan order.

    The memory limit must suffice for a microbatch (`JobShop.fits`).
    """
    # A search without numba spends most of its time in this loop, so it makes few calls and
    # look-ups.
    plan_starts: list[list[int]] = plan.tolist()
    operations, m, size = range(shop.operation_count), shop.columns, shop.operations_per_rank
    durations, deltas = shop.pass_durations.tolist(), shop.pass_memory_deltas.tolist()
    successors, limit = shop.successors_by_column, shop.limit
    may_acquire = (
        _BankersRule(shop).may_acquire
        if shop.recompute_deltas is None
        else _RecomputeRule(shop).may_acquire
    )
    # Number of placed passes of each operation, and the end of its latest one.
    count, op_end = [0 for _ in operations], [0 for _ in operations]
    missing = [[len(row)] * m for row in shop.predecessors]
    ready, starts = ([[0] * m for _ in operations] for _ in range(2))
    rank_end, held = list(shop.release_times), [0] * shop.placement.ranks
    gaps: list[list[Gap]] = [[] for _ in held]
    refused: list[list[tuple[int, int]]] = [[] for _ in held]
    heap = sorted((plan_starts[op][0], op) for op in operations if not shop.predecessors[op])
    push, pop = heapq.heappush, heapq.heappop
    while heap:
        entry = pop(heap)
        op = entry[1]
        rank, k = op // size, count[op]
        delta, duration = deltas[op][k], durations[op][k]
        if delta > 0 and (held[rank] + delta > limit or not may_acquire(op, rank, count)):
            refused[rank].append(entry)
            continue
        start = max(ready[op][k], op_end[op])
        if duration:
            start, rank_end[rank] = _put(
                gaps[rank], rank_end[rank], start, duration, delta, held[rank], limit
            )
        held[rank] += delta
        starts[op][k] = start
        end = op_end[op] = start + duration
        following = count[op] = k + 1
        if following < m and not missing[op][following]:
            push(heap, (plan_starts[op][following], op))
        for successor, p2p_ticks, columns in successors[op]:
            waits, n, there = missing[successor], columns[k], end + p2p_ticks[k]
            waits[n] -= 1
            if there > ready[successor][n]:
                ready[successor][n] = there
            if not waits[n] and count[successor] == n:
                push(heap, (plan_starts[successor][n], successor))
        while refused[rank]:
            push(heap, refused[rank].pop())
    assert min(count) == m, "memory got stuck"
    return Packed(max(map(int.__add__, rank_end, shop.tails)), np.array(starts, dtype=np.int64))


class _BankersRule:
    """Rule by which packing never deadlocks for memory, if nothing is recomputed.

    It is the banker's rule with the oldest microbatch served first. Let k be the first microbatch
    that lacks a pass on a rank that acquires memory there. A pass may acquire memory only if the
    following stays within the limit: the memory that microbatches after k hold, plus all that one
    microbatch may ever need. The oldest microbatch that is not done can then always continue.
    Earlier microbatches hold no memory any more, so on each rank it either has all the memory that
    it needs, or it is the k of that rank and finds enough. Its progress preserves the rule, as the
    next k has fewer microbatches after it. With slices, the rule is applied to whole microbatches.
    """

    def __init__(self, shop: JobShop) -> None:
        self.acquiring: list[list[int]] = [[] for _ in shop.microbatch_memory]
        self.changing: list[list[tuple[int, list[int]]]] = [[] for _ in shop.microbatch_memory]
        held_after: list[list[int]] = shop.held_after.tolist()
        for op, held in enumerate(held_after):
            rank, of_microbatch = op // shop.operations_per_rank, held[shop.slices]
            if of_microbatch > 0:
                self.acquiring[rank].append(op)
            if of_microbatch:
                self.changing[rank].append((op, held))
        # Memory of each rank that is free for the microbatches after the first incomplete one.
        self.free = [shop.limit - memory for memory in shop.microbatch_memory]
        self.slices = shop.slices

    def may_acquire(self, op: int, rank: int, count: list[int]) -> bool:
        """Return whether a rank may run the next pass of ``op`` without a memory deadlock later.

        The rank must still have enough memory for its first incomplete microbatch. (Incomplete: a
        pass that acquires memory has not been placed.)
        """
        count[op] += 1
        first = min([count[other] for other in self.acquiring[rank]])
        # Number of the first slice of the next microbatch.
        first += self.slices - first % self.slices
        behind = 0
        for other, held in self.changing[rank]:
            if count[other] > first:
                behind += held[count[other]] - held[first]
        count[op] -= 1
        return behind <= self.free[rank]


class _RecomputeRule:
    """Rule by which packing never deadlocks for memory if activations are recomputed.

    It is the banker's rule for the passes of a `JobShop`.
    """

    def __init__(self, shop: JobShop) -> None:
        self.limit, self.size = shop.limit, shop.operations_per_rank
        self.operation_order = shop.operation_order
        self.memory_deltas: list[list[int]] = shop.pass_memory_deltas.tolist()
        self.held_after: list[list[int]] = shop.held_after.tolist()
        self.next_acquiring: list[list[int]] = shop.next_acquiring.tolist()

    def may_acquire(self, op: int, rank: int, count: list[int]) -> bool:
        """Return whether a rank may run the next pass of ``op`` without a memory deadlock later.

        The rank's microbatches must still be able to end one after the other.
        """
        count[op] += 1
        may = self._can_end(range(rank * self.size, (rank + 1) * self.size), count)
        count[op] -= 1
        return may

    def _can_end(self, operations: range, count: list[int]) -> bool:
        oldest = min([self.next_acquiring[op][count[op]] for op in operations])
        free = self.limit
        for (
            op
            # Microbatches before the oldest one free all that they store, and need nothing more.
        ) in operations:
            free -= self.held_after[op][max(count[op], oldest)]
        for k in range(oldest, max(count[operations.start : operations.stop])):
            need = more = 0
            for op in self.operation_order:
                if count[operations.start + op] <= k:
                    more += self.memory_deltas[operations.start + op][k]
                    need = max(need, more)
            if need > free:
                return False
            free -= more
        return True


def _put(
    gaps: list[Gap],
    rank_end: int,
    earliest: int,
    duration: int,
    delta: int,
    held: int,
    limit: int,
) -> tuple[int, int]:
    """Place a pass in its rank's first idle gap in which it fits, or after all other passes.

    Return its start, and the rank's new end, in ticks.
    """
    if gaps and earliest < rank_end:
        in_gap = _fill_gap(gaps, earliest, duration, delta, limit)
        if in_gap is not None:
            return in_gap, rank_end
    start = earliest if earliest > rank_end else rank_end
    if start > rank_end:
        gaps.append([rank_end, start, held])
        del gaps[:-MAX_GAPS]
    if delta > 0:
        for gap in gaps:
            if held + delta > gap[2]:
                gap[2] = held + delta
    return start, start + duration


def _fill_gap(gaps: list[Gap], earliest: int, duration: int, delta: int, limit: int) -> int | None:
    """Place a pass in its rank's first idle gap in which it fits; return its start tick, or
    None."""
    for index, (opens, closes, most) in enumerate(gaps):
        start = opens if opens > earliest else earliest
        end = start + duration
        if end > closes or (delta > 0 and most + delta > limit):
            continue
        left = [[opens, start, most + max(delta, 0)]] if start > opens else []
        right = [[end, closes, most + delta]] if closes > end else []
        for gap in gaps[:index]:
            gap[2] = max(gap[2], most + delta)
        for gap in gaps[index + 1 :]:
            gap[2] += delta
        gaps[index : index + 1] = left + right
        del gaps[:-MAX_GAPS]
        return start
    return None
