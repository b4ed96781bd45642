"""Steps of models that a caller builds. Tests compare the gradients and losses of all ranks between
two callers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

Chunks = list[torch.nn.Module]
Gradients = dict[str, torch.Tensor]


def small_config(
    layers: int, ranks: int, kind: type[TransformerConfig] = TransformerConfig, **settings: Any
) -> TransformerConfig:
    """Return the config of a model with local layers and without dropout on ``ranks`` pipeline
    ranks."""
    common: dict[str, Any] = {
        "num_layers": layers,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "pipeline_model_parallel_size": ranks,
        "pipeline_dtype": torch.float32,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_cpu_initialization": True,
        "masked_softmax_fusion": False,
        "transformer_impl": "local",
    }
    return kind(**common | settings)


def draw_by_name(parameters: Iterator[tuple[str, torch.nn.Parameter]]) -> None:
    """Draw weights that depend only on a parameter's name, not on its rank."""
    for name, parameter in parameters:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        parameter.data.normal_(std=0.1, generator=generator)


def named_parameters(chunk: Any, model: Any = None) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the parameters of ``chunk`` with their names. In a name, a layer has its number in the
    whole language ``model``, not in the chunk."""
    model = model or chunk
    prefix = next(name for name, module in chunk.named_modules() if module is model.decoder)
    for name, parameter in chunk.named_parameters():
        if name.startswith(f"{prefix}.layers."):
            number, _, rest = name.removeprefix(f"{prefix}.layers.").partition(".")
            name = f"{prefix}.layers.{model.decoder.layers[int(number)].layer_number}.{rest}"
        yield name, parameter


def first_and_last(chunk: int) -> dict[str, bool]:
    """Return the arguments with which a model is told whether this rank's chunk number ``chunk``
    begins or ends it."""
    ends: dict[str, Any] = {"ignore_virtual": False, "vp_stage": chunk}
    return {
        "pre_process": parallel_state.is_pipeline_first_stage(**ends),
        "post_process": parallel_state.is_pipeline_last_stage(**ends),
    }


def forward_step(data: Iterator[torch.Tensor], model: Any, **given: Any) -> tuple[Any, Any]:
    """Run ``model`` on the next tokens, [b, s], which are also the labels."""
    tokens = next(data)
    positions = torch.arange(tokens.size(1)).expand(len(tokens), -1)
    mask = torch.ones(1, 1, tokens.size(1), tokens.size(1)).triu(1).bool()
    return model(tokens, positions, mask, labels=tokens, **given), loss_function


def loss_function(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the mean loss, and a dictionary of the same loss to be logged."""
    loss = output.mean()
    return loss, {"loss": loss.item()}


def wrapped(chunk: Any, overlap: bool = False) -> DistributedDataParallel:
    """Return ``chunk`` in Megatron's data-parallel wrapper, which adds to ``main_grad``."""
    chunk.config.finalize_model_grads_func = finalize_model_grads
    settings = DistributedDataParallelConfig(overlap_grad_reduce=overlap, grad_reduce_in_fp32=True)
    return DistributedDataParallel(chunk.config, settings, chunk)


def whole_step(
    build: Callable[[], Chunks],
    names: Callable[[Any], Iterator[tuple[str, torch.nn.Parameter]]],
    forward_step: Callable[..., Any],
    data: Callable[[], Sequence[Any]],
    chunks: int | None = None,
    context_parallel: int = 1,
    tensor_parallel: int = 1,
    replicas: int = 1,
    **call: Any,
) -> tuple[list[Any], Gradients]:
    """Run one step on all ranks, as one pipeline or as ``context_parallel`` times
    ``tensor_parallel`` times ``replicas`` pipelines, and return the losses and gradients of all
    ranks.

    ``names`` yields the parameters of a chunk with their names in the whole model. ``data`` returns
    the microbatches or, if there are several replicas, a list of microbatches for each replica; the
    chunks of replicas have Megatron's data-parallel wrapper. ``chunks`` is the number of virtual
    stages for Megatron's own schedule. ``call`` are further arguments of Megatron's
    forward_backward_func.
    """
    pipelines = context_parallel * tensor_parallel * replicas
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel,
        pipeline_model_parallel_size=dist.get_world_size() // pipelines,
        virtual_pipeline_model_parallel_size=chunks,
        context_parallel_size=context_parallel,
    )
    model_parallel_cuda_manual_seed(0)
    model, microbatches = build(), data()
    if replicas > 1:
        model = [wrapped(chunk) for chunk in model]
        microbatches = microbatches[parallel_state.get_data_parallel_rank()]
    losses = schedules.get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(microbatches) for _ in model],
        model=model,
        num_microbatches=len(microbatches),
        **{"forward_only": False, **call},
    )
    gradient_of = "main_grad" if replicas > 1 else "grad"
    own = {
        name: gradient
        for chunk in model
        for name, parameter in names(chunk.module if replicas > 1 else chunk)
        if (gradient := getattr(parameter, gradient_of)) is not None
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (losses, own))
    parallel_state.destroy_model_parallel()
    gradients = {name: gradient for _, own in everyone for name, gradient in own.items()}
    return [loss for losses, _ in everyone for loss in losses], gradients


def assert_same(ours: tuple[list[Any], Gradients], stocks: tuple[list[Any], Gradients]) -> None:
    """Assert that both callers have the same losses and gradients, to the last bit."""
    (losses, gradients), (expected_losses, expected) = ours, stocks
    assert losses == expected_losses and losses
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, expected[name]), name
