"""Tests of the notice in the first line of a run on several GPUs, which is printed until
docs/measurements.md has numbers of several GPUs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from megatron_ext.adapter import gpu_notice
from megatron_ext.adapter.step import connections
from megatron_ext.schedule.problem import P2P
from tests.helpers.megatron_runs import model_flags, train
from tests.helpers.schedules import line_problem

ROOT = Path(__file__).resolve().parents[3]
PROBLEM = line_problem(2, 2)


def test_it_is_for_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    gpu_notice.say_unverified(torch.device("cpu"), PROBLEM)
    assert capsys.readouterr().out == ""
    gpu_notice.say_unverified(torch.device("cuda", 0), PROBLEM)
    line = capsys.readouterr().out
    assert ("not yet verified on several GPUs" in line) != gpu_notice.HAS_FIGURES
    assert ("--pipeline-p2p batched" in line) != gpu_notice.HAS_FIGURES
    batched = PROBLEM.with_options(p2p=P2P.BATCHED)
    gpu_notice.say_unverified(torch.device("cuda", 0), batched)
    assert "batched" not in capsys.readouterr().out


def test_it_goes_when_the_page_has_figures() -> None:
    """The notice that there are no numbers from several GPUs, and the status in README.md, agree
    with docs/measurements.md: they must change once that page has such numbers."""
    page = (ROOT / "docs" / "measurements.md").read_text()
    _, section = page.split("\n## On several GPUs\n")
    has_figures = "| device |" in section.split("\n## ")[0]
    assert has_figures == gpu_notice.HAS_FIGURES
    readme = (ROOT / "README.md").read_text()
    (status,) = re.findall(r"^\| on several GPUs \|.*\| (.*) \| .* \|$", readme, re.MULTILINE)
    assert status.startswith("nothing yet") != gpu_notice.HAS_FIGURES


def test_one_rank_says_it_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        connections, "say_unverified", lambda device, problem: print(f"noticed: {device}")
    )
    train(2, model_flags(pipeline_model_parallel_size=2, pipeline_schedule="zb-h1", train_iters=2))
    assert capfd.readouterr().out.count("noticed: cpu") == 1
