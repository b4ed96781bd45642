"""`pack` compiled by numba, on arrays of whole numbers. Import this only if numba is installed.

This module mirrors `pack` function by function, and returns the same start times.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba import njit

from megatron_ext.base.progress import remark, task
from megatron_ext.search import disk_cache
from megatron_ext.search.job_shop import JobShop, Precedences, Starts
from megatron_ext.search.pack import MAX_GAPS, Pack, Packed

Int64s = npt.NDArray[np.int64]

_BITS = 16  # lowest bits of a heap's entry, which are the operation; the bits above are its start
_MASK = (1 << _BITS) - 1
if numba.config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set")

_NONE = -1
_UNBOUNDED = 1 << 62
# Indices of a gap's start, its end, and the peak memory from its start on.
_OPENS, _CLOSES, _PEAK = range(3)


def compiled_packer(shop: JobShop) -> Pack:
    """Return a function compiled by numba that packs plans of the job shop as `pack.pack` does."""
    tables, run = _tables(shop), _compiled()

    def pack(plan: Starts) -> Packed:
        starts = np.empty(plan.shape, np.int64)
        makespan = run(
            np.ascontiguousarray(plan, np.int64), starts, *tables, shop.slices, shop.limit, MAX_GAPS
        )
        assert makespan >= 0, "memory got stuck"
        return Packed(makespan, starts)

    return pack


def _tables(shop: JobShop) -> tuple[Int64s, ...]:
    assert shop.operation_count <= _MASK
    rank_of = np.repeat(np.arange(shop.placement.ranks), shop.operations_per_rank)
    # Equal columns are stored only once, since full tables of a long step would exceed a CPU's
    # caches.
    width = shop.column_period if shop.recompute_deltas is None else shop.columns
    place = np.arange(shop.columns) % width
    columns = (
        *(rank_of, shop.microbatch_memory, shop.release_times, shop.tails, shop.operation_order),
        *(shop.is_forward, shop.opposite_columns, place, shop.held_after[:, shop.slices]),
    )
    figures = (shop.pass_durations, shop.pass_memory_deltas, shop.pass_p2p_ticks)
    return (
        *(np.array(column, np.int64) for column in columns),
        *(np.ascontiguousarray(table[:, :width], np.int64) for table in figures),
        *(np.ascontiguousarray(t, np.int64) for t in (shop.held_after, shop.next_acquiring)),
        *_precedences(shop.predecessors, shop.successors),
    )


# Types of the arguments of `_pack`: the plan, the starts, the tables, and three numbers.
_LIST, _TABLE = numba.int64[::1], numba.int64[:, ::1]
_SIGNATURE = (_TABLE, _TABLE, *(_LIST,) * 9, *(_TABLE,) * 8, *(numba.int64,) * 3)


# The result is cached, since a search makes many job shops with the same precedences.
@functools.lru_cache(maxsize=8)
def _precedences(
    predecessors: Precedences, successors: Precedences
) -> tuple[Int64s, Int64s, Int64s]:
    """Return arrays with a row for each operation: predecessors, ticks of messages, successors.

    The ticks are those of the messages from the predecessors. Rows are padded with `_NONE`.
    """
    earlier, later = (
        _padded([[op for op, _ in row] for row in rows]) for rows in (predecessors, successors)
    )
    return earlier, _padded([[ticks for _, ticks in row] for row in predecessors]), later


def _padded(rows: Sequence[Sequence[int]]) -> Int64s:
    table = np.full((len(rows), max(map(len, rows)) + 1), _NONE, dtype=np.int64)
    for row, figures in zip(table, rows, strict=True):
        row[: len(figures)] = figures
    return table


def _pack(
    plan: Int64s,
    starts: Int64s,
    rank_of: Int64s,
    microbatch_memory: Int64s,
    release_times: Int64s,
    tails: Int64s,
    order: Int64s,
    is_forward: Int64s,
    opposite: Int64s,
    place: Int64s,
    microbatch_delta: Int64s,
    durations: Int64s,
    deltas: Int64s,
    pass_p2p_ticks: Int64s,
    held_after: Int64s,
    next_acquiring: Int64s,
    predecessors: Int64s,
    p2p_ticks: Int64s,
    successors: Int64s,
    slices: int,
    limit: int,
    max_gaps: int,
) -> int:
    """Pack a plan: fill ``starts`` with start times, and return the makespan in ticks.

    Return -1 if memory deadlocked.
    """
    operations, m = plan.shape
    ranks, size = len(microbatch_memory), len(plan) // len(microbatch_memory)
    count = np.zeros(operations, np.int64)
    op_end = np.zeros(operations, np.int64)
    end = release_times.copy()
    held = np.zeros(ranks, np.int64)
    op_held = np.zeros(operations, np.int64)
    gaps = np.empty((ranks, max_gaps + 1, 3), np.int64)
    gap_count = np.zeros(ranks, np.int64)
    refused = np.empty((ranks, size), np.int64)
    refusals = np.zeros(ranks, np.int64)
    heap, entries, left = np.empty(operations, np.int64), 0, operations * m
    for op in range(operations):
        if predecessors[op, 0] == _NONE:
            entries = _push(heap, entries, (plan[op, 0] << _BITS) | op)
    while entries:
        entry = heap[0]
        entries = _pop(heap, entries)
        op = entry & _MASK
        rank, k = rank_of[op], count[op]
        delta, duration = deltas[op, place[k]], durations[op, place[k]]
        if delta > 0 and (
            held[rank] + delta > limit
            or not (
                _can_end(
                    op,
                    rank * size,
                    deltas,
                    held_after,
                    next_acquiring,
                    count,
                    limit,
                    order,
                )
                if len(order)
                else _may_acquire(
                    op,
                    delta,
                    rank * size,
                    size,
                    microbatch_delta,
                    op_held,
                    count,
                    slices,
                    limit - microbatch_memory[rank],
                )
            )
        ):
            refused[rank, refusals[rank]] = entry
            refusals[rank] += 1
            continue
        earliest = _earliest(
            op,
            k,
            op_end[op],
            starts,
            durations,
            pass_p2p_ticks,
            predecessors,
            p2p_ticks,
            is_forward,
            opposite,
            place,
        )
        start = earliest
        if duration:
            start = _put(rank, earliest, duration, delta, limit, held, end, gaps, gap_count)
        starts[op, k] = start
        op_end[op] = start + duration
        op_held[op] += delta
        count[op] = k + 1
        left -= 1
        entries = _push_ready(
            heap, entries, op, plan, count, predecessors, successors, is_forward, opposite
        )
        while refusals[rank]:
            refusals[rank] -= 1
            entries = _push(heap, entries, refused[rank, refusals[rank]])
    return _NONE if left else int((end + tails).max())


@njit
def _may_acquire(
    op: int,
    delta: int,
    begin: int,
    size: int,
    microbatch_delta: Int64s,
    held: Int64s,
    count: Int64s,
    slices: int,
    allowed: int,
) -> bool:
    count[op] += 1
    held[op] += delta
    first, behind = _UNBOUNDED, 0
    for other in range(begin, begin + size):
        if microbatch_delta[other] > 0:
            first = min(first, count[other])
    microbatches = first // slices + 1
    first = microbatches * slices
    for other in range(begin, begin + size):
        if count[other] > first:
            behind += held[other] - microbatches * microbatch_delta[other]
    count[op] -= 1
    held[op] -= delta
    return behind <= allowed


@njit
def _can_end(
    op: int,
    begin: int,
    deltas: Int64s,
    held_after: Int64s,
    next_acquiring: Int64s,
    count: Int64s,
    limit: int,
    order: Int64s,
) -> bool:
    count[op] += 1
    oldest, newest = _UNBOUNDED, 0
    for other in range(begin, begin + len(order)):
        oldest = min(oldest, next_acquiring[other, count[other]])
        newest = max(newest, count[other])
    free = limit
    for other in range(begin, begin + len(order)):
        free -= held_after[other, max(count[other], oldest)]
    can = True
    for k in range(oldest, newest):
        need = more = 0
        for place in range(len(order)):
            other = begin + order[place]
            if count[other] <= k:
                more += deltas[other, k]
                need = max(need, more)
        if need > free:
            can = False
            break
        free -= more
    count[op] -= 1
    return can


@njit
def _column(k: int, op: int, other: int, is_forward: Int64s, opposite: Int64s) -> int:
    """Return the column of operation ``other`` for the microbatch, or slice, of column ``k`` of
    ``op``."""
    return opposite[k] if is_forward[op] != is_forward[other] else k


@njit
def _earliest(
    op: int,
    k: int,
    earliest: int,
    starts: Int64s,
    durations: Int64s,
    pass_p2p_ticks: Int64s,
    predecessors: Int64s,
    p2p_ticks: Int64s,
    is_forward: Int64s,
    opposite: Int64s,
    place: Int64s,
) -> int:
    """Return the earliest tick at which pass ``k`` of operation ``op`` has all its inputs."""
    at = 0
    while predecessors[op, at] != _NONE:
        other = predecessors[op, at]
        n = _column(k, op, other, is_forward, opposite)
        message = pass_p2p_ticks[op, place[k]] if p2p_ticks[op, at] else 0
        earliest = max(earliest, starts[other, n] + durations[other, place[n]] + message)
        at += 1
    return earliest


@njit
def _push_ready(
    heap: Int64s,
    entries: int,
    op: int,
    plan: Int64s,
    count: Int64s,
    predecessors: Int64s,
    successors: Int64s,
    is_forward: Int64s,
    opposite: Int64s,
) -> int:
    """Push passes that have become ready, after a pass of ``op`` was placed, onto the heap.

    Return the heap's new number of entries.
    """
    k, place = count[op], 0
    if k < plan.shape[1] and _is_ready(op, k, count, predecessors, is_forward, opposite):
        entries = _push(heap, entries, (plan[op, k] << _BITS) | op)
    while successors[op, place] != _NONE:
        other = successors[op, place]
        n = _column(k - 1, op, other, is_forward, opposite)
        if count[other] == n and _is_ready(other, n, count, predecessors, is_forward, opposite):
            entries = _push(heap, entries, (plan[other, n] << _BITS) | other)
        place += 1
    return entries


@njit
def _is_ready(
    op: int, k: int, count: Int64s, predecessors: Int64s, is_forward: Int64s, opposite: Int64s
) -> bool:
    place = 0
    while predecessors[op, place] != _NONE:
        other = predecessors[op, place]
        if count[other] <= _column(k, op, other, is_forward, opposite):
            return False
        place += 1
    return True


@njit
def _put(
    rank: int,
    earliest: int,
    duration: int,
    delta: int,
    limit: int,
    held: Int64s,
    end: Int64s,
    gaps: Int64s,
    gap_count: Int64s,
) -> int:
    predecessors, behind, count = held[rank], end[rank], gap_count[rank]
    held[rank] = predecessors + delta
    if count and earliest < behind:
        allowed = limit - delta if delta > 0 else _UNBOUNDED
        index = _gap_for(rank, gaps, count, earliest, duration, allowed)
        if index >= 0:
            start = max(gaps[rank, index, _OPENS], earliest)
            gap_count[rank] = _fill_gap(rank, gaps, count, index, start, start + duration, delta)
            return start
    start = max(earliest, behind)
    if start > behind:
        count = _insert(rank, gaps, count, count, behind, start, predecessors)
        gap_count[rank] = count
    if delta > 0:
        for index in range(count):
            gaps[rank, index, _PEAK] = max(gaps[rank, index, _PEAK], predecessors + delta)
    end[rank] = start + duration
    return start


@njit
def _gap_for(
    rank: int, gaps: Int64s, count: int, earliest: int, duration: int, allowed: int
) -> int:
    """Return the number of the rank's first idle gap in which a pass fits; -1 if there is none."""
    for index in range(count):
        end = max(gaps[rank, index, _OPENS], earliest) + duration
        if end <= gaps[rank, index, _CLOSES] and gaps[rank, index, _PEAK] <= allowed:
            return index
    return _NONE


