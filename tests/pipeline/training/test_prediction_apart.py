"""Multi-token prediction on a stage before the loss's, with features that split the sequences."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers import context_parallel
from tests.helpers.combinations import nightly
from tests.pipeline.training.test_multi_token_prediction import (
    ON_LINE,
    losses,
    predictions,
    separated,
)

MODEL = "untied, 1 depth"


@nightly("test_multi_token_prediction.py has whole sequences")
def test_slices_with_a_stage_apart() -> None:
    training, ours = separated(MODEL, ON_LINE)
    whole, sliced = training.beside(training, **ours, pipeline_slices=2)
    assert losses(sliced) == pytest.approx(losses(whole), rel=1e-6)
    (of_slices, right), (of_whole, expected) = (
        zip(*predictions(made), strict=True) for made in (sliced, whole)
    )
    assert of_slices == pytest.approx(of_whole, rel=1e-6) and right == expected


@nightly("test_multi_token_prediction.py has one rank for a sequence")
def test_ranks_that_share_sequences_with_a_stage_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    context_parallel.install(monkeypatch)
    training, ours = separated(MODEL, ON_LINE)
    shared = training.but(context_parallel_size=2, global_batch_size=3)
    replace(shared, ranks=6).start_as_stock(**ours)
