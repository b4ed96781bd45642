"""Tests of the predicted step times of our schedules, computed from traced steps of Megatron's own
schedule."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.registry import choose
from megatron_ext.observe.trace import TracedStep, TraceFile, read_trace, traced_step
from megatron_ext.observe.traced_costs import traced_costs
from megatron_ext.observe.what_if import TracedCosts, WhatIf, weight_shares, what_if
from megatron_ext.planner.stock import run_by_stock
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.stock_executor import STOCK_EXECUTOR, StockExecutor
from megatron_ext.search import best


def seen(
    spec: str,
    ranks: int,
    microbatches: int,
    hop: float = 0.0,
    executor: StockExecutor = STOCK_EXECUTOR,
) -> TracedStep:
    """Return a simulated step as a trace of Megatron's own: on a rank F takes 1 s and B 2 s, with W
    as 0.4 of B."""
    resolved = choose(spec)
    placement = resolved.place(ranks)
    costs = uniform(placement, 1.0, 1.2, 0.8, comm=hop)
    problem = run_by_stock(Problem(placement, microbatches, costs), spec, executor)
    program = build_program(resolved, problem)
    timeline = simulate(program, costs)
    compute = tuple(event for row in timeline.compute for event in row)
    measured = replace(timeline, events=compute)
    traced = traced_step(7, measured, timeline, clock_error=0.0)
    return replace(traced, weight_shares=weight_shares(costs), executor=executor)


def costs_of(step: TracedStep) -> TracedCosts:
    costs = traced_costs([step])
    assert costs is not None
    return costs


def step_of(told: WhatIf, name: str) -> tuple[float, float, float]:
    (prospect,) = (p for p in (*told.within, *told.with_more) if p.schedule == name)
    return round(prospect.low, 9), round(prospect.step, 9), round(prospect.high, 9)


def simulated(spec: str, weight: float) -> float:
    placement = choose(spec).place(4)
    costs = uniform(placement, 1.0, 2.0 - weight, weight)
    made = build_program(choose(spec), Problem(placement, 8, uniform(placement, 1.0, 1.2, 0.8)))
    return round(simulate(made, costs).makespan, 9)


def test_costs_are_those_that_the_step_shows() -> None:
    costs = costs_of(seen("1f1b", 4, 8, hop=0.25))
    assert costs.forward == pytest.approx((1.0,) * 4)
    assert costs.backward == pytest.approx((2.0,) * 4)
    assert costs.weight_shares == pytest.approx((0.4,) * 4)
    assert costs.message == pytest.approx(0.25)
    assert costs_of(seen("interleaved:vpp=2", 4, 8)).forward == pytest.approx((0.5,) * 8)


def test_a_step_of_1f1b() -> None:
    """From a traced step of 1F1B, other schedules are predicted. The step itself is the textbook's:
    4 ranks and 8 microbatches take 11 times F + B in Megatron's order."""
    told = what_if(costs_of(seen("1f1b", 4, 8)))
    assert told.stock.step == pytest.approx(33.0) == told.stock.high
    assert told.stock.of_stock == pytest.approx((1.0, 1.0))
    assert told.stock.bubble_share == pytest.approx(3 / 11) and told.stock.peak == 4
    assert all(p.peak <= 4 for p in told.within)
    assert all(p.peak > 4 and p.step < 33.0 for p in told.with_more)
    assert list(told.within) == sorted(told.within, key=lambda p: (p.step, p.peak))
    for spec in ("zb-h1", "zb-v"):  # stages of the V are half as long
        steps = [simulated(spec, 2.0 * share) for share in (0.3, 0.4, 0.5)]
        assert step_of(told, spec) == (min(steps), steps[1], max(steps))
    names = {p.schedule for p in (*told.within, *told.with_more)}
    assert "zb-h2" in names and not any(name.startswith("interleaved") for name in names)
    assert (
        "needs more memory than Megatron's own schedule, and is no faster" in told.excluded["gpipe"]
    )


