"""Policy steps of SkyRL's own worker, as a script on ranks without a GPU.

`MegatronPolicyWorkerBase` computes log-probabilities and trains on them with SkyRL's own loss and
microbatches. Creating a worker normally needs Ray, NCCL and weights from Hugging Face. Instead, the
script builds the worker by hand around a Megatron-Bridge model with Megatron's own layers, and
draws the sequences and advantages at random.
"""

from __future__ import annotations

import json
import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from skyrl.backends.skyrl_train.distributed.megatron.megatron_strategy import MegatronStrategy
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry
from skyrl.backends.skyrl_train.workers.megatron import megatron_model_wrapper
from skyrl.backends.skyrl_train.workers.megatron.megatron_worker import MegatronPolicyWorkerBase
from skyrl.train.config import TrainerConfig

from tests.helpers.small_policy import (
    BATCH,
    LENGTH,
    STEPS,
    VOCABULARY,
    build_policy,
    connect,
    digest,
    write_steps,
)

SETTINGS: dict[str, Any] = json.loads(os.environ["SKYRL_POLICY"])
RESPONSE = 12  # number of tokens of a response


def build_worker() -> Any:
    model, optimizer, scheduler = build_policy(
        average_in_collective=True,
        # SkyRL's own providers set variable_seq_lengths and the dispatcher in the same way.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
    )
    config = TrainerConfig()
    config.micro_forward_batch_size_per_gpu = 2
    config.micro_train_batch_size_per_gpu = 1
    config.algorithm.temperature = 1.0
    config.max_tokens_per_microbatch = 0
    config.remove_microbatch_padding = False
    # The worker is made without its constructor, which needs Ray and NCCL.
    worker = object.__new__(MegatronPolicyWorkerBase)
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
    """Stand in for SkyRL's mask, which masks padding only: Transformer Engine's attention would add
    the causal mask. The mask returned here is both."""
    length = mask.size(1)
    return (~mask.bool())[:, None, None, :] | torch.ones(length, length).triu(1).bool()


def main() -> None:
    connect()
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
        # Forward and backward run in two calls before a step of the optimizer. SkyRL defers the
        # calls' gradient reductions to that step.
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
    write_steps(steps, SETTINGS["result"])


if __name__ == "__main__":
    main()
