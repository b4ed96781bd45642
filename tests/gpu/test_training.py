"""Tests of training over NCCL that need several GPUs. They were written without one, and have not
run yet.

scripts/gpu_tests.sh        # on a node with two GPUs or more
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_ext.compile.registry import choose
from megatron_ext.observe.trace import read_trace
from megatron_ext.schedule.action import Kind
from megatron_ext.schedule.kinds import RULES
from tests.gpu.runs import ITERATIONS, RANKS, losses, needs_four_gpus, needs_two_gpus

pytestmark = [pytest.mark.gpu, needs_two_gpus]

SAVED_AT = 2


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return flags that resume from a checkpoint of Megatron's own training. Losses are compared
    with Megatron's resumed training, as Megatron then logs the mean of the first two iterations as
    the second's."""
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    assert losses(None, save=folder, save_interval=SAVED_AT) == losses(None)
    return {"load": folder, "ckpt_step": SAVED_AT}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-auto"])
def test_losses_are_stocks(schedule: str) -> None:
    """Losses equal Megatron's. With one stage on each rank, a run from scratch has Megatron's first
    weights."""
    assert losses(schedule) == losses(None)


@pytest.mark.parametrize("schedule", ["zb-v", "v-half", "interleaved", "gis"])
def test_losses_from_a_checkpoint_are_stocks(schedule: str, resumed: dict[str, Any]) -> None:
    """Losses from a checkpoint equal Megatron's. With several stages on a rank, a run from scratch
    would start from other weights."""
    assert losses(schedule, **resumed) == losses(None, **resumed)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v", "interleaved", "gis", "v-half"])
def test_one_communicator_gives_the_losses_of_many(schedule: str) -> None:
    """Losses with one communicator equal those with many. NCCL runs the batches of one communicator
    in order, and CUDA_DEVICE_MAX_CONNECTIONS=1 delays passes behind a batch that waits, so a wrong
    order of messages would hang."""
    assert losses(schedule, pipeline_p2p="batched") == losses(schedule)


def test_slices_have_the_same_losses_under_another_schedule() -> None:
    """Two schedules with slices of sequences have equal losses, which are nearly Megatron's."""
    sliced = losses("zb-h1", pipeline_slices=4)
    assert sliced == losses("1f1b", pipeline_slices=4)
    whole = [float(loss) for loss in losses(None)]
    assert [float(loss) for loss in sliced] == pytest.approx(whole, rel=1e-4)


