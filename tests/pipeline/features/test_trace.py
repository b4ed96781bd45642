"""Tests of traces of real trainings: one file with the predicted and the measured step of every
rank."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from megatron_ext.cli import app
from megatron_ext.compile.program.simulate import simulate
from megatron_ext.features.trace.adapter import step_trace
from megatron_ext.observe.trace import NAME, TracedStep, read_trace, traced_step
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.kinds import RULES
from tests.helpers.combinations import at_night
from tests.helpers.megatron_runs import SCRIPT, Run, assert_same, model_flags, train
from tests.helpers.schedules import line_problem, program

Flags = dict[str, object]


def run(ranks: int, flags: Flags, script: Path = SCRIPT) -> list[Run]:
    """Train four iterations on a V with two stages a rank."""
    common: Flags = {"num_layers": 8, "train_iters": 4, "pipeline_schedule": "zb-v"}
    common["global_batch_size"] = 2 * ranks
    return train(ranks, model_flags(**common | flags), script)


def pipeline(ranks: int) -> Flags:
    return {"pipeline_model_parallel_size": ranks}


def traced(folder: Path, iterations: str) -> Flags:
    return {"pipeline_trace": folder, "pipeline_trace_iters": iterations}


def orders(step: TracedStep, which: str) -> list[list[str]]:
    rows: Sequence[Any] = getattr(step, which).compute
    return [[str(event.action) for event in row] for row in rows]


def test_a_trace_of_four_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace has every pass of four ranks, and changes no number of the run. The ranks report
    reserved memory, as allocators of GPUs do."""
    monkeypatch.setattr(
        step_trace, "reserved_beyond_allocated", lambda device: 8.0 * dist.get_rank()
    )
    reference = run(4, pipeline(4))
    runs = run(4, pipeline(4) | traced(tmp_path / "new", "2:4"))
    assert_same(runs, reference)
    events = json.loads((tmp_path / "new" / NAME).read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1, 2, 3}
    assert {event["args"]["iteration"] for event in spans} == {2, 3}
    steps = read_trace(tmp_path / "new")
    assert [step.iteration for step in steps] == [2, 3]
    for step in steps:
        assert step.reserved == (0.0, 8.0, 16.0, 24.0)
        measured, predicted = orders(step, "measured"), orders(step, "predicted")
        assert measured == predicted and len(measured) == 4
        assert {len(row) for row in measured} == {8 * 2 * 3}
        assert step.measured.work == pytest.approx(step.predicted.work)
        assert 0 < step.clock_error < 0.1
        happens = {event.action: event for row in step.measured.compute for event in row}
        # All ranks are on one clock in the trace, so no input is used before it was computed.
        for action, event in happens.items():
            if RULES[action.kind].covers == (Kind.FORWARD,) and action.stage:
                made = happens[action._replace(stage=action.stage - 1)].end
                assert event.start >= made - step.clock_error
    assert steps[0].measured.compute[0][-1].end < steps[1].measured.compute[0][0].start


def test_steps_that_overlap_are_traced_together(tmp_path: Path) -> None:
    """Steps that overlap (post-validation) still overlap while they are traced. If events were
    gathered after each step, the steps would not overlap."""
    flags = pipeline(2) | {
        "pipeline_post_validation": True,
        "rerun_mode": "disabled",
        "log_interval": 100,
        "train_iters": 6,
    }
    reference = run(2, flags)
    assert_same(run(2, flags | traced(tmp_path, "4:6")), reference)
    first, second = read_trace(tmp_path)
    assert (first.iteration, second.iteration) == (4, 5)
    for step in (first, second):
        assert orders(step, "measured") == orders(step, "predicted")
    ends = [row[-1].end for row in first.predicted.compute]
    begins = [row[0].start for row in second.predicted.compute]
    assert min(begins) < max(ends)
    for rows in zip(first.measured.compute, second.measured.compute, strict=True):
        assert rows[0][-1].end <= rows[1][0].start


def test_the_command_explains_the_last_iteration_of_a_resumed_run(tmp_path: Path) -> None:
    """The command `trace` explains the last iteration of a resumed run, and gives it the number
    that it has in Megatron's log. This run resumes after iteration 2, and its second step is
    iteration 4."""
    run(2, pipeline(2) | {"save": tmp_path / "saved", "save_interval": 2})
    resumed: Flags = {"load": tmp_path / "saved", "ckpt_step": 2}
    run(2, pipeline(2) | resumed | traced(tmp_path, "4:5"))
    report = json.loads(CliRunner().invoke(app, ["trace", str(tmp_path), "--json"]).stdout)
    assert (report["schedule"], report["pp"], report["microbatches"]) == ("zb-v", 2, 4)
    assert [step["iteration"] for step in report["iterations"]] == [4]
    assert sum(report["parts"].values()) == pytest.approx(report["measured"]["makespan"])
    assert 0 < report["measured"]["bubble_share_makespan"] < 1


OVERLAP: Flags = {"overlap_grad_reduce": True}
DISTRIBUTED: Flags = {"use_distributed_optimizer": True, "overlap_param_gather": True}


