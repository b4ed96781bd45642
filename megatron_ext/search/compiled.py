"""`pack` for numba, on flat arrays of whole numbers. Import this only where numba is installed.

It mirrors `pack` function by function, and gives the same starts to the digit.
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

from megatron_ext.progress import remark, task
from megatron_ext.search import disk_cache
from megatron_ext.search.job_shop import Shop, Starts, Waits
from megatron_ext.search.pack import GAPS, Pack, Packed

Whole = npt.NDArray[np.int64]

_BITS = 16  # of a heap's entry are the lane
_MASK = (1 << _BITS) - 1
if numba.config.DISABLE_JIT:
    raise ImportError("NUMBA_DISABLE_JIT is set")

_NONE = -1
_ANY = 1 << 62
_OPENS, _CLOSES, _MOST = range(3)  # of a gap


def packer(shop: Shop) -> Pack:
    """Return `pack.pack` for ``shop``."""
    tables, run = _tables(shop), _compiled()

    def pack(plan: Starts) -> Packed:
        starts = np.empty(plan.shape, np.int64)
        makespan = run(
            np.ascontiguousarray(plan, np.int64), starts, *tables, shop.slices, shop.limit, GAPS
        )
        assert makespan >= 0, "memory got stuck"
        return Packed(makespan, starts)

    return pack


def _tables(shop: Shop) -> tuple[Whole, ...]:
    assert shop.lanes <= _MASK
    rank_of = np.repeat(np.arange(shop.placement.ranks), shop.lanes_of_rank)
    # What repeats is not written out: of a long step tables would be larger than a CPU's caches.
    width = shop.period if shop.recompute_gains is None else shop.pieces
    place = np.arange(shop.pieces) % width
    columns = (
        *(rank_of, shop.rooms, shop.heads, shop.tails, shop.way, shop.is_forward, shop.turned),
        *(place, shop.held_after[:, shop.slices]),
    )
    figures = (shop.durations_of_all, shop.gains_of_all, shop.hops_of_all)
    return (
        *(np.array(column, np.int64) for column in columns),
        *(np.ascontiguousarray(table[:, :width], np.int64) for table in figures),
        *(np.ascontiguousarray(table, np.int64) for table in (shop.held_after, shop.next_taking)),
        *_waits(shop.before, shop.after),
    )


# The types of `_pack`'s arguments: the plan, the starts, the tables, and three numbers.
_LIST, _TABLE = numba.int64[::1], numba.int64[:, ::1]
_SIGNATURE = (_TABLE, _TABLE, *(_LIST,) * 9, *(_TABLE,) * 8, *(numba.int64,) * 3)


@functools.lru_cache(maxsize=8)  # a search makes many shops that differ in other figures
def _waits(before: Waits, after: Waits) -> tuple[Whole, Whole, Whole]:
    """Return, per lane, the lanes that it waits for, their hops, and the lanes that wait for it."""
    earlier, later = (
        _padded([[lane for lane, _ in row] for row in rows]) for rows in (before, after)
    )
    return earlier, _padded([[hop for _, hop in row] for row in before]), later


def _padded(rows: Sequence[Sequence[int]]) -> Whole:
    table = np.full((len(rows), max(map(len, rows)) + 1), _NONE, dtype=np.int64)
    for row, figures in zip(table, rows, strict=True):
        row[: len(figures)] = figures
    return table


def _pack(
    plan: Whole,
    starts: Whole,
    rank_of: Whole,
    rooms: Whole,
    heads: Whole,
    tails: Whole,
    way: Whole,
    is_forward: Whole,
    turned: Whole,
    place: Whole,
    of_microbatch: Whole,
    durations: Whole,
    gains: Whole,
    hops_of_all: Whole,
    held_after: Whole,
    next_taking: Whole,
    before: Whole,
    hops: Whole,
    after: Whole,
    slices: int,
    limit: int,
    most_gaps: int,
) -> int:
    """Fill ``starts`` and return the makespan; -1 if memory got stuck."""
    lanes, m = plan.shape
    ranks, size = len(rooms), len(plan) // len(rooms)
    count = np.zeros(lanes, np.int64)
    lane_end = np.zeros(lanes, np.int64)
    end = heads.copy()
    held = np.zeros(ranks, np.int64)
    lane_held = np.zeros(lanes, np.int64)
    gaps = np.empty((ranks, most_gaps + 1, 3), np.int64)
    gap_count = np.zeros(ranks, np.int64)
    refused = np.empty((ranks, size), np.int64)
    refusals = np.zeros(ranks, np.int64)
    heap, entries, left = np.empty(lanes, np.int64), 0, lanes * m
    for lane in range(lanes):
        if before[lane, 0] == _NONE:
            entries = _push(heap, entries, (plan[lane, 0] << _BITS) | lane)
    while entries:
        entry = heap[0]
        entries = _pop(heap, entries)
        lane = entry & _MASK
        rank, k = rank_of[lane], count[lane]
        gain, duration = gains[lane, place[k]], durations[lane, place[k]]
        if gain > 0 and (
            held[rank] + gain > limit
            or not (
                _can_end(lane, rank * size, gains, held_after, next_taking, count, limit, way)
                if len(way)
                else _may_take(
                    lane,
                    gain,
                    rank * size,
                    size,
                    of_microbatch,
                    lane_held,
                    count,
                    slices,
                    limit - rooms[rank],
                )
            )
        ):
            refused[rank, refusals[rank]] = entry
            refusals[rank] += 1
            continue
        earliest = _earliest(
            lane,
            k,
            lane_end[lane],
            starts,
            durations,
            hops_of_all,
            before,
            hops,
            is_forward,
            turned,
            place,
        )
        start = earliest
        if duration:
            start = _put(rank, earliest, duration, gain, limit, held, end, gaps, gap_count)
        starts[lane, k] = start
        lane_end[lane] = start + duration
        lane_held[lane] += gain
        count[lane] = k + 1
        left -= 1
        entries = _push_ready(heap, entries, lane, plan, count, before, after, is_forward, turned)
        while refusals[rank]:
            refusals[rank] -= 1
            entries = _push(heap, entries, refused[rank, refusals[rank]])
    return _NONE if left else int((end + tails).max())


@njit
def _may_take(
    lane: int,
    gain: int,
    begin: int,
    size: int,
    of_microbatch: Whole,
    held: Whole,
    count: Whole,
    slices: int,
    room: int,
) -> bool:
    count[lane] += 1
    held[lane] += gain
    first, behind = _ANY, 0
    for other in range(begin, begin + size):
        if of_microbatch[other] > 0:
            first = min(first, count[other])
    whole = first // slices + 1  # microbatches
    first = whole * slices
    for other in range(begin, begin + size):
        if count[other] > first:
            behind += held[other] - whole * of_microbatch[other]
    count[lane] -= 1
    held[lane] -= gain
    return behind <= room


@njit
def _can_end(
    lane: int,
    begin: int,
    gains: Whole,
    held_after: Whole,
    next_taking: Whole,
    count: Whole,
    limit: int,
    way: Whole,
) -> bool:
    count[lane] += 1
    oldest, newest = _ANY, 0
    for other in range(begin, begin + len(way)):
        oldest = min(oldest, next_taking[other, count[other]])
        newest = max(newest, count[other])
    free = limit
    for other in range(begin, begin + len(way)):
        free -= held_after[other, max(count[other], oldest)]
    can = True
    for k in range(oldest, newest):
        need = more = 0
        for place in range(len(way)):
            other = begin + way[place]
            if count[other] <= k:
                more += gains[other, k]
                need = max(need, more)
        if need > free:
            can = False
            break
        free -= more
    count[lane] -= 1
    return can


@njit
def _column(k: int, lane: int, other: int, is_forward: Whole, turned: Whole) -> int:
    """Return the column of lane ``other`` with the slice that column ``k`` of ``lane`` has."""
    return turned[k] if is_forward[lane] != is_forward[other] else k


@njit
def _earliest(
    lane: int,
    k: int,
    earliest: int,
    starts: Whole,
    durations: Whole,
    hops_of_all: Whole,
    before: Whole,
    hops: Whole,
    is_forward: Whole,
    turned: Whole,
    place: Whole,
) -> int:
    """Return the tick from which the next pass of ``lane`` has all that it waits for."""
    at = 0
    while before[lane, at] != _NONE:
        other = before[lane, at]
        n = _column(k, lane, other, is_forward, turned)
        hop = hops_of_all[lane, place[k]] if hops[lane, at] else 0
        earliest = max(earliest, starts[other, n] + durations[other, place[n]] + hop)
        at += 1
    return earliest


@njit
def _push_ready(
    heap: Whole,
    entries: int,
    lane: int,
    plan: Whole,
    count: Whole,
    before: Whole,
    after: Whole,
    is_forward: Whole,
    turned: Whole,
) -> int:
    """Push the passes that may be taken since ``lane`` has advanced. Return the number of entries
    then."""
    k, place = count[lane], 0
    if k < plan.shape[1] and _is_ready(lane, k, count, before, is_forward, turned):
        entries = _push(heap, entries, (plan[lane, k] << _BITS) | lane)
    while after[lane, place] != _NONE:
        other = after[lane, place]
        n = _column(k - 1, lane, other, is_forward, turned)
        if count[other] == n and _is_ready(other, n, count, before, is_forward, turned):
            entries = _push(heap, entries, (plan[other, n] << _BITS) | other)
        place += 1
    return entries


@njit
def _is_ready(
    lane: int, k: int, count: Whole, before: Whole, is_forward: Whole, turned: Whole
) -> bool:
    place = 0
    while before[lane, place] != _NONE:
        other = before[lane, place]
        if count[other] <= _column(k, lane, other, is_forward, turned):
            return False
        place += 1
    return True


@njit
def _put(
    rank: int,
    earliest: int,
    duration: int,
    gain: int,
    limit: int,
    held: Whole,
    end: Whole,
    gaps: Whole,
    gap_count: Whole,
) -> int:
    before, behind, count = held[rank], end[rank], gap_count[rank]
    held[rank] = before + gain
    if count and earliest < behind:
        room = limit - gain if gain > 0 else _ANY
        index = _gap_for(rank, gaps, count, earliest, duration, room)
        if index >= 0:
            start = max(gaps[rank, index, _OPENS], earliest)
            gap_count[rank] = _fill_gap(rank, gaps, count, index, start, start + duration, gain)
            return start
    start = max(earliest, behind)
    if start > behind:
        count = _insert(rank, gaps, count, count, behind, start, before)
        gap_count[rank] = count
    if gain > 0:
        for index in range(count):
            gaps[rank, index, _MOST] = max(gaps[rank, index, _MOST], before + gain)
    end[rank] = start + duration
    return start


@njit
def _gap_for(rank: int, gaps: Whole, count: int, earliest: int, duration: int, room: int) -> int:
    """Return the first gap in which a pass fits; -1 if there is none."""
    for index in range(count):
        end = max(gaps[rank, index, _OPENS], earliest) + duration
        if end <= gaps[rank, index, _CLOSES] and gaps[rank, index, _MOST] <= room:
            return index
    return _NONE


@njit
def _fill_gap(
    rank: int, gaps: Whole, count: int, index: int, start: int, end: int, gain: int
) -> int:
    """Fill part of a gap. Return the number of gaps then."""
    closes, most = gaps[rank, index, _CLOSES], gaps[rank, index, _MOST]
    for other in range(index):
        gaps[rank, other, _MOST] = max(gaps[rank, other, _MOST], most + gain)
    for other in range(index + 1, count):
        gaps[rank, other, _MOST] += gain
    if start > gaps[rank, index, _OPENS]:
        gaps[rank, index, _CLOSES] = start
        gaps[rank, index, _MOST] = most + max(gain, 0)
        if closes > end:
            return _insert(rank, gaps, count, index + 1, end, closes, most + gain)
        return count
    if closes > end:
        gaps[rank, index, _OPENS] = end
        gaps[rank, index, _MOST] = most + gain
        return count
    _move(rank, gaps, index + 1, count, -1)
    return count - 1


@njit
def _insert(
    rank: int, gaps: Whole, count: int, index: int, opens: int, closes: int, most: int
) -> int:
    """Insert a gap; if there are too many, the first is dropped. Return the number of gaps then."""
    if count == gaps.shape[1] - 1:
        index, count = index - 1, count - 1
        _move(rank, gaps, 1, index + 1, -1)
    else:
        _move(rank, gaps, index, count, 1)
    gaps[rank, index, _OPENS] = opens
    gaps[rank, index, _CLOSES] = closes
    gaps[rank, index, _MOST] = most
    return count + 1


@njit
def _move(rank: int, gaps: Whole, first: int, last: int, by: int) -> None:
    """Move the gaps from ``first`` to before ``last`` by one place."""
    for step in range(last - first):
        index = first + step if by < 0 else last - 1 - step
        for figure in range(3):
            gaps[rank, index + by, figure] = gaps[rank, index, figure]


@njit
def _push(heap: Whole, entries: int, entry: int) -> int:
    """Add an entry. Return the number of entries then."""
    return _push_from(heap, entries, entry, entries + 1)


@njit
def _push_from(heap: Whole, place: int, entry: int, entries: int) -> int:
    while place:
        above = (place - 1) >> 1
        if heap[above] <= entry:
            break
        heap[place] = heap[above]
        place = above
    heap[place] = entry
    return entries


@njit
def _pop(heap: Whole, entries: int) -> int:
    """Remove the first entry. Return the number of entries then."""
    entries -= 1
    place, below = 0, 2
    while below < entries:  # the last entry mostly belongs far below: first move a gap there
        below -= heap[below - 1] < heap[below]
        heap[place] = heap[below]
        place, below = below, 2 * below + 2
    if below == entries:
        heap[place] = heap[below - 1]
        place = below - 1
    return _push_from(heap, place, heap[entries], entries)


@functools.cache
def _compiled() -> Callable[..., int]:
    """Return `_pack` compiled for the types of its arguments here."""
    with task("compiling what packs plans, which is kept"):
        try:
            return _cached()
        except Exception as error:  # where numba's cache is broken, whatever its pickles raise
            remark(
                f"what numba compiles cannot be kept in {_folder()} ({error or type(error)}): it "
                f"is compiled anew each time; empty that folder if it is broken, or set "
                f"XDG_CACHE_HOME to one that can be written"
            )
            dispatcher: Any = njit(_pack)
            dispatcher.compile(_SIGNATURE)
            return dispatcher


def _cached() -> Callable[..., int]:
    """Return the same from a cache in the user's cache directory, since that of this package may be
    read-only.

    Raises:
        Exception: whatever numba raises if the cache is broken, OSError if it cannot be written.
    """
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()  # or numba would look for another, next to this file
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder)
    try:
        dispatcher: Any = njit(_pack, cache=True)
    finally:
        numba.config.CACHE_DIR = before
    dispatcher.compile(_SIGNATURE)
    return dispatcher


def _folder() -> Path:
    return disk_cache.directory() / "numba"
