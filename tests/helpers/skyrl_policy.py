"""Policy steps of SkyRL's own worker, as a script on ranks without a GPU.

`MegatronPolicyWorkerBase` computes log-probabilities and trains on them with SkyRL's own loss and
microbatches. Creating a worker normally needs Ray, NCCL and weights from Hugging Face. Instead, the
script builds the worker by hand around a Megatron-Bridge model with Megatron's own layers, and
draws the sequences and advantages at random.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from skyrl.backends.skyrl_train.distributed.megatron.megatron_strategy import MegatronStrategy
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
from skyrl.backends.skyrl_train.workers.megatron import megatron_model_wrapper
from skyrl.backends.skyrl_train.workers.megatron.megatron_worker import MegatronPolicyWorkerBase
from skyrl.train.config import TrainerConfig

SETTINGS: dict[str, Any] = json.loads(os.environ["SKYRL_POLICY"])
PIPELINE, BATCH, LENGTH, RESPONSE, VOCABULARY, STEPS = 2, 12, 16, 12, 64, 3


def build_model() -> Any:
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
        variable_seq_lengths=True,  # this and the dispatcher as SkyRL's own providers
        moe_token_dispatcher_type="alltoall",
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        cross_entropy_loss_fusion=False,
    )
    provider.finalize()
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True, average_in_collective=True
    )
    return provider.provide_distributed_model(ddp_config=ddp, use_cpu_initialization=True)


def build_worker() -> Any:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=PIPELINE)
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(parallel_state.get_pipeline_model_parallel_rank())
    model = build_model()
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
    config = TrainerConfig()
    config.micro_forward_batch_size_per_gpu = 2
    config.micro_train_batch_size_per_gpu = 1
    config.algorithm.temperature = 1.0
    config.max_tokens_per_microbatch = 0
    config.remove_microbatch_padding = False
    worker = object.__new__(MegatronPolicyWorkerBase)  # its constructor needs Ray and NCCL
    values = {
        "cfg": config,
        "actor_module": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "strategy": object.__new__(MegatronStrategy),
        "model": megatron_model_wrapper.MegatronModelWrapper(
            config=config,
            actor_module=model,
            actor_optimizer=optimizer,
            policy_loss_fn=PolicyLossRegistry.get(config.algorithm.policy_loss_type),
        ),
        "empty_cuda_cache": False,
        "enable_router_replay": False,
        "enable_sample_support_replay": False,
    }
    for name, value in values.items():
        setattr(worker, name, value)
    return worker


def draw_batch(step: int) -> Any:
    """Return prompts and responses of different lengths, padded on the left; small tokens are
    rewarded."""
    draw = torch.Generator().manual_seed(100 * parallel_state.get_data_parallel_rank() + step)
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=draw)
    lengths = torch.randint(8, LENGTH + 1, (BATCH,), generator=draw)
    kept = torch.arange(LENGTH) >= (LENGTH - lengths).unsqueeze(1)
    responses = torch.minimum(lengths - 2, torch.tensor(RESPONSE))
    mask = torch.arange(RESPONSE) >= (RESPONSE - responses).unsqueeze(1)
    rewards = torch.where(ids[:, -RESPONSE:] < VOCABULARY // 2, 1.0, -1.0)
    batch = TrainingInputBatch(
        {
            "sequences": ids * kept,
            "attention_mask": kept.long(),
            "loss_mask": mask.float(),
            "response_mask": mask.long(),
            "advantages": rewards * mask,
        }
    )
    batch.metadata = {"response_length": RESPONSE}
    return batch


def causal(mask: torch.Tensor) -> torch.Tensor:
    """Stand in for SkyRL's mask of padding, which Transformer Engine's attention joins with the
    causal one."""
    length = mask.size(1)
    return (~mask.bool())[:, None, None, :] | torch.ones(length, length).triu(1).bool()


def digest(tensor: torch.Tensor) -> str:
    content = tensor.detach().float().contiguous()
    return hashlib.sha256(content.numpy().tobytes()).hexdigest()[:16]


def main() -> None:
    dist.init_process_group("gloo")
    if "MEGATRON_EXT_SCHEDULE" in os.environ:
        importlib.import_module("megatron_ext.auto")
    with mock.patch.object(megatron_model_wrapper, "to_te_attention_mask", causal):
        train(build_worker())
    dist.destroy_process_group()


def train(worker: Any) -> None:
    """Run the steps, and write their results."""
    steps = []
    for step in range(STEPS):
        batch = draw_batch(step)
        old = worker._forward_logprobs(batch)
        if not parallel_state.is_pipeline_last_stage():
            old = torch.zeros(BATCH, RESPONSE)
        dist.broadcast(
            old,
            parallel_state.get_pipeline_model_parallel_last_rank(),
            parallel_state.get_pipeline_model_parallel_group(),
        )
        for name in ("action_log_probs", "base_action_log_probs", "rollout_logprobs"):
            batch[name] = old
        # two calls before a step of the optimizer, whose reductions SkyRL defers to that step
        halves = [worker.forward_backward(half) for half in batch.chunk(BATCH // 2)]
        steps.append(
            {
                "log_probs": digest(old),
                "losses": [half.metrics["policy_loss"] for half in halves],
                "microbatches": [len(half.loss_fn_outputs) for half in halves],
                "norm": worker.optim_step(),
                "weights": [
                    digest(weight) for chunk in worker.actor_module for weight in chunk.parameters()
                ],
            }
        )
    Path(f"{SETTINGS['result']}.{dist.get_rank()}").write_text(json.dumps(steps))


if __name__ == "__main__":
    main()