# The case without the distributed optimizer runs at night: test_profile.py traces such reductions
# by day.
@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(DISTRIBUTED, id="distributed"), *at_night(pytest.param({}, id="plain"))],
)
def test_a_reduction_starts_after_its_last_weight_gradient_and_overlaps_passes(
    optimizer: Flags, tmp_path: Path
) -> None:
    run(4, pipeline(2) | OVERLAP | optimizer | traced(tmp_path, "2:5"))
    steps = read_trace(tmp_path)
    assert [step.iteration for step in steps] == [2, 3, 4]
    overlaps = []
    for step in steps:
        assert len(step.measured.reductions) == 4, "of each stage one"
        early = set()
        for reduction in step.measured.reductions:
            row = step.measured.compute[reduction.rank]
            last = [event for event in row if event.action.stage == reduction.stage][-1]
            assert Kind.BACKWARD_WEIGHT in RULES[last.action.kind].covers
            assert last.end <= reduction.start < reduction.end
            assert reduction.is_exact == (not optimizer)
            # Passes that run after the chunk's last one are those of the rank's other chunk.
            if later := [event for event in row if event.start >= last.end]:
                assert reduction.start <= later[0].start
                early.add(reduction.rank)
                overlaps.append(later[0].start < reduction.end)
        assert early == {0, 1}, "on each rank one chunk is done before the other"
    assert any(overlaps), "so small a reduction can end before the next pass begins, but not all"


WRITERS = """
import json, os, runpy, sys
from pathlib import Path
from types import SimpleNamespace
from megatron.training import global_vars

class Writer:
    def __init__(self, name):
        self.file = Path(os.environ["WRITTEN"]) / f"{name}-{os.environ['RANK']}"
        self.config = SimpleNamespace(update=lambda *args: None)

    def add_scalar(self, name, value, step):
        with self.file.open("a") as file:
            print(json.dumps([name, float(value), step]), file=file)

    def log(self, figures, step=None):
        for name, value in figures.items():
            self.add_scalar(name, value, step)

    def __getattr__(self, name):
        return lambda *args, **kwargs: None

def use(name, variable):
    def setter(args):
        if args.rank == args.world_size - 1:
            setattr(global_vars, variable, Writer(name))
    return setter

global_vars._set_tensorboard_writer = use("tensorboard", "_GLOBAL_TENSORBOARD_WRITER")
global_vars._set_wandb_writer = use("wandb", "_GLOBAL_WANDB_WRITER")
runpy.run_path({script!r}, run_name="__main__")
"""


def test_megatrons_own_writers_get_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metrics of a traced run go to Megatron's own writers, here stand-ins for TensorBoard and W&B,
    on the rank where Megatron has them."""
    script = tmp_path / "script.py"
    script.write_text(WRITERS.replace("{script!r}", repr(str(SCRIPT))))
    monkeypatch.setenv("WRITTEN", str(tmp_path))
    flags = pipeline(2) | {"tensorboard_log_interval": 2} | traced(tmp_path, "1:4")
    run(4, flags, script)
    (step,) = [step for step in read_trace(tmp_path) if step.iteration == 2]
    for name in ("tensorboard", "wandb"):
        lines = map(json.loads, (tmp_path / f"{name}-3").read_text().splitlines())
        written = {what: (value, at) for what, value, at in lines if what.startswith("pipeline/")}
        assert written == {
            "pipeline/bubble share": (pytest.approx(step.measured.bubble_share_makespan), 2),
            "pipeline/bubble share, predicted": (
                pytest.approx(step.predicted.bubble_share_makespan),
                2,
            ),
            "pipeline/step seconds": (pytest.approx(step.measured.makespan), 2),
            "pipeline/step seconds, predicted": (pytest.approx(step.predicted.makespan), 2),
        }


def test_a_trace_without_an_estimate_logs_no_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writers of a trace get only measured values for a model with sparse attention, whose
    seconds have no estimate. They used to get a predicted bubble and step time too."""
    made = program("1f1b", line_problem(2, 2, 10, 12, 8, 1))
    simulated = simulate(made, made.problem.costs)
    step = traced_step(7, simulated, simulated, 0.0)
    logged: list[dict[str, Any]] = []
    monkeypatch.setattr(step_trace, "log_interval", lambda: 1)
    monkeypatch.setattr(step_trace, "log_step", lambda iteration, **more: logged.append(more))
    for reason in ("", "of sparse attention no step is known"):
        step_trace._log(step, replace(made.problem.costs, no_estimate=reason))
    figures = simulated.bubble_share_makespan, simulated.makespan
    assert [(more["bubble_shares"], more["seconds"]) for more in logged] == [
        tuple((figure, figure) for figure in figures),
        tuple((None, figure) for figure in figures),
    ]


@pytest.mark.parametrize("of_stock", [False, True])
def test_a_trace_keeps_no_more_than_what_is_read(
    of_stock: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run keeps a traced step in memory only if it is read later, as steps of stock are. Each
    traced step used to stay in memory, 1.29 MB with 8 ranks and 64 microbatches. If the folder is
    removed during a run, one line says so; a line used to be printed in each step."""
    lines: list[str] = []
    monkeypatch.setattr(step_trace.logger, "error", lines.append)
    made = program("1f1b", line_problem(2, 2, 10, 12, 8, 1))
    simulated = simulate(made, made.problem.costs)
    step = traced_step(7, simulated, simulated, 0.0)
    own = step_trace.StepTrace(tmp_path / "gone", range(1, 1000), of_stock=of_stock)
    for iteration in range(1, 101):
        if iteration == 50:
            shutil.rmtree(tmp_path / "gone")
        own._write(replace(step, iteration=iteration))
    assert len(own._traced) == (64 if of_stock else 0)
    (line,) = lines
    assert line.startswith("iteration 50 is missing in the trace ") and "No such file" in line