@pytest.mark.parametrize("spec", ["1f1b", "interleaved:vpp=2"])
@pytest.mark.parametrize(
    "executor",
    [STOCK_EXECUTOR, StockExecutor(overlaps_ends=True), StockExecutor(overlaps=False)],
)
def test_megatrons_own_step_waits_as_it_did(
    spec: str, executor: StockExecutor, tmp_path: Path
) -> None:
    """The prediction of Megatron's own step includes its waits for messages. The step used to be
    predicted as our executor would run it, shorter than measured, so our gains were computed
    against a step that Megatron does not have."""
    step = seen(spec, 4, 8, hop=0.1, executor=executor)
    TraceFile(tmp_path / "trace.json").add(step)
    told = what_if(costs_of(read_trace(tmp_path)[0]), seconds=0.0)
    assert told.stock.step == pytest.approx(step.measured.makespan)
    costs = uniform(choose(spec).place(4), 1.0, 1.2, 0.8, comm=0.1)
    ours = build_program(choose(spec), Problem(choose(spec).place(4), 8, costs))
    assert told.stock.step > 1.005 * simulate(ours, costs).makespan


def test_a_step_of_two_chunks_a_rank() -> None:
    """From a traced interleaved step with two chunks a rank, other schedules are predicted. The
    group size follows from the order of passes. For zb-h1, which has one stage a rank,
    neighbouring stages are joined."""
    told = what_if(costs_of(seen("interleaved:vpp=2,group=3", 2, 6)))
    assert told.stock.schedule == "interleaved" and told.stock.vpp == 2
    tried = {p.schedule: p for p in (*told.within, *told.with_more)}
    assert tried["interleaved-zb:vpp=2"].step < told.stock.step
    assert tried["zb-h1"].vpp == 1 and tried["zb-v"].vpp == 2
    assert tried["zb-h1"].peak == 2
    # interleaved:vpp=2 has smaller groups of microbatches than the traced schedule.
    assert tried["interleaved:vpp=2"].step == pytest.approx(told.stock.step)
    assert tried["interleaved:vpp=2"].peak < told.stock.peak


def test_searching_families_are_predicted_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(best, "search", None)  # a search would fail
    told = what_if(costs_of(seen("interleaved:vpp=2", 2, 6)))
    assert {"v-auto", "wave-auto", "loop-auto:vpp=2"} <= {
        prospect.schedule for prospect in (*told.within, *told.with_more)
    }


def test_what_takes_long_is_omitted() -> None:
    told = what_if(costs_of(seen("1f1b", 4, 8)), seconds=0.0)
    assert not told.within and "time for comparisons ended" in told.excluded["zb-h1"]


def test_stages_that_cannot_be_cut() -> None:
    costs = costs_of(seen("interleaved:vpp=3", 2, 4))
    told = what_if(costs)
    assert "cannot be computed from the 6 measured stages" in told.excluded["zb-v"]
    assert costs.costs(4) is None


def test_a_trace_keeps_what_the_command_needs(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace.json")
    file.add(seen("1f1b", 2, 4))
    (step,) = read_trace(tmp_path)
    assert step.weight_shares == pytest.approx((0.4, 0.4))
    result = CliRunner().invoke(app, ["trace", str(tmp_path)])
    assert "Megatron's own 1f1b on 2 ranks" in result.stdout
    assert "what schedules would take" in result.stdout and "zb-h1" in result.stdout
    report = json.loads(CliRunner().invoke(app, ["trace", str(tmp_path), "--json"]).stdout)
    assert report["what_if"]["stock"]["step"] == pytest.approx(15.0)
    assert report["what_if"]["within"][0]["of_stock"][1] < 1


def test_a_trace_of_ours_has_no_what_if(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / "trace.json")
    file.add(replace(seen("zb-h1", 2, 4), weight_shares=None))
    assert read_trace(tmp_path)[0].weight_shares is None
    report = json.loads(CliRunner().invoke(app, ["trace", str(tmp_path), "--json"]).stdout)
    assert report["what_if"] is None


def test_shares_that_are_not_there(tmp_path: Path) -> None:
    TraceFile(tmp_path / "trace.json").add(replace(seen("1f1b", 2, 4), weight_shares=(0.4,)))
    with pytest.raises(
        ValueError, match="weight_shares has 1 figures, and the schedule has 2 stages"
    ):
        read_trace(tmp_path)
