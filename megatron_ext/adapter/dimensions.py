"""Estimated costs, from Megatron's arguments or transformer config."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_ext.adapter.layers import prediction_depths
from megatron_ext.schedule.costs import Costs
from megatron_ext.schedule.model.estimate import CPU, GPU, ModelDimensions, Rates, estimate


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
