"""Published and estimated seconds of steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scripts.published_steps import PAIR, TRAININGS, pair_seconds, predicted_seconds


@pytest.mark.parametrize("number", [0, 3, 5, 7], ids=["gpt", "llama", "nemotron", "deepseek"])
def test_estimated_steps_are_near_published_ones(number: int) -> None:
    training = TRAININGS[number]
    assert 0.75 <= training.seconds / predicted_seconds(training) <= 1.33


def test_a_pair_of_layers_is_near_its_profile() -> None:
    """Without pairs the same passes would take 1.6 times as long as profiled."""
    training = TRAININGS[-1]
    alone = replace(training, execution=replace(training.execution, overlap=1e-9))
    assert 0.75 <= PAIR / pair_seconds(training) <= 1.33
    assert pair_seconds(alone) > 1.5 * PAIR


def test_stages_have_all_layers_of_the_model() -> None:
    for training in TRAININGS:
        assert sum(training.layers) == len(training.model.layers)
        assert len(training.layers) % training.pipeline == 0
        ranks = training.execution.tensor_parallel * training.pipeline
        assert training.gpus % (ranks * training.execution.expert_parallel) == 0
        assert training.batch % training.copies == 0
