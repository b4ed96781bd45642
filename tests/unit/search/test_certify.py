"""Tests of lower bounds, and of how far schedules are from them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.memory import in_microbatches, peaks
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import choose
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.placement import v
from megatron_ext.schedule.problem import Offload, Problem, Recompute
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.schedule.schedule_csv import from_csv
from megatron_ext.search.bounds import lower_bound
from megatron_ext.search.certify import _search, certify
from tests.helpers.random_schedules import random_case

pytestmark = pytest.mark.search

Figures = tuple[float, float, float, float]


def program(
    name: str, p: int, m: int, costs: Figures = (1, 1, 1, 0), limit: float | None = None
) -> Program:
    resolved = choose(name)
    placement = resolved.place(p)
    memory = None if limit is None else MemoryLimit(limit)
    return build_program(resolved, Problem(placement, m, uniform(placement, *costs), memory))


@pytest.mark.parametrize(
    ("name", "p", "m", "makespan"), [("1f1b", 4, 8, 33), ("gpipe", 3, 5, 21), ("zb-h1", 4, 8, 27)]
)
def test_analysis_alone_proves_these_optimal_at_equal_costs(
    name: str, p: int, m: int, makespan: float
) -> None:
    certificate = certify(program(name, p, m), seconds=0)
    assert certificate.makespan == certificate.lower_bound == makespan
    assert certificate.optimal and certificate.gap == 0


def proved(schedule: Schedule, problem: Problem) -> Program:
    """Return the program of a schedule that comes from no family."""
    resolved = replace(choose("gpipe"), build=lambda problem: schedule)
    return build_program(resolved, problem)


def test_no_schedule_is_below_the_bound() -> None:
    for seed in range(60):
        case = random_case(seed)
        makespan = simulate(proved(case.schedule, case.problem), case.problem.costs).makespan
        most = max(peaks(case.schedule, in_microbatches(case.schedule)))
        for limit in (None, MemoryLimit(most)):
            bound = lower_bound(replace(case.problem, memory_limit=limit), splits_backward=True)
            assert bound <= makespan * (1 + 1e-9), seed


@pytest.mark.parametrize(
    ("p", "m", "costs", "limit", "bound"),
    [
        (8, 32, (10, 12, 8, 1), 4, 1084),
        (8, 32, (10, 12, 8, 1), 8, 1023),
        (16, 64, (10, 20, 10, 1), 16, 2765),  # v-auto reaches this bound
        (16, 64, (18, 18, 9, 1), 9, 3259.5),
    ],
)
def test_memory_bounds_a_v(p: int, m: int, costs: Figures, limit: float, bound: float) -> None:
    """Memory bounds the makespan on a V placement.

    Rank 0 of the first case has 960 time units of work. It would be idle for 143 units before its
    first I, of which eight F fill 40, and for 53 units after its last I, of which eight W fill 32.
    """
    placement = v(p)
    problem = Problem(placement, m, uniform(placement, *costs), MemoryLimit(limit))
    assert lower_bound(problem, splits_backward=True) == bound


@pytest.mark.parametrize(("limit", "bound"), [(3, 1275), (2, 1871), (1, 3678)])
def test_time_in_memory_bounds_a_v(limit: float, bound: int) -> None:
    """The time that microbatches spend in memory bounds the makespan on a V placement.

    A microbatch occupies memory on rank 0 of eight for 227 time units. Its outer chunk is there for
    117 units: F, the way to the last stage and back, and I. Its inner chunk is there for 106 units,
    until W has ended. One of the two is there for 4 more, as the outer I and the inner W cannot
    both follow the inner I. With memory for 6 chunks, 32 microbatches take at least 32 x 227 / 6 =
    1211 units, which are most of the bound of 1275 units.
    """
    placement = v(8)
    problem = Problem(placement, 32, uniform(placement, 10, 12, 8, 1), MemoryLimit(limit))
    assert int(lower_bound(problem, splits_backward=True)) == bound


def test_what_leaves_the_rank_bounds_nothing() -> None:
    """Memory gives no bound if activations are offloaded or recomputed, as the rank does not hold
    them."""
    placement = v(4)
    costs = uniform(placement, 10, 12, 8, 1).with_host((1,) * 8, (1,) * 8)
    problem = Problem(placement, 16, costs, MemoryLimit(2))
    copied = problem.with_options(activation_offload=Offload.FULL)
    given_up = problem.with_options(recompute=Recompute(fit=True))
    without_limit = replace(problem, memory_limit=None)
    variants = (problem, copied, given_up, without_limit)
    bounds = [lower_bound(made, splits_backward=True) for made in variants]
    assert bounds == [536, 498, 498, 498]


def test_search_raises_the_bound_and_never_passes_the_makespan() -> None:
    pytest.importorskip("ortools")
    made = program("zb-h1", 2, 3, (10, 12, 8, 1))
    analytic = lower_bound(made.problem, splits_backward=True)
    certificate = certify(made, seconds=10)
    assert analytic <= certificate.lower_bound <= certificate.makespan


def test_search_knows_the_hop_of_each_link() -> None:
    """The search for a bound uses the seconds of each link. It used to take the seconds of the
    fastest link for all, so its bound for a single microbatch was 32 time units too low."""
    pytest.importorskip("ortools")
    problem = program("1f1b", 3, 1, (10, 12, 8, 9)).problem
    costs = problem.costs.with_links(p2p_seconds_by_stage=(1.0, 17.0))
    made = build_program(choose("1f1b"), replace(problem, costs=costs))
    makespan = simulate(made, costs).makespan
    assert makespan == 126
    assert _search(made, makespan, seconds=10) == pytest.approx(makespan)


def test_search_knows_the_memory_limit() -> None:
    """The search for a bound respects the memory limit. With one microbatch at a time on both
    ranks, each microbatch takes a full round trip."""
    pytest.importorskip("ortools")
    loose = certify(program("1f1b", 2, 3), seconds=10)
    rows = "0F0,0B0,0F1,0B1,0F2,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"
    serial = from_csv(rows, "serial")
    problem = Problem(
        serial.placement, 3, uniform(serial.placement, 1, 1, 1), MemoryLimit(microbatches=1)
    )
    tight = certify(proved(serial, problem), seconds=10)
    assert tight.makespan == 18 and tight.optimal, tight
    assert loose.lower_bound < tight.lower_bound
