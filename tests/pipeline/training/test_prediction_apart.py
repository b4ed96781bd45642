"""Tests of multi-token prediction on a stage before that of the loss, with features that split the
sequences, with overlapped passes of experts, and with four replicas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers import context_parallel
from tests.helpers.combinations import nightly
from tests.pipeline.training.test_multi_token_prediction import (
    ON_LINE,
    ON_LOOP,
    ON_V,
    Flags,
    losses,
    predictions,
    separated,
)
from tests.pipeline.training.test_pairs import PREDICTION, compare

MODEL = "untied, 1 depth"
ON_ALL = pytest.mark.parametrize("ours", [ON_LINE, ON_LOOP, ON_V], ids=["line", "loop", "V"])


@nightly("test_multi_token_prediction.py has whole sequences")
@ON_ALL
def test_slices_with_a_stage_apart(ours: Flags) -> None:
    training, ours = separated(MODEL, ours)
    whole, sliced = training.beside(training, **ours, pipeline_slices=2)
    assert losses(sliced) == pytest.approx(losses(whole), rel=1e-6)
    (of_slices, right), (of_whole, expected) = (
        zip(*predictions(made), strict=True) for made in (sliced, whole)
    )
    assert of_slices == pytest.approx(of_whole, rel=1e-6) and right == expected


@nightly("test_multi_token_prediction.py has one rank for a sequence")
@ON_ALL
def test_ranks_that_share_sequences_with_a_stage_apart(
    ours: Flags, monkeypatch: pytest.MonkeyPatch
) -> None:
    context_parallel.install(monkeypatch)
    training, ours = separated(MODEL, ours)
    shared = training.but(context_parallel_size=2, global_batch_size=3)
    replace(shared, ranks=6).start_as_stock(**ours)


@nightly("test_multi_token_prediction.py has two replicas")
@pytest.mark.parametrize("ours", [ON_LOOP, ON_V], ids=["loop", "V"])
def test_four_replicas_with_a_stage_apart(ours: Flags) -> None:
    training, ours = separated(MODEL, ours)
    replicas = training.but(
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        global_batch_size=12,
    )
    replace(replicas, ranks=12).start_as_stock(**ours)


@nightly("test_pairs.py has multi-token prediction on the loss's stage")
def test_overlapped_passes_with_a_stage_apart() -> None:
    """Trainings with overlapped passes, and with a stage that has multi-token prediction alone,
    equal stock without the overlap. They are not compared with stock's own overlapped passes, which
    fail on a stage without layers."""
    apart: Flags = {
        "pipeline_model_parallel_size": 3,
        "pipeline_model_parallel_layout": "Et|t|t|t|m|L",
        "num_virtual_stages_per_pipeline_rank": None,
        "global_batch_size": 12,
    }
    compare(6, PREDICTION | apart, ("interleaved-zb", "zb-v"), combined=False)
