"""Tests that trainings under our schedules have stock Megatron's numbers, to the last bit.

Stock trains and saves at iteration 2, and a schedule loads that checkpoint and trains on. Both must
then have the same losses, parameters and optimizer tensors. The runs have ``--clip-grad 0``,
because clipping multiplies by a norm that is summed over the ranks in an order of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.combinations import at_night, each_once, nightly
from tests.helpers.covers.marks import covers
from tests.helpers.fetched import megatron_sources
from tests.helpers.megatron_runs import Run, assert_same, evaluations, losses
from tests.helpers.trainings import Training

FAMILIES = ("gpipe", "1f1b", "zb-h1")
SAVED_AT = 1
ITERATIONS = 3

SHAPES: dict[str, tuple[int, dict[str, object]]] = {
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "pp4": (4, {"pipeline_model_parallel_size": 4}),
    "pp2 dp2": (4, {"pipeline_model_parallel_size": 2}),
}
MODELS: dict[str, dict[str, object]] = {
    "tied": {},
    "untied, dropout": {
        "untie_embeddings_and_output_weights": True,
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
    },
    "dropout, full recompute": {
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


def training(shape: str, model: str) -> Training:
    ranks, layout = SHAPES[shape]
    return Training(ranks, {**layout, **MODELS[model], "train_iters": ITERATIONS}, SAVED_AT)


def case(shape: str, model: str, family: str) -> Any:
    flags = {**SHAPES[shape][1], **MODELS[model]}
    return pytest.param(shape, model, family, marks=covers("A", (family,), flags))


@pytest.mark.parametrize(
    ("shape", "model", "family"),
    [case(*names) for names in each_once(SHAPES, MODELS, FAMILIES)],
)
def test_resumed_training_is_stock_to_the_last_bit(shape: str, model: str, family: str) -> None:
    reference, _ = training(shape, model).saved()
    runs = training(shape, model).resume_as_stock(pipeline_schedule=family)
    for run, expected in zip(runs, reference, strict=True):
        assert run.norms == pytest.approx(expected.norms[SAVED_AT:], rel=2**-22)


def test_recomputed_passes_have_the_same_dropout() -> None:
    ours: dict[str, object] = {"pipeline_schedule": "zb-h1", "pipeline_recompute": "first:2"}
    training("pp2", "untied, dropout").resume_as_stock(**ours)


def compare(ranks: int, **flags: object) -> list[Run]:
    """Train under schedule zb-h1 and under stock's, and assert that both trainings end alike."""
    return Training(ranks, flags).start_as_stock(pipeline_schedule="zb-h1")


@nightly("test_matrix.py trains zb-auto with frozen weights, and test_profile.py with its costs")
@pytest.mark.parametrize("family", ["zb-auto", "zb-h2", "2bp"])
def test_every_schedule_on_a_line_runs(family: str) -> None:
    training("pp4", "tied").resume_as_stock(pipeline_schedule=family)


@pytest.mark.parametrize(
    ("ranks", "microbatches"),
    [(3, 7), *at_night((4, 3), (4, 1), (3, 5), (4, 6))],
)
def test_any_number_of_microbatches(ranks: int, microbatches: int) -> None:
    compare(
        ranks,
        num_layers=12 if ranks == 3 else 4,
        pipeline_model_parallel_size=ranks,
        global_batch_size=microbatches,
        train_iters=3,
    )


@pytest.mark.covers("A", ("line",), overlap_grad_reduce=True)
def test_gradient_reduction_overlaps() -> None:
    """--overlap-grad-reduce works under the schedule zb-h1. The first of the four steps does not
    overlap, because Megatron learns the order of its buckets in it; the other three do."""
    compare(4, pipeline_model_parallel_size=2, overlap_grad_reduce=True, train_iters=4)


@nightly("test_matrix.py has zb-auto with these")
@pytest.mark.covers(
    "A",
    ("line",),
    use_distributed_optimizer=True,
    overlap_grad_reduce=True,
    overlap_param_gather=True,
)
def test_distributed_optimizer_with_both_overlaps() -> None:
    compare(
        4,
        pipeline_model_parallel_size=2,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        train_iters=4,
    )


@nightly("test_matrix.py has zb-auto with these")
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel(sequence_parallel: bool) -> None:
    compare(
        4,
        pipeline_model_parallel_size=2,
        tensor_model_parallel_size=2,
        sequence_parallel=sequence_parallel,
        train_iters=3,
    )


@nightly("test_matrix.py has zb-auto with it")
@pytest.mark.covers("A", ("line",), precision="bf16")
def test_bf16() -> None:
    compare(2, pipeline_model_parallel_size=2, bf16=True, train_iters=3)


@pytest.mark.covers("A", ("line",), calculate_per_token_loss=True, group_query_attention=True)
def test_without_linear_bias_and_loss_per_token() -> None:
    compare(
        2,
        pipeline_model_parallel_size=2,
        calculate_per_token_loss=True,
        disable_bias_linear=True,
        swiglu=True,
        group_query_attention=True,
        num_query_groups=1,
        train_iters=3,
    )


@nightly("test_profile.py evaluates between iterations, and is stock's, on two ranks")
def test_evaluation_between_iterations() -> None:
    runs = compare(4, pipeline_model_parallel_size=4, eval_iters=2, eval_interval=2, train_iters=4)
    assert evaluations(runs)


@nightly("test_placements.py has a V with them, and test_adversary.py each family on small stages")
@pytest.mark.covers("A", ("line",), variable_seq_lengths=True)
def test_shapes_exchanged_when_sequence_lengths_vary() -> None:
    flags: dict[str, object] = {"pipeline_model_parallel_size": 4, "train_iters": 3}
    varying = Training(4, flags, config={"variable_seq_lengths": True})
    varying.start_as_stock(pipeline_schedule="zb-h1")


@nightly("test_placements.py has a V with it, whose norm leaves out a tied copy, too")
def test_clipping_is_close() -> None:
    """With gradient clipping, losses equal stock's up to rounding. A norm is summed over the ranks
    in another order, so parameters may differ in their last bits."""
    clipped = Training(4, {"pipeline_model_parallel_size": 4, "clip_grad": 0.5, "train_iters": 4})
    runs = clipped.run(pipeline_schedule="zb-h1")
    assert losses(runs) == pytest.approx(losses(clipped.run()), rel=1e-6)


def test_saved_under_a_schedule_and_resumed_under_stock(tmp_path: Path) -> None:
    pair = training("pp2", "tied")
    saving: dict[str, object] = {"save": tmp_path, "save_interval": SAVED_AT}
    pair.run(pipeline_schedule="zb-h1", **saving, exit_interval=SAVED_AT)
    resumed = pair.run(load=tmp_path)
    assert len(losses(resumed)) == ITERATIONS - SAVED_AT
    assert_same(resumed, pair.saved()[0])


def test_no_flag_means_stock() -> None:
    runs = training("pp2", "tied").saved()[0]
    assert {run.schedule for run in runs} == {"forward_backward_pipelining_without_interleaving"}


@nightly("test_placements.py has the script on a V, and test_packed_sequences.py on a loop")
def test_the_upstream_script() -> None:
    script = megatron_sources() / "pretrain_gpt.py"
    flags: dict[str, object] = {"pipeline_model_parallel_size": 4, "train_iters": 3}
    Training(4, flags, script=script).start_as_stock(pipeline_schedule="zb-h1")
