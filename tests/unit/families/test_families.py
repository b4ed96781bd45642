"""Tests of the schedule families: their published tables, and the promises of their documentation
at every size.

In the tables a column is a unit of time, ``.`` is idle, ``=`` goes on; F, I and W cost 1, B 2.
"""

import contextlib
import gc
import re
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from megatron_ext.compile import build
from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.memory import in_bytes, in_microbatches, peaks
from megatron_ext.compile.program.simulate import simulate, step_seconds
from megatron_ext.compile.program.verify import InvalidSchedule, Program, prove
from megatron_ext.compile.program.waits import SENDS_BEHIND
from megatron_ext.compile.registry import choose, entries
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.limit import MemoryLimit, parse_limit
from megatron_ext.schedule.placement import line
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule, bitwise_order
from megatron_ext.search.weight_gradient_filling import makespan
from tests.helpers.combinations import IS_NIGHT, in_pairs
from tests.helpers.random_schedules import PROPERTY, random_costs
from tests.helpers.reference_runs import runs_to_end
from tests.helpers.schedules import F, W, drawn, line_problem, program, table

TABLES = {
    ("gpipe", 3, 3): """
        0  F0 F1 F2 .  .  .  .  .  .  B0 =  B1 =  B2 =
        1  .  F0 F1 F2 .  .  .  B0 =  B1 =  B2 =  .  .
        2  .  .  F0 F1 F2 B0 =  B1 =  B2 =  .  .  .  .
        """,
    ("gpipe", 3, 1): """
        0  F0 .  .  .  .  .  .  B0 =
        1  .  F0 .  .  .  B0 =  .  .
        2  .  .  F0 B0 =  .  .  .  .
        """,
    ("gpipe", 1, 2): """
        0  F0 F1 B0 =  B1 =
        """,
    ("1f1b", 3, 4): """
        0  F0 F1 F2 .  .  .  .  B0 =  F3 B1 =  .  B2 =  .  B3 =
        1  .  F0 F1 .  .  B0 =  F2 B1 =  F3 B2 =  .  B3 =  .  .
        2  .  .  F0 B0 =  F1 B1 =  F2 B2 =  F3 B3 =  .  .  .  .
        """,
    ("1f1b", 4, 2): """
        0  F0 F1 .  .  .  .  .  .  .  .  B0 =  .  B1 =
        1  .  F0 F1 .  .  .  .  .  B0 =  .  B1 =  .  .
        2  .  .  F0 F1 .  .  B0 =  .  B1 =  .  .  .  .
        3  .  .  .  F0 B0 =  F1 B1 =  .  .  .  .  .  .
        """,
    ("1f1b", 3, 1): """
        0  F0 .  .  .  .  .  .  B0 =
        1  .  F0 .  .  .  B0 =  .  .
        2  .  .  F0 B0 =  .  .  .  .
        """,
    ("1f1b", 1, 3): """
        0  F0 B0 =  F1 B1 =  F2 B2 =
        """,
    ("zb-h1", 3, 4): """
        0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
        """,
    ("zb-h1", 4, 6): """
        0  F0 F1 F2 F3 .  .  .  I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5
        1  .  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
        2  .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5
        3  .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5
        """,
    ("zb-h1", 3, 2): """
        0  F0 F1 .  .  .  I0 W0 I1 W1
        1  .  F0 F1 .  I0 .  I1 W0 W1
        2  .  .  F0 I0 F1 I1 W0 W1 .
        """,
    ("zb-h1", 4, 1): """
        0  F0 .  .  .  .  .  .  I0 W0
        1  .  F0 .  .  .  .  I0 W0 .
        2  .  .  F0 .  .  I0 W0 .  .
        3  .  .  .  F0 I0 W0 .  .  .
        """,
    ("zb-h1", 1, 3): """
        0  F0 I0 W0 F1 I1 W1 F2 I2 W2
        """,
}  # fmt: skip

# Peak activations, in microbatches, that a family's documentation promises for rank r of p.
PEAKS: dict[str, Callable[[int, int, int], int]] = {
    "gpipe": lambda r, p, m: m,
    "1f1b": lambda r, p, m: min(p - r, m),
    "zb-h1": lambda r, p, m: min(p, m),
}

