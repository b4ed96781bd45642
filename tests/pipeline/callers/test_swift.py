"""Tests of ms-swift's own fine-tuning under our schedules, compared with Megatron's own schedule to
the last bit.

Compared are gradient norms, weights after each step, and the log-probabilities of each microbatch,
in training and in evaluations.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scripts.caller_packages import prepare
from tests.helpers.combinations import nightly
from tests.helpers.fetched import fetched
from tests.helpers.ranks import ROOT

pytestmark = nightly("by day callers with batches like verl's: test_dynamic_batches.py")


@dataclass(frozen=True)
class Training:
    """Results of a training by schedule and rank, and the text that its ranks printed."""

    results: dict[str, list[dict[str, Any]]]
    printed: str


def run(
    folder: Path, *trainings: str, ranks: int = 2, **arguments: str
) -> subprocess.CompletedProcess[str]:
    packages, problem = prepare("ms-swift")
    assert not problem, f"ms-swift cannot be installed with pip: {problem}"
    fetched("transformer_engine", "2.20.2")
    path = [str(packages), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    # The variable that selects the night's tests is no setting of a training, so megatron_ext.auto
    # would refuse it.
    environment = {
        name: value for name, value in os.environ.items() if name != "MEGATRON_EXT_NIGHTLY"
    }
    return subprocess.run(
        [sys.executable, "-m", "tests.helpers.swift_on_cpu", str(folder), *trainings],
        cwd=ROOT,
        env={
            **environment,
            "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": "1",
            "SWIFT_ARGUMENTS": json.dumps(arguments),
            "SWIFT_RANKS": str(ranks),
        },
        capture_output=True,
        text=True,
    )


def train(folder: Path, *trainings: str, ranks: int = 2, **rest: Any) -> Training:
    ran = run(folder, *trainings, ranks=ranks, **rest)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    results = {
        name: [json.loads((folder / f"{name}.json.{rank}").read_text()) for rank in range(ranks)]
        for name in trainings
    }
    return Training(results, ran.stdout)


def assert_as_stock(training: Training) -> None:
    stock = training.results["stock"]
    losses = stock[-1]["losses"]
    assert {is_training for is_training, _, _ in losses} == {True, False}
    assert len({tuple(shape) for _, shape, _ in losses}) > 2, "sequences are to differ in length"
    weights = [step[-1] for step in stock[0]["steps"]]
    assert len(weights) == 3
    assert len({tuple(step) for step in weights}) == 3, "it does not learn"
    for schedule, results in training.results.items():
        assert results == stock, schedule
        if schedule != "stock":
            assert training.printed.count(f"megatron_ext: schedule {schedule} is installed") == 1
            assert f"megatron_ext: {schedule} on 2 ranks" in training.printed


@pytest.mark.parametrize(
    ("schedules", "ranks", "rest"),
    [
        pytest.param(["zb-h1", "zb-auto"], 2, {}, id="varying lengths"),
        pytest.param(
            ["zb-h1"], 2, {"tuner_type": "lora", "target_modules": "all-linear"}, id="adapters"
        ),
        pytest.param(["zb-h1"], 4, {}, id="two replicas"),
    ],
)
def test_ms_swift_trains_to_its_own_numbers(
    schedules: list[str], ranks: int, rest: dict[str, Any], tmp_path: Path
) -> None:
    assert_as_stock(train(tmp_path, "stock", *schedules, ranks=ranks, **rest))


def test_a_v_has_the_iterators_of_ms_swifts_own_flag(tmp_path: Path) -> None:
    """ms-swift trains under a V if its own flag sets two virtual stages, because ms-swift
    makes a data iterator for each. Gradients are not clipped, because a V sums the norm in another
    order."""
    for name in ("line", "v"):
        (tmp_path / name).mkdir()
    line = train(tmp_path / "line", "stock", clip_grad="0").results["stock"][-1]["losses"]
    ran = train(tmp_path / "v", "zb-v", clip_grad="0", virtual_pipeline_model_parallel_size="2")
    v = ran.results["zb-v"][-1]["losses"]
    assert v == line and len(v) > 18


def test_a_v_without_that_flag_is_refused_in_words(tmp_path: Path) -> None:
    ran = run(tmp_path, "zb-v")
    assert ran.returncode
    assert (
        "Megatron's pipeline function was called with 2 model chunks and 1 data "
        "iterator: give each chunk a data iterator of its own" in ran.stdout + ran.stderr
    )
