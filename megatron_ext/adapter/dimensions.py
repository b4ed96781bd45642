"""Inputs of cost estimates: how Megatron's settings run a microbatch, and the speed of a rank.

The cost model knows neither Megatron's arguments nor this machine's GPU. Here both are translated
for it: settings into an `Execution`, the GPU or a costs file into `Rates`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from megatron_ext.adapter.transformer_engine.captured import captured_parts
from megatron_ext.cost_model.description import OVERLAP, execution_of
from megatron_ext.cost_model.execution import Execution, Precision
from megatron_ext.cost_model.gpus import assumed_rates, gpu_named
from megatron_ext.cost_model.measured.file import load_measured
from megatron_ext.cost_model.messages.paired_layers import hidden_share
from megatron_ext.cost_model.rates import CPU, Rates
from megatron_ext.schedule.costs import Costs, uniform
from megatron_ext.schedule.placement import Placement


def rates_in_file(path: Path, layers: Sequence[int | None]) -> Rates | None:
    """Return the rates per layer type in the costs file ``path``, to estimate the costs of stages.

    None is returned if the file has no rates per layer type, or directly has the costs of stages
    with as many ``layers``.

    Raises:
        ValueError: the file is not a costs file, or was measured on another GPU than this one.
    """
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    measured = load_measured(path, here)
    if measured is None or list(measured.stages) == list(layers):
        return None
    return measured.rates


def equal_costs(placement: Placement) -> Costs:
    """Return costs that are equal for all passes of all stages, for a model of unknown work.

    The passes are those of forward (F), input gradient (I) and weight gradient (W).
    """
    return uniform(placement, 1.0, 1.0, 1.0, origin="taken as equal")


def execution(settings: Any, sequence: int, micro_batch: int) -> Execution:
    """Return how a microbatch runs under ``settings``, Megatron's arguments or a TransformerConfig.

    Args:
        sequence: tokens of a sample, on all context-parallel ranks together.
    """
    captured = captured_parts(settings)
    if getattr(settings, "moe_shared_expert_overlap", False):
        captured -= {"moe_router"}
    world_size = getattr(settings, "world_size", None) or 0  # a TransformerConfig has no world size
    is_one = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    names = "tensor_model_parallel_size", "context_parallel_size"
    is_required = any((getattr(settings, name, None) or 1) > 1 for name in names)
    return execution_of(
        settings,
        sequence,
        micro_batch,
        captured,
        pipeline_span=world_size,
        has_one_queue=is_one or is_required,
    )


def hidden_in_pairs(settings: Any, measured: Rates | None = None) -> str:
    """Return, in words, the assumed share of experts' all-to-all time that overlapping hides.

    The share depends on ``settings`` and on the GPU: that of this machine, or the ``measured`` one.
    """
    run = replace(execution(settings, sequence=1, micro_batch=1), overlap=OVERLAP)
    share = Fraction(hidden_share(run, measured or rates(run.precision))).limit_denominator(10)
    return {2: "half", 3: "a third", 6: "a sixth"}[share.denominator]


def rates(precision: Precision) -> Rates:
    """Return approximate rates (compute, memory) of this machine's GPU or CPU at ``precision``."""
    if not torch.cuda.is_available():
        return CPU
    gpu = gpu_named(torch.cuda.get_device_name())
    return gpu.rates(precision) if gpu and gpu.can(precision) else assumed_rates(precision)
