"""Tests of overlapped passes on two streams of real devices. They were written without a GPU, and
have not run yet.

scripts/gpu_tests.sh        # on a node with four GPUs or more
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.runs import losses, needs_four_gpus

pytestmark = [pytest.mark.gpu, needs_four_gpus]

FLAGS: dict[str, str | int | bool] = {
    "pipeline_model_parallel_size": 2,
    "expert_model_parallel_size": 2,
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_token_dispatcher_type": "alltoall",
    "untie_embeddings_and_output_weights": True,
    "bf16": True,
}
LOOP: dict[str, str | int | bool] = {"num_virtual_stages_per_pipeline_rank": 2}
PAIRS: dict[str, str | int | bool] = {"overlap_moe_expert_parallel_comm": True}


@pytest.mark.parametrize("schedule", ["interleaved", "interleaved-zb", "zb-v", "dualpipe-v"])
def test_losses_are_stocks(schedule: str, tmp_path: Path) -> None:
    """Overlapped passes, Megatron's and ours, continue from one checkpoint with the losses of
    Megatron without overlap."""
    losses(None, **FLAGS, **LOOP, save=str(tmp_path), save_interval=2)
    resumed: dict[str, str | int | bool] = {**FLAGS, "load": str(tmp_path), "ckpt_step": 2}
    stocks = losses(None, **resumed, **LOOP)
    assert losses(None, **resumed, **LOOP, **PAIRS) == stocks
    loop = LOOP if schedule.startswith("interleaved") else {}
    assert losses(schedule, **resumed, **loop, **PAIRS) == stocks