@pytest.mark.covers("C", ("line", "v"), tp_comm_overlap=True, sequence_parallel=True)
@needs_four_gpus
@pytest.mark.parametrize("rs_dgrad", [False, True])
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_layers_in_userbuffers_have_stocks_losses(schedule: str, rs_dgrad: bool) -> None:
    """Layers in Userbuffers have Megatron's losses. Operands of another layer in the buffer would
    change the losses of the second iteration.

    On a V placement a run from scratch starts from other weights, so it is compared with the same
    run without Userbuffers.
    """
    flags: dict[str, Any] = {
        "pipeline_model_parallel_size": 2,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "transformer_impl": "transformer_engine",
        "bf16": True,
        "hidden_size": 256,
        "seq_length": 256,
        "max_position_embeddings": 256,
    }
    overlapped = {**flags, "tp_comm_overlap": True, "tp_comm_overlap_rs_dgrad": rs_dgrad}
    ours = losses(schedule, **overlapped)
    if schedule == "zb-h1":
        assert ours == losses(None, **overlapped)
    else:
        expected = [float(loss) for loss in losses(schedule, **flags)]
        assert [float(loss) for loss in ours] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("variant", ["1", "2"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_a_divided_vocabulary_has_stocks_losses(
    schedule: str, variant: str, resumed: dict[str, Any]
) -> None:
    """A training whose vocabulary is split over the ranks has Megatron's losses except for
    rounding, as sums over the vocabulary have another order. The collectives are NCCL's."""
    ours = losses(schedule, pipeline_vocab_parallel=variant, **resumed)
    expected = [float(loss) for loss in losses(None, **resumed)]
    assert [float(loss) for loss in ours] == pytest.approx(expected, rel=1e-5)


@needs_four_gpus
@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved-zb", "zb-v"])
def test_divided_sequences_have_stocks_losses(schedule: str, tmp_path: Path) -> None:
    """Sequences that context-parallel ranks share have Megatron's losses.

    Within F and I, Transformer Engine's attention sends keys and values, and within F multi-token
    prediction sends tokens. All of these are in one hardware queue with the messages of the
    pipeline.
    """
    flags: dict[str, Any] = {
        "pipeline_model_parallel_size": 2,
        "context_parallel_size": 2,
        "mtp_num_layers": 1,
        "untie_embeddings_and_output_weights": True,
        "transformer_impl": "transformer_engine",
        "bf16": True,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "seq_length": 512,
        "max_position_embeddings": 512,
        "position_embedding_type": "rope",
    }
    losses(None, save=str(tmp_path), save_interval=SAVED_AT, **flags)
    flags |= {"load": str(tmp_path), "ckpt_step": SAVED_AT}
    assert losses(schedule, **flags) == losses(None, **flags)


@pytest.mark.parametrize("schedule", ["zb-2p", "zb-v"])
@pytest.mark.parametrize("overlaps", [False, True])
def test_steps_that_overlap_have_the_losses_of_those_that_do_not(
    schedule: str, overlaps: bool
) -> None:
    """Steps that overlap under post-validation have the losses of steps that do not. Early steps
    are clipped and later ones are not, so some steps are rolled back, with kernels on several
    streams. Snapshots of the state that a step overwrites are on the device."""
    flags: dict[str, Any] = {
        "untie_embeddings_and_output_weights": True,
        "clip_grad": 1.0,
        "bf16": True,
        "use_distributed_optimizer": overlaps,
        "overlap_grad_reduce": overlaps,
        "overlap_param_gather": overlaps,
        "rerun_mode": "disabled",
        "log_interval": ITERATIONS,
        "train_iters": 4 * ITERATIONS,
    }
    post_validated = losses(schedule, pipeline_post_validation=True, **flags)
    assert post_validated == losses(schedule, **flags)


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_recomputed_passes_have_the_losses_of_others(schedule: str) -> None:
    """Recomputed passes have the losses of passes that are not recomputed. Dropout draws from the
    device's generator and from Megatron's own, and fused kernels must compute the same with and
    without gradients."""
    flags: dict[str, Any] = {"attention_dropout": 0.1, "hidden_dropout": 0.1, "bf16": True}
    every_stage = f"first:{choose(schedule).place(RANKS).stages}"
    again = losses(schedule, pipeline_recompute=every_stage, **flags)
    assert again == losses(schedule, **flags)


def test_a_trace_has_every_pass_of_every_rank(tmp_path: Path) -> None:
    """A trace has every pass of every rank. Passes are timed by device events, and clocks are
    aligned over NCCL: no pass begins before the pass that it needs has ended on another rank, up to
    the clock error in the trace."""
    traced = losses("zb-v", pipeline_trace=str(tmp_path), pipeline_trace_iters="3:5")
    assert traced == losses("zb-v")
    steps = read_trace(tmp_path)
    assert [step.iteration for step in steps] == [3, 4]
    for step in steps:
        assert step.reserved is not None and len(step.reserved) == RANKS
        orders = [
            [[event.action for event in row] for row in timeline.compute]
            for timeline in (step.measured, step.predicted)
        ]
        assert orders[0] == orders[1] and len(orders[0]) == RANKS
        assert 0 < step.clock_error < 0.01
        happens = {event.action: event for row in step.measured.compute for event in row}
        for action, event in happens.items():
            if RULES[action.kind].covers == (Kind.FORWARD,) and action.stage:
                made = happens[action._replace(stage=action.stage - 1)].end
                assert event.start >= made - step.clock_error
