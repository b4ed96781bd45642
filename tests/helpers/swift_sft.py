"""A fine-tuning by ms-swift's own `megatron_sft_main`, as a script on ranks without a GPU.

ms-swift and mcore-bridge run as in their packages: arguments, data, packing, models, the training
loop, evaluations and the export of weights. A plug-in, which ms-swift imports before it creates
process groups, installs this project's schedule.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

SETTINGS: dict[str, Any] = json.loads(os.environ["SWIFT_SFT"])


def digest(tensor: torch.Tensor) -> str:
    content = tensor.detach().float().contiguous()
    return hashlib.sha256(content.numpy().tobytes()).hexdigest()[:16]


def record(trainer: Any, steps: list[Any], losses: list[Any]) -> None:
    """Record the results of each training step, and the losses of each microbatch by token: the
    negated log-probabilities of its labels."""
    train_step: Callable[..., Any] = trainer.train_step
    loss_func: Callable[..., Any] = trainer.loss_func

    def noted_step(self: Any, iterator: Any) -> Any:
        metrics, norm, updated = train_step(self, iterator)
        weights = [
            digest(weight) for model in self.unwrapped_models for weight in model.parameters()
        ]
        steps.append([float(norm), bool(updated), weights])
        return metrics, norm, updated

    def noted_loss(self: Any, output: torch.Tensor, **rest: Any) -> Any:
        losses.append([self.wrapped_models[0].training, list(output.shape), digest(output)])
        return loss_func(self, output, **rest)

    trainer.train_step, trainer.loss_func = noted_step, noted_loss


def where_cuda_is(build: Callable[..., Any]) -> Callable[..., Any]:
    """Let Transformer Engine's classes, which refuse to be created without a GPU, find one."""

    def built(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(torch.cuda, "is_available", lambda: True):
            return build(*args, **kwargs)

    return built


def main() -> None:
    from swift.megatron import MegatronTrainer, megatron_sft_main

    # torch reports one device, as mcore-bridge seeds Megatron's generators only if there is one.
    torch.cuda.device_count = lambda: 1
    base: Any = importlib.import_module("swift.megatron.trainers.base")
    for name in ("get_mcore_model", "prepare_mcore_model"):
        setattr(base, name, where_cuda_is(getattr(base, name)))
    callbacks: Any = importlib.import_module("swift.megatron.callbacks")
    callbacks.megatron_callbacks_map["tensorboard"] = callbacks.MegatronCallback
    pipeline: Any = importlib.import_module("swift.megatron.pipelines.train.sft")
    pipeline.plot_images = lambda *_: None  # ms-swift would plot TensorBoard's records
    steps: list[Any] = []
    losses: list[Any] = []
    record(MegatronTrainer, steps, losses)
    rank = int(os.environ["RANK"])
    megatron_sft_main(SETTINGS["arguments"])
    Path(f"{SETTINGS['result']}.{rank}").write_text(json.dumps({"steps": steps, "losses": losses}))


if __name__ == "__main__":
    main()
    assert not dist.is_initialized()  # ms-swift has destroyed its groups
