"""Tests of training with --pipeline-p2p batched: the losses and weights are stock Megatron's, to
the last bit.

Stock trains and saves at iteration 2; a schedule loads that checkpoint and trains on.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.helpers.combinations import at_night, each_once
from tests.helpers.megatron_runs import Run, assert_same, evaluations, losses, model_flags, train
from tests.helpers.ranks import lasting_folder

SAVED_AT = 1


def run(ranks: int, **flags: object) -> list[Run]:
    return train(
        ranks,
        model_flags(
            num_layers=2 * ranks,
            pipeline_model_parallel_size=ranks,
            global_batch_size=2 * ranks,
            train_iters=3,
            eval_interval=3,
            eval_iters=1,
            **flags,
        ),
    )


@functools.cache
def stock(ranks: int) -> tuple[list[Run], Path]:
    """Return the run of stock Megatron, and the folder of its checkpoint."""
    folder = lasting_folder()
    return run(ranks, save=folder, save_interval=SAVED_AT), folder


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    at_night(*each_once(["zb-v", "1f1b", "gis", "zb-h1", "interleaved"], [2, 4]))
    or [("zb-v", 2), ("interleaved", 2)],  # a line has both overlaps below
)
def test_resumed_training_is_stock_to_the_last_bit(ranks: int, schedule: str) -> None:
    reference, folder = stock(ranks)
    runs = run(
        ranks,
        load=folder,
        ckpt_step=SAVED_AT,
        pipeline_schedule=schedule,
        pipeline_p2p="batched",
    )
    assert {result.schedule for result in runs} == {"PipelineStep"}
    assert len(losses(runs)) == len(losses(reference)) - SAVED_AT
    assert evaluations(runs)
    assert_same(runs, reference)


def test_two_pipelines_with_both_overlaps() -> None:
    """Two pipelines train with overlapped gradient reductions and parameter gathers. Each pipeline
    sends its batched messages in its own group while gradients are reduced in other groups."""
    flags: dict[str, object] = {
        "pipeline_model_parallel_size": 2,
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "train_iters": 4,
    }
    reference = train(4, model_flags(**flags))
    runs = train(4, model_flags(**flags, pipeline_schedule="zb-h1", pipeline_p2p="batched"))
    assert_same(runs, reference)
