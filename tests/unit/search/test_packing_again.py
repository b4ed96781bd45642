"""Tests of plans with recomputed activations: each is packed soundly, and recompute shortens the
makespan."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.compile.build import build_program, complete
from megatron_ext.compile.program.memory import recomputed_share
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.registry import choose
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.placement import Placement, v
from megatron_ext.schedule.problem import Recompute
from megatron_ext.schedule.schedule import Schedule, bitwise_order
from megatron_ext.search import recompute_search
from megatron_ext.search.best import searched
from megatron_ext.search.effort import effort
from megatron_ext.search.extension import extended
from megatron_ext.search.improve import packers_of
from megatron_ext.search.job_shop import end_of, job_shop_of, rows_of, starts_of
from megatron_ext.search.pack import packer
from tests.helpers.combinations import at_night
from tests.helpers.random_schedules import PROPERTY, seeds
from tests.helpers.short_search import little_effort, shorten_search
from tests.unit.search.test_packing import random_plan, random_recomputed, shapes, usual


@settings(PROPERTY, max_examples=30)
@given(seed=seeds, place=shapes, p=st.integers(1, 4), m=st.integers(1, 6), more=st.integers(0, 6))
def test_any_choice_of_recompute_packs_soundly(
    seed: int, place: Callable[[int], Placement], p: int, m: int, more: int
) -> None:
    """Any set of activations to recompute can be packed into a sound schedule, forwards or
    backwards in time. It never happens that packing stops because no rank has memory for its next
    pass. The schedule has an R for each activation of the set, and no other R."""
    random, placement = Random(seed), place(p)
    problem = usual(placement, m, 1 + more / placement.chunks)
    recomputed = random_recomputed(random, problem)
    shop = job_shop_of(problem, recomputed)
    plan = random_plan(random, shop)
    packed = packers_of(shop, packer).justified(plan, rounds=3)
    rows = rows_of(packed.starts, placement, shop.recompute_actions)
    made = {(a.stage, a.microbatch) for row in rows for a in row if a.kind is Kind.RECOMPUTE}
    assert made == {tuple(place) for place in np.argwhere(recomputed).tolist()}
    # raises if the schedule is not within the limit
    complete(Schedule("packed", placement, rows), problem)
    back = starts_of(rows, shop)
    assert rows_of(back, placement, shop.recompute_actions) == rows
    assert end_of(back, shop) <= packed.makespan


@pytest.mark.parametrize("limit", [1.5, *at_night(3.0)])
def test_a_search_chooses_what_is_recomputed(limit: float) -> None:
    """A search chooses the activations to recompute, and is no worse than a search that may not
    recompute. With little memory, a second forward pass costs less time than waiting for memory."""
    alone = usual(v(3), 9, limit)
    seconds = []
    for recompute in (Recompute(), Recompute(fit=True)):
        problem = alone.with_options(recompute=recompute)
        program = complete(searched("v-auto", problem, little_effort()), problem)
        seconds.append(simulate(program, problem.costs).makespan)
        again = recomputed_share(program.schedule)
    assert seconds[1] <= seconds[0]
    if limit == 1.5:
        assert again > 0 and seconds[1] < 0.9 * seconds[0]


def test_what_takes_the_least_there_is_is_not_improved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute_search, "shifted", None)  # a call would fail
    problem = usual(v(2), 4, 1.5).with_options(recompute=Recompute(fit=True))
    assert recompute_search.search_with_recompute(problem, [], 1e9, little_effort())
    with pytest.raises(TypeError):
        recompute_search.search_with_recompute(problem, [], 0.0, little_effort())


@pytest.mark.search
@pytest.mark.parametrize("spec", ["wave-auto", *at_night("v-auto", "loop-auto", "auto:chunks=2")])
def test_every_search_takes_a_limit_to_fit_into(
    spec: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shorten_search(monkeypatch)
    words = ["simulate", spec, "--pp", "2", "-m", "8", "--costs", "f=10,i=12,w=8,comm=1"]
    words += ["--recompute", "fit", "--memory-limit", "1.25", "--json"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    figures = json.loads(shown.stdout)
    assert figures["recomputed"] > 0 and max(figures["peak_activation_microbatches"]) <= 1.26


# Memory limits in microbatches, with the makespans that a packer written for a test found on a V
# placement with p = 8, m = 32 and F : I : W as 10 : 12 : 8. (Without recompute the makespans are
# 2142, 1535 and 1227.) The large effort of a search finds these makespans, and the effort of these
# tests must find them, too.
TARGETS = ((2.0, 1338), (3.0, 1245), (4.0, 1182))


@pytest.mark.parametrize(("limit", "makespan"), at_night(*TARGETS))
def test_a_v_in_little_memory(limit: float, makespan: float) -> None:
    pytest.importorskip("numba")
    problem = usual(v(8), 32, limit).with_options(recompute=Recompute(fit=True))
    program = complete(searched("v-auto", problem, effort()), problem)
    assert simulate(program, problem.costs).makespan <= makespan


@pytest.mark.parametrize("microbatches", [10, 19])
def test_what_was_found_is_made_longer_and_shorter(microbatches: int) -> None:
    """A schedule with recompute that a search found can be made longer and shorter. A step of
    another length recomputes activations of the same stages, for the microbatches that correspond.
    This used to fail at a missing lane of R."""
    known = usual(v(3), 13, 1.5).with_options(recompute=Recompute(fit=True))
    schedule = build_program(choose("v-half"), known).schedule
    schedule = replace(schedule, rows=schedule.compute_rows)
    problem = replace(known, microbatches=microbatches)
    made = extended(schedule, problem)
    program = complete(made, problem)  # raises if the schedule is not within the limit
    assert bitwise_order(made)
    before, after = map(recomputed_share, (schedule, program.schedule))
    assert before > 0 and after == pytest.approx(before, abs=0.2)
