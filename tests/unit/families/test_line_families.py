"""Tests of zb-h2, 2bp, zb-1p, zb-2p and zb-auto: drawn tables, published numbers, and comparisons
with other families.

In the tables a column is a unit of time and ``.`` is idle; F, I and W cost 1.
"""

from dataclasses import replace
from random import Random

import pytest

from megatron_ext.compile.program.memory import in_bytes, in_microbatches, peaks
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.registry import choose, entries
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import bitwise_order
from megatron_ext.schedule.timeline import Timeline
from megatron_ext.search.weight_gradient_filling import makespan
from tests.helpers.combinations import at_night
from tests.helpers.random_schedules import random_costs
from tests.helpers.schedules import drawn, line_problem, program, table

TABLES = {
    ("zb-h2", 3, 6): """
        0  F0 F1 F2 F3 F4 I0 W0 F5 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 .  .
        1  .  F0 F1 F2 I0 F3 I1 F4 I2 W0 F5 I3 W1 I4 W2 I5 W3 W4 W5 .
        2  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 F5 I5 W1 W2 W3 W4 W5
        """,
    ("zb-h2", 3, 1): """
        0  F0 .  .  .  .  I0 W0
        1  .  F0 .  .  I0 W0 .
        2  .  .  F0 I0 W0 .  .
        """,
    ("2bp", 3, 3): """
        0  F0 F1 F2 .  .  I0 .  I1 .  I2 W0 W1 W2
        1  .  F0 F1 .  I0 F2 I1 .  I2 W0 W1 W2 .
        2  .  .  F0 I0 F1 I1 F2 I2 W0 W1 W2 .  .
        """,
    ("2bp:base=gpipe", 3, 2): """
        0  F0 F1 .  .  .  .  I0 I1 W0 W1
        1  .  F0 F1 .  .  I0 I1 W0 W1 .
        2  .  .  F0 F1 I0 I1 W0 W1 .  .
        """,
    ("zb-1p", 3, 4): """
        0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
        """,
    ("zb-auto", 2, 3): """
        0  F0 F1 F2 I0 W0 I1 W1 I2 W2 .
        1  .  F0 I0 F1 I1 F2 I2 W0 W1 W2
        """,
}  # fmt: skip

SMALL = (18.522, 18.086, 9.337, 0.601)  # costs of the papers' models with 1.5B and 28.3B parameters
LARGE = (10.419, 10.207, 7.715, 0.408)


def ran(spec: str, problem: Problem) -> Timeline:
    return simulate(program(spec, problem), problem.costs)


def peak(timeline: Timeline) -> float:
    return max(peaks(timeline.schedule, in_microbatches(timeline.schedule)))


@pytest.mark.parametrize(("spec", "p", "m"), TABLES)
def test_table(spec: str, p: int, m: int) -> None:
    assert drawn(ran(spec, line_problem(p, m))) == table(TABLES[spec, p, m])


@pytest.mark.parametrize("p", [2, 3, 8])
def test_zb_h2_has_no_span_bubble(p: int) -> None:
    timeline = ran("zb-h2", line_problem(p, 4 * p))
    assert timeline.span == timeline.work
    assert peak(timeline) == 2 * p - 1


@pytest.mark.search
@pytest.mark.parametrize(
    ("p", "m", "costs", "limit", "time", "span"),
    [
        (8, 32, (1, 1, 1, 0), "8", 103, 103),
        (8, 32, (1, 1, 1, 0), "16", 103, 96),
        (8, 32, (10, 12, 8, 1), "8", 1086, 1086),
        (8, 32, (10, 12, 8, 1), "16", 1037, 1008),
    ],
)
def test_zb_auto_is_no_worse_than_published(p, m, costs, limit, time, span) -> None:
    timeline = ran("zb-auto", line_problem(p, m, *costs, limit=limit))
    assert (timeline.makespan, timeline.span) <= (time, span)
    assert peak(timeline) <= float(limit or 2 * p)


