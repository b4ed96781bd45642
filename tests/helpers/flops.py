"""Floating-point operations of a stage, as Megatron counts those of a model."""

from __future__ import annotations

from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.model import Model, Stage
from megatron_ext.cost_model.operations.ends import mtp_projection, output_layer
from megatron_ext.cost_model.operations.parts import part_of


def flops_of(model: Model, stage: Stage, execution: Execution) -> float:
    """Return the floating-point operations of a microbatch in F, I and W, without recomputation."""
    ends = [output_layer(model, execution)] * stage.output_runs
    depths = [mtp_projection(model, execution)] * stage.depths
    layers = "".join((*stage.layers, *[model.mtp_layer] * stage.depths))
    parts = [part_of(symbol, model, execution) for symbol in layers]
    counted = [o.flops for part in (*ends, *depths, *parts) for o in part.operations]
    return sum(sum(vars(flops).values()) for flops in counted)
