"""Tests of searches for schedules of slices of sequences: packed soundly, compiled or not, and as
good as known schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.compile.build import build_program, complete
from megatron_ext.compile.program.memory import in_microbatches, peaks
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.registry import choose, entries
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.limit import MemoryLimit, parse_limit
from megatron_ext.schedule.placement import Placement, line, loop, v, wave
from megatron_ext.schedule.problem import Problem, Recompute, ScheduleOptions
from megatron_ext.schedule.schedule import Schedule, bitwise_order
from megatron_ext.schedule.slices import Lengths, Slices
from megatron_ext.search import best as best_room
from megatron_ext.search.best import best_known, best_schedule
from megatron_ext.search.extension import extended, has_middle
from megatron_ext.search.improve import packers_of
from megatron_ext.search.job_shop import JobShop, Starts, end_of, job_shop_of, rows_of, starts_of
from megatron_ext.search.pack import packer
from tests.helpers.combinations import at_night
from tests.helpers.random_schedules import PROPERTY, random_costs, seeds, with_random_links
from tests.helpers.short_search import little_effort

pytestmark = pytest.mark.search

Place = Callable[[int], Placement]
shapes = st.sampled_from([line, v, wave, loop, lambda p: loop(p, vpp=3)])


@pytest.fixture(autouse=True)
def brief(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(best_room, "effort", little_effort)


def costs_of_slices(random: Random, placement: Placement) -> Costs:
    costs = random_costs(random, placement)
    attention = tuple(random.uniform(0, 0.6) for _ in range(placement.stages))
    costs = costs.with_links(latency=costs.links.p2p_seconds * random.random())
    assert costs.held_bytes is not None
    keys_values = tuple(held * random.random() for held in costs.held_bytes[Held.ACTIVATION])
    return costs.with_slices(attention=attention, keys_values=keys_values)


def random_problem(random: Random, place: Place, p: int, m: int, k: int) -> Problem:
    """Return a problem with memory for one microbatch and any share of others; half of the limits
    are in bytes."""
    placement = place(p)
    costs = with_random_links(random, costs_of_slices(random, placement))
    assert costs.held_bytes is not None
    limit = MemoryLimit(microbatches=1 + 3 * random.random())
    if random.random() < 0.5:
        figures = [*map(max, *costs.held_bytes.values())], costs.slices.keys_values
        most = sum(
            max(sum(held[stage] + k for stage in stages) for stages in placement.stages_of)
            for held in figures
        )
        limit = MemoryLimit(bytes=int(most * (1 + 3 * random.random())) + 1)
    cut = Slices(k, random.choice(list(Lengths)))
    return Problem(placement, m, costs, limit, options=ScheduleOptions(slices=cut))


def random_plan(random: Random, shop: JobShop) -> Starts:
    lanes = range(shop.operation_count)
    far = 20 * shop.work
    return np.array([sorted(random.randrange(far) for _ in range(shop.columns)) for _ in lanes])


def hops_between(shop: JobShop) -> dict[frozenset[int], tuple[int, ...]]:
    """Return the ticks of a message between two lanes of the packing problem, for each column. They
    are the same in a problem that is mirrored in time."""
    hops = {}
    for lane, row in enumerate(shop.predecessors_by_column):
        for other, of_columns, columns in row:
            after = {n: figures for n, figures, _ in shop.successors_by_column[other]}
            assert [after[lane][n] for n in columns] == of_columns
            turned = of_columns[::-1] if shop.is_mirrored else of_columns
            hops[frozenset((lane, other))] = tuple(turned)
    return hops


@settings(PROPERTY, max_examples=20)
@given(seed=seeds, place=shapes, p=st.integers(1, 3), m=st.integers(1, 4), k=st.integers(2, 5))
def test_any_plan_packs_soundly(seed: int, place: Place, p: int, m: int, k: int) -> None:
    """Any plan of slices is packed into a sound schedule, forwards or backwards in time. It never
    happens that packing stops because no rank has memory for its next pass. The packed plan is
    accepted by `prove`, is within the limit, runs at the promised times, and is the same with
    compiled code."""
    random = Random(seed)
    problem = random_problem(random, place, p, m, k)
    shop = job_shop_of(problem)
    assert shop.fits
    for side in (shop, shop.mirrored()):
        assert hops_between(side.mirrored()) == hops_between(side)
        plan = random_plan(random, side)
        packed = packer(side)(plan)
        compiled = pytest.importorskip("megatron_ext.search.compiled")
        theirs = compiled.compiled_packer(side)(plan)
        assert packed.makespan == theirs.makespan and np.array_equal(packed.starts, theirs.starts)
    packed = packers_of(shop, packer).justified(random_plan(random, shop), rounds=3)
    rows = rows_of(packed.starts, problem.placement, orders=problem.orders)
    schedule = Schedule("packed", problem.placement, rows)
    assert bitwise_order(schedule)
    complete(schedule, problem)
    starts = starts_of(rows, shop)
    assert rows_of(starts, problem.placement, orders=problem.orders) == rows
    assert (starts <= packed.starts).all() and end_of(starts, shop) <= packed.makespan


def test_times_are_those_of_the_simulator() -> None:
    """The times of slices are those of the simulator. Messages take no time here, as a search uses
    the same message time for slices of different lengths."""
    problem = asked("v-auto", 3, 4, 4, "f=10,i=12,w=8,attention=0.4", Lengths.BALANCED)
    shop = job_shop_of(problem)
    rows = choose("zb-v").build(problem).rows
    program = complete(Schedule("zb-v", problem.placement, rows), problem)
    predicted = end_of(starts_of(rows, shop), shop) * shop.tick
    assert predicted == pytest.approx(simulate(program, problem.costs).makespan, rel=1e-3)


# --- the schedules that are found


def asked(
    spec: str,
    p: int,
    m: int,
    k: int,
    costs: str = "f=10,i=12,w=8,comm=1,attention=0.3,latency=0.1",
    lengths: Lengths = Lengths.BALANCED,
    limit: float | None = None,
) -> Problem:
    placement = choose(spec).place(p)
    within = None if limit is None else MemoryLimit(microbatches=limit)
    options = ScheduleOptions(slices=Slices(k, lengths))
    return Problem(placement, m, parse_costs(costs, placement), within, options=options)


SEARCHES = ("v-auto", "loop-auto", "wave-auto")


def figures(spec: str, problem: Problem) -> tuple[float, float]:
    program = build_program(choose(spec), problem)
    held = max(peaks(program.schedule, in_microbatches(program.schedule)))
    return simulate(program, problem.costs).makespan, held


@pytest.mark.parametrize(
    ("spec", "limit"),
    [("v-auto", None), *at_night(("v-auto", 2.0), *[(s, None) for s in SEARCHES])],
)
def test_no_worse_than_what_is_known(spec: str, limit: float | None) -> None:
    """A search for slices is no worse than known schedules. The schedule v-auto used to take the
    best of the schedules zb-v, v-half and v-min only, and other searches refused slices."""
    problem = asked(spec, 4, 6, 2, limit=limit)
    within = problem.held_by_1f1b if limit is None else limit
    found, held = figures(spec, problem)
    assert held <= within * (1 + 1e-9)
    others = []
    for name, entry in entries().items():
        if entry.place == entries()[spec].place and not entry.traits.searches:
            others.append(figures(name, replace(problem, memory_limit=None)))
    fitting = [makespan for makespan, other in others if other <= within * (1 + 1e-9)]
    assert found <= min(fitting) * (1 + 1e-9)
    if spec == "v-auto":
        assert found < 0.995 * min(fitting)


def test_slices_with_little_room_on_a_line() -> None:
    """A search finds short steps of slices with little memory on a linear placement. The schedule
    zb-auto used to have a makespan of 474.6 time units: in the orders that it tries, ranks stop and
    start again if there is memory for only few slices."""
    problem = asked("zb-auto", 4, 8, 2, limit=1.75)
    assert figures("zb-auto", problem)[0] < 450


@pytest.mark.parametrize("spec", ["v-auto", *at_night("loop-auto", "wave-auto")])
def test_what_is_built_at_once_is_sound(spec: str) -> None:
    problem = asked(spec, 3, 4, 3)
    program = complete(best_known(spec, problem), problem)
    assert program.schedule.arrays.slices == 3


def test_what_was_found_is_kept_with_its_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stored schedule of slices keeps their lengths. The table does not contain them, so the
    lengths used to be even when it was read."""
    problem = asked("v-auto", 2, 2, 3)
    made = best_schedule("v-auto", problem)
    monkeypatch.delattr(best_room, "searched")
    again = best_schedule("v-auto", problem)
    assert again.rows == made.rows
    slices = {a.microbatch.ends for row in again.rows for a in row}  # type: ignore[attr-defined]
    assert slices == {problem.slice_ends}


