"""Published and estimated seconds of steps of dense models."""

from __future__ import annotations

import pytest

from scripts.published_steps import TRAININGS, predicted_seconds


@pytest.mark.parametrize("number", [0, 3, 5], ids=["gpt", "llama", "nemotron"])
def test_estimated_steps_are_near_published_ones(number: int) -> None:
    training = TRAININGS[number]
    assert 0.75 <= training.seconds / predicted_seconds(training) <= 1.33


def test_stages_have_all_layers_of_the_model() -> None:
    for training in TRAININGS:
        assert f"layers={sum(training.layers)}," in training.model
        assert len(training.layers) % training.pipeline == 0
        assert training.gpus % (8 * training.pipeline) == 0
