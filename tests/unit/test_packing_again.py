"""Packing plans in which some activations are made again: sound, and worth it."""

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
from megatron_ext.schedule.problem import Recompute
from megatron_ext.schedule.program.memory import share_made_again
from megatron_ext.schedule.program.simulate import simulate
from megatron_ext.schedule.schedule import Schedule
from megatron_ext.schedule.search.best import searched
from megatron_ext.schedule.search.improve import sides_of
from megatron_ext.schedule.search.pack import packer
from megatron_ext.schedule.search.shop import end_of, rows_of, shop_of, starts_of
from tests.helpers.schedules import PROPERTY, seeds
from tests.helpers.short_search import little_effort
from tests.unit.test_packing import random_again, random_plan, shapes, usual


@settings(PROPERTY, max_examples=40)
@given(seed=seeds, place=shapes, p=st.integers(1, 4), m=st.integers(1, 6), more=st.integers(0, 6))
def test_any_choice_of_what_is_made_again_packs_soundly(
    seed: int, place: Callable[[int], Placement], p: int, m: int, more: int
) -> None:
    """Memory cannot deadlock, in either direction of time; R is where it was chosen, and only
    there."""
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


@pytest.mark.parametrize("limit", [1.5, 3.0])
def test_a_search_chooses_what_is_made_again(limit: float) -> None:
    """In little memory a second forward pass costs less than waiting for room; and where nothing
    need be made again, it is no worse for that it may be."""
    alone = usual(v(3), 9, limit)
    seconds = []
    for recompute in (Recompute(), Recompute(fit=True)):
        problem = alone.with_extras(recompute=recompute)
        program = complete(searched("v-auto", problem, little_effort()), problem)
        seconds.append(simulate(program, problem.costs).makespan)
        again = share_made_again(program.schedule)
    assert seconds[1] <= seconds[0]
    if limit == 1.5:
        assert again > 0 and seconds[1] < 0.9 * seconds[0]