@njit
def _fill_gap(
    rank: int, gaps: Int64s, count: int, index: int, start: int, end: int, delta: int
) -> int:
    """Place a pass into part of a rank's idle gap; return the rank's new number of gaps."""
    closes, most = gaps[rank, index, _CLOSES], gaps[rank, index, _PEAK]
    for other in range(index):
        gaps[rank, other, _PEAK] = max(gaps[rank, other, _PEAK], most + delta)
    for other in range(index + 1, count):
        gaps[rank, other, _PEAK] += delta
    if start > gaps[rank, index, _OPENS]:
        gaps[rank, index, _CLOSES] = start
        gaps[rank, index, _PEAK] = most + max(delta, 0)
        if closes > end:
            return _insert(rank, gaps, count, index + 1, end, closes, most + delta)
        return count
    if closes > end:
        gaps[rank, index, _OPENS] = end
        gaps[rank, index, _PEAK] = most + delta
        return count
    _move(rank, gaps, index + 1, count, -1)
    return count - 1


@njit
def _insert(
    rank: int, gaps: Int64s, count: int, index: int, opens: int, closes: int, most: int
) -> int:
    """Insert an idle gap of a rank, and drop its first gap if there are too many.

    Return the rank's new number of gaps.
    """
    if count == gaps.shape[1] - 1:
        index, count = index - 1, count - 1
        _move(rank, gaps, 1, index + 1, -1)
    else:
        _move(rank, gaps, index, count, 1)
    gaps[rank, index, _OPENS] = opens
    gaps[rank, index, _CLOSES] = closes
    gaps[rank, index, _PEAK] = most
    return count + 1