SIZES = settings(PROPERTY, max_examples=8 if IS_NIGHT else 4)
sizes = st.integers(1, 6).flatmap(lambda p: st.tuples(st.just(p), st.integers(1, 3 * p)))


def problem_for(name: str, p: int, m: int, *, forward_only: bool = False) -> Problem:
    placement = choose(name).place(p)
    return Problem(placement, m, uniform(placement, 1, 1, 1), forward_only=forward_only)


@pytest.mark.parametrize(("name", "p", "m"), TABLES)
def test_table(name: str, p: int, m: int) -> None:
    problem = line_problem(p, m)
    timeline = simulate(program(name, problem), problem.costs)
    assert drawn(timeline) == table(TABLES[name, p, m])


# Searching families have tests of their own, at fewer sizes.
PLAIN = [name for name, entry in entries().items() if not entry.traits.uses_costs]


# Families that refuse some numbers of microbatches.
GROUPED = ("interleaved", "interleaved-zb", "gis", "gis-h")


def accepts(name: str, p: int, m: int) -> bool:
    """Return whether the family is defined for this size, and assert that a refusal says what to
    write instead."""
    if name not in GROUPED:
        return True  # other tests build the program of this size, and fail if the family refuses it
    try:
        choose(name).build(problem_for(name, p, m))
    except ValueError as error:
        assert m % p and f"{m} microbatches" in str(error) and "write" in str(error)
        return False
    return True


@pytest.mark.parametrize("name", PLAIN)
@SIZES
@given(size=sizes)
@example(size=(1, 1))
@example(size=(9, 1))
@example(size=(9, 27))
def test_every_size_is_sound(name: str, size: tuple[int, int]) -> None:
    p, m = size
    assume(accepts(name, p, m))
    problem = problem_for(name, p, m)
    schedule = program(name, problem).schedule  # raises if the schedule is not valid
    assert schedule.name == name
    assert runs_to_end(schedule, problem)
    assert bitwise_order(schedule)
    splits = any(action.kind is W for row in schedule.rows for action in row)
    assert splits == choose(name).traits.splits_backward


@pytest.mark.parametrize("name", PEAKS)
@SIZES
@given(size=sizes)
@example(size=(4, 16))
def test_peak_is_as_promised(name: str, size: tuple[int, int]) -> None:
    p, m = size
    schedule = choose(name).build(line_problem(p, m))
    measured = peaks(schedule, in_microbatches(schedule))
    assert measured == [PEAKS[name](rank, p, m) for rank in range(p)]


@pytest.mark.parametrize("name", PLAIN)
@SIZES
@given(size=sizes)
def test_evaluation_is_the_forwards_alone_in_order(name: str, size: tuple[int, int]) -> None:
    p, m = size
    assume(accepts(name, p, m))
    training = choose(name).build(problem_for(name, p, m))
    problem = problem_for(name, p, m, forward_only=True)
    evaluation = program(name, problem).schedule
    forwards = [[action for action in row if action.kind is F] for row in training.rows]
    assert list(map(list, evaluation.compute_rows)) == forwards
    assert runs_to_end(evaluation, problem)


@pytest.mark.parametrize("p", [2, 8])
def test_outputs_on_their_way_do_not_pile_up_in_an_evaluation(p: int) -> None:
    """In an evaluation a rank waits for its oldest send once a few sends are under way. In a
    training the gradient that comes back shows that a send has ended, and in an evaluation none
    comes back."""
    schedule = program("gpipe", line_problem(p, 40, forward_only=True)).schedule
    for row in schedule.rows:
        under_way = 0
        for action in row:
            under_way += (action.kind is Kind.SEND_F) - (action.kind is Kind.WAIT_F)
            assert under_way <= SENDS_BEHIND + 1
        assert under_way == 0


def test_evaluation_holds_nothing() -> None:
    """An evaluation is not held to the memory limit of the training, because it stores no
    activations."""
    with pytest.raises(InvalidSchedule, match="memory limit"):
        program("gpipe", line_problem(4, 8, limit="1"))
    program("gpipe", line_problem(4, 8, limit="1", forward_only=True))


