"""From a schedule for so many microbatches to one for more of them, or for fewer.

In the middle of a long step ranks do the same over and over: some microbatches later, every pass
comes one period later. Where a schedule does so best is found, and so much of it is repeated there,
or omitted. The seam need not fit: the result is a plan, and packing it from both sides gives a
schedule. That takes no search, but a few packings.

What was found for few microbatches need not repeat well: half of its step is warm-up and cool-down.
So on a V a pattern, which repeats by itself (`pattern_plans`), is packed as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import numpy as np

from megatron_ext.compile.program.memory import in_microbatches, peaks
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.search.improve import Sides, sides_of
from megatron_ext.search.pack import Packed, packer
from megatron_ext.search.shop import Starts, again_in, rows_of, shop_of, starts_of
from megatron_ext.search.v_patterns import pattern_plans

_MIDDLE = 4  # times what a rank holds under 1F1B: from there on a schedule has a middle
_GROUPS = (4, 3, 6, 8, 2, 1)  # microbatches after which it may repeat; the most promising first
_SEAM = 4  # microbatches behind the seam of a shorter step that have to fit
_PASSES = 100_000  # packed, about, which takes half a second
_PATTERNS = 1  # others take as long, but for a percent
_ROUNDS = 3


def with_middle(problem: Problem) -> int:
    """The fewest microbatches with which a schedule for ``problem`` is long enough to be made
    longer or shorter."""
    slices = problem.slices.count
    return -(-_MIDDLE * (problem.ranks + slices - 1) // slices)


def has_middle(problem: Problem) -> bool:
    """Whether a schedule for ``problem`` is long enough to be made longer or shorter (and packing
    can, as ranks have equally many chunks and the limit suffices for a microbatch)."""
    placement = problem.placement
    is_even = {len(stages) for stages in placement.stages_of} == {placement.chunks}
    is_long = problem.microbatches >= with_middle(problem)
    return is_even and is_long and shop_of(problem).fits


def extended(known: Schedule, problem: Problem) -> Schedule:
    """A schedule for ``problem`` from ``known``, one of the same problem with enough microbatches
    (`has_middle`), but another number of them. It holds no more than the limit; without one, than
    ``known``.

    It depends on nothing else, so that every rank makes the same.
    """
    limit = problem.memory_limit
    if limit is None:
        limit = MemoryLimit(microbatches=max(peaks(known, in_microbatches(known))))
    problem = replace(problem, memory_limit=limit)
    pieces, slices = 1 + max(a.microbatch for row in known.rows for a in row), problem.slices.count
    length = pieces // slices
    again = again_in(known.rows, problem.placement.stages, length)
    starts = starts_of(known.rows, shop_of(replace(problem, microbatches=length), again))

    def packed(columns: Starts, later: Starts) -> tuple[Sides, Packed]:
        shop = shop_of(problem, None if again is None else again[:, columns])
        sides = sides_of(shop, packer)  # which is there before numba has been loaded
        return sides, sides.justified(starts[:, columns] + later)

    number = _PASSES // (2 * len(starts) * problem.pieces)
    some = islice(_columns_from(starts, problem.pieces, slices), max(number, 1))
    made = [packed(*plan) for plan in some]
    if number and again is None:
        sides = sides_of(shop_of(problem), packer)
        made += [(sides, sides.justified(plan)) for plan in pattern_plans(sides.shop)[:_PATTERNS]]
    sides, best = min(made, key=lambda of_plan: of_plan[1].makespan)
    if number:
        best = sides.justified(best.starts, _ROUNDS)
    is_there = None if again is None else sides.shop.again
    rows = rows_of(best.starts, problem.placement, is_there, problem.orders)
    return replace(known, rows=rows)


def plans_from(known: Starts, pieces: int, slices: int) -> Iterator[Starts]:
    """Plans for so many ``pieces``, ``slices`` of each microbatch, from ``known``, the starts of a
    schedule for another number."""
    for columns, later in _columns_from(known, pieces, slices):
        yield known[:, columns] + later


def _columns_from(known: Starts, pieces: int, slices: int) -> Iterator[tuple[Starts, Starts]]:
    """For each plan which of the ``known`` columns each of its own is like, and how much later it
    comes. They are as many apart as make whole microbatches, and so of the same slice."""
    have = known.shape[1]
    if pieces < have:
        fewer = have - pieces
        first, period = _steady(known, fewer, min(_SEAM * slices, pieces))
        columns = np.delete(np.arange(have), np.s_[first : first + fewer])
        yield columns, np.where(columns < first, 0, -period)
        return
    for group in (microbatches * slices for microbatches in _GROUPS):
        if 2 * group <= have:
            yield _lengthened(known, pieces - have, group)


def _lengthened(known: Starts, more: int, group: int) -> tuple[Starts, Starts]:
    """With ``more`` columns in the middle, which repeat a ``group`` of them."""
    first, period = _steady(known, group, group)
    behind, repeated = first + group, np.arange(more)
    rest = np.arange(behind, known.shape[1])
    return (
        np.concatenate([np.arange(behind), first + repeated % group, rest]),
        np.concatenate(
            [
                np.zeros(behind, np.int64),
                (repeated // group + 1) * period,
                np.full(len(rest), more * period // group),
            ]
        ),
    )


def _steady(known: Starts, apart: int, width: int) -> tuple[int, int]:
    """The column from which on ``width`` of them are most like those that come ``apart`` behind
    them, in the middle half of the step if that is so long; and by how much those come later."""
    later = known[:, apart:] - known[:, :-apart]
    windows = np.lib.stride_tricks.sliding_window_view(later, width, axis=1)
    quarter = windows.shape[1] // 4
    middle = windows[:, quarter : windows.shape[1] - quarter].swapaxes(0, 1)
    middle = middle.reshape(len(middle), -1)
    periods = np.median(middle, axis=1)
    first = int(np.abs(middle - periods[:, None]).sum(axis=1).argmin())
    return quarter + first, int(periods[first])
