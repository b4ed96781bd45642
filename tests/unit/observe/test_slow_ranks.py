"""Tests that tell apart a slow GPU, a slow replica, and a stage that costs more than estimated."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.registry import choose
from megatron_ext.observe.slow_ranks import (
    PATIENCE,
    PipelineTimes,
    SlowRanks,
    share_lost,
    slow_ranks,
    speeds_in,
    speeds_of,
)
from megatron_ext.observe.trace import NAME, TraceFile, read_trace, traced_step
from megatron_ext.schedule.costs import uniform
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.rank_speeds import RankSpeeds, at_speeds
from megatron_ext.schedule.timeline import Timeline


def step(speeds: tuple[float, ...] = ()) -> Timeline:
    """Return a step of zb-h1, ordered for equal ranks, on ranks of these ``speeds``."""
    placement = choose("zb-h1").place(4)
    costs = uniform(placement, 10, 12, 8)
    program = build_program(choose("zb-h1"), Problem(placement, 8, costs))
    return simulate(program, at_speeds(costs, placement, speeds))


PREDICTED = step()
ALIKE = (240.0, 240.0, 240.0, 240.0)


def busy(rank: int | None = None, times: float = 1.3) -> tuple[float, ...]:
    return tuple(b * (times if number == rank else 1.0) for number, b in enumerate(ALIKE))


def told(own: tuple[float, ...], *others: tuple[float, ...], iterations: int = PATIENCE) -> str:
    ratios = [seconds / 240.0 for seconds in own]
    pipelines = [PipelineTimes(15 - 4 * number, b) for number, b in enumerate(others, start=1)]
    text = SlowRanks().see(ratios, PREDICTED, iterations, PipelineTimes(15, own), pipelines)
    return text or ""


def test_noise_is_no_slow_rank() -> None:
    assert slow_ranks([1.0, 1.04, 1.0, 0.98]) == {} and speeds_of([1.0, 1.04, 1.0, 0.98]) is None
    assert told(busy(2, 1.04)) == ""


def test_speeds_are_those_of_slow_ranks_alone() -> None:
    assert speeds_of([2.0, 2.6, 2.04, 2.0]) == RankSpeeds((1.0, 0.7692, 1.0, 1.0))


def test_what_a_slow_rank_costs_is_what_the_simulator_says() -> None:
    expected = step((1.0, 1.0, 1 / 1.3, 1.0)).makespan / PREDICTED.makespan - 1
    assert share_lost(PREDICTED, {2: 1.3}) == pytest.approx(expected, rel=1e-6)
    assert expected > 0.1


def test_one_pipeline_cannot_tell_a_slow_gpu_from_a_wrong_cost() -> None:
    text = told(busy(2))
    assert "pipeline rank 2 has been 1.30 times as slow as its stage's cost" in text
    assert "its GPU is slow, or the cost is wrong" in text
    assert "megatron-ext plan --rank-speeds 1,1,0.77,1 -- " in text


def test_a_gpu_that_is_slow_in_one_of_four_pipelines() -> None:
    text = told(busy(2), ALIKE, ALIKE, ALIKE)
    assert "in the one that ends on global rank 15: a slow GPU" in text
    # the slow GPU is in another pipeline than the one that is logged
    text = told(ALIKE, ALIKE, busy(1), ALIKE)
    assert "pipeline rank 1 has been 1.30 times as slow as in other pipelines" in text
    assert "global rank 7: a slow GPU" in text and "--rank-speeds 1,0.77,1,1" in text


def test_a_stage_that_is_slow_in_all_pipelines() -> None:
    text = told(busy(2), busy(2), busy(2), busy(2))
    assert "in all 4 pipelines: its stage takes longer, not one GPU" in text


def test_a_slow_replica_is_not_a_slow_stage() -> None:
    slow = tuple(1.2 * b for b in ALIKE)
    text = told(ALIKE, slow, ALIKE, ALIKE)
    assert "all ranks of the pipeline that ends on global rank 11" in text
    assert "a slow replica, which no layout helps" in text and "--rank-speeds" not in text


def test_a_slow_rank_is_reported_once_and_only_after_long() -> None:
    ranks, own = SlowRanks(), PipelineTimes(3, busy(0))
    ratios = [seconds / 240.0 for seconds in own.busy]
    seen = [ranks.see(ratios, PREDICTED, PATIENCE // 2, own, []) for _ in range(4)]
    assert [text is not None for text in seen] == [False, True, False, False]
    healthy = PipelineTimes(3, ALIKE)
    ranks = SlowRanks()
    for _ in range(4):  # never slow for long enough at a time
        assert ranks.see(ratios, PREDICTED, PATIENCE // 2, own, []) is None
        assert ranks.see([1.0] * 4, PREDICTED, 1, healthy, []) is None


def test_a_trace_gives_the_speeds(tmp_path: Path) -> None:
    file = TraceFile(tmp_path / NAME)
    slow = step((1.0, 0.5, 1.0, 1.0))
    for iteration in (7, 8):
        file.add(traced_step(iteration, slow, PREDICTED, 0.0))
    speeds = RankSpeeds((1.0, 0.5, 1.0, 1.0))
    assert speeds_in(read_trace(tmp_path)) == (speeds, speeds)


def test_noise_of_a_few_steps_is_no_speed(tmp_path: Path) -> None:
    """A trace of few noisy steps gives no rank speeds for a plan. The medians of three steps, in
    which rank 1 took 7, 30 and 12 % longer, used to be written into a recommended command as
    --pipeline-rank-speeds."""
    file = TraceFile(tmp_path / NAME)
    for iteration, times in enumerate((1.07, 1.3, 1.12)):
        noisy = step((1.0, 1 / times, 1.0, 1 / 1.02))
        file.add(traced_step(iteration, noisy, PREDICTED, 0.0))
    sure, of_medians = speeds_in(read_trace(tmp_path))
    assert sure is None and of_medians is not None
    assert of_medians.values[1] == pytest.approx(1 / 1.12, abs=0.01)
