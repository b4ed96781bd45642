"""Costs before any are measured: estimated from Megatron's arguments or transformer config, or
equal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from megatron_ext.adapter.layers import experts_of, prediction_depths, symbols_of_layers
from megatron_ext.adapter.model_parts import ChunkSize
from megatron_ext.adapter.transformer_engine.captured import captured_parts
from megatron_ext.logger import logger
from megatron_ext.schedule.costs import Costs, uniform
from megatron_ext.schedule.model import hybrid
from megatron_ext.schedule.model.estimate import (
    CPU,
    GPU,
    LayerWork,
    ModelDimensions,
    Rates,
    attention,
    estimate,
    mlp,
)
from megatron_ext.schedule.model.frozen import without_frozen
from megatron_ext.schedule.placement import Placement

_REMEDY = "--pipeline-costs profile measures them (of install: costs='profile')"
_SYMBOLS = "*-EGM"  # of layers whose costs are known
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

    A model without Megatron's layers, or with some whose work is not known, has equal costs: F, I
    and W of every stage take as long. ``is_told``: one line says so, and what of a stage is not in
    an estimate.
    """
    layers = [size.layers for size in per_stage if size.layers is not None]
    is_known = len(layers) == len(per_stage) and any(layers)
    symbols = [size.symbols for size in per_stage]
    if not (is_known and are_known(symbols) and isinstance(config, TransformerConfig)):
        if is_told:
            logger.info(
                f"the costs of {per_stage[0].model} cannot be estimated, and are taken as equal "
                f"for every stage; {_REMEDY}"
            )
        return equal_costs(placement)
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
        symbols=symbols if any(symbols) else None,
    )
    return without_frozen(
        costs,
        [size.trained_matrices for size in per_stage],
        reached=per_stage[0].reached,
        head=per_stage[-1].head_is_trained,
    )


def equal_costs(placement: Placement) -> Costs:
    """Those of a model of which nothing is known."""
    return uniform(placement, 1.0, 1.0, 1.0, origin="taken as equal")


def are_known(symbols: Iterable[str]) -> bool:
    """Whether the costs of layers with such ``symbols`` can be estimated."""
    return set().union(*symbols) <= set(_SYMBOLS)


def estimated_costs(
    settings: Any,
    layers: Sequence[int],
    sequence: int,
    micro_batch: int,
    vocabulary: int,
    symbols: Sequence[str] | None = None,
) -> Costs:
    """Costs from the dimensions that ``settings`` tells of (`dimensions_of`)."""
    model = dimensions_of(settings, layers, sequence, micro_batch, vocabulary, symbols)
    return estimate(model, rates())


def dimensions_of(
    settings: Any,
    layers: Sequence[int],
    sequence: int,
    micro_batch: int,
    vocabulary: int,
    symbols: Sequence[str] | None = None,
) -> ModelDimensions:
    """The model that ``settings`` tells of.

    Args:
        settings: Megatron's parsed arguments or a TransformerConfig; they share these names.
        layers: transformer layers of each stage.
        sequence: tokens of a sample on this rank, micro_batch: samples of a microbatch.
        vocabulary: rows of the output layer, on all tensor-parallel ranks together.
        symbols: of each stage's layers, as a hybrid model's pattern has them. None: those that
            ``settings`` tells of.
    """
    if symbols is None and (of_layers := symbols_of_layers(settings)):
        ends = [0, *accumulate(layers)]
        symbols = ["".join(of_layers[start:end]) for start, end in pairwise(ends)]
    heads = settings.num_attention_heads
    head_width = settings.kv_channels or settings.hidden_size // heads
    # Without this flag, which a TransformerConfig has not, the arguments say 1 group and mean none.
    grouped = getattr(settings, "group_query_attention", True)
    gated = getattr(settings, "gated_linear_unit", False) or getattr(settings, "swiglu", False)
    model = ModelDimensions(
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
        context_parallel=settings.context_parallel_size,
        depths=prediction_depths(settings),
        captured=_captured_work(settings, symbols is not None),
        gathers_again=frozenset(
            ["inputs"]
            if getattr(settings, "transformer_impl", "") == "local"
            else ["inputs", "gradients"]
        ),
        userbuffers=_whole_in_userbuffers(settings),
    )
    if symbols is None:
        return model
    of_symbol = {symbol: _work_of(symbol, model, settings) for symbol in set().union(*symbols)}
    work = [sum((of_symbol[symbol] for symbol in own), LayerWork()) for own in symbols]
    return replace(model, work=tuple(work))


def _captured_work(settings: Any, knows_experts: bool) -> frozenset[str]:
    """What is captured, by the names under which work is counted: where layers are counted as all
    alike, experts are counted as an MLP."""
    parts = captured_parts(settings)
    if getattr(settings, "moe_shared_expert_overlap", False):
        parts -= {"moe_router"}
    if knows_experts or not experts_of(settings):
        return parts
    return parts - {"mlp"} | ({"mlp"} if "moe" in parts else set())


def _whole_in_userbuffers(settings: Any) -> frozenset[str]:
    """Which matrices of a pair keep whole backwards, as their operands are in Userbuffers."""
    if not getattr(settings, "tp_comm_overlap", False):
        return frozenset()
    of_columns = not getattr(settings, "tp_comm_overlap_rs_dgrad", False)
    return frozenset(["row", "column"] if of_columns else ["row"])


def _work_of(symbol: str, model: ModelDimensions, settings: Any) -> LayerWork:
    match symbol:
        case "*":
            return attention(model)
        case "-":
            return mlp(model)
        case "E":
            return hybrid.experts(
                model,
                routed=settings.moe_router_topk,
                width=settings.moe_ffn_hidden_size or model.ffn_hidden,
                shared_width=settings.moe_shared_expert_intermediate_size or 0,
                latent=getattr(settings, "moe_latent_size", None) or 0,
            )
        case "G":
            heads = settings.linear_num_value_heads
            return hybrid.delta_net(
                model,
                keys=settings.linear_num_key_heads * settings.linear_key_head_dim,
                values=heads * settings.linear_value_head_dim,
                heads=heads,
            )
    assert symbol == "M"
    heads = settings.mamba_num_heads or 2 * model.hidden // settings.mamba_head_dim
    return hybrid.mamba(
        model,
        width=heads * settings.mamba_head_dim,
        state=settings.mamba_state_dim,
        groups=settings.mamba_num_groups,
        heads=heads,
    )


def rates() -> Rates:
    """What a rank on this machine reaches, roughly."""
    return GPU if torch.cuda.is_available() else CPU
