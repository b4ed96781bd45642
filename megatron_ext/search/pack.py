"""Packer of a plan: every pass as early as possible.

`pack` takes the passes in the plan's order, each as soon as its dependencies have been taken. It
puts each at the earliest time at which its rank is idle long enough and has the memory, if possible
in a gap between passes taken before. (Serial schedule generation, Kolisch 1996.)

`compiled` is the same for numba, about thirty times faster. They are two sources because numba's
version works on arrays, on which plain Python takes 10.8 ms for a plan instead of 5.8 ms on lists;
`tests/unit/search/test_packing.py` runs both on random problems and compares them to the digit.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from megatron_ext.search.job_shop import Shop, Starts

GAPS = 12  # remembered of a rank; older ones have rarely anything left that fits


class Packed(NamedTuple):
    """A makespan in ticks, with heads and tails, and the schedule that has it."""

    makespan: int
    starts: Starts


Pack = Callable[[Starts], Packed]
Gap = list[int]  # start, end, the most that is held from here to the end of the rank


def packer(shop: Shop) -> Pack:
    """Return `pack` for ``shop``."""
    return lambda plan: pack(shop, plan)


def pack(shop: Shop, plan: Starts) -> Packed:
    """Return ``plan`` packed to the left. The limit must suffice for a microbatch (`Shop.fits`)."""
    # A search without numba spends its time in this loop: it calls little and looks little up.
    wanted: list[list[int]] = plan.tolist()
    lanes, m, size = shop.lanes, shop.pieces, shop.lanes_of_rank
    durations, gains = shop.durations_of_all.tolist(), shop.gains_of_all.tolist()
    after, limit = shop.after_by_column, shop.limit
    may_take = (
        _BankersRule(shop).may_take
        if shop.recompute_gains is None
        else _RecomputeRule(shop).may_take
    )
    count, lane_end = [0] * lanes, [0] * lanes  # count: passes taken
    missing = [[len(row)] * m for row in shop.before]
    ready, starts = ([[0] * m for _ in range(lanes)] for _ in range(2))
    rank_end, held = list(shop.heads), [0] * shop.placement.ranks
    gaps: list[list[Gap]] = [[] for _ in held]
    refused: list[list[tuple[int, int]]] = [[] for _ in held]
    heap = sorted((wanted[lane][0], lane) for lane in range(lanes) if not shop.before[lane])
    push, pop = heapq.heappush, heapq.heappop
    while heap:
        entry = pop(heap)
        lane = entry[1]
        rank, k = lane // size, count[lane]
        gain, duration = gains[lane][k], durations[lane][k]
        if gain > 0 and (held[rank] + gain > limit or not may_take(lane, rank, count)):
            refused[rank].append(entry)
            continue
        start = max(ready[lane][k], lane_end[lane])
        if duration:
            start, rank_end[rank] = _put(
                gaps[rank], rank_end[rank], start, duration, gain, held[rank], limit
            )
        held[rank] += gain
        starts[lane][k] = start
        end = lane_end[lane] = start + duration
        following = count[lane] = k + 1
        if following < m and not missing[lane][following]:
            push(heap, (wanted[lane][following], lane))
        for follower, hops, columns in after[lane]:
            waits, n, there = missing[follower], columns[k], end + hops[k]
            waits[n] -= 1
            if there > ready[follower][n]:
                ready[follower][n] = there
            if not waits[n] and count[follower] == n:
                push(heap, (wanted[follower][n], follower))
        while refused[rank]:
            push(heap, refused[rank].pop())
    assert min(count) == m, "memory got stuck"
    return Packed(max(map(int.__add__, rank_end, shop.tails)), np.array(starts, dtype=np.int64))


class _BankersRule:
    """The rule of `shop` by which memory never deadlocks, without recompute."""

    def __init__(self, shop: Shop) -> None:
        self.taking: list[list[int]] = [[] for _ in shop.rooms]
        self.changing: list[list[tuple[int, list[int]]]] = [[] for _ in shop.rooms]
        held_after: list[list[int]] = shop.held_after.tolist()
        for lane, held in enumerate(held_after):
            rank, of_microbatch = lane // shop.lanes_of_rank, held[shop.slices]
            if of_microbatch > 0:
                self.taking[rank].append(lane)
            if of_microbatch:
                self.changing[rank].append((lane, held))
        self.free = [shop.limit - needed for needed in shop.rooms]  # less one microbatch's
        self.slices = shop.slices

    def may_take(self, lane: int, rank: int, count: list[int]) -> bool:
        """Return whether after the next pass of ``lane`` the rank still has enough memory for the
        first microbatch that lacks some of its memory, next to the memory that later microbatches
        hold."""
        count[lane] += 1
        first = min([count[other] for other in self.taking[rank]])
        first += self.slices - first % self.slices  # of the next microbatch
        behind = 0
        for other, held in self.changing[rank]:
            if count[other] > first:
                behind += held[count[other]] - held[first]
        count[lane] -= 1
        return behind <= self.free[rank]


class _RecomputeRule:
    """The rule of `shop` by which memory never deadlocks, with recompute."""

    def __init__(self, shop: Shop) -> None:
        self.limit, self.way, self.size = shop.limit, shop.way, shop.lanes_of_rank
        self.gains: list[list[int]] = shop.gains_of_all.tolist()
        self.held_after: list[list[int]] = shop.held_after.tolist()
        self.next_taking: list[list[int]] = shop.next_taking.tolist()

    def may_take(self, lane: int, rank: int, count: list[int]) -> bool:
        """Return whether after the next pass of ``lane`` the microbatches of its rank can end, one
        after the other."""
        count[lane] += 1
        may = self._can_end(range(rank * self.size, (rank + 1) * self.size), count)
        count[lane] -= 1
        return may

    def _can_end(self, lanes: range, count: list[int]) -> bool:
        oldest = min([self.next_taking[lane][count[lane]] for lane in lanes])
        free = self.limit
        for lane in lanes:  # those before the oldest give back what they hold, and need nothing
            free -= self.held_after[lane][max(count[lane], oldest)]
        for k in range(oldest, max(count[lanes.start : lanes.stop])):
            need = more = 0
            for lane in self.way:
                if count[lanes.start + lane] <= k:
                    more += self.gains[lanes.start + lane][k]
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
    gain: int,
    held: int,
    limit: int,
) -> tuple[int, int]:
    """Put a pass into the first gap of its rank in which it fits, or behind all others. Return its
    start, and the rank's new end."""
    if gaps and earliest < rank_end:
        in_gap = _fill_gap(gaps, earliest, duration, gain, limit)
        if in_gap is not None:
            return in_gap, rank_end
    start = earliest if earliest > rank_end else rank_end
    if start > rank_end:
        gaps.append([rank_end, start, held])
        del gaps[:-GAPS]
    if gain > 0:
        for gap in gaps:
            if held + gain > gap[2]:
                gap[2] = held + gain
    return start, start + duration


def _fill_gap(gaps: list[Gap], earliest: int, duration: int, gain: int, limit: int) -> int | None:
    """Put a pass into the first gap in which it fits. Return its start, or None."""
    for index, (opens, closes, most) in enumerate(gaps):
        start = opens if opens > earliest else earliest
        end = start + duration
        if end > closes or (gain > 0 and most + gain > limit):
            continue
        left = [[opens, start, most + max(gain, 0)]] if start > opens else []
        right = [[end, closes, most + gain]] if closes > end else []
        for gap in gaps[:index]:
            gap[2] = max(gap[2], most + gain)
        for gap in gaps[index + 1 :]:
            gap[2] += gain
        gaps[index : index + 1] = left + right
        del gaps[:-GAPS]
        return start
    return None
