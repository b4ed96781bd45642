"""Tests of --pipeline-metrics in real trainings: printed lines, TensorBoard and W&B. No rank waits
for metrics."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megatron_ext.base.logger import logger
from megatron_ext.compile.registry import choose
from megatron_ext.features.metrics.adapter.pipelines import Pipelines
from megatron_ext.features.metrics.adapter.step_metrics import _Log
from megatron_ext.observe.metrics import RankSums
from megatron_ext.observe.trace import read_trace
from megatron_ext.runtime.measure.exchange import AsyncAllGather
from megatron_ext.runtime.measure.step_sums import StepSums
from megatron_ext.runtime.recorder import Recorder
from tests.helpers.combinations import at_night
from tests.helpers.megatron_runs import SCRIPT, Run, assert_same, model_flags, train
from tests.helpers.ranks import run_ranks, values
from tests.helpers.stages import CPU, program_for, world
from tests.pipeline.features.test_trace import WRITERS, traced

Flags = dict[str, object]

LINE = re.compile(
    r"megatron_ext: iterations? (?P<iterations>[\d to]+): "
    r"bubble (?P<bubble>-?[\d.]+)% of the (?P<what>makespan|span) "
    r"\(predicted (?P<predicted_bubble>[\d.]+)%\), "
    r"step (?P<step>[\d.e-]+) (?P<unit>m?s) \(predicted [\d.e-]+ m?s\), "
    r"slowest rank (?P<slowest>\d+), its passes take (?P<times>[\d.]+) times the others'$",
    re.MULTILINE,
)


def run(ranks: int, flags: Flags, script: Path = SCRIPT) -> list[Run]:
    common: Flags = {
        "pipeline_model_parallel_size": 2,
        "pipeline_schedule": "zb-v",
        "global_batch_size": 2 * ranks,
        "train_iters": 6,
        "log_interval": 2,
    }
    return train(ranks, model_flags(**common | flags), script)


def lines(capfd: pytest.CaptureFixture[str]) -> list[re.Match[str]]:
    printed = capfd.readouterr().out
    matches = list(LINE.finditer(printed))
    assert len(matches) == len(re.findall(r"megatron_ext: iterations? \d", printed)), printed
    return matches


MEASURED: Flags = {"pipeline_metrics": True}


def test_a_run_with_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run with --pipeline-metrics trains to the same numbers. The last of two pipelines reports:
    in a line as often as Megatron prints a line, and to the writers as often as Megatron writes to
    them. The first iteration is not measured. Memory is not measured without a GPU."""
    reference = run(4, {})
    capfd.readouterr()
    script = tmp_path / "script.py"
    script.write_text(WRITERS.replace("{script!r}", repr(str(SCRIPT))))
    monkeypatch.setenv("WRITTEN", str(tmp_path))
    writes: Flags = {"tensorboard_dir": tmp_path / "board", "tensorboard_log_interval": 3}
    assert_same(run(4, MEASURED | writes, script), reference)
    told = lines(capfd)
    assert [line["iterations"] for line in told] == ["2", "3 to 4", "5 to 6"]
    assert {line["what"] for line in told} == {"makespan"}
    assert len({line["predicted_bubble"] for line in told}) == 1
    assert all(0 < float(line["bubble"]) < 100 for line in told)
    assert all(line["slowest"] in "01" and float(line["times"]) >= 1 for line in told)
    for name in ("tensorboard", "wandb"):
        assert not (tmp_path / f"{name}-1").exists()
        entries = map(json.loads, (tmp_path / f"{name}-3").read_text().splitlines())
        written = {(what, at): value for what, value, at in entries if what.startswith("pipeline/")}
        names = {
            *("pipeline/bubble share", "pipeline/bubble share, predicted"),
            *("pipeline/step seconds", "pipeline/step seconds, predicted"),
            *("pipeline/slowest rank", "pipeline/slowest rank, slower by"),
        }
        assert written.keys() == {(name, at) for name in names for at in (3, 6)}
        (predicted,) = {written["pipeline/bubble share, predicted", at] for at in (3, 6)}
        assert predicted == pytest.approx(float(told[0]["predicted_bubble"]) / 100, abs=1e-3)


