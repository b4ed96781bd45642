"""Tests of programs for microbatches whose cost depends on their place in the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.compile.build import complete
from megatron_ext.compile.program.memory import in_bytes, in_microbatches, peaks
from megatron_ext.compile.program.simulate import seconds_of, simulate
from megatron_ext.compile.program.unequal import UnequalSteps, profile_of
from megatron_ext.schedule.action import Action, Kind
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.dealing import MicrobatchOrder, arranged
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.microbatch_costs import lognormal
from megatron_ext.schedule.placement import Placement, line, loop, v
from megatron_ext.schedule.problem import Problem, Recompute
from megatron_ext.schedule.schedule import Schedule, bitwise_order
from megatron_ext.search.bounds import lower_bound
from megatron_ext.search.for_places import judged_for_places, program_for_places
from megatron_ext.search.improve import packers_of
from megatron_ext.search.job_shop import end_of, job_shop_of, rows_of, starts_of
from megatron_ext.search.pack import packer
from megatron_ext.search.weight_gradient_filling import fill_once
from tests.helpers.random_schedules import PROPERTY, seeds
from tests.helpers.short_search import shorten_search
from tests.unit.program.test_noise import program
from tests.unit.search.test_packing import (
    assert_packers_agree,
    random_plan,
    random_problem,
    usual,
)

F, I, W = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741
PLACES = st.sampled_from([line, v, loop])


def same_for_all_passes(factors: Sequence[float]) -> dict[Kind, tuple[float, ...]]:
    return dict.fromkeys((F, I, W), tuple(factors))


def at_places(problem: Problem, random: Random) -> Problem:
    """Return ``problem`` with random costs for each place and each kind of pass."""
    factors = {
        kind: tuple(random.uniform(0.2, 3) for _ in range(problem.microbatches))
        for kind in (F, I, W)
    }
    return replace(problem, costs=replace(problem.costs, at_places=factors))


# --- costs


def test_a_pass_takes_its_place_times_what_it_does() -> None:
    costs = replace(uniform(line(2), 10, 12, 8, 1), at_places={F: (0.5, 2.0), I: (1.0, 3.0)})
    taken = {
        kind: [costs.of(Action(0, kind, k)) for k in (0, 1)]
        for kind in Kind
        if kind.value in "FIWBR"
    }
    assert taken[F] == [5, 20] and taken[I] == [12, 36] and taken[W] == [8, 8]
    assert taken[Kind.FULL_BACKWARD] == [20, 44] and taken[Kind.RECOMPUTE] == [5, 20]
    assert costs.of(Action(0, Kind.SEND_F, 1)) == 1
    given = costs.with_passes(recompute=(4.0, 4.0), fused_backward_saving=(1.0, 1.0))
    assert given.of(Action(0, Kind.RECOMPUTE, 1)) == 8
    assert given.of(Action(0, Kind.FULL_BACKWARD, 1)) == 43
    assert costs.alike.of(Action(0, F, 1)) == 10


def test_a_step_of_unequal_microbatches_is_one_with_costs_by_place() -> None:
    """A step of unequal microbatches takes as long as one with costs by place: the simulator of
    random steps agrees with the usual one."""
    here = program("zb-v", 4, 8)
    costs = np.random.default_rng(1).lognormal(0, 0.5, 8)
    placed = replace(here.problem.costs, at_places=same_for_all_passes(costs.tolist()))
    rows = np.arange(8)[None]
    expected = UnequalSteps(here).makespan(dict.fromkeys((F, I, W), costs), rows)
    assert simulate(here, placed).makespan == pytest.approx(expected)
    own = complete(
        replace(here.schedule, rows=here.schedule.compute_rows), replace(here.problem, costs=placed)
    )
    assert UnequalSteps(own).makespan(dict.fromkeys((F, I, W), costs), rows) == pytest.approx(
        simulate(own, placed).makespan, rel=0.05
    )


# --- packing


@settings(PROPERTY, max_examples=60)
@given(seed=seeds, place=PLACES, p=st.integers(1, 4), m=st.integers(1, 8), more=st.integers(0, 9))
def test_both_packers_give_the_same_to_the_digit(
    seed: int, place: Callable[[int], Placement], p: int, m: int, more: int
) -> None:
    random = Random(seed)
    problem = random_problem(random, place(p), m, more)
    assert_packers_agree(random, job_shop_of(at_places(problem, random)))


@settings(PROPERTY, max_examples=40)
@given(seed=seeds, place=PLACES, p=st.integers(1, 4), m=st.integers(1, 6), more=st.integers(0, 6))
def test_any_plan_packs_soundly(
    seed: int, place: Callable[[int], Placement], p: int, m: int, more: int
) -> None:
    """Any plan with costs by place is packed into a sound schedule: within the limit, in the order
    of the microbatches, and no shorter than the bound. If messages take no time, passes start when
    the plan says."""
    random, placement = Random(seed), place(p)
    problem = at_places(usual(placement, m, 1 + more / placement.chunks), random)
    shop = job_shop_of(problem)
    packed = packers_of(shop, packer).justified(random_plan(random, shop), rounds=3)
    schedule = Schedule("packed", placement, rows_of(packed.starts, placement))
    assert bitwise_order(schedule)
    ran = complete(schedule, problem)  # raises if the schedule is not within the limit
    makespan = simulate(ran, problem.costs).makespan
    assert lower_bound(problem, splits_backward=True) <= makespan * (1 + 1e-9)
    instant = replace(problem, costs=problem.costs.with_links(p2p_seconds=0.0))
    quick = simulate(complete(schedule, instant), instant.costs).makespan
    assert quick <= packed.makespan * shop.tick * 1.001
    starts = starts_of(schedule.rows, shop)
    assert (starts <= packed.starts).all() and end_of(starts, shop) <= packed.makespan


@settings(PROPERTY, max_examples=20)
@given(seed=seeds, place=PLACES, p=st.integers(1, 4), m=st.integers(1, 6))
def test_places_that_are_alike_pack_as_equal_microbatches(
    seed: int, place: Callable[[int], Placement], p: int, m: int
) -> None:
    problem = usual(place(p), m, 2)
    alike = replace(problem.costs, at_places=same_for_all_passes([1.0] * m))
    shop, by_place = job_shop_of(problem), job_shop_of(replace(problem, costs=alike))
    plan = random_plan(Random(seed), shop)
    made = [packers_of(one, packer).justified(plan) for one in (shop, by_place)]
    assert np.array_equal(made[0].starts, made[1].starts)


def test_weight_gradients_are_placed_by_the_costs_of_their_place() -> None:
    """Weight gradients are placed by the costs of their own place. Two ranks run F and I of three
    microbatches; the gap that a W fits into depends on which W it is."""
    problem = usual(line(2), 3, 3)
    places = {F: (1.0, 1.0, 1.0), I: (1.0, 1.0, 1.0), W: (0.1, 4.0, 0.1)}
    problem = replace(problem, costs=replace(problem.costs, at_places=places))
    orders = [
        [Action(0, kind, k) for kind, k in ((F, 0), (F, 1), (F, 2), (I, 0), (I, 1), (I, 2))],
        [Action(1, kind, k) for k in range(3) for kind in (F, I)],
    ]
    filled = fill_once(orders, problem)
    schedule = Schedule("filled", problem.placement, filled.rows)
    ran = complete(schedule, problem)
    seconds = seconds_of(ran.graph, ran.schedule, problem.costs)
    of_w = [s for s, action in zip(seconds, ran.graph.actions, strict=True) if action.kind is W]
    assert sorted(of_w) == pytest.approx([0.8] * 4 + [32] * 2)
    assert filled.makespan == pytest.approx(simulate(ran, problem.costs).makespan)


# --- the program


LOAD = lognormal(np.random.default_rng(5), 0.5, (20, 64))  # 16 microbatches on 4 replicas


def test_a_program_for_the_places_is_shorter_on_a_v() -> None:
    """On a V placement, a program made for the microbatches' places is shorter, also in steps that
    it was not made for, and needs no more memory."""
    here, load = program("v-auto", 4, 8, limit=4), LOAD[:, :32]
    made = program_for_places(here, profile_of(dict.fromkeys((F, I, W), load[:10]), 4))
    assert made is not None and bitwise_order(made.schedule)
    assert max(peaks(made.schedule, in_microbatches(made.schedule))) <= 4 * (1 + 1e-9)
    taken = []
    for row in load[10:]:
        rows = arranged(row, 4, MicrobatchOrder.SMALL_ENDS, deal=True)
        of_passes = dict.fromkeys((F, I, W), row)
        taken.append([UnequalSteps(one).makespan(of_passes, rows) for one in (made, here)])
    now, before = np.median(taken, axis=0)
    assert now < 0.98 * before


@pytest.mark.parametrize(("microbatches", "is_shorter"), [(8, True), (16, False)])
def test_the_better_program_is_kept(microbatches: int, is_shorter: bool) -> None:
    """The better program is kept. With images in seven of ten microbatches, on a linear placement,
    the program for the places is not always the better one."""
    here, rng = program("zb-h1", 4, microbatches, limit=4), np.random.default_rng(3)
    size = (20, 4 * microbatches)
    images = np.where(rng.random(size) < 0.3, 0, rng.lognormal(0, 0.8, size))
    load = 0.9 + 0.4 * images
    judged, made = judged_for_places(here, dict.fromkeys((F, I, W), load / load.mean()), 4)
    assert made is not None and judged.profile is not None
    assert judged.keeps_profile is is_shorter is (judged.profile < judged.dealt)
    assert judged.dealt < judged.arrival


@pytest.mark.parametrize(("largest", "most"), [(1, 4), (3, 2), (9, 0)])
def test_a_limit_in_bytes_counts_the_largest_microbatch(largest: int, most: int) -> None:
    """A limit in bytes counts each microbatch as the largest one.

    The limit is 8 bytes, and microbatches have 1 on average. As many are in flight as fit if all
    are the largest; if not even one fits, there is no search.
    """
    here = program("zb-h1", 4, 8)
    held = dict.fromkeys((Held.ACTIVATION, Held.WEIGHT_INPUTS), (float(largest),) * 4)
    costs = here.problem.costs.with_passes(held_bytes=held)
    problem = replace(here.problem, costs=costs, memory_limit=MemoryLimit(bytes=8))
    places = same_for_all_passes([0.2, 0.6, 1.4, 1.8, 1.8, 1.4, 0.6, 0.2])
    equal: Any = SimpleNamespace(schedule=here.schedule, problem=problem)
    made = program_for_places(equal, places)
    if not most:
        assert made is None
        return
    assert made is not None
    assert max(peaks(made.schedule, in_bytes(made.problem.costs))) <= 8
    in_flight = max(peaks(made.schedule, in_microbatches(made.schedule)))
    assert in_flight <= most if largest > 1 else in_flight >= most


def test_it_stays_within_what_the_program_holds_if_there_is_no_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shorten_search(monkeypatch)
    here = program("v-half", 4, 8)
    made = program_for_places(here, same_for_all_passes([1.0] * 4 + [2.0] * 4))
    held = [max(peaks(one.schedule, in_microbatches(one.schedule))) for one in (made, here) if one]
    assert len(held) == 2 and held[0] <= held[1] < 4


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("1f1b", {}),
        ("zb-h1", {"recompute": Recompute(first=1)}),
        ("zb-h1", {"steps_overlap": True}),
    ],
)
def test_programs_without_one_for_the_places(spec: str, options: dict[str, Any]) -> None:
    here = program(spec, 4, 8, **options)
    assert program_for_places(here, same_for_all_passes([1.0] * 8)) is None


def test_most_of_the_gain_is_left_under_noise() -> None:
    """Most of the gain remains if passes vary by 15 %: at least 80 % of the gain of ordering,
    dealing and the program together."""
    here = program("zb-v", 4, 16, limit=4)
    made = program_for_places(here, profile_of(dict.fromkeys((F, I, W), LOAD[:10]), 4))
    assert made is not None
    rng, gains = np.random.default_rng(2), []
    for noise in (0.0, 0.15):
        taken = []
        for row in LOAD[10:]:
            for one, order, deal in (
                (here, MicrobatchOrder.ARRIVAL, False),
                (made, MicrobatchOrder.SMALL_ENDS, True),
            ):
                steps, rows = UnequalSteps(one), arranged(row, 4, order, deal=deal)
                factors = steps.factors(dict.fromkeys((F, I, W), row), rows)
                taken.append(steps.slowest(factors * lognormal(rng, noise, factors.shape)))
        before, now = np.array(taken).reshape(-1, 2).T
        gains.append(1 - np.median(now / before))
    assert gains[1] > 0.8 * gains[0] > 0.1
