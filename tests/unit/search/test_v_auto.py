"""Tests of v-auto, the V schedule that a search finds for given costs and a given limit."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.compile import build
from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.memory import in_bytes, in_microbatches, peaks
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.program.verify import InvalidSchedule, Program, prove, within_limit
from megatron_ext.compile.registry import choose, entries
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.limit import MemoryLimit, parse_limit
from megatron_ext.schedule.placement import v
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule, bitwise_order
from megatron_ext.schedule.schedule_csv import to_csv
from megatron_ext.search import best as best_room
from megatron_ext.search import disk_cache
from megatron_ext.search.bounds import lower_bound
from megatron_ext.search.effort import LARGE
from tests.helpers.combinations import at_night
from tests.helpers.random_schedules import PROPERTY, random_costs, seeds
from tests.helpers.reference_runs import runs_to_end
from tests.helpers.short_search import little_effort

pytestmark = pytest.mark.search

FourCosts = tuple[float, float, float, float]  # f, i, w, comm


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "megatron_ext"


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search with little effort: these tests need the search to work, not its best result."""
    monkeypatch.setattr(best_room, "effort", little_effort)


def v_problem(
    p: int, m: int, costs: FourCosts = (10, 12, 8, 1), limit: str | None = None
) -> Problem:
    placement = v(p)
    memory_limit = parse_limit(limit, p, m) if limit else None
    return Problem(placement, m, uniform(placement, *costs), memory_limit)


def best(problem: Problem) -> Program:
    return build_program(choose("v-auto"), problem)


def makespan(program: Program) -> float:
    return simulate(program, program.problem.costs).makespan


