"""Tests of packing plans in Python and compiled: sound, within the limit, and with exactly the same
result."""

from __future__ import annotations

import builtins
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.base.progress import reporting
from megatron_ext.compile.build import complete
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.registry import choose
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.kinds import Held
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.placement import Placement, line, loop, v, wave
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.schedule import Schedule, bitwise_order
from megatron_ext.search import improve
from megatron_ext.search.effort import LARGE, SMALL, effort, small_effort
from megatron_ext.search.improve import packers_of, search
from megatron_ext.search.job_shop import (
    JobShop,
    Starts,
    end_of,
    job_shop_of,
    rows_of,
    starts_of,
    timed,
)
from megatron_ext.search.pack import Pack, packer
from megatron_ext.search.recompute_search import Recomputed
from tests.helpers.random_schedules import PROPERTY, random_costs, seeds, with_random_links
from tests.helpers.short_search import little_effort

COMPILED = "megatron_ext.search.compiled"
PLACEMENTS = {
    "line": line,
    "v": v,
    "wave": wave,
    "loop of 2": loop,
    "loop of 3": lambda p: loop(p, vpp=3),
    "loop of 4": lambda p: loop(p, vpp=4),
}
shapes = st.sampled_from(list(PLACEMENTS.values()))


def random_plan(random: Random, shop: JobShop) -> Starts:
    plan = [
        sorted(random.randrange(20 * shop.work) for _ in range(shop.columns))
        for _ in range(shop.operation_count)
    ]
    return np.array(plan)


def random_problem(random: Random, placement: Placement, m: int, more: int) -> Problem:
    """Return a problem whose limit is in microbatches, or in bytes if ``more`` is odd."""
    costs = with_random_links(random, random_costs(random, placement))
    limit = MemoryLimit(1 + more / placement.chunks)
    if more % 2:
        limit = MemoryLimit(bytes=int(random.uniform(3e9, 9e9) * placement.chunks) + 1)
    return Problem(placement, m, costs, limit)


def assert_packers_agree(random: Random, shop: JobShop) -> None:
    """Assert that the Python packer and the compiled one pack a random plan in the same way."""
    compiled = pytest.importorskip(COMPILED)
    for side in (shop, shop.mirrored()):
        plan = random_plan(random, side)
        if side.fits:
            ours, theirs = packer(side)(plan), compiled.compiled_packer(side)(plan)
            assert ours.makespan == theirs.makespan
            assert np.array_equal(ours.starts, theirs.starts)


def random_recomputed(random: Random, problem: Problem) -> Recomputed:
    shape = problem.placement.stages, problem.microbatches
    share = random.random()
    return np.array([[random.random() < share for _ in range(shape[1])] for _ in range(shape[0])])


def usual(placement: Placement, m: int, limit: float) -> Problem:
    return Problem(placement, m, uniform(placement, 10, 12, 8, 1), MemoryLimit(limit))


@settings(PROPERTY, max_examples=30)
@given(seed=seeds, place=shapes, p=st.integers(1, 4), m=st.integers(1, 6), more=st.integers(0, 6))
def test_any_plan_packs_soundly(
    seed: int, place: Callable[[int], Placement], p: int, m: int, more: int
) -> None:
    """Any plan is packed into a sound schedule, forwards or backwards in time. It never happens
    that packing stops because no rank has memory for its next pass. Passes start when the plan
    says, except where messages delay one another."""
    placement = place(p)
    problem = usual(placement, m, 1 + more / placement.chunks)
    shop = job_shop_of(problem)
    packed = packers_of(shop, packer).justified(random_plan(Random(seed), shop), rounds=3)
    schedule = Schedule("packed", placement, rows_of(packed.starts, placement))
    assert bitwise_order(schedule)
    complete(schedule, problem)  # raises if the schedule is not within the limit
    instant = replace(problem, costs=uniform(placement, 10, 12, 8, 0))
    ran = complete(schedule, instant)
    assert simulate(ran, instant.costs).makespan <= packed.makespan * shop.tick + 1e-6


@settings(PROPERTY, max_examples=30)
@given(seed=seeds, place=shapes, p=st.integers(1, 4), m=st.integers(1, 5), above=st.floats(1, 4))
def test_bytes_never_deadlock(
    seed: int, place: Callable[[int], Placement], p: int, m: int, above: float
) -> None:
    """Packing never deadlocks, also if W needs more memory than I frees, so that memory grows in
    the backward passes."""
    random, placement = Random(seed), place(p)
    costs = random_costs(random, placement)
    assert costs.held_bytes is not None
    both = zip(*(costs.held_bytes[h] for h in (Held.ACTIVATION, Held.WEIGHT_INPUTS)), strict=True)
    need = [max(pair) + 1 for pair in both]
    most = max(sum(need[stage] for stage in stages) for stages in placement.stages_of)
    problem = Problem(placement, m, costs, MemoryLimit(bytes=int(above * most) + 1))
    shop = job_shop_of(problem)
    assert shop.fits
    packed = packers_of(shop, packer).justified(random_plan(random, shop), rounds=3)
    complete(Schedule("packed", placement, rows_of(packed.starts, placement)), problem)