@njit
def _move(rank: int, gaps: Int64s, first: int, last: int, by: int) -> None:
    """Move the entries ``first`` to ``last`` (exclusive) of a rank's idle gaps by ``by`` places."""
    for step in range(last - first):
        index = first + step if by < 0 else last - 1 - step
        for figure in range(3):
            gaps[rank, index + by, figure] = gaps[rank, index, figure]


@njit
def _push(heap: Int64s, entries: int, entry: int) -> int:
    """Add an entry to the heap of ready passes; return the heap's new number of entries."""
    return _push_from(heap, entries, entry, entries + 1)


@njit
def _push_from(heap: Int64s, place: int, entry: int, entries: int) -> int:
    while place:
        above = (place - 1) >> 1
        if heap[above] <= entry:
            break
        heap[place] = heap[above]
        place = above
    heap[place] = entry
    return entries


@njit
def _pop(heap: Int64s, entries: int) -> int:
    """Remove the first entry of the heap of ready passes; return the new number of entries."""
    entries -= 1
    place, below = 0, 2
    # The heap's last entry mostly belongs near the bottom, so the hole is moved down before the
    # entry is put into it.
    while below < entries:
        below -= heap[below - 1] < heap[below]
        heap[place] = heap[below]
        place, below = below, 2 * below + 2
    if below == entries:
        heap[place] = heap[below - 1]
        place = below - 1
    return _push_from(heap, place, heap[entries], entries)


