"""Bytes that a pass takes only while it runs, in addition to those that it stores for later
passes."""

from __future__ import annotations

from megatron_ext.cost_model.execution import Execution, Framework
from megatron_ext.cost_model.model import Model, Stage


def temporary_bytes(model: Model, stage: Stage, execution: Execution) -> float:
    """Return the bytes of the largest temporary tensors of a pass of ``stage`` on one rank: those
    of a layer's backward pass or those of the loss, whichever are more."""
    layers = max((_of_layer(layer, model, execution) for layer in stage.layers), default=0.0)
    return max(layers, _of_loss(model, execution) if stage.head else 0.0)


def _of_layer(layer: str, model: Model, execution: Execution) -> float:
    """Return the bytes of the gradients of an MLP's activation, of its input and output, and of the
    MLP's input."""
    gates = 2 if model.gated_linear_unit else 1
    width, divides = model.ffn_hidden_size, execution.tensor_parallel
    tokens = float(execution.tokens)
    if "E" in layer:
        width, divides = model.moe_ffn_hidden_size, execution.expert_tensor_parallel
        tokens = execution.split_tokens * model.moe_router_topk * divides
    inside = tokens * (gates + 1) * width / divides
    return (inside + execution.tokens * model.hidden_size) * execution.element_bytes


def _of_loss(model: Model, execution: Execution) -> float:
    """Return the bytes of the logits in 16 bits, which exist in addition to the stored logits in
    fp32. An unfused loss also needs their gradient in fp32 step by step.

    Fused losses (``--cross-entropy-loss-fusion``) work in place.
    """
    logits = execution.tokens * model.vocabulary / execution.tensor_parallel
    if execution.framework is Framework.PYTORCH:
        return logits * (execution.element_bytes + 4)
    return 0.0 if execution.loss_fusion else logits * execution.element_bytes
