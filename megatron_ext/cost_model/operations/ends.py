"""Operations of a pipeline's first and last stage.

The ends of a model have parts that no other stage has: the embedding, the output layer with the
loss, and the projection before the layers of multi-token prediction. They make these stages slower
than others.
"""

from __future__ import annotations

from megatron_ext.cost_model.execution import Execution, Framework
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

# Bytes that the loss reads and writes for each logit, in F and in I. The fused loss computes the
# gradient in place; the unfused loss works in several steps, in fp32.
_FUSED_LOSS = (4.0, 4.0)
_LOSS = (22.0, 14.0)
# Bytes per logit of the loss in Scaling (transformer/model/losses/cross_entropy.py). F casts to
# fp32 (6 bytes), computes the logarithm of the softmax, with three reads and one write (16), and
# finds the best token (4). I makes an empty gradient (4), runs the logarithm's backward pass, with
# three reads and a write (16), and casts (6). Reads and writes are those of cunn_SoftMaxForward and
# cunn_SoftMaxBackward in PyTorch's ATen/native/cuda/SoftMax.cu.
_PYTORCH_LOSS = (26.0, 26.0)
# Bytes for each gathered logit: one copy from NCCL's buffer into tensors, and one from the tensors
# into one tensor.
_GATHERED_BYTES = 8.0
# Bytes for each element of the embedding's gradient, which is set to zero and then added to the
# fp32 gradient.
_EMBEDDING_GRADIENT_BYTES = 12.0


def embedding(model: Model, execution: Execution) -> Operation:
    """Return the operation of the embedding: F looks tokens up, W computes the table's gradient.

    The gradient is that of the whole table, even of rows that were not looked up.
    """
    size = execution.tokens * model.hidden_size * execution.element_bytes
    rows = model.vocabulary / execution.tensor_parallel
    moved = Passes(2 * size, 0.0, rows * model.hidden_size * _EMBEDDING_GRADIENT_BYTES)
    return Operation("embedding", Engine.MEMORY, moved=moved)


def output_layer(model: Model, execution: Execution) -> Part:
    """Return the operations and exchanges of one run of the output layer with the loss.

    With tensor parallelism, ranks gather its input (sequence parallelism) or sum the gradient of
    its input, and in plain PyTorch gather its output.
    """
    ranks, tokens = execution.tensor_parallel, execution.tokens
    rows = model.vocabulary / ranks
    is_pytorch = execution.framework is Framework.PYTORCH
    forward, backward = _FUSED_LOSS if execution.loss_fusion else _LOSS
    logits = tokens * model.vocabulary / execution.ranks_of_loss
    if is_pytorch:
        forward, backward = _PYTORCH_LOSS
        forward += _GATHERED_BYTES * (ranks > 1)
    operations = (
        *linear("logits", tokens, model.hidden_size, rows, execution, engine=Engine.MATRIX),
        elementwise("loss", logits, forward, logits * backward),
    )
    if ranks == 1 or not model.vocabulary:
        return Part(operations)
    moved = tokens * model.hidden_size * execution.element_bytes
    passes = Passes(moved, moved) if execution.sequence_parallel else Passes(0.0, 2 * moved)
    exchanges = [Exchange(Group.TENSOR, ranks, 1, passes)]
    if is_pytorch:
        gathered = Passes(logits * execution.element_bytes)
        exchanges.append(Exchange(Group.TENSOR, ranks, 1, gathered))
    return Part(operations, tuple(exchanges))


def mtp_projection(model: Model, execution: Execution) -> Part:
    """Return the operations of one depth of multi-token prediction before its transformer layer.

    They are two norms, and a projection from twice the hidden size to the hidden size.
    """
    hidden_size, ranks = model.hidden_size, execution.tensor_parallel
    elements = execution.split_tokens * hidden_size
    operations = (
        passing_over("norms", 3 * elements, (2, 3), execution),
        *linear("projection", execution.tokens, 2 * hidden_size, hidden_size / ranks, execution),
    )
    if ranks == 1:
        return Part(operations)
    # The projection's exchange moves two inputs and one output.
    moved = 3 * execution.tokens * hidden_size * execution.element_bytes
    return Part(operations, (Exchange(Group.TENSOR, ranks, 1, Passes(moved, moved)),))
