"""Operations of attention: grouped queries, latent keys and values, gates, sliding windows.

Attention is the part of a layer that grows with the square of the sequence, and whose cost depends
most on the kernel: a fused one never writes the matrix of scores, and recomputes it in the backward
pass.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_ext.cost_model.execution import Execution, Framework
from megatron_ext.cost_model.model import Model
from megatron_ext.cost_model.operations.operation import (
    Exchange,
    Group,
    Operation,
    Part,
    Passes,
    attention_operation,
    dropout,
    elementwise,
    linear,
    local_bias,
    norm_and_residual,
    passing_over,
    tensor_parallel_part,
)


def attention(model: Model, execution: Execution, *, is_sliding: bool) -> Part:
    """Return the operations of causal attention on a microbatch, with the norm before it."""
    ranks = execution.tensor_parallel
    query, key_value = model.query_width / ranks, model.key_value_width / ranks
    gate = query if model.attention_output_gate else 0
    tokens = execution.tokens
    turned = tokens * (query + key_value)
    operations = [
        *norm_and_residual(model.hidden_size, execution),
        *linear(
            "qkv",
            tokens,
            model.hidden_size,
            query + 2 * key_value + gate,
            execution,
            is_column=True,
        ),
    ]
    if model.is_rotary:
        # Unfused rotary embeddings negate and swap halves, concatenate them, multiply twice, and
        # add.
        times = (10, 10) if execution.framework is Framework.PYTORCH else (2, 2)
        operations.append(passing_over("rotary", turned, times, execution))
    if model.qk_layernorm:
        operations.append(passing_over("norms of q and k", turned, (2, 3), execution))
    operations += _local_kernels(model, execution, query, key_value)
    operations.append(_attention(model, execution, query, query, key_value, key_value, is_sliding))
    operations += _softmax(model, execution)
    operations += _merged_steps(execution, query, query, 2 * key_value)
    if gate:
        operations.append(passing_over("gate", tokens * query, (3, 5), execution))
    operations += linear("projection", tokens, query, model.hidden_size, execution, is_row=True)
    exchanges = _of_samples(execution, query, 2 * key_value)
    return tensor_parallel_part(operations, 2 * model.hidden_size, execution, exchanges)


def latent_attention(model: Model, execution: Execution, *, is_sliding: bool) -> Part:
    """Return the operations of multi-latent attention, which compresses keys, values and queries.

    Each tensor-parallel rank has the first (compressing) matrices whole and applies them to its
    share of the sequence; their outputs are gathered.
    """
    hidden_size, rank, rotary = model.hidden_size, model.q_lora_rank, model.qk_pos_emb_head_dim
    heads = model.num_attention_heads / execution.tensor_parallel
    tokens, split = execution.tokens, execution.split_tokens
    keys, values = heads * (model.qk_head_dim + rotary), heads * model.v_head_dim
    modules = ["mla_up_proj"]
    operations = norm_and_residual(hidden_size, execution, is_alone=True)
    if rank:
        operations += linear("q down", split, hidden_size, rank, execution)
        operations.append(passing_over("norm of q", split * rank, (2, 3), execution, modules))
        operations += linear("q up", tokens, rank, keys, execution, modules=modules)
    else:
        operations += linear("q", tokens, hidden_size, keys, execution)
    latent = model.kv_lora_rank
    operations += linear("kv down", split, hidden_size, latent + rotary, execution)
    operations.append(passing_over("norm of kv", split * latent, (2, 3), execution, modules))
    made = heads * (model.qk_head_dim + model.v_head_dim)
    operations += linear("kv up", tokens, latent, made, execution, modules=modules)
    operations.append(passing_over("rotary", tokens * 2 * keys, (2, 2), execution, modules))
    operations.append(_attention(model, execution, keys, values, keys, values, is_sliding))
    operations += _softmax(model, execution)
    operations += _merged_steps(execution, keys, values, keys + values)
    operations += linear("projection", tokens, values, hidden_size, execution, is_row=True)
    exchanges = _of_samples(execution, keys, keys + values)
    return tensor_parallel_part(
        operations, (rank or hidden_size) + latent + rotary + hidden_size, execution, exchanges
    )


def attended_tokens(sequence: int, window: int) -> float:
    """Return the mean number of tokens that a token of a sequence attends to.

    These are the token itself and earlier ones, at most ``window`` of the latter.
    """
    most = min(window + 1, sequence) if window else sequence
    return most - most**2 / (2 * sequence)


def squared_share(sequence: int, window: int) -> float:
    """Return the share of attention that grows with the square of the sequence length.

    The rest is proportional to the length. The share is 1 without a ``window``, and nearly 0 with a
    short one.

    In a window, the number of attended tokens grows until the window is full and is constant from
    there. The share a is chosen so that (1 - a) x + a x^2 equals on average the true cost of the
    first x of the sequence. The error is at most 5 % of attention.
    """
    most = min(window + 1, sequence) if window else sequence
    full = most / sequence  # share of the sequence after which the attention window is full
    on_average = (full**2 / 3 + (1 - full)) / (2 - full)
    return 3 - 6 * on_average


def _attention(
    model: Model,
    execution: Execution,
    query: float,
    output: float,
    key: float,
    value: float,
    is_sliding: bool,
) -> Operation:
    """Return the operations of attention without its projections.

    The backward pass of fused attention recomputes the scores, which is half of F.
    """
    tokens = execution.tokens
    window = model.window_size if is_sliding else 0
    attended = (
        attended_tokens(execution.sequence, window) if model.is_causal else execution.sequence
    )
    flops = 2 * tokens * attended * (query + output)
    size = tokens * (query + key + value + output) * execution.element_bytes
    recomputed_flops = 2 * tokens * attended * query if execution.has_fused_attention else 0.0
    squared = squared_share(execution.sequence, window)
    matrix = _matrix_bytes(model, execution)
    # Both products of F write or read the matrix of scores, and so do the four products of I.
    moved = (size + 2 * matrix, 2 * size + 4 * matrix)
    return attention_operation(
        "attention",
        flops,
        moved,
        recomputed_flops=recomputed_flops,
        modules=["core_attn"],
        squared=squared,
    )


def _matrix_bytes(model: Model, execution: Execution) -> float:
    """Return the bytes of attention's matrix of scores, which fused attention never writes."""
    if execution.has_fused_attention:
        return 0.0
    heads = model.num_attention_heads / execution.tensor_parallel
    return heads * execution.tokens * execution.sequence * execution.element_bytes


