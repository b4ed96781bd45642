"""Costs before any are measured: estimated from Megatron's arguments or transformer config, or
equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from megatron_ext.adapter.layers import prediction_depths
from megatron_ext.adapter.model_parts import ChunkSize
from megatron_ext.logger import logger
from megatron_ext.schedule.costs import Costs, uniform
from megatron_ext.schedule.model.estimate import CPU, GPU, ModelDimensions, Rates, estimate
from megatron_ext.schedule.model.frozen import without_frozen
from megatron_ext.schedule.placement import Placement

_REMEDY = "--pipeline-costs profile measures them (of install: costs='profile')"
_FEW = 0.005  # of a stage's parameters that are not worth a word


def costs_of_model(
    config: Any,
    placement: Placement,
    per_stage: Sequence[ChunkSize],
    sequence: int,
    micro_batch: int,
    *,
    is_told: bool,
) -> Costs:
    """The costs of a microbatch, of ``sequence`` tokens of ``micro_batch`` samples.

    A model without Megatron's transformer layers has equal costs: F, I and W of every stage take as
    long. ``is_told``: one line says so, and what of a stage is not in an estimate.
    """
    layers = [size.layers for size in per_stage if size.layers is not None]
    if len(layers) < len(per_stage) or not any(layers) or not isinstance(config, TransformerConfig):
        if is_told:
            logger.info(
                f"the costs of {per_stage[0].model} cannot be estimated, and are taken as equal "
                f"for every stage; {_REMEDY}"
            )
        return uniform(placement, 1.0, 1.0, 1.0, origin="taken as equal")
    shares = {
        stage: size.beside / size.parameters
        for stage, size in enumerate(per_stage)
        if size.beside > _FEW * size.parameters
    }
    if shares and is_told:
        beside = ", ".join(f"{share:.0%} of stage {stage}" for stage, share in shares.items())
        logger.info(
            f"the costs of {per_stage[0].model} are estimated from its language model, without "
            f"the parameters beside it ({beside}); {_REMEDY}"
        )
    costs = estimated_costs(
        config,
        layers=layers,
        sequence=sequence // config.context_parallel_size,
        micro_batch=micro_batch,
        vocabulary=sum(size.rows for size in per_stage) * config.tensor_model_parallel_size,
    )
    return without_frozen(
        costs,
        [size.trained_matrices for size in per_stage],
        reached=per_stage[0].reached,
        head=per_stage[-1].head_is_trained,
    )


def estimated_costs(
    settings: Any, layers: Sequence[int], sequence: int, micro_batch: int, vocabulary: int
) -> Costs:
    """Costs from the dimensions that ``settings`` tells of (`dimensions_of`)."""
    return estimate(dimensions_of(settings, layers, sequence, micro_batch, vocabulary), rates())


def dimensions_of(
    settings: Any, layers: Sequence[int], sequence: int, micro_batch: int, vocabulary: int
) -> ModelDimensions:
    """The model that ``settings`` tells of.

    Args:
        settings: Megatron's parsed arguments or a TransformerConfig; they share these names.
        layers: transformer layers of each stage.
        sequence: tokens of a sample on this rank, micro_batch: samples of a microbatch.
        vocabulary: rows of the output layer, on all tensor-parallel ranks together.
    """
    heads = settings.num_attention_heads
    head_width = settings.kv_channels or settings.hidden_size // heads
    # Without this flag, which a TransformerConfig has not, the arguments say 1 group and mean none.
    grouped = getattr(settings, "group_query_attention", True)
    gated = getattr(settings, "gated_linear_unit", False) or getattr(settings, "swiglu", False)
    return ModelDimensions(
        layers=tuple(layers),
        hidden=settings.hidden_size,
        ffn_hidden=settings.ffn_hidden_size or 4 * settings.hidden_size,
        query_width=heads * head_width,
        key_value_width=(settings.num_query_groups if grouped else heads) * head_width,
        gated=gated,
        heads=heads,
        sequence=sequence,
        micro_batch=micro_batch,
        vocabulary=vocabulary,
        tensor_parallel=settings.tensor_model_parallel_size,
        element_bytes=2 if settings.bf16 or settings.fp16 else 4,
        recompute=settings.recompute_granularity == "full",
        recompute_modules=frozenset(
            getattr(settings, "recompute_modules", None) or ["core_attn"]
            if settings.recompute_granularity == "selective"
            else []
        ),
        fused_attention=getattr(settings, "transformer_impl", "") == "transformer_engine",
        sequence_parallel=settings.sequence_parallel,
        depths=prediction_depths(settings),
    )


def rates() -> Rates:
    """What a rank on this machine reaches, roughly."""
    return GPU if torch.cuda.is_available() else CPU
