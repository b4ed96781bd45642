"""Tests of steps whose passes vary in time: each sample is a longest path, and the numbers
summarise many samples."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program import noise as noise_module
from megatron_ext.compile.program.noise import Noise, factors_of, spread
from megatron_ext.compile.program.simulate import seconds_of, simulate
from megatron_ext.compile.program.verify import Program
from megatron_ext.compile.registry import choose
from megatron_ext.observe.noise_text import noise_of, parse_noise
from megatron_ext.observe.trace import TraceFile, traced_step
from megatron_ext.schedule.action import Action
from megatron_ext.schedule.costs_text import parse_costs
from megatron_ext.schedule.limit import MemoryLimit
from megatron_ext.schedule.problem import P2P, Offload, Problem, VocabularyParallel
from megatron_ext.schedule.schedule import Schedule, is_compute
from tests.helpers.schedules import line_problem
from tests.unit.commands.test_cli import run

FloatArray = NDArray[np.float64]
COSTS = "f=10,i=12,w=8,comm=1"


def program(
    spec: str, p: int, m: int, costs: str = COSTS, limit: float | None = None, **options: object
) -> Program:
    resolved = choose(spec)
    placement = resolved.place(p)
    within = None if limit is None else MemoryLimit(microbatches=limit)
    problem = Problem(placement, m, parse_costs(costs, placement), within)
    return build_program(resolved, problem.with_options(**options) if options else problem)


@pytest.mark.parametrize(
    "made",
    [
        lambda: program("1f1b", 3, 7),
        lambda: program("zb-v", 4, 9),
        lambda: program("interleaved", 4, 8, p2p=P2P.BATCHED),
        lambda: program(
            "zb-h1", 3, 5, COSTS + ",output_layer=10/12/8", vocab_parallel=VocabularyParallel.ONE
        ),
        lambda: program(
            "1f1b", 4, 8, COSTS + ",d2h=6,link=2,duplex=0", activation_offload=Offload.FULL
        ),
    ],
    ids=["1f1b", "zb-v", "batched", "collectives", "shared links"],
)
def test_a_sample_is_a_longest_path(made: Callable[[], Program]) -> None:
    """Many samples at once give the times that the simulator gives for each of them."""
    here = made()
    timeline = simulate(here, here.problem.costs)
    still = spread(here, Noise(), 2)
    assert still.makespan.median == still.makespan.p90 == pytest.approx(timeline.makespan)
    assert still.span.median == still.span.p90 == pytest.approx(timeline.span)


def test_samples_are_those_of_the_simulator_one_by_one() -> None:
    here = program("zb-v", 4, 9)
    noise, arrays = Noise(0.3, 0.1), here.schedule.arrays
    seconds = np.array(seconds_of(here.graph, here.schedule, here.problem.costs))
    (factors,) = factors_of(arrays, noise, 5)
    makespans = [max(here.graph.longest_paths((seconds * row).tolist())[1]) for row in factors]
    assert spread(here, noise, 5).makespan.median == pytest.approx(sorted(makespans)[2])


def test_factors_have_their_mean_and_deviation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The random factors have the given mean and deviation. They are the same however many are
    drawn at once, and also if the passes are in another order."""
    noise = Noise(0.3)

    def of_passes(schedule: Schedule) -> dict[Action, FloatArray]:
        factors = np.concatenate(list(factors_of(schedule.arrays, noise, 2000)))
        actions = (action for row in schedule.rows for action in row)
        arrays = zip(actions, factors.T, strict=True)
        return {action: column for action, column in arrays if (column != 1).any()}

    here, other = (program(spec, 2, 6).schedule for spec in ("zb-h1", "zb-h2"))
    factors = of_passes(here)
    assert all(map(is_compute, factors)) and len(factors) == 2 * 6 * 3
    every = np.array(list(factors.values()))
    assert every.min() > 0
    assert every.mean() == pytest.approx(1, abs=0.01)
    assert every.std() == pytest.approx(0.3, abs=0.01)

    assert here.rows != other.rows
    monkeypatch.setattr(noise_module, "_TIMES", 700 * len(other.arrays))
    assert len(list(factors_of(other.arrays, noise, 2000))) == 3
    in_pieces = of_passes(other)
    assert all(np.array_equal(in_pieces[action], column) for action, column in factors.items())


def test_one_rank_is_a_sum() -> None:
    """On one rank, the sum of n equal passes that each have a relative deviation s has a relative
    deviation of s over the root of n."""
    problem = line_problem(1, 64, 1, 1, 1)
    alone = build_program(choose("zb-h1"), problem)
    n, z = 64 * 3, NormalDist().inv_cdf(0.9)
    figures = spread(alone, Noise(0.2), 4000).makespan
    assert figures.median == pytest.approx(n, rel=0.002)
    assert figures.p90 == pytest.approx(n * (1 + z * 0.2 / n**0.5), rel=0.002)
    slow = spread(alone, Noise(ranks=0.05), 4000).makespan
    assert slow.p90 == pytest.approx(n * (1 + z * 0.05), rel=0.005)


def test_noise_of_a_trace(tmp_path: Path) -> None:
    """Noise can be estimated from a trace. In the trace here, half of the passes take 0.8 times
    their mean, and the other half 1.2 times."""
    problem = line_problem(2, 4)
    here = build_program(choose("1f1b"), problem)
    simulated = simulate(here, problem.costs)
    file = TraceFile(tmp_path / "trace.json")
    for number, factor in enumerate((0.8, 1.2)):
        step = simulated.moved(10.0 * number, 1.0)
        events = tuple(e._replace(end=e.start + (e.end - e.start) * factor) for e in step.events)
        measured = type(step)(step.schedule, events)
        file.add(traced_step(number, measured, simulated, 0.0))
    noise = parse_noise(str(tmp_path))
    assert {round(factor, 6) for factor in noise.measured} == {0.8, 1.2}
    assert np.mean(noise.measured) == pytest.approx(1)
    figures = spread(here, noise, 500).makespan
    assert simulated.makespan * 0.8 <= figures.median <= figures.p90 <= simulated.makespan * 1.2
    assert noise_of([]).measured == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("-0.1", "'-0.1' is no number from 0 to 1"),
        ("nan", "'nan' is no number"),
        ("0.1,ranks=2", "'2' is no number"),
        ("0.1,rank=0.1", "'rank=0.1' is unknown"),
        ("no/trace.json", "--pipeline-trace DIR"),
    ],
)
def test_what_is_no_noise_is_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"noise|trace") as raised:
        parse_noise(text)
    assert said in str(raised.value)


def test_simulate_reports_noise() -> None:
    words = ("simulate", "zb-h1", "--pp", "4", "-m", "8", "--costs", COSTS)
    assert "noise" not in json.loads(run(*words, "--json"))
    made = json.loads(run(*words, "--noise", "0.1,ranks=0.05", "--json"))
    figures = made["noise"]
    assert figures["samples"] == 1000
    assert made["makespan"] < figures["makespan"]["median"] < figures["makespan"]["p90"]
    said = run(*words, "--noise", "0.1")
    assert "makespan with noise" in said and "90% of steps within" in said
    assert "no number from 0 to 1" in run(*words, "--noise", "7", code=2)
