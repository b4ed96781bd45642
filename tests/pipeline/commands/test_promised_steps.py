"""Tests of step times that a trace of Megatron's own step predicts for other schedules, and of
Megatron's simulated executor.

The predictions are compared with real trainings, and the executor with Megatron's pipeline
functions. Layers and output layer run by emulated clocks (`tests.helpers.timed_model`); the output
layer takes as long as four of the eight layers, while the estimate gives it less than one. The
prediction used to split a rank's work evenly over its stages: zb-v was predicted to take 0.80 times
as long as Megatron's step, and took 0.99 times as long.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.compile.build import build_program
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.compile.registry import choose
from megatron_ext.observe.trace import TracedStep, read_trace
from megatron_ext.observe.trace_report import TraceReport, trace_report
from megatron_ext.observe.traced_costs import traced_costs
from megatron_ext.schedule.problem import Problem
from megatron_ext.schedule.stock_executor import StockExecutor
from megatron_ext.schedule.timeline import Timeline
from tests.helpers.combinations import at_night, nightly
from tests.helpers.megatron_runs import model_flags, train
from tests.helpers.timed_model import PartTimes, timed_models

Flags = dict[str, object]
FLAGS: Flags = {
    "pipeline_model_parallel_size": 2,
    "num_layers": 8,
    "hidden_size": 16,
    "untie_embeddings_and_output_weights": True,
    "train_iters": 2,
    "pipeline_trace_iters": "1:2",
}
CHUNKS: Flags = {"num_virtual_stages_per_pipeline_rank": 2}
AT_ENDS: Flags = {"overlap_p2p_communication_warmup_flush": True}
TRAININGS: dict[str, Flags] = {
    "line": {},
    "loop": CHUNKS,
    "zb-h1": {"pipeline_schedule": "zb-h1"},
    "interleaved-zb:vpp=2": {"pipeline_schedule": "interleaved-zb"} | CHUNKS,
    "zb-v": {"pipeline_schedule": "zb-v"},
    "v-half": {"pipeline_schedule": "v-half"},
}
TIMES = PartTimes(layer=(10e-3, 12e-3, 8e-3), output_layer=(40e-3, 45e-3, 35e-3), message=0.5e-3)
ALIKE = PartTimes(layer=(10e-3, 12e-3, 8e-3), output_layer=(0.0, 0.0, 0.0), message=3e-3)


def traced_step(ranks: int, flags: Flags, folder: Path, times: PartTimes = TIMES) -> TracedStep:
    """Train with ``flags`` on ``ranks`` ranks, whose parts take ``times``, and return the traced
    step."""
    with pytest.MonkeyPatch.context() as patch:
        words = model_flags(**FLAGS | flags, pipeline_trace=folder)
        train(ranks, words, model_provider=timed_models(times, patch))
    (step,) = read_trace(folder)
    return step


class Traces:
    """Reports on the traced steps of `TRAININGS`; each training runs when its report is first
    used."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, TraceReport] = {}

    def of(self, name: str) -> TraceReport:
        if name not in self._made:
            self._made[name] = trace_report([traced_step(2, TRAININGS[name], self._folder / name)])
        return self._made[name]


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Traces:
    return Traces(tmp_path_factory.mktemp("traces"))


@pytest.mark.parametrize(
    ("traced", "spec"),
    [
        ("line", "zb-v"),
        *at_night(
            ("line", "v-half"),
            ("line", "zb-h1"),
            ("loop", "zb-v"),
            ("loop", "v-half"),
            ("loop", "zb-h1"),
            ("loop", "interleaved-zb:vpp=2"),
        ),
    ],
)
def test_a_training_takes_what_the_trace_promised(traced: str, spec: str, traces: Traces) -> None:
    """A training under another schedule takes the step time that the trace of Megatron's step
    predicted, to 5 %."""
    told = traces.of(traced).what_if
    assert told is not None and told.has_parts
    said = {each.schedule: each for each in (*told.within, *told.with_more)}[spec]
    took = traces.of(spec).measured.makespan
    assert said.step == pytest.approx(took, rel=0.05)
    assert 0.95 * said.low < took < 1.05 * said.high


@nightly("the simulated executor alone, in tests/unit/program/test_stock.py")
@pytest.mark.parametrize(
    ("ranks", "flags", "executor"),
    [
        (2, {}, StockExecutor(overlaps=False)),
        (4, {}, StockExecutor(overlaps=False)),
        (2, CHUNKS, StockExecutor()),
        (4, CHUNKS, StockExecutor()),
        (2, CHUNKS | AT_ENDS, StockExecutor(overlaps_ends=True)),
        (4, CHUNKS | AT_ENDS, StockExecutor(overlaps_ends=True)),
        (4, CHUNKS | {"no_overlap_p2p_communication": True}, StockExecutor(overlaps=False)),
    ],
    ids=[
        "2-1f1b",
        "4-1f1b",
        "2-overlap",
        "4-overlap",
        "2-overlap-at-ends",
        "4-overlap-at-ends",
        "4-no-overlap",
    ],
)
def test_megatron_waits_for_messages_as_its_simulated_executor_does(
    ranks: int, flags: Flags, executor: StockExecutor, tmp_path: Path
) -> None:
    """Megatron's passes wait for messages at the moments that its simulated executor predicts. The
    simulation was written by reading Megatron's sources; here Megatron posts and waits itself, and
    only the clocks are emulated."""
    step = traced_step(ranks, flags | {"pipeline_model_parallel_size": ranks}, tmp_path, ALIKE)
    assert step.executor == executor
    costs = traced_costs([step])
    assert costs is not None and costs.message == pytest.approx(ALIKE.message)
    spec = "interleaved:vpp=2" if flags else "1f1b"
    placement = choose(spec).place(ranks)
    of_passes = costs.costs(placement.stages)
    assert of_passes is not None

    def simulated(stock: StockExecutor | None) -> Timeline:
        problem = Problem(placement, costs.microbatches, of_passes, stock=stock)
        return simulate(build_program(choose(spec), problem), of_passes)

    assert starts(simulated(executor)) == pytest.approx(starts(step.measured), abs=1e-6)
    assert simulated(None).makespan < 0.998 * step.measured.makespan


def starts(timeline: Timeline) -> dict[str, float]:
    """Return the seconds from the start of the step to the start of each pass."""
    events = (event for row in timeline.compute for event in row)
    return {str(event.action): event.start - timeline.start for event in events}