@settings(PROPERTY, max_examples=30)
@given(seed=seeds, place=shapes, p=st.integers(1, 4), m=st.integers(1, 5))
def test_plan_of_a_schedule_gives_it_back(
    seed: int, place: Callable[[int], Placement], p: int, m: int
) -> None:
    placement = place(p)
    shop = job_shop_of(usual(placement, m, 2))
    packed = packers_of(shop, packer).justified(random_plan(Random(seed), shop))
    rows = rows_of(packed.starts, placement)
    starts = starts_of(rows, shop)
    assert rows_of(starts, placement) == rows
    assert (timed(packed.starts, shop) == starts).all()
    assert (starts <= packed.starts).all() and end_of(starts, shop) <= packed.makespan


def test_costs_become_whole_ticks() -> None:
    shop = job_shop_of(usual(v(2), 4, 1.5))
    ticks = [round(seconds / shop.tick, 6) for seconds in (5, 6, 4, 1)]
    assert [shop.durations[lane] for lane in (0, 2, 4)] == ticks[:3]
    assert shop.predecessors[2][0][1] == ticks[3] and shop.work >= 1000
    assert (shop.limit, shop.microbatch_memory) == (3, (2, 2))
    assert job_shop_of(usual(v(2), 4, 1.99)).limit == 3
    # 4/3 microbatches are 4 chunks, although 4/3 is rounded
    assert job_shop_of(usual(loop(2, vpp=3), 4, 4 / 3)).limit == 4


def test_costs_without_a_common_unit_become_ticks_too() -> None:
    placement = v(2)
    costs = uniform(placement, 0.0123456, 0.0134567, 0.0098765, 0.0003)
    shop = job_shop_of(Problem(placement, 4, costs, MemoryLimit(2)))
    assert shop.work == pytest.approx(100_000, abs=3)
    assert shop.durations[0] * shop.tick == pytest.approx(0.0123456 / 2, rel=1e-4)


@pytest.mark.parametrize(("spec", "place"), [("zb-h1", line), ("zb-v", v)])
def test_each_link_takes_its_own_time(spec: str, place: Callable[[int], Placement]) -> None:
    """Packing uses the seconds of each link. A search used to take the mean of all links for each,
    and so ignored a single slow one."""
    placement = place(4)
    hops = tuple(8.0 if placement.rank_of[s] == 1 else 1.0 for s in range(placement.last))
    costs = uniform(placement, 10, 12, 8, fmean(hops)).with_links(p2p_seconds_by_stage=hops)
    problem = Problem(placement, 8, costs)
    shop, rows = job_shop_of(problem), choose(spec).build(problem).rows
    program = complete(Schedule(spec, placement, rows), problem)
    exact = simulate(program, costs).makespan
    assert end_of(starts_of(rows, shop), shop) * shop.tick == pytest.approx(exact, rel=1e-3)


# --- the search


def short(shop: JobShop, pack: Callable[[JobShop], Pack] = packer, least: int = 0) -> list[Starts]:
    how = replace(little_effort(), packer=pack)
    return [packed.starts for packed in search(shop, [], least, how)]


def test_search_ends_where_nothing_can_be_shorter() -> None:
    packed = []

    def counted(shop: JobShop) -> Pack:
        pack = packer(shop)
        return lambda plan: packed.append(shop) or pack(plan)  # type: ignore[func-returns-value]

    shop = job_shop_of(usual(v(2), 8, 2))
    short(shop, counted)
    all_steps = len(packed)
    packed.clear()
    short(shop, counted, least=10**9)
    steps = little_effort().passes(2) // (2 * shop.operation_count * shop.columns)
    assert len(packed) == all_steps - 2 * max(steps, improve._MIN_STEPS)