@pytest.mark.parametrize(
    ("name", "p", "m", "costs", "share"),
    [
        ("zb-1p", 8, 24, SMALL, 0.1585),
        ("zb-2p:paper_count=true", 8, 24, SMALL, 0.0436),  # the paper gives a bubble of 0.0433
        *at_night(("zb-2p:paper_count=true", 32, 96, LARGE, 0.0038)),
    ],
)
def test_published_bubbles(name, p, m, costs, share) -> None:
    problem = line_problem(p, m, *costs)
    schedule = choose(name).build(problem)
    assert bitwise_order(schedule)
    assert round(ran(name, problem).bubble_share_span, 4) <= share


@pytest.mark.parametrize("name", ["zb-2p", "zb-2p:paper_count=true"])
@pytest.mark.parametrize("limit", [None, "100"])
def test_zb_2p_keeps_to_2p_unless_it_counts_as_the_paper(name: str, limit: str | None) -> None:
    exceeds = peak(ran(name, line_problem(6, 15, *SMALL, limit=limit))) > 12
    assert exceeds == (limit is None and "paper" in name)


@pytest.mark.search
@pytest.mark.parametrize("seed", range(2))
def test_zb_auto_is_never_worse_than_the_others(seed: int) -> None:
    random = Random(seed)
    p, m = random.randint(2, 5), random.randint(1, 10)
    costs = random_costs(random, line(p))
    problem = Problem(line(p), m, costs)
    for name, entry in entries().items():
        if entry.place is line and name != "zb-auto":
            other = ran(name, problem)
            limit = MemoryLimit(microbatches=peak(other))
            ours = ran("zb-auto", replace(problem, memory_limit=limit))
            assert ours.makespan <= other.makespan * (1 + 1e-9), name


@pytest.mark.parametrize("name", ["zb-h2", "2bp", "zb-1p", "zb-2p", "zb-auto"])
@pytest.mark.parametrize("p", [2, 5])
def test_every_size_is_sound(name: str, p: int) -> None:
    for m in (1, p, 2 * p + 1):
        for costs in [(10, 20, 10, 3), (3, 1, 9, 20)]:
            assert bitwise_order(program(name, line_problem(p, m, *costs)).schedule)


@pytest.mark.parametrize("limit", ["1", "3.5"])
@pytest.mark.parametrize("p", [2, 5])
def test_any_limit_is_kept(p: int, limit: str) -> None:
    timeline = ran("zb-auto", line_problem(p, 12, 10, 12, 8, 1, limit=limit))
    assert peak(timeline) <= float(limit)


def test_a_limit_in_bytes_is_kept() -> None:
    held = {Held.ACTIVATION: (10.0, 8, 8, 9), Held.WEIGHT_INPUTS: (4.0, 4, 9, 4)}
    costs = uniform(line(4), 10, 12, 8, 1).with_passes(held_bytes=held)
    for allowed in (10, 25, 47):
        problem = Problem(line(4), 9, costs, MemoryLimit(bytes=allowed))
        schedule = program("zb-auto", problem).schedule
        assert max(peaks(schedule, in_bytes(costs))) <= allowed


@pytest.mark.parametrize("name", ["zb-1p", "zb-2p", "zb-auto"])
def test_too_small_a_limit_names_the_least(name: str) -> None:
    with pytest.raises(ValueError, match=r"0\.5 microbatches.*least feasible limit is 1 micro"):
        choose(name).build(line_problem(4, 8, limit="0.5"))


@pytest.mark.parametrize("comm", [0, 1, 30])
def test_makespan_is_the_simulators(comm: float) -> None:
    problem = line_problem(4, 9, 10, 12, 8, comm)
    for name in ("1f1b", "gpipe", "zb-h2", "zb-auto"):
        schedule = choose(name).build(problem)
        assert makespan(schedule, problem) == pytest.approx(ran(name, problem).makespan)


def test_unknown_base_is_refused() -> None:
    with pytest.raises(ValueError, match="write base=1f1b or base=gpipe"):
        choose("2bp:base=zb-h1").build(line_problem(2, 2))
