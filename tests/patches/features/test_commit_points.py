"""Tests of the commit points of post-validation: iterations after which a step is post-validated
before the next step begins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron.core import num_microbatches_calculator as microbatches

from megatron_ext.features.post_validation.adapter.commit_points import (
    INTERVALS,
    is_commit_point,
    microbatches_will_change,
)
from tests.helpers.megatron_runs import model_flags


def settings(**overrides: Any) -> SimpleNamespace:
    """Return Megatron's defaults, except for a log interval that is never reached."""
    none = dict.fromkeys(INTERVALS)
    others: dict[str, Any] = {
        "adlr_autoresume": False,
        "adlr_autoresume_interval": 10,
        "phase_transition_iterations": None,
        "iterations_to_skip": [],
        "train_iters": 100,
        "log_interval": 1000,
    }
    return SimpleNamespace(**none | others | overrides)


def points(args: SimpleNamespace) -> list[int]:
    return [iteration for iteration in range(1, 51) if is_commit_point(iteration, args)]


def test_nothing_to_do_means_no_point() -> None:
    assert points(settings()) == []


@pytest.mark.parametrize("interval", INTERVALS)
def test_every_interval_is_one(interval: str) -> None:
    assert points(settings(**{interval: 20})) == [20, 40]


def test_autoresume_only_where_it_is_on() -> None:
    assert points(settings(adlr_autoresume=True)) == [10, 20, 30, 40, 50]


def test_single_iterations() -> None:
    assert points(settings(phase_transition_iterations=[7])) == [7]
    assert points(settings(iterations_to_skip=[7, 30])) == [6, 29]
    assert points(settings(train_iters=48)) == [48, 49, 50]


def test_megatron_has_all_these_settings() -> None:
    """Each setting that can make an iteration a commit point (of post-validation) exists in this
    Megatron. A name from another release would make a point that is never reached."""
    from megatron_ext.launch.command import megatron_arguments

    line = megatron_arguments.parse_arguments(model_flags())
    assert set(vars(settings())) <= set(vars(line.args))


def test_the_batch_size_changes_after_a_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """An iteration after which the batch size changes is a commit point (of post-validation):
    Megatron saves a checkpoint at the change, and the log prints the batch size of that moment."""
    calculator = microbatches.StepBatchsizeNumMicroBatchesCalculator(1, 1, False, 1, "0:4 12:8")
    calculator.update(0, consistency_check=False)
    monkeypatch.setattr(microbatches, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR", calculator)
    changes = [
        samples
        for samples in (4, 8, 12)
        if microbatches_will_change(SimpleNamespace(consumed_train_samples=samples))
    ]
    assert changes == [12]
    assert calculator.get() == 4, "asking changes nothing"