def test_search_ends_where_it_gains_nothing() -> None:
    """A search ends when it gains nothing more. For 64 ranks it used to pack plans for a minute,
    although it had found its result in the first seconds."""
    packed = []

    def counted(shop: JobShop) -> Pack:
        pack = packer(shop)
        return lambda plan: packed.append(shop) or pack(plan)  # type: ignore[func-returns-value]

    shop = job_shop_of(usual(v(2), 8, 2))
    ends = []
    for patience in (little_effort().patience, 1):
        packed.clear()
        how = replace(little_effort(), packer=counted, patience=patience)
        ends.append((search(shop, [], 0, how)[0].makespan, len(packed)))
    (of_all, tried), (of_some, tried_less) = ends
    assert of_some == of_all and tried_less < tried


def test_a_small_problem_is_not_improved_for_long() -> None:
    """A small problem is not improved for long. For 2 ranks and 4 microbatches the search used to
    pack 90,000 plans, which took a minute."""
    how = small_effort()
    assert improve.steps_of(how, 2, 2 * 12 * 4) == how.steps < how.passes(2) // 96
    assert improve.steps_of(how, 8, 2 * 48 * 32) == how.passes(8) // 3072 < how.steps


@pytest.mark.search
@pytest.mark.parametrize(
    "problem", [usual(v(3), 7, 2), usual(wave(2), 5, 2.5), usual(loop(3, vpp=3), 6, 4)]
)
def test_compiled_search_finds_the_same(problem: Problem) -> None:
    """A compiled search finds the same schedule as one in Python, with the same small effort."""
    compiled = pytest.importorskip(COMPILED)
    shop = job_shop_of(problem)
    for ours, theirs in zip(short(shop), short(shop, compiled.compiled_packer), strict=True):
        assert np.array_equal(ours, theirs)


@settings(PROPERTY, max_examples=60)
@given(seed=seeds, place=shapes, p=st.integers(1, 4), m=st.integers(1, 8), more=st.integers(0, 9))
def test_compiled_packing_is_the_same_to_the_digit(
    seed: int, place: Callable[[int], Placement], p: int, m: int, more: int
) -> None:
    random = Random(seed)
    problem = random_problem(random, place(p), m, more)
    recomputed = random.choice([None, random_recomputed(random, problem)])
    assert_packers_agree(random, job_shop_of(problem, recomputed))


# --- optional packages


def test_effort_is_large_where_numba_is() -> None:
    pytest.importorskip("numba")
    assert effort().name == LARGE
    assert all(effort().passes(p) >= 4 * small_effort().passes(p) for p in (2, 8, 16, 32, 64))


@pytest.mark.parametrize("error", ["No module named 'numba'", "Numba needs NumPy 2.5 or less"])
def test_search_without_numba_says_what_to_install(
    error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "numba":
            raise ImportError(error)
        return imported(name, *args, **kwargs)

    imported = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.delitem(sys.modules, COMPILED, raising=False)
    monkeypatch.delattr("megatron_ext.search.compiled", raising=False)
    heard: list[str] = []
    with reporting(heard.append):
        assert effort().name == SMALL
    (line,) = heard
    assert error in line and "pip install 'megatron_ext[search]'" in line


def test_compiled_code_lies_in_the_cache_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled code is stored in the user's cache and never in the folder of the package, which is
    read-only in a container. numba's own settings do not change."""
    numba = pytest.importorskip("numba")
    compiled = pytest.importorskip(COMPILED)
    asked: list[object] = []

    class Dispatcher:
        def compile(self, signature: object) -> None:
            asked.append((signature, numba.config.CACHE_DIR))

    def njit(function: object, cache: bool = False) -> Dispatcher:
        asked.append((cache, numba.config.CACHE_DIR))
        return Dispatcher()

    monkeypatch.setattr(compiled, "njit", njit)
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(tmp_path))
    before = numba.config.CACHE_DIR
    compiled._compiled.__wrapped__()
    folder = os.fspath(tmp_path / "megatron_ext" / "numba")
    assert asked == [(True, folder), (compiled._SIGNATURE, before)]


@pytest.mark.parametrize("fault", ["unwritable", "broken"])
def test_cache_of_compiled_code_that_fails_is_done_without(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = pytest.importorskip(COMPILED)
    cached: list[bool] = []

    class Dispatcher:
        def compile(self, signature: object) -> None:
            if cached[-1]:
                raise pickle.UnpicklingError("pickle data was truncated")

    def njit(function: object, cache: bool = False) -> Dispatcher:
        cached.append(cache)
        return Dispatcher()

    monkeypatch.setattr(compiled, "njit", njit)
    home = tmp_path / "file"
    home.write_text("in the way") if fault == "unwritable" else home.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", os.fspath(home))
    heard: list[str] = []
    with reporting(heard.append):
        compiled._compiled.__wrapped__()
    assert cached == ([False] if fault == "unwritable" else [True, False])
    (line,) = heard
    assert str(home) in line and "XDG_CACHE_HOME" in line
