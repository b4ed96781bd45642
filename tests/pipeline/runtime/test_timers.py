"""Tests of Megatron's timers at their highest level, which synchronize the device around every
pass."""

from __future__ import annotations

import pytest
from megatron.training.global_vars import get_timers

from megatron_ext.runtime.weight_gradients import WeightGradients
from tests.helpers.megatron_runs import losses, model_flags, train
from tests.pipeline.features.test_post_validation_training import SETTINGS, times_redone

CASES: dict[str, tuple[str, dict[str, object]]] = {
    "1f1b": ("1f1b", {}),
    "zb-h1, evaluation": ("zb-h1", {"eval_interval": 1, "eval_iters": 1}),
    "zb-v, divided vocabulary, offload": (
        "zb-v",
        {
            "pipeline_vocab_parallel": 2,
            "pipeline_activation_offload": "full",
            "pipeline_costs": "f=10,i=12,w=8,comm=1,d2h=3,h2d=3",
        },
    ),
}
HIGHEST: dict[str, object] = {"timing_log_level": 2}


@pytest.fixture
def every_backward_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = WeightGradients.run

    def timed(queue: WeightGradients, stage: int, microbatch: int) -> None:
        timer = get_timers()("backward-compute")
        assert getattr(timer, "_started", True), "a W pass is not timed"
        run(queue, stage, microbatch)

    monkeypatch.setattr(WeightGradients, "run", timed)


@pytest.mark.usefixtures("every_backward_is_timed")
@pytest.mark.parametrize("case", CASES)
def test_timers_change_nothing_and_time_every_pass(case: str) -> None:
    """Megatron's timers change no number and include W passes. They used to ignore W, so a backward
    pass seemed to take half its time under a schedule that splits it."""
    schedule, more = CASES[case]
    flags = {
        "pipeline_model_parallel_size": 2,
        "num_layers": 4,
        "global_batch_size": 4,
        "train_iters": 2,
        "pipeline_schedule": schedule,
        **more,
    }
    runs, barred = (
        train(2, model_flags(**flags, **HIGHEST, no_barrier_with_level_1_timing=lets_ranks_run))
        for lets_ranks_run in (True, False)
    )
    without = train(2, model_flags(**flags))
    for others in (barred, without):
        assert losses(others) == losses(runs)
        assert [run.state for run in others] == [run.state for run in runs]


@pytest.mark.usefixtures("every_backward_is_timed")
def test_restarted_steps() -> None:
    setting = SETTINGS["zb-v, fp16"]
    more: dict[str, object] = {"train_iters": 5, "no_barrier_with_level_1_timing": True}
    runs = setting.train({3: 100.0}, validates=True, **HIGHEST, **more)
    assert times_redone(runs) == 1
