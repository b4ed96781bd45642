"""Tests of a process that trains a second time, on new process groups.

Megatron's --inprocess-restart does so, and callers that catch an error. Channels, watchdog,
programs, and the step counts of traces and measurements used to live as long as the process, so the
second training met those of the first: it sent messages to groups that no longer existed.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.megatron_runs import losses, model_flags, train

SCRIPT = Path(__file__).parents[1] / "scripts" / "pretrain_gpt_twice.py"
RANKS = 2
SIZES: dict[str, object] = {
    "pipeline_model_parallel_size": RANKS,
    "global_batch_size": 2 * RANKS,
    "train_iters": 4,
}


@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline_schedule": "zb-h1", "pipeline_costs": "profile:{}/costs.json"},
        {"pipeline_schedule": "zb-v", "pipeline_trace": "{}", "pipeline_trace_iters": "2:4"},
        {"pipeline_schedule": "zb-h1", "pipeline_vocab_parallel": 1},
        {
            "pipeline_schedule": "zb-v",
            "pipeline_post_validation": True,
            "rerun_mode": "disabled",
            "clip_grad": 100,
            "log_interval": 3,
        },
    ],
)
def test_a_second_training_equals_the_first(settings: dict[str, object], tmp_path: Path) -> None:
    flags = {
        name: value.format(tmp_path) if isinstance(value, str) else value
        for name, value in settings.items()
    }
    runs = train(RANKS, model_flags(**SIZES | flags), SCRIPT)
    assert losses(runs)[4:] == losses(runs)[:4]
    assert all(run.schedule == "PipelineStep" for run in runs)


def test_a_training_after_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training that fails leaves nothing to the next one in the same process: no channel, and no
    thread that ends the second training with a message of the first."""
    monkeypatch.setenv("FAILS_AT", "3")
    runs = train(RANKS, model_flags(**SIZES, pipeline_schedule="zb-h1"), SCRIPT)
    stock = losses(train(RANKS, model_flags(**SIZES)))
    assert losses(runs) == [*stock[:2], *stock]
