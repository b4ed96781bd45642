"""Packing plans in which some activations are made again: sound, and to the digit the same."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.build.build import complete
from megatron_ext.schedule.placement import Placement, v
from megatron_ext.schedule.problem import Problem, Recompute
from megatron_ext.schedule.program.memory import share_made_again
from megatron_ext.schedule.program.simulate import simulate
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.schedule.search.again import Again, search_again
from megatron_ext.schedule.search.improve import search, sides_of
from megatron_ext.schedule.search.pack import packer
from megatron_ext.schedule.search.shop import end_of, rows_of, shop_of, starts_of
from tests.helpers.schedules import PROPERTY, seeds
from tests.helpers.short_search import little_effort
from tests.unit.test_packing import random_plan, shapes, usual


def random_again(random: Random, problem: Problem) -> Again:
    shape = problem.placement.stages, problem.microbatches
    share = random.random()
    return np.array([[random.random() < share for _ in range(shape[1])] for _ in range(shape[0])])


@settings(PROPERTY, max_examples=40)
@given(seed=seeds, place=shapes, p=st.integers(1, 4), m=st.integers(1, 6), more=st.integers(0, 6))
def test_any_choice_of_what_is_made_again_packs_soundly(
    seed: int, place: Callable[[int], Placement], p: int, m: int, more: int
) -> None:
    """Memory cannot deadlock, in either direction of time; R is where it was chosen, and only
    there; plain Python and numba agree to the digit."""
    random, placement = Random(seed), place(p)
    problem = usual(placement, m, 1 + more / placement.chunks)
    again = random_again(random, problem)
    shop = shop_of(problem, again)
    plan = random_plan(random, shop)
    packed = sides_of(shop, packer).justified(plan, rounds=3)
    rows = rows_of(packed.starts, placement, shop.again)
    made = {(a.stage, a.microbatch) for row in rows for a in row if a.kind is Kind.RECOMPUTE}
    assert made == {tuple(place) for place in np.argwhere(again).tolist()}
    complete(Schedule("packed", placement, rows), problem)  # within the limit
    back = starts_of(rows, shop)
    assert rows_of(back, placement, shop.again) == rows
    assert end_of(back, shop) <= packed.makespan
    compiled = pytest.importorskip("megatron_ext.schedule.search.compiled")
    other = sides_of(shop, compiled.packer).justified(plan, rounds=3)
    assert np.array_equal(packed.starts, other.starts)


def test_a_search_chooses_what_is_made_again() -> None:
    """In little memory a second forward pass costs less than waiting for room."""
    problem = usual(v(4), 12, 2).with_extras(recompute=Recompute(fit=True))
    found = search_again(problem, [], little_effort())
    program = complete(Schedule("found", problem.placement, found[0]), problem)
    assert share_made_again(program.schedule) > 0
    shop = shop_of(usual(v(4), 12, 2))
    without = min(packed.makespan for packed in search(shop, [], 0, little_effort()))
    assert simulate(program, problem.costs).makespan < without * shop.tick
