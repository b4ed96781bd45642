"""Uses of `patterns` on a V: initial plans for a search, and the shortest period of a steady state.

`patterns` knows ranks from the turn of the V outwards and whole ticks. Here problems are translated
for it, and its patterns become plans.
"""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace

import numpy as np

from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.placement import Neighbour, Placement, v
from megatron_ext.schedule.problem import Problem
from megatron_ext.search.job_shop import JobShop, Starts, job_shop_of, operations_of
from megatron_ext.search.patterns import (
    F_INNER,
    F_OUTER,
    OPERATIONS,
    W_INNER,
    W_OUTER,
    Arrangements,
    MessageTicks,
    RankWork,
    arrangements_of,
    exists,
    patterns,
)

_PLANS = 24
# Number of chunks above the memory limit that a plan may store before it is packed.
_MORE_CHUNKS = 4
_MOST_ARRANGEMENTS = 3_400  # largest number of arrangements of a rank's passes that are tried
# Largest number of combinations of two neighbouring ranks' arrangements, times the ranks; that many
# take some seconds.
_MOST_PAIRS = 2_000_000_000


def pattern_plans(shop: JobShop) -> list[Starts]:
    """Return plans on a V, from patterns in which the busiest rank never idles.

    They hold no more than the memory limit; if there are no such plans, they hold little more.
    Return none if the placement of ``shop`` is no V.
    """
    if not is_v(shop.placement):
        return []
    works, p2p_ticks = _ranks_of(shop), _p2p_ticks_of(shop)
    # With slices an activation lives longer, until the backward passes of later slices have run, so
    # less of the limit is left.
    works = [replace(w, limit=w.limit - (shop.slices - 1) * sum(w.activations)) for w in works]
    period = max(sum(rank.ticks) for rank in works)
    turns = period * shop.period_offsets
    for more in range(_MORE_CHUNKS + 1):
        ranks = [replace(rank, limit=rank.limit + more * max(rank.activations)) for rank in works]
        repeated = patterns(ranks, p2p_ticks, period, _PLANS, Arrangements.ONE_GAP)
        if repeated:
            return [np.array(pattern).reshape(-1, 1) + turns for pattern in repeated]
    return []


def excluded_period(problem: Problem, seconds: float) -> float | None:
    """Return the longest period that is proved to be impossible for a steady state on a V.

    No V within the memory limit of ``problem`` repeats one microbatch's passes at this period or a
    shorter one. Return None if nothing beyond the work itself excludes a period, or if that is not
    known.

    The proof is about patterns. It bounds no other schedules: these may repeat the passes of
    several microbatches, or none at all, with shorter intervals on average.

    The period is known if costs have a common unit, for periods in that unit, while a rank's idle
    time is so short that all arrangements can be tried. Longer periods are tried for ``seconds``.
    """
    if problem.memory_limit is None or not is_v(problem.placement):
        return None
    shop = job_shop_of(problem)
    unit = math.gcd(*shop.durations, *shop.p2p_ticks)
    if not _is_exact(shop, problem):
        return None
    p2p_ticks = [(outer // unit, inner // unit) for outer, inner in _p2p_ticks_of(shop)]
    ranks = [replace(r, ticks=tuple(t // unit for t in r.ticks)) for r in _ranks_of(shop)]
    least = max(sum(rank.ticks) for rank in ranks)
    deadline = time.monotonic() + seconds
    excluded = None
    for period in itertools.count(least):
        most = max(arrangements_of(rank, period) for rank in ranks)
        if most > _MOST_ARRANGEMENTS or (most * len(ranks)) ** 2 > _MOST_PAIRS:
            break
        if exists(ranks, p2p_ticks, period):
            break
        excluded = period * unit * shop.tick
        if time.monotonic() > deadline:
            break
    return excluded


def is_v(placement: Placement) -> bool:
    """Return whether ``placement`` is a V: two stages on each rank, down and up the ranks."""
    return placement.rank_of == v(placement.ranks).rank_of


def _ranks_of(shop: JobShop) -> list[RankWork]:
    assert shop.operations_per_rank == OPERATIONS
    works = []
    for first in range(0, shop.operation_count, OPERATIONS):
        ticks = shop.durations[first : first + OPERATIONS]
        gains = [float(gain) for gain in shop.memory_deltas[first : first + OPERATIONS]]
        works.append(
            RankWork(
                ticks,
                (gains[F_OUTER], gains[F_INNER]),
                (-gains[W_OUTER], -gains[W_INNER]),
                float(shop.limit),
            )
        )
    return works


def _p2p_ticks_of(shop: JobShop) -> list[MessageTicks]:
    """Return for each rank of a V but the first the message ticks of its two forward passes.

    The messages go from and to the previous rank.
    """
    operations = range(0, shop.operation_count - OPERATIONS, OPERATIONS)
    return [
        (shop.p2p_ticks[op + F_OUTER], shop.p2p_ticks[op + OPERATIONS + F_INNER])
        for op in operations
    ]


def _is_exact(shop: JobShop, problem: Problem) -> bool:
    """Return whether the whole ticks of ``shop`` are the costs of ``problem`` without rounding."""
    costs, placement, passes = problem.costs, shop.placement, operations_of(shop.placement)
    figures = [costs.seconds[kind][stage] for stage, kind in passes]
    ticks = list(shop.durations)
    for op, (stage, kind) in enumerate(passes):
        if kind is Kind.FORWARD and placement.is_remote(stage, Neighbour.PREVIOUS):
            figures.append(costs.p2p_seconds_behind(stage - 1))
            ticks.append(shop.p2p_ticks[op])
    pairs = zip(figures, ticks, strict=True)
    return all(math.isclose(figure, ticks * shop.tick) for figure, ticks in pairs)