def held(schedule: Schedule) -> float:
    return max(peaks(schedule, in_microbatches(schedule)))


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("limit", [None, "3"])
def test_what_a_search_ends_with_is_proved_once(
    limit: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The schedule that a search finds is proved valid once: without deadlocks, and within the
    memory limit.

    On 64 ranks this proof takes seconds. It used to be repeated when the schedule was built, in the
    search, and on all ranks that got the schedule's rows.
    """
    proved: list[Schedule] = []

    def counted(schedule: Schedule, problem: Problem) -> Program:
        proved.append(replace(schedule, name=""))
        return prove(schedule, problem)

    monkeypatch.setattr(build, "prove", counted)
    problem = v_problem(2, 6, limit=limit)
    for _ in ("searched for", "kept"):
        proved.clear()
        program = best(problem)
        assert program.problem == problem
        assert proved.count(replace(program.schedule, name="")) == 1
    again = prove(program.schedule, problem)
    assert (again.digest, again.graph.order.tolist()) == (
        program.digest,
        program.graph.order.tolist(),
    )
    with pytest.raises(InvalidSchedule, match="over the memory limit of 1 microbatch"):
        within_limit(program, replace(problem, memory_limit=MemoryLimit(1)))


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize(
    ("limit", "target"),
    [("5", 1110), *at_night(("4", 1300), ("6", 1090), ("8", 1035))],
)
def test_targets_are_reached(limit: str, target: float) -> None:
    """The schedule v-auto has a shorter makespan than the published blocks, which ignore costs:
    V-Min has 1475 time units within 4 microbatches, and V-Half has 1119 within 5."""
    program = best(v_problem(8, 32, limit=limit))
    assert makespan(program) <= target
    assert held(program.schedule) <= float(limit)
    assert bitwise_order(program.schedule)


@pytest.mark.usefixtures("brief")
@settings(PROPERTY, max_examples=8)
@given(seed=seeds, p=st.integers(1, 5), m=st.integers(1, 8), halves=st.integers(2, 10))
def test_any_problem_is_solved(seed: int, p: int, m: int, halves: int) -> None:
    """v-auto solves any problem: odd p, m < p, costs that differ from stage to stage, and limits
    down to the least."""
    placement = v(p)
    limit = MemoryLimit(microbatches=halves / 2)
    problem = Problem(placement, m, random_costs(Random(seed), placement), limit)
    program = best(problem)
    assert bitwise_order(program.schedule)
    assert runs_to_end(program.schedule, problem)
    assert lower_bound(problem, splits_backward=True) <= makespan(program) * (1 + 1e-9)


@pytest.mark.usefixtures("brief")
@settings(PROPERTY, max_examples=8)
@given(seed=seeds, p=st.integers(1, 4), above=st.floats(1, 4))
def test_bytes_are_respected(seed: int, p: int, above: float) -> None:
    """v-auto keeps to a limit in bytes, also if W needs more memory than I frees, so that memory
    grows in the backward passes."""
    placement = v(p)
    costs = random_costs(Random(seed), placement)
    with pytest.raises(ValueError, match="least feasible") as error:
        best(Problem(placement, 4, costs, MemoryLimit(bytes=1)))
    least = parse_limit(str(error.value).split()[-1], p, 4).bytes
    assert least is not None
    allowed = int(least * above)
    program = best(Problem(placement, 4, costs, MemoryLimit(bytes=allowed)))
    assert max(peaks(program.schedule, in_bytes(costs))) <= allowed


def test_too_little_memory_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"0\.5 microbatches .* limit is 1 microbatch$"):
        best(v_problem(4, 8, limit="0.5"))
    with pytest.raises(ValueError, match="have no bytes"):
        best(v_problem(4, 8, limit="1GiB"))


@pytest.mark.usefixtures("brief")
def test_no_limit_is_that_of_zb_v() -> None:
    program = best(v_problem(4, 8))
    assert held(program.schedule) <= 4
    with_limit = best(v_problem(4, 8, limit="4"))
    assert program.schedule.rows == with_limit.schedule.rows


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("costs", [(1, 1, 1, 0), (10, 12, 8, 1), (18, 18, 9, 5)])
@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 8)])
def test_never_worse_than_another_family(p: int, m: int, costs: FourCosts) -> None:
    problem = v_problem(p, m, costs)
    for name, entry in entries().items():
        if name == "v-auto" or entry.place(p).rank_of != problem.placement.rank_of:
            continue
        try:
            other = build_program(choose(name), problem)
        except ValueError:
            continue
        limit = f"{held(other.schedule):g}"
        ours = best(v_problem(p, m, costs, limit))
        assert makespan(ours) <= makespan(other) + 1e-9, name


def test_nothing_is_searched_for_where_a_known_schedule_takes_the_least(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(best_room, "search", None)  # a call would fail
    # The makespan is a rank's work of 24, and 1.5 until the first F of the rank that starts last.
    assert makespan(best(v_problem(4, 8, (1, 1, 1, 0)))) == 25.5


@pytest.mark.usefixtures("brief")
def test_evaluation_runs_the_forwards_of_training() -> None:
    problem = v_problem(2, 4)
    training, forwards = best(problem), choose("v-auto").build(problem)
    assert forwards.rows == training.schedule.compute_rows


# --- the cache


@pytest.mark.usefixtures("brief")
def test_second_time_comes_from_the_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = v_problem(3, 6, limit="2")
    first = best(problem)
    assert [path.suffix for path in cache.iterdir()] == [".csv"]
    monkeypatch.setattr(best_room, "searched", None)  # a call would fail
    assert best(problem).digest == first.digest


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("text", ["", "not a schedule", "0F0\n", b"\xff\xfe"])
def test_broken_entry_is_ignored_and_replaced(cache: Path, text: str | bytes) -> None:
    problem = v_problem(2, 4)
    first = best(problem)
    (entry,) = cache.iterdir()
    whole = entry.read_text()
    entry.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert best(problem).digest == first.digest
    assert entry.read_text() == whole


@pytest.mark.usefixtures("brief")
def test_entry_over_the_limit_is_ignored(cache: Path) -> None:
    """A cached schedule over the memory limit is ignored. Files are never trusted: a schedule from
    the cache is checked by the same proof as any other."""
    best(v_problem(3, 6, limit="3"))
    (wide,) = cache.iterdir()
    tight = v_problem(3, 6, limit="1")
    first = best(tight)
    (narrow,) = set(cache.iterdir()) - {wide}
    narrow.write_text(wide.read_text())
    assert best(tight).digest == first.digest


@pytest.mark.usefixtures("brief")
def test_unwritable_cache_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(blocked))
    assert best(v_problem(2, 4)).digest == best(v_problem(2, 4)).digest


@pytest.mark.usefixtures("brief")
def test_what_a_larger_effort_left_is_taken(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search takes the stored result of a larger effort. So a login node with numba can search on
    behalf of jobs without numba. Each effort has its own cache entry."""
    problem = v_problem(3, 6, limit="2")
    small = best(problem)
    large = replace(little_effort(100_000), name=LARGE)
    monkeypatch.setattr(best_room, "effort", lambda: large)
    best(problem)
    assert len(list(cache.iterdir())) == 2
    worse = build_program(choose("v-min"), problem).schedule
    disk_cache.store("v-auto", best_room._key(problem, LARGE), to_csv(worse))
    monkeypatch.setattr(best_room, "effort", little_effort)
    assert best(problem).schedule.compute_rows == worse.compute_rows != small.schedule.compute_rows


def test_key_holds_every_input() -> None:
    disk_cache.store("x", "one", "1")
    assert disk_cache.load("x", "one") == "1"
    assert disk_cache.load("x", "two") is None
    assert disk_cache.load("y", "one") is None
