"""Tests of optimizers that need kernels, or packages that are on no index. They were written
without a GPU, and have not run yet.

scripts/gpu_tests.sh        # on a node with two GPUs or more
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.gpu.runs import GPUS, losses, needs_two_gpus

pytestmark = [pytest.mark.gpu, needs_two_gpus]

# Sizes with which four GPUs have two data-parallel replicas. Most of the tested settings concern
# replicas.
PARALLEL: dict[str, Any] = {
    "pipeline_model_parallel_size": 2,
    "bf16": True,
    "untie_embeddings_and_output_weights": True,
    "overlap_grad_reduce": True,
    "ddp_average_in_collective": True,
}
PRECISION_AWARE: dict[str, Any] = {
    **PARALLEL,
    "use_distributed_optimizer": True,
    "overlap_param_gather": True,
    "dist_ckpt_optim_fully_reshardable": True,
    "use_precision_aware_optimizer": True,
    "main_grads_dtype": "bf16",
}
LOW: dict[str, Any] = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
OFFLOADED: dict[str, Any] = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
SAVED_AT = 2


@pytest.mark.parametrize("more", [{}, LOW, OFFLOADED], ids=["states fp32", "bf16", "half on host"])
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v"])
def test_precision_aware(schedule: str, more: dict[str, Any], tmp_path: Any) -> None:
    """The precision-aware optimizer trains with half of the parameters on the host and the others
    on the device. This has not run under our schedules yet, as a machine without a GPU has all
    parameters on the host."""
    pytest.importorskip("transformer_engine")
    _assert_stocks(schedule, str(tmp_path), **PRECISION_AWARE, **more)


KINDS = ("line", "loop", "v")


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(name, marks=pytest.mark.covers("C", KINDS, optimizer=name))
        for name in ("muon", "dist_muon")
    ],
)
@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved-zb", "zb-v"])
def test_muon(schedule: str, optimizer: str, tmp_path: Any) -> None:
    pytest.importorskip("emerging_optimizers")
    _assert_stocks(schedule, str(tmp_path), **PARALLEL, optimizer=optimizer)


@pytest.mark.skipif(
    GPUS < 1 or torch.cuda.get_device_capability() < (10, 0),
    reason="needs compute capability 10.0 or later (Blackwell), for MXFP8",
)
@pytest.mark.covers(
    "C",
    KINDS,
    precision="fp8_mx",
    fp8_param_gather=True,
    reuse_grad_buf_for_mxfp8_param_ag=True,
)
@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved-zb", "zb-v"])
def test_parameters_are_gathered_in_the_gradients_buffer(schedule: str, tmp_path: Any) -> None:
    """Parameters can be gathered in the buffer of the gradients. This is safe since the gradients
    of a chunk come after its first forward pass, by which all its parameters have been gathered."""
    pytest.importorskip("transformer_engine")
    flags = {
        **PARALLEL,
        "use_distributed_optimizer": True,
        "overlap_param_gather": True,
        "dist_ckpt_optim_fully_reshardable": True,
        "transformer_impl": "transformer_engine",
        "fp8_format": "e4m3",
        "fp8_recipe": "mxfp8",
        "fp8_param_gather": True,
        "reuse_grad_buf_for_mxfp8_param_ag": True,
        # MXFP8 scales blocks of 32 elements, so sizes are multiples of 32.
        "hidden_size": 128,
        "num_attention_heads": 4,
        "seq_length": 128,
        "max_position_embeddings": 128,
    }
    _assert_stocks(schedule, str(tmp_path), **flags)


def _assert_stocks(schedule: str, folder: str, **flags: Any) -> None:
    """Assert that the losses are Megatron's, resumed from a checkpoint of Megatron's own training.
    With several stages on a rank, a run from scratch would start from other weights."""
    losses(None, **flags, save=folder, save_interval=SAVED_AT)
    flags |= {"load": folder, "ckpt_step": SAVED_AT}
    assert losses(schedule, **flags) == losses(None, **flags)