def test_the_figures_are_those_of_a_trace(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """--pipeline-metrics gives the makespan and bubble that a trace of the same steps gives.
    Metrics need no comparison of the ranks' clocks, because the messages of the step show how the
    ranks' times relate."""
    run(2, MEASURED | {"log_interval": 1, "global_batch_size": 8} | traced(tmp_path, "3:6"))
    told = {line["iterations"]: line for line in lines(capfd)}
    for step in read_trace(tmp_path):
        line = told[str(step.iteration)]
        seconds = float(line["step"]) / (1e3 if line["unit"] == "ms" else 1)
        assert seconds == pytest.approx(step.measured.makespan, rel=0.05)
        assert float(line["predicted_bubble"]) == pytest.approx(
            100 * step.predicted.bubble_share_makespan, abs=0.06
        )


def test_steps_that_overlap(capfd: pytest.CaptureFixture[str]) -> None:
    """With post-validation, where steps overlap, --pipeline-metrics reports the span of a step (the
    longest time of one rank), and the steps still overlap."""
    flags: Flags = {"pipeline_post_validation": True, "rerun_mode": "disabled"}
    reference = run(2, flags)
    capfd.readouterr()
    assert_same(run(2, flags | MEASURED), reference)
    assert [line["what"] for line in lines(capfd)] == ["span"] * 3


def test_costs_that_are_measured_meanwhile(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """If costs are measured during a run, a program made for the measured costs runs from the fifth
    iteration on. No value of --pipeline-metrics mixes the two programs."""
    flags: Flags = {
        "pipeline_costs": f"profile:{tmp_path / 'costs.json'}",
        "pipeline_schedule": "zb-auto",
        "pipeline_memory_limit": "1x",
        "pipeline_p2p": "batched",
        "log_interval": 6,
    }
    run(2, flags | MEASURED)
    assert [line["iterations"] for line in lines(capfd)] == ["5 to 6"]


LOOP: Flags = {"num_virtual_stages_per_pipeline_rank": 2}


@pytest.mark.parametrize(
    "placement",
    [pytest.param(LOOP, id="interleaved"), *at_night(pytest.param({}, id="1f1b"))],
)
def test_megatrons_own_step(placement: Flags, capfd: pytest.CaptureFixture[str]) -> None:
    """--pipeline-metrics also works with Megatron's own step, without a schedule flag, and changes
    no number."""
    stock: Flags = {"pipeline_schedule": None, "train_iters": 4} | placement
    reference = run(2, stock)
    capfd.readouterr()
    runs = run(2, stock | MEASURED | {"eval_iters": 1, "eval_interval": 2})
    assert_same([replace(rank, evaluation=[]) for rank in runs], reference)
    told = lines(capfd)
    assert [line["iterations"] for line in told] == ["2", "3 to 4"]
    assert all(0 < float(line["bubble"]) < 100 for line in told)
    assert float(told[0]["predicted_bubble"]) > 5


def test_a_step_of_other_passes_does_not_count() -> None:
    """--pipeline-metrics ignores a step whose passes are not the expected ones in the expected
    order. In a Megatron version with another order of passes, the time of one pass would otherwise
    count for another pass."""
    program = program_for(choose("1f1b"), 2, 2)
    expected = program.schedule.compute_rows[0]
    recorder, steps = Recorder(0), StepSums(CPU)
    for row in (expected, expected[:-1], expected[::-1], expected):
        steps.begin(recorder)
        for action in row:
            with recorder.computing(action):
                pass
        recorder.end()
        steps.end(program, 0)
    assert steps.take().steps == 2


def test_where_nothing_is_known_it_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    log, said = _Log(overlap=False), BufferingHandler(9)
    monkeypatch.setattr(logger, "handlers", [said])
    program = program_for(choose("1f1b"), 2, 2)
    for last in (10, 20):
        log.add([RankSums(), RankSums()], program, last - 9, last)
    assert [(record.levelname, record.getMessage()) for record in said.buffer] == [
        (
            "WARNING",
            "no metrics of the iterations from 1 to 10: on some rank no step ran the passes of "
            "1f1b in its order",
        )
    ]


def test_off_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a step is recorded although no flag requests it")

    monkeypatch.setattr(Recorder, "record", refuse)
    run(2, {"train_iters": 2})


def test_pipelines_know_the_times_of_one_another() -> None:
    """The last ranks of all pipelines publish their latest times to one another. Each rank here is
    the last of its own pipeline, and one of them has no step yet."""

    def on_rank(rank: int) -> list[tuple[int, tuple[float, ...]]]:
        pipelines = Pipelines()
        for step in range(2):  # only the latest step counts
            if rank < 2:
                pipelines.publish([1.0 + rank, 2.0 + step])
        dist.barrier()
        return sorted((one.last, one.busy) for one in pipelines.others())

    told = values(run_ranks(3, on_rank))
    first, second = (0, (1.0, 3.0)), (1, (2.0, 3.0))
    assert told == [[second], [first], [first, second]]


SLEEP = 0.3


def exchanged(rank: int) -> tuple[float, bool, list[list[float]]]:
    """Exchange numbers with an asynchronous gather to which rank 1 comes late."""
    dist.barrier()
    if rank == 1:
        time.sleep(SLEEP)
    begin = time.perf_counter()
    exchange = AsyncAllGather(world(), [float(rank), 2.0**52 + rank], None)
    seconds, has_come = time.perf_counter() - begin, exchange.has_come()
    exchange.wait()
    assert exchange.has_come()
    return seconds, has_come, exchange.rows()


@pytest.mark.real_time
def test_no_rank_waits_for_the_numbers_of_others() -> None:
    (seconds, has_come, rows), (_, _, others) = values(run_ranks(2, exchanged))
    assert seconds < SLEEP / 2 and not has_come
    assert rows == others == [[0.0, 2.0**52], [1.0, 2.0**52 + 1]]
