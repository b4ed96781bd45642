"""Conversion of a schedule for some number of microbatches into one for more of them, or for fewer.

In the middle of a long step a schedule is periodic: every pass of microbatch k + n starts one
period after that of microbatch k. The columns that repeat best are found, and are repeated or
removed. The result is only a plan, in which passes may collide at the seam; packing it from both
sides gives a schedule. This takes a few packings and no search.

A schedule found for few microbatches need not repeat well: half of its step is warm-up and
cool-down. On a V a pattern, which is periodic by itself (`pattern_plans`), is therefore packed as
well.
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
from megatron_ext.search.improve import Packers, packers_of
from megatron_ext.search.job_shop import Starts, job_shop_of, recomputed_in, rows_of, starts_of
from megatron_ext.search.pack import Packed, packer
from megatron_ext.search.v_patterns import pattern_plans

_MIDDLE = 4  # a step is long if it has this multiple of the microbatches that 1F1B stores
_GROUPS = (4, 3, 6, 8, 2, 1)  # tried numbers of microbatches in a period, the most promising first
_SEAM = 4  # number of microbatches after the seam whose order is compared, if a step is shortened
_PASSES = 100_000  # number of passes that are packed, which takes about half a second
# Number of patterns that are tried; the makespans of other patterns differ by at most 1 %.
_PATTERNS = 1
_ROUNDS = 3


def with_middle(problem: Problem) -> int:
    """Return the fewest microbatches with which a schedule can be lengthened or shortened.

    A shorter schedule has no periodic middle to repeat or to cut.
    """
    slices = problem.slices.count
    return -(-_MIDDLE * (problem.ranks + slices - 1) // slices)


def has_middle(problem: Problem) -> bool:
    """Return whether a schedule for ``problem`` can be lengthened or shortened in its middle.

    The problem must have enough microbatches, equally many chunks on all ranks, and a memory limit
    that suffices for a microbatch.
    """
    placement = problem.placement
    is_even = {len(stages) for stages in placement.stages_of} == {placement.chunks}
    is_long = problem.microbatches >= with_middle(problem)
    return is_even and is_long and job_shop_of(problem).fits


def extended(known: Schedule, problem: Problem) -> Schedule:
    """Return a schedule for ``problem`` made from ``known``, one for another number of
    microbatches.

    ``known`` must have enough of them (`has_middle`). The result holds no more memory than the
    limit, or without a limit, than ``known``. It depends on nothing else, so every rank makes the
    same schedule.
    """
    limit = problem.memory_limit
    if limit is None:
        limit = MemoryLimit(microbatches=max(peaks(known, in_microbatches(known))))
    problem = replace(problem, memory_limit=limit)
    pieces, slices = 1 + max(a.microbatch for row in known.rows for a in row), problem.slices.count
    length = pieces // slices
    recomputed = recomputed_in(known.rows, problem.placement.stages, length)
    starts = starts_of(known.rows, job_shop_of(replace(problem, microbatches=length), recomputed))

    def packed(columns: Starts, later: Starts) -> tuple[Packers, Packed]:
        shop = job_shop_of(problem, None if recomputed is None else recomputed[:, columns])
        # The plan is packed by packers that need no numba, which may not be loaded yet.
        packers = packers_of(shop, packer)
        return packers, packers.justified(starts[:, columns] + later)

    number = _PASSES // (2 * len(starts) * problem.pieces)
    some = islice(_columns_from(starts, problem.pieces, slices), max(number, 1))
    made = [packed(*plan) for plan in some]
    if number and recomputed is None:
        packers = packers_of(job_shop_of(problem), packer)
        made += [
            (packers, packers.justified(plan)) for plan in pattern_plans(packers.shop)[:_PATTERNS]
        ]
    packers, best = min(made, key=lambda of_plan: of_plan[1].makespan)
    if number:
        best = packers.justified(best.starts, _ROUNDS)
    recompute_actions = None if recomputed is None else packers.shop.recompute_actions
    rows = rows_of(best.starts, problem.placement, recompute_actions, problem.orders)
    return replace(known, rows=rows)


def plans_from(known: Starts, pieces: int, slices: int) -> Iterator[Starts]:
    """Yield plans with ``pieces`` columns, made by repeating or cutting columns of ``known``.

    A column has the start times of one microbatch, or of one slice; a microbatch has ``slices``.
    """
    for columns, later in _columns_from(known, pieces, slices):
        yield known[:, columns] + later


def _columns_from(known: Starts, pieces: int, slices: int) -> Iterator[tuple[Starts, Starts]]:
    """Yield for each plan the ``known`` column that each of its columns copies, and a delay.

    A column has the start times of one microbatch or slice. Columns are removed or repeated by
    whole microbatches, so copies are of the same slice.
    """
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
    """Return a plan with ``more`` columns in the middle, which repeat a ``group`` of columns.

    The form is that of `_columns_from`: the column that each column copies, and its delay.
    """
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


def _steady(known: Starts, shift: int, width: int) -> tuple[int, int]:
    """Return the first of the ``width`` columns that best repeat ``shift`` columns later, and the
    delay.

    The columns are consecutive microbatches of a plan. Those in the middle half of the step are
    preferred if it is long enough.
    """
    later = known[:, shift:] - known[:, :-shift]
    windows = np.lib.stride_tricks.sliding_window_view(later, width, axis=1)
    quarter = windows.shape[1] // 4
    middle = windows[:, quarter : windows.shape[1] - quarter].swapaxes(0, 1)
    middle = middle.reshape(len(middle), -1)
    periods = np.median(middle, axis=1)
    first = int(np.abs(middle - periods[:, None]).sum(axis=1).argmin())
    return quarter + first, int(periods[first])
