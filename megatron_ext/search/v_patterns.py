"""Uses of `patterns` on a V: plans to begin a search with, and the rate at which a steady state can
take microbatches at most."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace

import numpy as np

from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.placement import Neighbour, Placement, v
from megatron_ext.schedule.problem import Problem
from megatron_ext.search.patterns import (
    F_INNER,
    F_OUTER,
    LANES,
    W_INNER,
    W_OUTER,
    Arrangements,
    Hops,
    RankWork,
    arrangements_of,
    exists,
    patterns,
)
from megatron_ext.search.shop import Shop, Starts, passes_of, shop_of

_PLANS = 24
_MORE_CHUNKS = 4  # than the limit, for a plan, which packing brings within it
_MOST_ARRANGEMENTS = 3_400  # of a rank, ...
_MOST_PAIRS = 2_000_000_000  # ... and of neighbours, times the ranks: some seconds


def pattern_plans(shop: Shop) -> list[Starts]:
    """Patterns in which the busiest rank never idles, that need no more than the limit; or where
    there is none, only little more. None where ``shop`` is no V."""
    if not is_v(shop.placement):
        return []
    works, hops = _ranks_of(shop), _hops_of(shop)
    # What goes back so many slices later is held so much longer.
    works = [replace(w, limit=w.limit - (shop.slices - 1) * sum(w.activations)) for w in works]
    period = max(sum(rank.ticks) for rank in works)
    turns = period * shop.turns
    for more in range(_MORE_CHUNKS + 1):
        ranks = [replace(rank, limit=rank.limit + more * max(rank.activations)) for rank in works]
        repeated = patterns(ranks, hops, period, _PLANS, Arrangements.ONE_GAP)
        if repeated:
            return [np.array(pattern).reshape(-1, 1) + turns for pattern in repeated]
    return []


def excluded_period(problem: Problem, seconds: float) -> float | None:
    """A period: no V within the memory limit of ``problem`` repeats one microbatch's passes so
    often, or more often. None if nothing is excluded but by the work, or that is not known.

    That is proved, of patterns. It is no bound on schedules: others may repeat the passes of
    several microbatches, or none at all, and come at shorter intervals on average.

    It is known where costs have a common unit, for periods in that unit, while a rank's idle time
    is so little that all arrangements can be looked at. Longer ones are looked at for ``seconds``.
    """
    if problem.memory_limit is None or not is_v(problem.placement):
        return None
    shop = shop_of(problem)
    unit = math.gcd(*shop.durations, *shop.hops)
    if not _is_exact(shop, problem):
        return None
    hops = [(outer // unit, inner // unit) for outer, inner in _hops_of(shop)]
    ranks = [replace(r, ticks=tuple(t // unit for t in r.ticks)) for r in _ranks_of(shop)]
    least = max(sum(rank.ticks) for rank in ranks)
    deadline = time.monotonic() + seconds
    excluded = None
    for period in itertools.count(least):
        most = max(arrangements_of(rank, period) for rank in ranks)
        if most > _MOST_ARRANGEMENTS or (most * len(ranks)) ** 2 > _MOST_PAIRS:
            break
        if exists(ranks, hops, period):
            break
        excluded = period * unit * shop.tick
        if time.monotonic() > deadline:
            break
    return excluded


def is_v(placement: Placement) -> bool:
    """Whether its ranks hold two stages each, in a V."""
    return placement.rank_of == v(placement.ranks).rank_of


def _ranks_of(shop: Shop) -> list[RankWork]:
    assert shop.lanes_of_rank == LANES
    works = []
    for first in range(0, shop.lanes, LANES):
        ticks = shop.durations[first : first + LANES]
        gains = [float(gain) for gain in shop.gains[first : first + LANES]]
        works.append(
            RankWork(
                ticks,
                (gains[F_OUTER], gains[F_INNER]),
                (-gains[W_OUTER], -gains[W_INNER]),
                float(shop.limit),
            )
        )
    return works


def _hops_of(shop: Shop) -> list[Hops]:
    """For each rank but the first, the hops of the messages of its F that come from or go to the
    one before."""
    lanes = range(0, shop.lanes - LANES, LANES)
    return [(shop.hops[lane + F_OUTER], shop.hops[lane + LANES + F_INNER]) for lane in lanes]


def _is_exact(shop: Shop, problem: Problem) -> bool:
    """Whether the ticks of ``shop`` are the costs of ``problem``, not rounded."""
    costs, placement, passes = problem.costs, shop.placement, passes_of(shop.placement)
    figures = [costs.seconds[kind][stage] for stage, kind in passes]
    ticks = list(shop.durations)
    for lane, (stage, kind) in enumerate(passes):
        if kind is Kind.FORWARD and placement.is_remote(stage, Neighbour.PREVIOUS):
            figures.append(costs.hop_behind(stage - 1))
            ticks.append(shop.hops[lane])
    pairs = zip(figures, ticks, strict=True)
    return all(math.isclose(figure, ticks * shop.tick) for figure, ticks in pairs)