@pytest.mark.parametrize("limit", [MemoryLimit(microbatches=0.6), MemoryLimit(bytes=1000)])
@pytest.mark.parametrize(
    "spec", [name for name in entries() if not choose(name).without_search.takes_long]
)
def test_no_limit_applies_to_an_evaluation(spec: str, limit: MemoryLimit) -> None:
    """No memory limit applies to an evaluation. A limit of 0.6x in a training of 8 microbatches
    used to become 0.6 microbatches in an evaluation of one microbatch. No family can run within
    that limit, so the training ended in its first evaluation."""
    resolved, unlimited = choose(spec).without_search, problem_for(spec, 4, 1, forward_only=True)
    held = dict.fromkeys((Held.ACTIVATION, Held.WEIGHT_INPUTS), (1e6,) * unlimited.placement.stages)
    unlimited = replace(unlimited, costs=unlimited.costs.with_passes(held_bytes=held))
    limited = build_program(resolved, replace(unlimited, memory_limit=limit))
    assert limited.schedule.rows == build_program(resolved, unlimited).schedule.rows


# ---- memory limits

# Families with long searches have tests of their own.
LIMITED = [name for name, entry in entries().items() if not entry.traits.searches] + [
    "gis:vpp=3",
    "hanayo:waves=1",
]


@pytest.mark.parametrize(
    ("spec", "size", "limit"),
    [
        (spec, size, limit)
        for spec, size, limit in in_pairs(LIMITED, [(4, 8), (3, 5)], ["0.1", "100KiB"])
        if accepts(spec.partition(":")[0], *size)
    ],
)
def test_the_limit_that_a_refusal_names_will_do(
    spec: str, size: tuple[int, int], limit: str
) -> None:
    """A family that refuses a memory limit names a larger one, within which it succeeds. The
    schedules gis and interleaved-zb used to name only the first pass beyond the limit. Bytes were
    printed as 8.5e+09, which is no valid limit, and rounded down. With chunks of unequal size, a
    rank that stores most microbatches of its larger chunk did not fit within the named limit."""
    p, m = size
    unlimited = problem_for(spec, p, m)
    stages = unlimited.placement.stages
    held = {
        Held.ACTIVATION: tuple(1e6 / 3 * (stages - stage) for stage in range(stages)),
        Held.WEIGHT_INPUTS: tuple(3e5 * (1 + stage % 3) for stage in range(stages)),
    }
    unlimited = replace(unlimited, costs=unlimited.costs.with_passes(held_bytes=held))
    with pytest.raises(ValueError, match="the least feasible limit") as refusal:
        program(spec, replace(unlimited, memory_limit=parse_limit(limit, p, m)))
    named = re.search(r"least feasible limit(?: for it)? is ([\w.]+)", str(refusal.value))
    assert named is not None
    least = parse_limit(named[1], p, m)
    assert (least.bytes is None) == (limit == "0.1")
    less = (
        MemoryLimit(microbatches=0.99 * least.microbatches)
        if least.microbatches is not None
        else MemoryLimit(bytes=int(0.99 * (least.bytes or 0)))
    )
    with pytest.raises(ValueError, match="the least feasible limit"):
        program(spec, replace(unlimited, memory_limit=less))
    schedule = program(spec, replace(unlimited, memory_limit=least)).schedule
    in_unit = in_microbatches(schedule) if least.bytes is None else in_bytes(unlimited.costs)
    assert max(peaks(schedule, in_unit)) <= (least.microbatches or least.bytes or 0) + 1e-6


@pytest.mark.parametrize(
    ("limit", "amount", "written"),
    [
        ("1", 1, "1 microbatch"),
        ("1", 34 / 3, "11.334 microbatches"),
        ("1", 0.1 + 0.2, "0.3 microbatches"),
        ("1KiB", 10, "10B"),
        ("1KiB", 2**30, "1GiB"),
        ("1KiB", 2**30 + 1, "1.001GiB"),
        ("1KiB", 1.36e10, "12.666GiB"),
    ],
)
def test_least_limits_are_written_as_they_are_read(limit: str, amount: float, written: str) -> None:
    assert parse_limit(limit, 4, 8).at_least(amount) == written
    read = parse_limit(written.split()[0], 4, 8)
    assert (read.microbatches or read.bytes or 0) >= amount * (1 - 1e-9)