def _softmax(model: Model, execution: Execution) -> list[Operation]:
    """Return the softmax and dropout of unfused attention, which read and write the matrix of
    scores.

    Megatron's local layers (``DotProductAttention``) have a kernel for each.
    """
    matrix = _matrix_bytes(model, execution)
    if not matrix:
        return []
    operations = [elementwise("softmax", 1, 2 * matrix, 3 * matrix, ["core_attn"])]
    if execution.attention_dropout:
        scores = matrix / execution.element_bytes
        operations.append(dropout("attention dropout", scores, execution, ["core_attn"]))
    return [replace(operation, squared=1.0) for operation in operations]


def _local_kernels(
    model: Model, execution: Execution, query: float, key_value: float
) -> list[Operation]:
    """Return the operations around attention that Megatron's local layers run as separate kernels.

    They are biases, the joining of the gradients of queries, keys and values, and a copy of the
    output (core/transformer/attention.py, dot_product_attention.py).
    """
    if not execution.has_local_kernels:
        return []
    joint = execution.tokens * (query + 2 * key_value)
    operations = [
        passing_over("joined gradients", joint, (0, 2), execution),
        passing_over("copy", execution.tokens * query, (2, 0), execution, ["core_attn"]),
    ]
    if model.add_bias_linear:
        of_hidden = execution.split_tokens * model.hidden_size
        operations += [
            local_bias("qkv's bias", joint, execution, is_added=True),
            local_bias("projection's bias", of_hidden, execution, is_added=False),
        ]
    return operations


# Average share of a rank's tokens that a later step of ring attention computes with. Causal
# attention uses all tokens for the keys of earlier ranks, and the second half of them for the keys
# of later ranks.
_MET = 0.75


def _merged_steps(
    execution: Execution, query: float, output: float, key_value: float
) -> list[Operation]:
    """Return the operation that merges the steps of ring attention over context-parallel ranks.

    In a ring, attention is computed once with the keys and values of each rank. Transformer Engine
    copies the first step's output, scaled, and adds each later one to it, and likewise the
    gradients of queries, keys and values (``flash_attn_fwd_out_correction`` and
    ``AttnFuncWithCPAndKVP2P`` in its context_parallel.py). Without a ring there is nothing to
    merge.
    """
    ranks = execution.context_parallel
    if ranks == 1 or "p2p" not in execution.context_exchange:
        return []
    added = 3 * _MET * (ranks - 1)  # reads and writes of each element that ring attention adds
    size = execution.tokens * execution.element_bytes
    backward = size * ((2 + added) * query + added * key_value)
    forward = (2 + added) * execution.element_bytes
    return [
        elementwise("merging", execution.tokens * output, forward, backward, ["core_attn"]),
    ]


def _of_samples(execution: Execution, query: float, key_value: float) -> list[Exchange]:
    """Return the communication of context-parallel ranks for attention.

    They exchange keys and values, in turns or all together, or heads for tokens.
    """
    ranks = execution.context_parallel
    if ranks == 1:
        return []
    size = execution.tokens * execution.element_bytes
    if execution.context_exchange == "a2a":
        moved = size * (2 * query + key_value)
        passes = Passes(moved, moved)
    else:
        moved = size * key_value * ranks
        # The gradients of keys and values go round the ring together with the keys and values.
        passes = Passes(moved, 2 * moved)
    return [
        Exchange(
            Group.CONTEXT,
            ranks,
            execution.tensor_parallel,
            passes,
            frozenset(["core_attn"]),
            is_behind_attention="p2p" in execution.context_exchange,
        )
    ]
