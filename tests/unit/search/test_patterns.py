"""Tests of patterns on a V placement: the passes of one microbatch, repeated every period."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.compile.build import complete
from megatron_ext.compile.program.memory import in_microbatches, peaks
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.placement import v, wave
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.search import pack
from megatron_ext.search.improve import packers_of
from megatron_ext.search.job_shop import end_of, job_shop_of, rows_of
from megatron_ext.search.patterns import (
    F_INNER,
    F_OUTER,
    I_INNER,
    I_OUTER,
    OPERATIONS,
    W_INNER,
    W_OUTER,
    Arrangements,
    MessageTicks,
    Pattern,
    RankWork,
    _PatternProgram,
    exists,
    patterns,
)
from megatron_ext.search.v_patterns import excluded_period, pattern_plans
from tests.helpers.combinations import at_night, nightly
from tests.helpers.random_schedules import PROPERTY, random_costs, seeds

pytestmark = pytest.mark.search

FourCosts = tuple[float, float, float, float]  # f, i, w, comm
CHUNKS = ((F_OUTER, I_OUTER, W_OUTER), (F_INNER, I_INNER, W_INNER))
Many = npt.NDArray[np.int_]  # each row of the array is an arrangement, by rank and lane
EQUAL = (1, 1, 1, 1, 1, 1)
USUAL = (5, 5, 6, 6, 4, 4)  # ticks of passes with F : I : W as 10 : 12 : 8


def ranks_of(ticks: Sequence[Sequence[int]], chunks: float) -> list[RankWork]:
    return [RankWork(tuple(row), (1, 1), (1, 1), chunks) for row in ticks]


def usual(p: int, limit: float) -> list[RankWork]:
    return ranks_of([USUAL] * p, 2 * limit)


def alike(ranks: Sequence[RankWork], hop: int) -> list[MessageTicks]:
    return [(hop, hop)] * (len(ranks) - 1)


def check(
    pattern: Pattern, ranks: Sequence[RankWork], hops: Sequence[MessageTicks], period: int
) -> None:
    """Assert that ``pattern`` meets the definition of a pattern, tick by tick."""
    for starts, rank in zip(pattern, ranks, strict=True):
        taken = [
            (s + n) % period for s, t in zip(starts, rank.ticks, strict=True) for n in range(t)
        ]
        assert len(set(taken)) == len(taken), "two passes collide"
        for start, end in ((F_OUTER, F_INNER), (F_INNER, I_INNER), (I_INNER, I_OUTER)):
            assert starts[start] + rank.ticks[start] <= starts[end]
        for start, end in ((I_INNER, W_INNER), (I_OUTER, W_OUTER)):
            assert starts[start] + rank.ticks[start] <= starts[end]
        assert held(starts, rank, period) <= rank.limit
    neighbours = itertools.pairwise(zip(pattern, ranks, strict=True))
    for ((inner, far), (outer, near)), hop in zip(neighbours, hops, strict=True):
        assert outer[F_OUTER] + near.ticks[F_OUTER] + hop[0] <= inner[F_OUTER]
        assert inner[F_INNER] + far.ticks[F_INNER] + hop[1] <= outer[F_INNER]
        assert outer[I_INNER] + near.ticks[I_INNER] + hop[1] <= inner[I_INNER]
        assert inner[I_OUTER] + far.ticks[I_OUTER] + hop[0] <= outer[I_OUTER]


def held(starts: Sequence[int], rank: RankWork, period: int) -> float:
    """Return the most that ``rank`` holds in the steady state, counted tick by tick."""
    curve = [0.0] * period
    for chunk, (forward, backward, weight) in enumerate(CHUNKS):
        turned = starts[backward] + rank.ticks[backward]
        for tick in range(starts[forward], turned):
            curve[tick % period] += rank.activations[chunk]
        for tick in range(turned, starts[weight] + rank.ticks[weight]):
            curve[tick % period] += rank.weight_inputs[chunk]
    return max(curve)


def way_of(pattern: Pattern) -> int:
    """Return the ticks from F of the first stage to I of the first stage."""
    return pattern[-1][I_OUTER] - pattern[-1][F_OUTER]


@pytest.mark.parametrize(("p", "limit"), [(4, 3), (8, 5), (8, 8), (16, 9)])
def test_patterns_are_what_they_say(p: int, limit: float) -> None:
    ranks = usual(p, limit)
    hops = alike(ranks, 1)
    chosen = patterns(ranks, hops, 30, 20, Arrangements.EACH)
    assert len(set(chosen)) == len(chosen) == 20
    for pattern in chosen:
        check(pattern, ranks, hops, 30)
    ways = [way_of(pattern) for pattern in chosen]
    assert ways == sorted(ways, reverse=True)


@settings(PROPERTY, max_examples=8)
@given(
    seed=seeds,
    p=st.integers(1, 5),
    hop=st.integers(0, 9),
    idle=st.integers(0, 2),
    spread=st.sampled_from(Arrangements),
)
def test_any_costs(seed: int, p: int, hop: int, idle: int, spread: Arrangements) -> None:
    """Patterns exist for any costs: costs and bytes that differ from rank to rank, messages that
    differ from link to link, inputs of W that are larger than the activations of F, and odd p."""
    random = Random(seed)
    ranks = [
        RankWork(
            tuple(random.randint(1, 4) for _ in range(OPERATIONS)),
            (random.randint(1, 3), random.randint(1, 3)),
            (random.randint(0, 4), random.randint(0, 4)),
            3 * p + random.randint(2, 9),
        )
        for _ in range(p)
    ]
    period = max(sum(rank.ticks) for rank in ranks) + idle
    if max(period - sum(rank.ticks) for rank in ranks) > 2:
        spread = Arrangements.ONE_GAP
    hops = [(random.randint(0, hop), random.randint(0, hop)) for _ in range(p - 1)]
    for pattern in patterns(ranks, hops, period, 8, spread):
        check(pattern, ranks, hops, period)


def circles(ticks: Sequence[int], period: int) -> Many:
    """Return all starts of a rank's passes within a period in which no two collide; the first pass
    starts at 0."""
    rows = []
    for starts in itertools.product(range(period), repeat=OPERATIONS - 1):
        taken = {
            (s + n) % period for s, t in zip((0, *starts), ticks, strict=True) for n in range(t)
        }
        if len(taken) == sum(ticks):
            rows.append([0, *starts])
    return np.array(rows)


def walked(ranks: Sequence[RankWork], hop: int, period: int, places: Sequence[Many]) -> Many:
    """Return start times of a microbatch's passes, if each pass runs at the first time that its
    place in the period allows.

    Args:
        places: by rank, a row for each choice of the passes' places in the period.
    """
    last = len(ranks) - 1
    down, up = range(last, -1, -1), range(last + 1)
    lanes = ((F_OUTER, down), (F_INNER, up), (I_INNER, down), (I_OUTER, up))
    starts = np.zeros((len(places[0]), len(ranks), OPERATIONS), dtype=int)
    time, at = places[last][:, F_OUTER], last
    for rank, lane in [(rank, lane) for lane, order in lanes for rank in order]:
        time = time + hop * (rank != at)
        time = time + (places[rank][:, lane] - time) % period
        starts[:, rank, lane] = time
        time, at = time + ranks[rank].ticks[lane], rank
    for rank, work in enumerate(ranks):
        for backward, weight in ((I_INNER, W_INNER), (I_OUTER, W_OUTER)):
            ready = starts[:, rank, backward] + work.ticks[backward]
            starts[:, rank, weight] = ready + (places[rank][:, weight] - ready) % period
    return starts


def needs_and_ways(ways: Many, ranks: Sequence[RankWork], period: int) -> tuple[Many, Many]:
    """Return, for each of ``ways`` to place the passes in the period, the largest number of chunks
    that a rank stores, and how long a microbatch takes."""
    curves = np.zeros((*ways.shape[:2], period), dtype=int)
    for rank, work in enumerate(ranks):
        for forward, _, weight in CHUNKS:
            begin, end = ways[:, rank, forward], ways[:, rank, weight] + work.ticks[weight]
            for tick in range(period):
                since = (tick - begin) % period
                curves[:, rank, tick] += np.maximum(-((since - (end - begin)) // period), 0)
    return curves.max(axis=(1, 2)), ways[:, -1, I_OUTER] - ways[:, -1, F_OUTER]


@pytest.mark.parametrize(
    ("ticks", "hop", "period"),
    [
        ((EQUAL, EQUAL), 0, 6),
        pytest.param((EQUAL, EQUAL), 1, 7, marks=nightly("more of the same")),
        pytest.param(((2, 1, 1, 2, 1, 1), (1, 1, 2, 1, 1, 1)), 1, 8, marks=nightly("the same")),
    ],
)
def test_as_short_as_brute_force_finds(
    ticks: tuple[tuple[int, ...], ...], hop: int, period: int
) -> None:
    """For each limit, the shortest pattern of two ranks is as short as brute force finds."""
    inner, outer = ranks = ranks_of(ticks, 99)
    insides, outsides = circles(inner.ticks, period), circles(outer.ticks, period)
    a, b, turn = map(np.ravel, np.indices((len(insides), len(outsides), period)))
    ways = walked(ranks, hop, period, [(insides[a] + turn[:, None]) % period, outsides[b]])
    needs, lengths = needs_and_ways(ways, ranks, period)
    for limit in range(int(needs.max()) + 1):
        within = lengths[needs <= limit]
        limited = [replace(rank, limit=limit) for rank in ranks]
        assert shortest(limited, hop, period) == min(within, default=None)


def test_no_pattern_of_three_ranks_is_shorter() -> None:
    """No random pattern of three ranks is shorter than the one that is found. There are too many
    patterns to try them all."""
    random, ranks, places = np.random.default_rng(0), ranks_of([EQUAL] * 3, 99), circles(EQUAL, 6)
    drawn = [places[random.integers(len(places), size=100_000)] for _ in ranks]
    turned = [(row + random.integers(6, size=(len(row), 1))) % 6 for row in drawn]
    needs, lengths = needs_and_ways(walked(ranks, 0, 6, turned), ranks, 6)
    for limit in range(2, 9):
        least = shortest(ranks_of([EQUAL] * 3, limit), 0, 6)
        within = lengths[needs <= limit]
        assert not within.size or (least is not None and min(within) >= least)


def shortest(ranks: Sequence[RankWork], hop: int, period: int) -> int | None:
    """Return the fewest ticks of a microbatch in a pattern, or None if there is no pattern."""
    program = _PatternProgram(tuple(ranks), alike(ranks, hop), period, Arrangements.EACH)
    return min((way_of(program.pattern(end, 0)) for end in program.ends()[-1:]), default=None)


@pytest.mark.parametrize(
    ("p", "limit", "period", "there"),
    [
        (8, 4.0, 30, False),
        (8, 4.5, 30, False),
        (8, 5.0, 30, True),
        (16, 8.5, 30, False),
        (16, 9.0, 30, True),
        (4, 2.5, 30, False),
    ],
)
def test_below_half_of_the_ranks_and_one_a_v_idles(
    p: int, limit: float, period: int, there: bool
) -> None:
    ranks = usual(p, limit)
    assert exists(ranks, alike(ranks, 1), period) == there


@nightly("the same with idle time, in which there are thousands of arrangements")
@pytest.mark.parametrize(("p", "limit", "period"), [(8, 4.0, 34), (8, 4.5, 34), (16, 8.5, 32)])
def test_a_longer_period_does_not_help(p: int, limit: float, period: int) -> None:
    """A longer period, in which ranks are idle, makes no pattern possible either. Below p/2 + 1
    microbatches of memory no pattern has a period of 34 ticks on 8 ranks, or of 32 on 16 ranks. So
    none has a shorter period, because a pattern can be stretched in time."""
    ranks = usual(p, limit)
    assert not exists(ranks, alike(ranks, 1), period)


def test_a_rank_with_more_work_than_the_period_has_none() -> None:
    ranks = usual(4, 4)
    assert not patterns(ranks, alike(ranks, 1), 29, 1, Arrangements.EACH)


def test_fineness_of_ticks_changes_nothing() -> None:
    ranks = usual(8, 5)
    fine = [replace(rank, ticks=tuple(100 * t for t in rank.ticks)) for rank in ranks]
    coarse = patterns(ranks, alike(ranks, 1), 30, 5, Arrangements.EACH)
    assert patterns(fine, alike(ranks, 100), 3000, 5, Arrangements.EACH) == [
        tuple(tuple(100 * start for start in row) for row in pattern) for pattern in coarse
    ]


# --- on a problem


def problem_of(p: int, m: int, limit: float, costs: FourCosts = (10, 12, 8, 1)) -> Problem:
    placement = v(p)
    return Problem(placement, m, uniform(placement, *costs), MemoryLimit(limit))


@pytest.mark.parametrize(
    ("p", "m", "limit", "target"),
    [(8, 32, 5, 1109), (8, 32, 6, 1079), (16, 64, 9, 2261), *at_night((16, 64, 12, 2173))],
)
def test_packed_patterns_take_what_long_searches_take(
    p: int, m: int, limit: float, target: float
) -> None:
    """Schedules packed from patterns have makespans no longer than ``target``, which long searches
    reached. For comparison: for 16 ranks and a limit of 9 microbatches, a search of ten seconds
    ends at a makespan of 2358 time units."""
    shop = job_shop_of(problem_of(p, m, limit))
    packers = packers_of(shop, pack.packer)
    packed = (packers.justified(plan).makespan for plan in pattern_plans(shop))
    assert min(itertools.islice(packed, 2)) * shop.tick <= target


@settings(PROPERTY, max_examples=6)
@given(seed=seeds, p=st.integers(1, 4), m=st.integers(1, 6), more=st.integers(0, 4))
def test_repeated_they_are_schedules(seed: int, p: int, m: int, more: int) -> None:
    """Repeated patterns are valid schedules, also with costs that differ by stage: `prove` accepts
    them, and they are no longer than promised and within the limit. If there is no pattern, as with
    few ranks or uneven stages, the plans need memory for up to four chunks more than the limit."""
    placement = v(p)
    limit = p / 2 + 1 + more / 2
    costs = random_costs(Random(seed), placement)
    shop = job_shop_of(Problem(placement, m, costs, MemoryLimit(microbatches=limit)))
    plans = pattern_plans(shop)[:2]
    schedules = [Schedule("repeated", placement, rows_of(plan, placement)) for plan in plans]
    held = [max(peaks(schedule, in_microbatches(schedule))) for schedule in schedules]
    assert all(peak <= limit for peak in held) or min(held) > limit
    problem = Problem(placement, m, costs, MemoryLimit(microbatches=limit + 2))
    for plan in plans:
        instant = replace(problem, costs=problem.costs.with_links(p2p_seconds=0.0))
        program = complete(Schedule("repeated", placement, rows_of(plan, placement)), instant)
        took = simulate(program, instant.costs).makespan
        rounding = shop.operation_count * m * shop.tick
        assert took <= (end_of(plan, shop) - plan.min()) * shop.tick + rounding


def test_where_there_is_none_those_of_a_little_more_memory_are_plans() -> None:
    """If no repeating pattern is within the memory limit, patterns with a little more memory serve
    as plans, which are packed within the limit. Their makespan is shorter than 2532, the shortest
    that plans without a pattern lead to."""
    shop = job_shop_of(problem_of(16, 64, 8.5))
    packers = packers_of(shop, pack.packer)
    packed = [packers.justified(plan).makespan for plan in pattern_plans(shop)]
    assert min(packed) * shop.tick <= 2510
    assert not pattern_plans(job_shop_of(problem_of(16, 64, 4)))


def test_bytes_are_as_good_as_microbatches() -> None:
    """A limit in bytes gives the same patterns as one in microbatches, also with more bytes than 32
    bits can count."""
    limited, chunk = problem_of(8, 16, 5), 2**33
    held = dict.fromkeys((Held.ACTIVATION, Held.WEIGHT_INPUTS), (float(chunk),) * 16)
    in_bytes = replace(
        limited,
        costs=limited.costs.with_passes(held_bytes=held),
        memory_limit=MemoryLimit(bytes=10 * chunk),
    )
    plans, same = (pattern_plans(job_shop_of(problem)) for problem in (limited, in_bytes))
    assert len(plans) == 24 and np.array_equal(plans, same)


def test_only_a_v_has_them() -> None:
    placement = wave(2)
    problem = Problem(placement, 4, uniform(placement, 10, 12, 8, 1), MemoryLimit(4))
    assert not pattern_plans(job_shop_of(problem))
    assert excluded_period(problem, seconds=0) is None


def test_excluded_period_is_that_of_the_work_at_least() -> None:
    assert excluded_period(problem_of(8, 32, 4), seconds=0) == 30
    assert excluded_period(problem_of(8, 32, 5), seconds=9) is None
    halves = (1.25, 1.5, 1, 0.125)  # costs in eighths: the work of a microbatch is 30 eighths
    assert excluded_period(problem_of(8, 32, 4, halves), seconds=0) == pytest.approx(30 / 8)
    # These costs are rounded to ticks, so no period is excluded.
    unrelated = (1.0123456, 1.3456789, 0.9876543, 0.1)
    assert excluded_period(problem_of(8, 32, 4, unrelated), seconds=0) is None


def test_a_period_is_excluded_by_the_hop_of_each_link() -> None:
    """The search shows that a period has no pattern by the seconds of each link.

    One link at the open end of the V is slow. With the mean of all links, the search used to call a
    pattern impossible that exists.
    """
    problem = problem_of(8, 32, 5)
    hops = tuple({0: 9.0, 14: 9.0, 7: 0.0}.get(stage, 1.0) for stage in range(15))
    linked = problem.costs.with_links(p2p_seconds=2.0, p2p_seconds_by_stage=hops)
    assert excluded_period(replace(problem, costs=linked), seconds=0) is None
    alike = problem.costs.with_links(p2p_seconds=2.0)
    assert excluded_period(replace(problem, costs=alike), seconds=0) == 30


@nightly("the same, with idle time")
def test_longer_periods_are_excluded() -> None:
    assert excluded_period(problem_of(4, 16, 2), seconds=60) == 35