@pytest.mark.search
def test_zb_auto_is_never_worse_for_more_memory_nor_than_another_family() -> None:
    """The step of the schedule zb-auto gets no longer with a larger memory limit, and is no longer
    than the step of another family on a linear placement. Only a test can show the former, because
    a search with a larger limit does not try all the orders that it tries with a smaller one."""
    random = Random(0)
    others = [e for e in entries().values() if e.place is line and e.name != "zb-auto"]
    for _ in range(10):
        p, m = random.randint(2, 5), random.randint(1, 8)
        costs = random.choice([random_costs(random, line(p)), uniform(line(p), 10, 12, 8, 1)])
        shortest = float("inf")
        for limit in sorted({1, random.randint(1, p), random.randint(p, 2 * p)}):
            problem = Problem(line(p), m, costs, MemoryLimit(microbatches=limit))
            ours = makespan(choose("zb-auto").build(problem), problem)
            assert ours <= shortest * (1 + 1e-9), (p, m, limit, costs)
            shortest = ours
            for other in others:
                schedule: Schedule = other.build(problem)
                if max(peaks(schedule, in_microbatches(schedule))) <= limit:
                    assert ours <= makespan(schedule, problem) * (1 + 1e-9), other.name


@pytest.mark.search
@pytest.mark.parametrize("limit", ["1", "2", "0.5x", "3000KiB"])
@pytest.mark.parametrize(("name", "published"), [("v-auto", "zb-v"), ("zb-auto", "zb-h1")])
def test_what_stands_in_for_a_search_keeps_to_its_limit_and_takes_the_best(
    name: str, published: str, limit: str
) -> None:
    """The schedule that stands in for a search keeps to the memory limit and is no slower than the
    published schedule on the same placement. It serves steps that cannot wait for a search: with
    dynamic batches each step has another number of microbatches."""
    resolved, p, m = choose(name), 3, 5
    placement = resolved.place(p)
    held = dict.fromkeys((Held.ACTIVATION, Held.WEIGHT_INPUTS), (500_000.0,) * placement.stages)
    costs = uniform(placement, 10, 12, 8, 1).with_passes(held_bytes=held)
    problem = Problem(placement, m, costs, parse_limit(limit, p, m))
    made = build_program(resolved.without_search, problem)
    assert bitwise_order(made.schedule)
    fits = peaks(made.schedule, in_microbatches(made.schedule))
    assert problem.memory_limit is not None
    if (allowed := problem.memory_limit.microbatches) is not None:
        assert max(fits) <= allowed + 1e-9
    with contextlib.suppress(ValueError):  # the published schedule may be over the limit
        other = build_program(choose(published), problem)
        assert step_seconds(made, costs) <= step_seconds(other, costs) * (1 + 1e-9)


def test_no_garbage_is_looked_for_while_a_program_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The garbage collector is off while a program is built. It used to take a sixth of the time of
    a build for 64 ranks, and freed nothing."""
    looks: list[bool] = []

    def noted(schedule: Schedule, problem: Problem) -> Program:
        looks.append(gc.isenabled())
        return prove(schedule, problem)

    monkeypatch.setattr(build, "prove", noted)
    problem = line_problem(2, 4)
    build_program(choose("1f1b"), problem)
    with pytest.raises(InvalidSchedule, match="over the memory limit"):
        build_program(choose("1f1b"), replace(problem, memory_limit=MemoryLimit(1)))
    assert looks == [False, False] and gc.isenabled()


def test_a_stand_in_without_a_limit_has_its_familys_own() -> None:
    placement = choose("v-auto").place(3)
    problem = Problem(placement, 6, uniform(placement, 10, 12, 8, 1))
    made = build_program(choose("v-auto").without_search, problem)
    assert max(peaks(made.schedule, in_microbatches(made.schedule))) <= 3 + 1e-9
    assert step_seconds(made, problem.costs) == simulate(made, problem.costs).makespan
    plain = choose("zb-h1")
    assert plain.without_search is plain