@functools.cache
def _compiled() -> Callable[..., int]:
    """Return `_pack` compiled by numba for the types of its arguments."""
    with task("compiling the packer of plans once for all later runs"):
        top = disk_cache.directory()
        folder = None if top is None else top / "numba"
        try:
            if top and folder and disk_cache.is_private(top) and disk_cache.is_private(folder):
                return _cached(folder)
        except Exception as error:  # numba's cache is broken, and its pickles may raise anything
            remark(
                f"the compiled packer of plans cannot be stored in {folder} "
                f"({error or type(error)}), so each run compiles it; empty that folder if it is "
                f"broken, or set XDG_CACHE_HOME to a folder that only you can write"
            )
        dispatcher: Any = njit(_pack)
        dispatcher.compile(_SIGNATURE)
        return dispatcher


def _cached(folder: Path) -> Callable[..., int]:
    """Return `_pack` compiled by numba, from the cache in ``folder`` if it is there.

    numba's own folder, next to this file, may be read-only.

    Raises:
        Exception: whatever numba raises if the cache is broken, OSError if it cannot be written or
            has files that numba must not load.
    """
    if (foreign := disk_cache.foreign_file(folder)) is not None:
        raise OSError(
            f"{foreign.name} in this folder is too large, no plain file, or one that other users "
            "could have written"
        )
    tempfile.TemporaryFile(
        dir=folder
    ).close()  # closing it keeps numba from using a folder next to this file
    previous = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder)
    try:
        dispatcher: Any = njit(_pack, cache=True)
    finally:
        numba.config.CACHE_DIR = previous
    dispatcher.compile(_SIGNATURE)
    return dispatcher
