"""Promises of a trace of Megatron's own step, held against the trainings that it speaks of.

Layers and output layer run by emulated clocks (`tests.helpers.timed_model`), and the output layer
takes as long as four of the eight layers; all else are trainings. The estimate takes it for less
than one. When all of a rank's work was cut evenly, zb-v was promised 0.80 of Megatron's step and
took 0.99.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.viz.trace import read_trace
from megatron_ext.viz.trace_report import TraceReport, trace_report
from tests.helpers.combinations import at_night
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
TRAININGS: dict[str, Flags] = {
    "line": {},
    "loop": CHUNKS,
    "zb-h1": {"pipeline_schedule": "zb-h1"},
    "interleaved-zb:vpp=2": {"pipeline_schedule": "interleaved-zb"} | CHUNKS,
    "zb-v": {"pipeline_schedule": "zb-v"},
    "v-half": {"pipeline_schedule": "v-half"},
}
TIMES = PartTimes(layer=(10e-3, 12e-3, 8e-3), output_layer=(40e-3, 45e-3, 35e-3), message=0.5e-3)


class Traces:
    """Reports on the step of each of `TRAININGS`, which runs with its first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, TraceReport] = {}

    def of(self, name: str) -> TraceReport:
        if name not in self._made:
            folder = self._folder / name
            flags = model_flags(**FLAGS, **TRAININGS[name], pipeline_trace=folder)
            with pytest.MonkeyPatch.context() as patch:
                train(2, flags, model_provider=timed_models(TIMES, patch))
            self._made[name] = trace_report(read_trace(folder))
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
    """Within 5 %."""
    told = traces.of(traced).what_if
    assert told is not None and told.has_parts
    said = {each.schedule: each for each in (*told.within, *told.with_more)}[spec]
    took = traces.of(spec).measured.makespan
    assert said.step == pytest.approx(took, rel=0.05)
    assert 0.95 * said.low < took < 1.05 * said.high
