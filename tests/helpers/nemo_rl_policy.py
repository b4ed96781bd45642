"""Policy steps of NeMo-RL's own worker, as a script on ranks without a GPU.

`MegatronPolicyWorkerImpl` computes log-probabilities and trains on them with NeMo-RL's own GRPO
loss, microbatches and normalization. Creating a worker normally needs Ray, NCCL and weights from
Hugging Face. Instead, the script builds the worker by hand around a Megatron-Bridge model with
Megatron's own layers, and draws the sequences and advantages at random.
"""

from __future__ import annotations

import importlib
import json
import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from nemo_rl.algorithms.loss import ClippedPGLossFn
from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl
from nemo_rl.utils.timer import Timer

from tests.helpers.small_policy import (
    BATCH,
    LENGTH,
    PIPELINE,
    STEPS,
    VOCABULARY,
    build_policy,
    connect,
    digest,
    write_steps,
)

SETTINGS: dict[str, Any] = json.loads(os.environ["NEMO_RL_POLICY"])


def policy_config(replicas: int) -> dict[str, Any]:
    """Return the part of NeMo-RL's policy configuration that its worker reads in a step."""
    return {
        "train_global_batch_size": BATCH // 2 * replicas,
        "train_micro_batch_size": 1,
        "logprob_batch_size": 2,
        "logprob_chunk_size": None,
        "make_sequence_length_divisible_by": 1,
        "max_total_sequence_length": LENGTH,
        "sequence_packing": {"enabled": False},
        "dynamic_batching": {"enabled": False},
        "megatron_cfg": {
            "empty_unused_memory_level": 0,
            "tensor_model_parallel_size": 1,
            "pipeline_model_parallel_size": PIPELINE,
            "context_parallel_size": 1,
            "sequence_parallel": False,
        },
    }


def build_worker() -> Any:
    (model,), optimizer, scheduler = build_policy(
        average_in_collective=False,
        # NeMo-RL itself normalizes losses, by the tokens of the whole batch.
        calculate_per_token_loss=True,
    )
    config = importlib.import_module("megatron.core.utils").get_model_config(model)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    # The worker is made without its constructor, which needs Ray and NCCL.
    worker = object.__new__(MegatronPolicyWorkerImpl)
    replicas = parallel_state.get_data_parallel_world_size()
    values = {
        "cfg": policy_config(replicas),
        "rank": dist.get_rank(),
        "dp_size": replicas,
        "timer": Timer(),
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "dtype": torch.bfloat16,
        "fp8_cfg": None,
        "mcore_state": SimpleNamespace(straggler_timer=None),
        "megatron_cfg": SimpleNamespace(
            model=config, optimizer=optimizer.config, ddp=model.ddp_config
        ),
        "sampling_params": None,
        "draft_model": None,
        "defer_fp32_logits": False,
        "delegate_pack_to_model": False,
        "delegate_mtp_loss_mask_to_model": False,
        "model_slices_context_parallel_inputs": False,
        "media_placeholder_token_id": None,
        "_router_replay_enabled": False,
        "should_disable_forward_pre_hook": False,
        "_first_train_step_forward_pre_hook_disabled": False,
    }
    for name, value in values.items():
        setattr(worker, name, value)
    return worker


def draw_batch(step: int) -> Any:
    """Return prompts and responses of different lengths, padded on the right; small tokens are
    rewarded."""
    draw = torch.Generator().manual_seed(100 * parallel_state.get_data_parallel_rank() + step)
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=draw)
    lengths = torch.randint(8, LENGTH + 1, (BATCH,), generator=draw)
    column = torch.arange(LENGTH)
    mask = (column >= 4) & (column < lengths.unsqueeze(1))
    ids = ids * (column < lengths.unsqueeze(1))
    rewards = torch.where(ids < VOCABULARY // 2, 1.0, -1.0)
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": lengths,
            "token_mask": mask.float(),
            "sample_mask": torch.ones(BATCH),
            "advantages": rewards * mask,
        }
    )


def main() -> None:
    connect()
    with (
        mock.patch.object(BatchedDataDict, "to", lambda batch, device: batch),
        mock.patch.object(torch.cuda, "get_device_name", lambda: "CPU"),
    ):
        train(build_worker())
    dist.destroy_process_group()


def train(worker: Any) -> None:
    """Run the steps, and write their results."""
    loss = ClippedPGLossFn(ClippedPGLossConfig())
    steps = []
    for step in range(STEPS):
        batch = draw_batch(step)
        old = worker.get_logprobs(data=batch)["logprobs"]
        batch |= {
            "prev_logprobs": old,
            "generation_logprobs": old,
            "reference_policy_logprobs": old,
        }
        answer = worker.train(batch, loss)
        steps.append(
            {
                "log_probs": digest(old),
                "loss": digest(answer["global_loss"]),
                "norm": float(answer["grad_norm"]),
                "microbatches": answer["all_mb_metrics"]["loss"],
                "weights": [digest(weight) for weight in worker.model.parameters()],
            }
        )
    write_steps(steps, SETTINGS["result"])


if __name__ == "__main__":
    main()
