"""A small policy for workers of other projects on ranks without a GPU: a model of Megatron-Bridge's
with Megatron's own layers, and its optimizer.

Stand-ins for NeMo-RL's and SkyRL's workers build their policy with it.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

PIPELINE, BATCH, LENGTH, VOCABULARY, STEPS = 2, 12, 16, 64, 3


def connect() -> None:
    """Connect the ranks, and install the schedule that the environment names, if any."""
    dist.init_process_group("gloo")
    if "MEGATRON_EXT_SCHEDULE" in os.environ:
        importlib.import_module("megatron_ext.auto")


def build_policy(*, average_in_collective: bool, **settings: Any) -> tuple[list[Any], Any, Any]:
    """Return the chunks of a model with a pipeline, its optimizer and its scheduler.

    Args:
        average_in_collective: whether gradients are averaged as they are reduced.
        settings: of the model, besides its sizes.
    """
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=PIPELINE)
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(parallel_state.get_pipeline_model_parallel_rank())
    model = _build_model(average_in_collective, settings)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=1e-2, bf16=True, use_distributed_optimizer=True), model
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=1e-2,
        lr_warmup_steps=0,
        lr_decay_steps=1000,
        lr_decay_style="constant",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return model, optimizer, scheduler


def _build_model(average_in_collective: bool, settings: dict[str, Any]) -> list[Any]:
    provider = GPTModelProvider(
        num_layers=8,
        hidden_size=32,
        ffn_hidden_size=64,
        num_attention_heads=4,
        seq_length=LENGTH,
        vocab_size=VOCABULARY,
        make_vocab_size_divisible_by=1,
        pipeline_model_parallel_size=PIPELINE,
        pipeline_dtype=torch.bfloat16,
        bf16=True,
        params_dtype=torch.bfloat16,
        transformer_layer_spec=local_layer_spec,
        transformer_impl="local",
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        cross_entropy_loss_fusion=False,
        **settings,
    )
    provider.finalize()
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        average_in_collective=average_in_collective,
    )
    chunks: list[Any] = provider.provide_distributed_model(
        ddp_config=ddp, use_cpu_initialization=True
    )
    return chunks


def digest(tensor: torch.Tensor) -> str:
    content = tensor.detach().float().contiguous()
    return hashlib.sha256(content.numpy().tobytes()).hexdigest()[:16]


def write_steps(steps: list[dict[str, Any]], result: str) -> None:
    """Write the results of this rank's ``steps`` to the file ``result``.RANK."""
    Path(f"{result}.{dist.get_rank()}").write_text(json.dumps(steps))
