"""Recurrent parts of hybrid models in the place of attention: gated delta nets, and Mamba.

The operation counts of recurrences are Megatron's (its num_floating_point_operations).
"""

from __future__ import annotations

from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.model import Model
from megatron_ext.cost_model.operations.operation import (
    Operation,
    Part,
    attention_operation,
    linear,
    norm_and_residual,
    passing_over,
    tensor_parallel_part,
)

_MAMBA_KERNEL = 4  # width of Mamba's convolution in Megatron, which no argument changes


def delta_net(model: Model, execution: Execution) -> Part:
    """Return the operations of a gated delta net, a linear attention, on a microbatch.

    Each head of values has a state of keys by values.
    """
    ranks, tokens = execution.tensor_parallel, execution.tokens
    heads = model.linear_num_value_heads / ranks
    keys = model.linear_num_key_heads * model.linear_key_head_dim / ranks
    values = heads * model.linear_value_head_dim
    projected = 2 * keys + 2 * values + 2 * heads
    convolved = tokens * (2 * keys + values)
    size = convolved * execution.element_bytes
    operations = [
        *norm_and_residual(model.hidden_size, execution),
        *linear("projections", tokens, model.hidden_size, projected, execution, is_column=True),
        _convolution(convolved, model.linear_conv_kernel_dim, execution),
        attention_operation(
            "delta rule", 8 * tokens * values * model.linear_key_head_dim, (size, 2 * size)
        ),
        passing_over("gated norm", tokens * values, (3, 5), execution),
        *linear("projection", tokens, values, model.hidden_size, execution, is_row=True),
    ]
    return tensor_parallel_part(operations, 2 * model.hidden_size, execution)


def mamba(model: Model, execution: Execution) -> Part:
    """Return the operations of a Mamba (state space) layer on a microbatch."""
    ranks, tokens = execution.tensor_parallel, execution.tokens
    heads = model.mamba_num_heads / ranks
    width = heads * model.mamba_head_dim
    states = model.mamba_num_groups * model.mamba_state_dim / ranks
    convolved = tokens * (width + 2 * states)
    size = convolved * execution.element_bytes
    operations = [
        *norm_and_residual(model.hidden_size, execution),
        *linear(
            "projections",
            tokens,
            model.hidden_size,
            2 * width + 2 * states + heads,
            execution,
            is_column=True,
        ),
        _convolution(convolved, _MAMBA_KERNEL, execution),
        attention_operation("scan", 7 * tokens * width * model.mamba_state_dim, (size, 2 * size)),
        passing_over("gated norm", tokens * width, (3, 5), execution),
        *linear("projection", tokens, width, model.hidden_size, execution, is_row=True),
    ]
    return tensor_parallel_part(operations, 2 * model.hidden_size, execution)


def _convolution(elements: float, kernel: int, execution: Execution) -> Operation:
    return passing_over("convolution", elements, (2, 3), execution, flops=2 * elements * kernel)
