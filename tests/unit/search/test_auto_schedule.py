"""Tests of the spec ``auto``, and of the searches on waves and loops that it chooses from."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.compile.auto_spec import auto_searches, is_open
from megatron_ext.compile.build import build_program, complete
from megatron_ext.compile.program.memory import in_bytes, in_microbatches, peaks
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import ResolvedSpec, choose, on_placement
from megatron_ext.config import PipelineConfig
from megatron_ext.planner.shortest_search import take
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.limit import MemoryLimit, parse_limit
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule, bitwise_order
from megatron_ext.search.job_shop import job_shop_of, rows_of
from megatron_ext.search.pack import pack
from tests.helpers.random_schedules import PROPERTY, random_costs, seeds
from tests.helpers.reference_runs import runs_to_end
from tests.helpers.short_search import shorten_search

pytestmark = pytest.mark.search

LOOPS = tuple(f"loop-auto:vpp={chunks}" for chunks in range(2, 7))


@pytest.fixture(autouse=True)
def short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shorten_search(monkeypatch)


# --- the searches that ``auto`` stands for


@pytest.mark.parametrize(
    ("spec", "searches"),
    [
        ("auto", ("zb-auto", "v-auto", "wave-auto", *LOOPS)),
        ("auto:placement=line", ("zb-auto",)),
        ("auto:placement=v", ("v-auto",)),
        ("auto:placement=v,chunks=2", ("v-auto",)),
        ("auto:placement=wave", ("wave-auto",)),
        ("auto:placement=loop", LOOPS),
        ("auto:placement=loop,chunks=3", ("loop-auto:vpp=3",)),
        ("auto:chunks=2", ("v-auto", "loop-auto:vpp=2")),
        ("auto:chunks=4", ("wave-auto", "loop-auto:vpp=4")),
    ],
)
def test_what_is_left_open(spec: str, searches: tuple[str, ...]) -> None:
    assert auto_searches(spec) == searches
    assert is_open(spec) == (len(searches) > 1) == PipelineConfig(spec).is_chosen_later
    if len(searches) == 1:
        assert choose(spec).spec == searches[0]
    else:
        with pytest.raises(
            ValueError, match=rf"{spec} stands for several .* write one of {searches[0]}, "
        ):
            choose(spec)
    for search in searches:
        placement = choose(search).place(4)
        chunks = re.search(r"chunks=(\d)", spec)
        assert chunks is None or placement.chunks == int(chunks[1])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("auto:placement=foo", "called 'foo'; write line, v, wave or loop"),
        ("auto:placement=lop", "called 'lop'; did you mean loop?"),
        ("auto:placement=v,chunks=3", "no v of 3 chunks a rank: write chunks=2 or another"),
        ("auto:chunks=7", "no placement of 7 chunks a rank: write chunks=1 to 6"),
        ("auto:chunk=2", "has no option 'chunk'; did you mean chunks?"),
        ("auto:chunks=two", "chunks must be a whole number, not 'two'"),
        ("auto:chunks=2,chunks=3", "chunks is given twice"),
        ("auot", "did you mean auto?"),
    ],
)
def test_mistakes(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        PipelineConfig(spec)


# --- the searches


def auto_problem(spec: str, p: int, m: int, limit: str | None = None) -> Problem:
    placement = choose(spec).place(p)
    memory = None if limit is None else parse_limit(limit, p, m)
    return Problem(placement, m, uniform(placement, 10, 12, 8, 1), memory)


def makespan(program: Program) -> float:
    return simulate(program, program.problem.costs).makespan


SPECS = st.sampled_from(["wave-auto", "wave-auto:waves=1", *LOOPS[:3]])


@settings(PROPERTY, max_examples=10)
@given(spec=SPECS, seed=seeds, p=st.integers(1, 3), m=st.integers(1, 5), parts=st.integers(4, 16))
def test_any_problem_is_solved(spec: str, seed: int, p: int, m: int, parts: int) -> None:
    """Any problem has a schedule: with memory limits in quarters of a microbatch down to the least,
    and with m that is no multiple of p."""
    placement = choose(spec).place(p)
    costs = random_costs(Random(seed), placement)
    problem = Problem(placement, m, costs, MemoryLimit(microbatches=parts / 4))
    for resolved in (choose(spec), choose(spec).without_search):
        program = build_program(resolved, problem)
        assert program.schedule.name == spec.partition(":")[0]
        assert bitwise_order(program.schedule)
        assert runs_to_end(program.schedule, problem)
        held = peaks(program.schedule, in_microbatches(program.schedule))
        assert max(held) <= parts / 4 + 1e-9


@pytest.mark.parametrize("spec", ["wave-auto", "loop-auto:vpp=3"])
def test_bytes_are_respected(spec: str) -> None:
    placement = choose(spec).place(2)
    costs = random_costs(Random(1), placement)
    refused = Problem(placement, 4, costs, MemoryLimit(bytes=1))
    with pytest.raises(ValueError, match="least feasible") as error:
        build_program(choose(spec), refused)
    least = parse_limit(str(error.value).split()[-1], 2, 4).bytes
    assert least is not None
    for allowed in (least, 2 * least):
        problem = Problem(placement, 4, costs, MemoryLimit(bytes=allowed))
        assert max(peaks(build_program(choose(spec), problem).schedule, in_bytes(costs))) <= allowed


@pytest.mark.parametrize(
    ("spec", "limit"), [("wave-auto", "9"), ("loop-auto:vpp=2", "3"), ("loop-auto:vpp=3", "4")]
)
def test_never_worse_than_another_family_within_the_limit(spec: str, limit: str) -> None:
    problem = auto_problem(spec, 4, 8, limit)
    ours, compared = makespan(build_program(choose(spec), problem)), 0
    for other in on_placement(problem.placement):
        try:
            program = build_program(other, problem)
        except ValueError:
            continue
        compared += 1
        assert ours <= makespan(program) + 1e-9, other.spec
    assert compared


def test_what_needs_more_memory_is_a_start() -> None:
    """A schedule that needs more memory than the limit can start a search. The order of gis-h,
    packed within the limit, is better than any plan with a fixed period."""
    problem = auto_problem("loop-auto:vpp=4", 8, 16, "4")
    with pytest.raises(ValueError, match="least feasible limit for it is 5"):
        build_program(choose("gis-h:vpp=4"), problem)
    at_once = build_program(choose("loop-auto:vpp=4").without_search, problem)
    assert makespan(at_once) < 740  # without the packed order of gis-h the makespan is 1214.5


def test_no_limit_is_that_of_1f1b() -> None:
    for spec in ("wave-auto", "loop-auto:vpp=2"):
        free = build_program(choose(spec), auto_problem(spec, 2, 4))
        within = build_program(choose(spec), auto_problem(spec, 2, 4, "1x"))
        assert free.schedule.rows == within.schedule.rows


# --- the schedule that is taken


def test_the_shortest_is_taken_and_the_others_are_listed() -> None:
    problems: dict[str, Problem] = {}

    def problem_of(resolved: ResolvedSpec) -> Problem:
        if resolved.spec == "loop-auto:vpp=5":
            raise ValueError(
                "8 layers cannot be split evenly over 10 stages; say which stage has which"
            )
        problems[resolved.spec] = auto_problem(resolved.spec, 2, 6, "2")
        return problems[resolved.spec]

    searches = auto_searches("auto")
    assert searches is not None
    taken = take(searches, problem_of)
    least = makespan(build_program(choose(taken.spec), problems[taken.spec]))
    for spec, problem in problems.items():
        assert makespan(build_program(choose(spec).without_search, problem)) >= least - 1e-9, spec
    assert re.match(r"the shortest predicted step of [23] schedules within 2 micr", taken.why)
    assert "loop-auto:vpp=5 (8 layers cannot be split evenly over 10 stages)" in taken.why
    assert "give each" not in taken.why and all(spec in taken.why for spec in problems)


def test_the_reasons_are_given_if_no_schedule_can_be_made() -> None:
    with pytest.raises(ValueError, match=r"made: v-auto, loop.* \(the memory.* limit is 1 micro"):
        take(
            ("v-auto", "loop-auto:vpp=2"),
            lambda spec: auto_problem("v-auto", 2, 4, "0.5"),
        )


def simulated(*words: str) -> str:
    size = ["--pp", "2", "-m", "4", "--costs", "f=10,i=12,w=8,comm=1"]
    result = CliRunner().invoke(app, ["simulate", *words, *size])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_simulate_says_what_is_taken() -> None:
    said = simulated("auto")
    line = re.match(r"auto takes (\S+): the shortest predicted step of . schedules within 2", said)
    assert line is not None and "memory limit" in said
    assert said.splitlines()[1].strip() == line[1]
    assert simulated("auto:chunks=3").split()[0] == "loop-auto:vpp=3"
    by_both_names = [simulated(spec).splitlines() for spec in ("auto:placement=v", "v-auto")]
    assert [row for row in by_both_names[0] if "made in" not in row] == [
        row for row in by_both_names[1] if "made in" not in row
    ]


@pytest.mark.parametrize("spec", ["wave-auto", "loop-auto:vpp=3"])
def test_bytes_where_w_needs_more_than_i_left(spec: str) -> None:
    placement = choose(spec).place(2)
    held = {
        Held.ACTIVATION: (10.0,) * placement.stages,
        Held.WEIGHT_INPUTS: (15.0,) * placement.stages,
    }
    costs = random_costs(Random(2), placement).with_passes(held_bytes=held)
    problem = Problem(placement, 4, costs, MemoryLimit(bytes=15 * placement.chunks))
    assert bitwise_order(build_program(choose(spec), problem).schedule)


def test_an_output_has_been_waited_for_before_its_gradient_is_used() -> None:
    """The wait for the send of an output comes before the output's gradient is used.

    A wave placement sends the outputs of two stages over one channel. The wait for the first send
    used to be late, which delayed the wait for the second send. The pass I of the second stage then
    ran while that stage's output was not freed.
    """
    placement = choose("wave-auto").place(2)
    problem = Problem(placement, 6, uniform(placement, 10, 12, 8, 1), parse_limit("8", 2, 6))
    shop = job_shop_of(problem)
    for seed in range(20):
        random = np.random.default_rng(seed)
        plan = np.sort(random.integers(0, 12 * shop.work, (shop.operation_count, 6)), axis=1)
        rows = rows_of(pack(shop, plan).starts, placement)
        for row in complete(Schedule("packed", placement, rows), problem).schedule.rows:
            place = {action: place for place, action in enumerate(row)}
            for action in row:
                wait = action._replace(kind=Kind.WAIT_F)
                if action.kind is Kind.BACKWARD_INPUT and wait in place:
                    assert place[wait] < place[action], (seed, str(action))
