"""Operations of the parts of a stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.model import Model, Stage
from megatron_ext.cost_model.operations.attention import attention, latent_attention
from megatron_ext.cost_model.operations.ends import (
    embedding,
    mtp_projection,
    output_layer,
)
from megatron_ext.cost_model.operations.mlp import experts, mlp
from megatron_ext.cost_model.operations.operation import Part, Passes
from megatron_ext.cost_model.operations.recurrent import delta_net, mamba

_CAPTURED = {"M": "mamba", "-": "mlp", "E": "moe"}  # what Megatron calls them in CUDA graphs


@lru_cache(maxsize=1024)
def part_of(symbol: str, model: Model, execution: Execution) -> Part:
    """Return the part that ``symbol`` stands for."""
    match symbol:
        case "*" | "w" if not model.multi_latent_attention:
            part = attention(model, execution, is_sliding=symbol == "w")
        case "*" | "w" | "+":
            part = latent_attention(model, execution, is_sliding=symbol == "w")
        case "G":
            part = delta_net(model, execution)
        case "M":
            part = mamba(model, execution)
        case "-":
            part = mlp(model, execution)
        case _:
            assert symbol == "E", symbol
            part = experts(model, execution)
    if _CAPTURED.get(symbol, "attn") in execution.captured:
        return part.with_whole_backward()
    if symbol == "E" and "moe_router" in execution.captured:  # and the shared expert with it
        kept = [
            replace(o, is_whole=o.is_whole or "shared_experts" in o.modules)
            for o in part.operations
        ]
        return replace(part, operations=tuple(kept))
    return part


def flops_of(model: Model, stage: Stage, execution: Execution) -> Passes:
    """Return the floating-point operations of a microbatch as a model's are counted: without
    recomputation."""
    counted = [o.flops for part in _parts_of(model, stage, execution) for o in part.operations]
    return Passes(
        sum(flops.forward for flops in counted),
        sum(flops.input_gradient for flops in counted),
        sum(flops.weight_gradient for flops in counted),
    )


def _parts_of(model: Model, stage: Stage, execution: Execution) -> Iterator[Part]:
    if stage.embedding:
        yield Part((embedding(model, execution),))
    depths = [mtp_projection(model, execution)] * stage.depths
    yield from depths
    for layer in (*stage.layers, *[model.mtp_layer] * stage.depths):
        for symbol in layer:
            yield part_of(symbol, model, execution)
    yield from [output_layer(model, execution)] * stage.output_runs
