"""Costs before any are measured: estimated from Megatron's arguments or transformer config, or
equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from megatron_ext.adapter.layers import layers_of_stages
from megatron_ext.adapter.model_parts import ChunkSize
from megatron_ext.adapter.transformer_engine.captured import captured_parts
from megatron_ext.logger import logger
from megatron_ext.schedule.costs import Costs, uniform
from megatron_ext.schedule.model.description import describe, execution_of
from megatron_ext.schedule.model.estimate import estimate
from megatron_ext.schedule.model.execution import Execution, Precision
from megatron_ext.schedule.model.frozen import without_frozen
from megatron_ext.schedule.model.gpus import assumed_rates, gpu_named
from megatron_ext.schedule.model.links import with_links
from megatron_ext.schedule.model.measured.file import load_measured
from megatron_ext.schedule.model.measured.layer_costs import Basis
from megatron_ext.schedule.model.model import SYMBOLS, Model, Stage, stages_of
from megatron_ext.schedule.model.rates import CPU, Rates
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
    measured: Rates | None = None,
) -> Costs:
    """The costs of a microbatch, of ``sequence`` tokens of ``micro_batch`` samples.

    A model without Megatron's layers, or with some whose work is not known, has equal costs: F, I
    and W of every stage take as long.

    Args:
        is_told: whether one line says so, and what of a stage is not in an estimate.
        measured: rates to estimate with, in place of this machine's.
    """
    basis = _basis(config, per_stage, sequence, micro_batch, measured)
    if basis is None:
        if is_told:
            logger.info(
                f"the costs of {per_stage[0].model} cannot be estimated, and are taken as equal "
                f"for every stage; {_REMEDY}"
            )
        return equal_costs(placement)
    shares = _beside(per_stage)
    if shares and is_told:
        beside = ", ".join(f"{share:.0%} of stage {stage}" for stage, share in shares.items())
        logger.info(
            f"the costs of {per_stage[0].model} are estimated from its language model, without "
            f"the parameters beside it ({beside}); {_REMEDY}"
        )
    return without_frozen(
        estimate(basis.model, basis.stages, basis.execution, basis.rates),
        [size.trained_matrices for size in per_stage],
        reached=per_stage[0].reached,
        head=per_stage[-1].head_is_trained,
    )


def basis_of_model(
    config: Any, per_stage: Sequence[ChunkSize], sequence: int, micro_batch: int
) -> Basis | None:
    """What `costs_of_model` estimates by, of a model that has nothing beside its layers, and all of
    them trained; None of others: stages do not tell what each layer takes there."""
    is_trained = all(
        size.trained_matrices == size.reached == 1 and size.head_is_trained for size in per_stage
    )
    if not is_trained or _beside(per_stage) or per_stage[-1].head_is_looked_up:
        return None
    return _basis(config, per_stage, sequence, micro_batch, None)


def _basis(
    config: Any,
    per_stage: Sequence[ChunkSize],
    sequence: int,
    micro_batch: int,
    measured: Rates | None,
) -> Basis | None:
    if not isinstance(config, TransformerConfig):
        return None
    rows = sum(size.rows for size in per_stage) * config.tensor_model_parallel_size
    model = describe(config, rows)
    stages = _stages_built(model, per_stage)
    if stages is None:
        return None
    of_stages = [size.unkept for size in per_stage if size.layers]
    unkept = frozenset.intersection(*of_stages) if of_stages else frozenset[str]()
    run = replace(execution(config, sequence, micro_batch), unkept=unkept)
    return Basis(model, stages, run, measured or rates(run.precision))


def _beside(per_stage: Sequence[ChunkSize]) -> dict[int, float]:
    """What share of each stage's parameters is not its language model's, where it is any."""
    return {
        stage: size.beside / size.parameters
        for stage, size in enumerate(per_stage)
        if size.beside > _FEW * size.parameters
    }


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


def costs_of_arguments(args: Any, placement: Placement, measured: Rates | None = None) -> Costs:
    """The costs that Megatron's parsed ``args`` tell of; equal ones where layers are not known.

    Args:
        measured: rates to estimate with, in place of this machine's.

    Raises:
        ValueError: the layers do not divide over the stages.
    """
    model = describe(args)
    if not _are_known(model.layers):
        return equal_costs(placement)
    stages = stages_of(model, layers_of_stages(args, placement))
    return costs_of_stages(args, model, stages, placement, measured)


def costs_of_stages(
    args: Any,
    model: Model,
    stages: Sequence[Stage],
    placement: Placement,
    measured: Rates | None = None,
) -> Costs:
    """The costs of ``stages`` of ``model``, which ``args`` tell of. Arguments as of
    `costs_of_arguments`."""
    run = execution(args, args.seq_length, args.micro_batch_size)
    reached = measured or rates(run.precision)
    costs = estimate(model, stages, run, reached)
    return with_links(costs, placement, reached, args.world_size, _stride(args))


def _stride(args: Any) -> int:
    """How many ranks lie from one pipeline rank to the next."""
    inner: int = args.world_size // args.pipeline_model_parallel_size
    if args.use_tp_pp_dp_mapping:
        inner = args.tensor_model_parallel_size * args.context_parallel_size
    return inner


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


def _stages_built(model: Model, per_stage: Sequence[ChunkSize]) -> tuple[Stage, ...] | None:
    """What is on each stage of the model that was built; None where that is not known."""
    counts = [size.layers for size in per_stage if size.layers is not None]
    if len(counts) < len(per_stage) or not any(counts):
        return None
    layers = model.layers
    if any(size.symbols for size in per_stage):  # which its TransformerConfig does not know
        layers = tuple("".join(size.symbols for size in per_stage))
    elif sum(counts) != len(layers) and len(set(layers)) == 1:  # another part of it was built
        layers = layers[:1] * sum(counts)
    if sum(counts) != len(layers) or not _are_known(layers):
        return None
    return stages_of(replace(model, layers=layers), counts)


def _are_known(layers: Sequence[str]) -> bool:
    return set("".join(layers)) <= SYMBOLS


def rates(precision: Precision) -> Rates:
    """What a rank on this machine reaches, roughly."""
    if not torch.cuda.is_available():
        return CPU
    gpu = gpu_named(torch.cuda.get_device_name())
    return gpu.rates(precision) if gpu and gpu.can(precision) else assumed_rates(precision)
