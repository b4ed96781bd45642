"""Bytes that a pass takes only while it runs, in addition to those that it stores for later passes.

A rank that stores as many activations as its limit allows still needs memory for the running pass.
The largest temporary tensors are counted, as they decide whether a rank fits.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from megatron_ext.cost_model.activations import held_by_component
from megatron_ext.cost_model.execution import Execution, Framework
from megatron_ext.cost_model.model import ATTENTION, Model, Stage

_FP32 = 4


@cache
def temporary_bytes(
    model: Model, stage: Stage, execution: Execution, *, loss_share: float | None = None
) -> float:
    """Return the bytes of the largest temporary tensors of a pass of ``stage`` on one rank.

    They are those of a layer's backward pass or those of the loss, whichever are more.

    Args:
        loss_share: share of the vocabulary's logits that the rank has; None: all of them on the
            stage with the output layer, and none elsewhere.
    """
    share = float(stage.output_layer) if loss_share is None else loss_share
    layers = {*stage.layers, *([model.mtp_layer] if stage.depths else [])}
    largest = max((_of_layer(layer, model, execution) for layer in layers), default=0.0)
    return max(largest, share * _of_loss(model, execution))


def _of_layer(layer: str, model: Model, execution: Execution) -> float:
    """Return the bytes of temporary tensors in the backward pass of a layer, in its largest part.

    Activations that are recomputed for it are included. Around each part there are the gradient of
    its output, the whole gradient of its input and, with sequence parallelism, the gathered input
    that its weight gradient needs.
    """
    entering = execution.tokens * model.hidden_size
    gathered = entering if execution.sequence_parallel and execution.tensor_parallel > 1 else 0
    around = execution.split_tokens * model.hidden_size + entering + gathered
    inside = max((_inside(part, model, execution) for part in layer), default=0.0)
    return inside + around * execution.element_bytes + _recomputed(layer, model, execution)


def _inside(part: str, model: Model, execution: Execution) -> float:
    """Return the bytes of the temporary tensors inside a part of a layer, in its backward pass.

    Attention has gradients of its output, of queries, keys and values and of their joint
    projection; kernels sum the queries' in fp32, and FlashAttention-2 gives each query head its own
    gradients of shared keys and values (mha_bwd in csrc/flash_attn/flash_api.cpp). An MLP has
    gradients of its activation's input and output. Experts also have gradients of their inputs
    before and after the exchange.
    """
    size, divides = execution.element_bytes, execution.tensor_parallel
    gates = 2 if model.gated_linear_unit else 1
    is_pytorch = execution.framework is Framework.PYTORCH
    tokens = float(execution.tokens)
    if part in ATTENTION:
        query, keys, values = _attention_widths(model)
        # Elements of the output of attention.
        elements = values if model.multi_latent_attention else query
        elements += 2 * (query + keys + values)
        if is_pytorch and keys < query:
            elements += 2 * query
        if not execution.has_fused_attention and not is_pytorch:
            # Elements of the scores, and of their softmax.
            elements += 2 * model.num_attention_heads * execution.sequence
        return tokens / divides * (elements * size + query * _FP32)
    if part == "E":
        inner = model.moe_latent_size or model.hidden_size
        elements = (gates + 1) * model.moe_ffn_hidden_size + 2 * inner
        return execution.split_tokens * model.moe_router_topk * elements * size
    if part in "GM":
        return tokens / divides * 2 * _recurrent_width(part, model) * size
    of_pass = tokens / divides * (gates + 1) * model.ffn_hidden_size * size
    # Plain PyTorch computes a weight gradient into a separate tensor before it is added.
    if is_pytorch:
        of_pass += model.hidden_size * model.ffn_hidden_size / divides * size
    return of_pass


def _attention_widths(model: Model) -> tuple[int, int, int]:
    """Return the widths of queries, keys and values of all attention heads together."""
    if not model.multi_latent_attention:
        return model.query_width, model.key_value_width, model.key_value_width
    heads = model.num_attention_heads
    query = heads * (model.qk_head_dim + model.qk_pos_emb_head_dim)
    return query, query, heads * model.v_head_dim


def _recurrent_width(part: str, model: Model) -> int:
    """Return the width of the tensors that enter the recurrence of a gated delta net or of
    Mamba."""
    if part == "G":
        keys = model.linear_num_key_heads * model.linear_key_head_dim
        return 2 * keys + 2 * model.linear_num_value_heads * model.linear_value_head_dim
    states = model.mamba_num_groups * model.mamba_state_dim
    return 2 * model.mamba_num_heads * model.mamba_head_dim + 2 * states


def _recomputed(layer: str, model: Model, execution: Execution) -> float:
    """Return the bytes of the activations that Megatron recomputes together for a backward pass."""
    stage = Stage((layer,))
    without = replace(execution, recompute=False, recompute_modules=frozenset())
    if without == execution:
        return 0.0
    stored, needed = (
        sum(kept for _, kept, _ in held_by_component(model, stage, run))
        for run in (execution, without)
    )
    is_uniform = execution.recompute and execution.recompute_method == "uniform"
    at_once = max(execution.recompute_num_layers, 1) if is_uniform else 1
    return max(at_once * needed - stored, 0.0)


def _of_loss(model: Model, execution: Execution) -> float:
    """Return the bytes of temporary tensors of the loss, beyond the stored logits in fp32.

    Megatron's unfused loss works in place but has the logits, and their gradient, in 16 bits too.
    Fused losses (``--cross-entropy-loss-fusion``) have neither. In plain PyTorch the gradients of
    the softmax's logarithm and of its input are two more tensors in fp32; later there are the
    gradient in 16 bits and that of the output layer's weight.
    """
    logits = execution.tokens * model.vocabulary / execution.ranks_of_loss
    if execution.framework is Framework.PYTORCH:
        table = model.vocabulary * model.hidden_size / execution.tensor_parallel
        return max(2 * _FP32 * logits, (logits + table) * execution.element_bytes)
    return 0.0 if execution.loss_fusion else logits * execution.element_bytes
