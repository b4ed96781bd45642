"""Memory of a rank's share of the model, according to Megatron's arguments.

Whether a launch fits depends on more than its activations: parameters, gradients and optimizer
states take most of the memory of many trainings. They are counted as Megatron's arguments say that
they are stored and sharded, without building a model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megatron_ext.adapter.dimensions import execution
from megatron_ext.adapter.layers import depths_of_stages, layers_of_stages
from megatron_ext.cost_model.description import describe
from megatron_ext.cost_model.model import stages_of
from megatron_ext.cost_model.model_memory import (
    ModelBytes,
    TrainingState,
    bytes_of_ranks,
    default_bucket,
)
from megatron_ext.schedule.placement import Placement
from megatron_ext.schedule.problem import VocabularyParallel

_FP32 = 4
_MOMENTS = ("exp_avg_dtype", "exp_avg_sq_dtype")
# Bytes of a quantized weight by recipe. Its matrix is stored twice, by rows and by columns, for the
# products of both passes. One scale belongs to 32 elements (MXFP8), to 128 x 128 elements
# (blockwise FP8) or to 16 elements (FP4).
_QUANTIZED = {
    "mxfp8": 2 * (1 + 1 / 32),
    "blockwise": 2 * (1 + 4 / 128**2),
    "fp4": 2 * (1 / 2 + 1 / 16),
}
_FP8 = 2.0  # bytes of a weight in FP8 with one scale for each matrix


def model_bytes_of_ranks(
    args: Any, placement: Placement, vocabulary: VocabularyParallel = VocabularyParallel.NONE
) -> list[ModelBytes] | None:
    """Return the bytes of model state on each pipeline rank, without stored activations.

    None means that the work of some layer is not known. ``args`` are validated and have their
    padded vocabulary; None counts as no vocabulary.

    Raises:
        ValueError: the layers cannot be split over the stages.
    """
    model = describe(args)
    if not model.is_known:
        return None
    stages = stages_of(model, layers_of_stages(args, placement), depths_of_stages(args))
    run = execution(args, args.seq_length, args.micro_batch_size)
    return bytes_of_ranks(model, stages, run, placement, vocabulary, state_of(args))


def checkpoint_bytes(args: Any, placement: Placement) -> float | None:
    """Return the approximate bytes of a checkpoint on disk; None if layers are not known.

    A checkpoint has the weights once, and the optimizer states unless ``args`` have
    --no-save-optim.
    """
    model = describe(args)
    if not model.is_known:
        return None
    run = execution(args, args.seq_length, args.micro_batch_size)
    unsplit = replace(run, tensor_parallel=1, expert_parallel=1, expert_tensor_parallel=1)
    stages = stages_of(model, layers_of_stages(args, placement), depths_of_stages(args))
    state = replace(state_of(args), distributed=False, matrix_bytes=None)
    ranks = bytes_of_ranks(model, stages, unsplit, placement, VocabularyParallel.NONE, state)
    return sum(rank.weights + (0 if args.no_save_optim else rank.optimizer) for rank in ranks)


def state_of(args: Any) -> TrainingState:
    """Return how each parameter's weight, gradient and optimizer states are stored and sharded."""
    instances = args.num_distributed_optimizer_instances
    tensor = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    of_experts = tensor * args.expert_model_parallel_size * args.pipeline_model_parallel_size
    data_parallel = args.data_parallel_size * args.context_parallel_size // instances
    weight = args.params_dtype.itemsize
    bucket = args.ddp_bucket_size or default_bucket(data_parallel)
    return TrainingState(
        distributed=args.use_distributed_optimizer,
        data_parallel=data_parallel,
        expert_data_parallel=max(args.world_size // of_experts // instances, 1),
        weight_bytes=weight,
        matrix_bytes=_matrix_bytes(args),
        gathered_matrix_bytes=_gathered_matrix_bytes(args),
        gradient_bytes=_FP32 if args.accumulate_allreduce_grads_in_fp32 else weight,
        optimizer_bytes=_optimizer_bytes(args),
        bucket=bucket if args.overlap_grad_reduce else 0,
        large_buckets=args.ddp_pad_buckets_for_high_nccl_busbw,
    )


def quantized_bytes(recipe: str) -> float:
    """Return the bytes of a matrix element under Megatron's ``fp8_recipe``, or under "fp4"."""
    return _QUANTIZED.get(recipe, _FP8)


def _matrix_bytes(args: Any) -> float | None:
    """Return the bytes of an element of layers' matrices if they are quantised, else None.

    Quantised matrices may replace the 16-bit ones, or exist in addition: a step casts 16-bit
    matrices once for all its microbatches.
    """
    quantized = None
    if getattr(args, "fp4", None):
        quantized, alone = quantized_bytes("fp4"), args.fp4_param_gather
    elif args.fp8:
        quantized, alone = quantized_bytes(args.fp8_recipe), args.fp8_param_gather
    if quantized is None:
        return None
    return quantized if alone else args.params_dtype.itemsize + quantized


def _gathered_matrix_bytes(args: Any) -> float | None:
    """Return the bytes of an element of layers' matrices that data-parallel ranks gather.

    None means the same bytes as for other weights. Matrices are gathered in 8 or 4 bits if only
    their quantised form is stored: the form by rows is gathered, and each rank makes the form by
    columns itself. MXFP8 matrices are gathered in 16 bits, in the buffer of gradients
    (`_ParamAndGradBuffer` in Megatron's distributed/param_and_grad_buffer.py).
    """
    if getattr(args, "fp4", None):
        return 1 / 2 if args.fp4_param_gather else None
    gathers = args.fp8 and args.fp8_param_gather and args.fp8_recipe != "mxfp8"
    return 1.0 if gathers else None


def _optimizer_bytes(args: Any) -> float:
    """Return the bytes of one parameter's optimizer states on a GPU.

    They are Adam's two moments, and a master copy for 16-bit parameters. With the precision-aware
    optimizer each state has its own type, and Transformer Engine stores only the bits of an fp32
    master copy that bf16 lacks.
    """
    moments = 2 * _FP32
    master = _FP32 if args.params_dtype.itemsize < _FP32 else 0
    if args.optimizer == "sgd":
        moments = _FP32 if args.sgd_momentum else 0
    if args.use_precision_aware_optimizer:
        moments = sum(getattr(args, name).itemsize for name in _MOMENTS)
        if args.main_params_dtype is not torch.float32:
            master = args.main_params_dtype.itemsize
        elif args.params_dtype is torch.bfloat16 and args.fp8_recipe in (None, "delayed"):
            master = _FP32 - args.params_dtype.itemsize
    on_gpu = 1.0 - (args.optimizer_offload_fraction if args.optimizer_cpu_offload else 0.0)
    return (master + moments) * on_gpu
