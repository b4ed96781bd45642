"""Operations of a pipeline's ends: the embedding, the output layer, the loss, and the projection
that multi-token prediction has before its layers."""

from __future__ import annotations

from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.model import Model
from megatron_ext.cost_model.operations.operation import (
    Engine,
    Exchange,
    Group,
    Operation,
    Part,
    Passes,
    elementwise,
    linear,
    passing_over,
)

# Bytes of a logit that the loss reads and writes in F and in I: fused, where the gradient is made
# in place; or step by step, in fp32.
_FUSED_LOSS = (4.0, 4.0)
_LOSS = (22.0, 14.0)
# Of an element of the embedding's gradient: cleared, and added to the one in fp32.
_TABLE_GRADIENT = 12.0


def embedding(model: Model, execution: Execution) -> Operation:
    """Return the embedding: the look-up is F, the gradient of its whole table is W, whichever rows
    were looked up."""
    size = execution.tokens * model.hidden_size * execution.element_bytes
    rows = model.vocabulary / execution.tensor_parallel
    moved = Passes(2 * size, 0.0, rows * model.hidden_size * _TABLE_GRADIENT)
    return Operation("embedding", Engine.MEMORY, moved=moved)


def output_layer(model: Model, execution: Execution) -> Part:
    """Return one run of the output layer with the loss. Its input is gathered, or the gradient of
    its input summed."""
    ranks, tokens = execution.tensor_parallel, execution.tokens
    rows = model.vocabulary / ranks
    forward, backward = _FUSED_LOSS if execution.loss_fusion else _LOSS
    logits = tokens * rows
    operations = (
        *linear("logits", tokens, model.hidden_size, rows, execution, engine=Engine.MATRIX),
        elementwise("loss", logits, forward, logits * backward),
    )
    if ranks == 1 or not model.vocabulary:
        return Part(operations)
    moved = tokens * model.hidden_size * execution.element_bytes
    passes = Passes(moved, moved) if execution.sequence_parallel else Passes(0.0, 2 * moved)
    return Part(operations, (Exchange(Group.TENSOR, ranks, 1, passes),))


def projection_of_depth(model: Model, execution: Execution) -> Part:
    """Return the part of a depth of multi-token prediction before its layer: two norms, and a
    matrix from two widths to one."""
    hidden, ranks = model.hidden_size, execution.tensor_parallel
    elements = execution.split_tokens * hidden
    operations = (
        passing_over("norms", 3 * elements, (2, 3), execution),
        *linear("projection", execution.tokens, 2 * hidden, hidden / ranks, execution),
    )
    if ranks == 1:
        return Part(operations)
    moved = 3 * execution.tokens * hidden * execution.element_bytes  # what enters, and what leaves
    return Part(operations, (Exchange(Group.TENSOR, ranks, 1, Passes(moved, moved)),))
