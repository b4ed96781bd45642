"""The sources of estimates: how Megatron's settings run a microbatch, and the rates of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_ext.adapter.transformer_engine.captured import captured_parts
from megatron_ext.schedule.costs import Costs, uniform
from megatron_ext.schedule.model.description import execution_of
from megatron_ext.schedule.model.execution import Execution, Precision
from megatron_ext.schedule.model.gpus import assumed_rates, gpu_named
from megatron_ext.schedule.model.measured.file import load_measured
from megatron_ext.schedule.model.rates import CPU, Rates
from megatron_ext.schedule.placement import Placement


def rates_in_file(path: Path, layers: Sequence[int | None]) -> Rates | None:
    """The rates to estimate stages of so many ``layers`` with, by what the costs file ``path`` has
    per layer type. None: it has nothing of that, or is of such stages: it tells what each takes.

    Raises:
        ValueError: it is no costs file.
    """
    measured = load_measured(path)
    if measured is None or list(measured.stages) == list(layers):
        return None
    return measured.rates


def equal_costs(placement: Placement) -> Costs:
    """Those of a model of which nothing is known."""
    return uniform(placement, 1.0, 1.0, 1.0, origin="taken as equal")


def execution(settings: Any, sequence: int, micro_batch: int) -> Execution:
    """How ``settings``, Megatron's arguments or a TransformerConfig, have a microbatch run.

    Args:
        sequence: tokens of a sample, on all context-parallel ranks together.
    """
    captured = captured_parts(settings)
    if getattr(settings, "moe_shared_expert_overlap", False):
        captured -= {"moe_router"}
    world_size = getattr(settings, "world_size", None) or 0  # a TransformerConfig has none
    return execution_of(settings, sequence, micro_batch, captured, pipeline_span=world_size)


def rates(precision: Precision) -> Rates:
    """What a rank on this machine reaches, roughly."""
    if not torch.cuda.is_available():
        return CPU
    gpu = gpu_named(torch.cuda.get_device_name())
    return gpu.rates(precision) if gpu and gpu.can(precision) else assumed_rates(precision)
