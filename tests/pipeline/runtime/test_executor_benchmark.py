"""Tests of the executor's benchmark on emulated clocks: every schedule runs, and none looks faster
than it is."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.compile.registry import choose
from megatron_ext.runtime.stage import Backward
from megatron_ext.runtime.weight_gradients import queue
from megatron_ext.schedule.problem import ScheduleOptions
from scripts.benchmarks import emulated
from scripts.benchmarks.contestants import EmulatedStage, ideal_of, program_of
from scripts.benchmarks.emulated import EmulatedChunk
from scripts.benchmarks.executors import main
from scripts.benchmarks.runs import Setting

DOCS = Path(__file__).resolve().parents[3] / "docs"
Output = pytest.CaptureFixture[str]


def report_of(capsys: Output, *words: str, costs: str = "f=4,i=4,w=4") -> dict[str, Any]:
    """Run a benchmark of two ranks, and return its report with the rows by name."""
    size = ["--pp", "2", "-m", "4", "--costs", costs, "--launches", "1", "--json"]
    assert main([*size, *words]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report | {"rows": {row["name"]: row for row in report["rows"]}}


def test_every_contender_takes_at_least_its_ideal_time(capsys: Output) -> None:
    """No schedule in the benchmark is measured faster than its ideal time. Emulated passes sleep
    and never end early, so a shorter step would have omitted passes."""
    report = report_of(capsys, "--schedules", "1f1b zb-v")
    rows = report["rows"]
    assert {"megatron 1f1b", "torch 1F1B", "torch ZBVZeroBubble", "megatron-ext zb-v"} <= set(rows)
    assert rows["megatron-ext 1f1b"]["ideal"] == pytest.approx(0.06)
    assert rows["megatron-ext zb-v"]["ideal"] == pytest.approx(0.05)
    for row in rows.values():
        assert 0.5 < row["efficiency"] * row["measured"] / row["ideal"] < 1.01
        assert row["measured"] >= row["ideal"]
        assert row["host_microseconds"] > 0
    assert all(microseconds > 1 for microseconds in report["autograd_microseconds"])


def test_split_and_whole_vocabularies_are_both_measured(capsys: Output) -> None:
    """The benchmark has a row for a vocabulary split over the ranks next to one for a whole
    vocabulary. The output layer, which takes as long as the stages of a rank, is on one of two
    ranks, or half of it on each."""
    words = ("--schedules", "zb-v", "--vocab-parallel", "2")
    rows = report_of(capsys, *words, costs="f=4,i=4,w=4,output_layer=4/4/4")["rows"]
    naive, divided = rows["megatron-ext zb-v"], rows["megatron-ext zb-v, vocabulary 2"]
    assert divided["ideal"] < naive["ideal"]
    for row in (naive, divided):
        assert row["measured"] >= row["ideal"]


def test_a_pair_takes_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the benchmark an overlapped forward and backward take their common cost, and neither pass
    takes time in addition. Schedules on a linear placement have no overlapped passes."""
    taken: list[float] = []
    monkeypatch.setattr(
        emulated, "take", lambda seconds: taken.append(seconds) if emulated._clock.runs else None
    )
    costs = program_of(choose("zb-v"), 2, 4, "f=8,i=6,w=4,overlap_saving=4").problem.costs
    behind, ahead = (EmulatedStage(n, EmulatedChunk(n, costs), has_loss=False) for n in (1, 2))
    x = torch.ones(emulated.SHAPE, requires_grad=True)
    y = ahead.forward(0, x)
    queue.splitting = True
    behind.overlapped_forward(1, x, Backward(ahead, 0, torch.ones_like(y), is_full=False))
    queue.clear()
    assert taken == pytest.approx([0.004, 0.004 + 0.003 - 0.002])
    ours = Setting(2, 4, "f=1,i=1,w=1", ("1f1b", "zb-v"), 1, pairs=True).ours
    assert ours == [
        ("1f1b", ScheduleOptions()),
        ("zb-v", ScheduleOptions()),
        ("zb-v", ScheduleOptions(pairs=True)),
    ]


def test_a_schedule_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="there is no schedule 'zb-x'"):
        main(["--schedules", "zb-x"])


def test_steps_in_a_row_with_post_validation(capsys: Output) -> None:
    """With post-validation the steps of the benchmark overlap, so the ideal time of a step is its
    span (the longest time of one rank) rather than its makespan."""
    rows = report_of(capsys, "--schedules", "zb-2p", "--post-validation", "--steps", "4")["rows"]
    at_once, afterwards = rows["megatron-ext zb-2p"], rows["megatron-ext zb-2p, post-validation"]
    assert at_once["ideal"] == pytest.approx(0.052)
    assert afterwards["ideal"] == pytest.approx(0.048)
    assert at_once["measured"] >= at_once["ideal"]
    assert afterwards["measured"] >= afterwards["ideal"]


def test_the_measured_table_is_consistent_with_the_simulator() -> None:
    """The ideal steps on the page are what the simulator computes today, and the columns that are
    quotients of others are their quotients. A row is out of date if its schedule has changed."""
    page = (DOCS / "measurements.md").read_text()
    cell = r" ([\d.]+)(?: %)? \|"
    name = r"(megatron|torch|megatron-ext) (\S+)"
    rows = re.findall(rf"^\| {name} \|{cell * 6}$", page, re.MULTILINE)
    assert len(rows) == 17
    baseline = next(float(measured) for _, name, _, measured, *_ in rows if name == "1f1b")
    for executor, name, ideal, measured, share, gain, *_ in rows:
        if executor != "torch":
            program = program_of(choose(name), 4, 8, "f=40,i=40,w=40")
            assert ideal == f"{ideal_of(program):.3f}", name
        assert float(share) == pytest.approx(100 * float(ideal) / float(measured), abs=0.1), name
        assert float(gain) == pytest.approx(baseline / float(measured), abs=0.01), name


def test_a_table_of_a_benchmark_is_what_a_page_has(capsys: Output) -> None:
    """The benchmark prints its table in the columns of docs/measurements.md, with a row for each
    schedule below one heading."""
    size = ["--pp", "2", "-m", "4", "--costs", "f=1,i=1,w=1", "--launches", "1"]
    assert main([*size, "--schedules", "1f1b"]) == 0
    head, line, *rows = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    assert f"\n{head}\n" in (DOCS / "measurements.md").read_text()
    assert {row.count("|") for row in (head, line, *rows)} == {8}
    assert rows[0].startswith("| megatron 1f1b | 0.0") and len(rows) > 5