def test_no_limit_holds_less_than_a_microbatch() -> None:
    with pytest.raises(ValueError, match=r"the least feasible limit is 1 microbatch$"):
        best_schedule("v-auto", asked("v-auto", 2, 2, 3, limit=0.9))


def test_bytes_are_respected_down_to_the_least() -> None:
    random, placement = Random(3), v(3)
    costs = costs_of_slices(random, placement)
    problem = Problem(
        placement, 3, costs, MemoryLimit(bytes=1), options=ScheduleOptions(slices=Slices(3))
    )
    with pytest.raises(ValueError, match="least feasible") as error:
        best_schedule("v-auto", problem)
    least = parse_limit(str(error.value).split()[-1], 3, 3)
    tight = replace(problem, memory_limit=least)
    made = best_schedule("v-auto", tight)
    complete(made, tight)


@pytest.mark.parametrize(
    ("spec", "p", "k"), [("zb-v", 3, 3), *at_night(("zb-h1", 4, 2), ("interleaved-zb", 3, 3))]
)
def test_a_schedule_of_slices_is_made_longer_and_shorter(spec: str, p: int, k: int) -> None:
    problem = asked(spec, p, 12, k)
    assert has_middle(problem)
    known = choose(spec).build(problem)
    for m in (1, 3, 7, 11, 20):
        other = replace(problem, microbatches=m)
        made = extended(known, other)
        by_rule = build_program(choose(spec), other)
        takes = simulate(complete(made, other), other.costs).makespan
        assert takes <= 1.03 * simulate(by_rule, other.costs).makespan


def test_recompute_of_slices_searches_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """With recompute, no search is started for a schedule of slices. Recompute tries several
    limits, and a search for each of them would take minutes."""
    monkeypatch.delattr(best_room, "searched")
    problem = asked("v-auto", 2, 3, 2, limit=1.2).with_options(recompute=Recompute(fit=True))
    program = build_program(choose("v-auto"), problem)
    assert Kind.RECOMPUTE in {a.kind for row in program.schedule.rows for a in row}
