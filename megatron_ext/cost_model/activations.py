"""Bytes of activations that a microbatch leaves on a stage: from F to I, and from I to W.

The counts follow what autograd saves. For Megatron's local layers they equal the counts of a
training without a GPU, for Transformer Engine's layers what their fused kernels save (34 bytes for
each unit of width of a GPT in 16 bits, 20 if norms, activations and dropout are recomputed:
Korthikanti et al. 2022, section 4; Wan et al. 2025).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from megatron_ext.cost_model.execution import Execution, Framework
from megatron_ext.cost_model.measured.scale import (
    DEPTH,
    NOT_SCALED,
    OUTPUT_LAYER,
    Measured,
)
from megatron_ext.cost_model.model import Model, Stage

_FP32 = 4


@dataclass(frozen=True)
class Kept:
    """Activations that a layer stores for each token, summed over all tensor-parallel ranks.

    Attributes:
        elements: elements kept for the backward pass inside attention and MLPs.
        between: elements kept between these parts, which only sequence parallelism partitions.
        masks: bytes of the masks of dropouts between the parts.
        figures: bytes kept inside the parts in addition to ``elements``.
        widths: summed widths of the inputs and outputs of matrices whose weight gradients wait for
            W.
        unsharded: the part of ``widths`` that each tensor-parallel rank has whole. Half of it is
            the inputs of the first matrices of attention and MLPs, the other half the gradients of
            the outputs of their last matrices.
    """

    elements: float = 0.0
    between: float = 0.0
    masks: float = 0.0
    figures: float = 0.0
    widths: float = 0.0
    unsharded: float = 0.0

    def __add__(self, other: Kept) -> Kept:
        names = [field.name for field in fields(self)]
        return Kept(*(getattr(self, name) + getattr(other, name) for name in names))


@lru_cache(maxsize=4096)  # the result is cached, since layouts have the same stages many times
def held_of_stage(
    model: Model, stage: Stage, execution: Execution, measured: Measured | None = None
) -> tuple[float, float]:
    """Return the bytes that a microbatch holds on a rank of ``stage``: from F to I, and from I to
    W.

    The second number counts what W needs. Logits, and the inputs of the output layer's weight
    gradient, are not included. ``measured`` scales both byte counts to measured bytes.
    """
    activation = left = 0.0
    for component, kept, for_w in held_by_component(model, stage, execution):
        scale = NOT_SCALED if measured is None else measured.of(component)
        activation += kept * scale.activation
        left += for_w * scale.weight_inputs
    return activation, left


def held_by_component(
    model: Model, stage: Stage, execution: Execution
) -> Iterator[tuple[str, float, float]]:
    """Yield each component of a stage with its stored bytes from F to I, and from I to W.

    A component is a layer, named by its type, or another part of the stage, such as the output
    layer.
    """
    tokens, size = execution.tokens, execution.element_bytes
    boundary = tokens * model.hidden_size * size
    # Bytes of a layer's input that one rank stores; sequence parallelism splits its tokens.
    split = execution.split_tokens * model.hidden_size * size
    if stage.depths:
        # Multi-token prediction stores the input of its projection (of twice the width), and what
        # its three norms store (of embeddings, of hidden states, and behind the layer). If its
        # layer is recomputed, it stores only the embeddings.
        of_norms = 3 * (_norms(model, execution) - 1)
        projection = boundary if execution.recompute else (2 + of_norms) * split
        yield DEPTH, stage.depths * projection, stage.depths * 3 * split
    # The stored activation of the last stage includes the inputs of the output layer and of the
    # final norm.
    if stage.output_layer or stage.final_norm:
        of_norm = stage.final_norm * (_norms(model, execution) - 1)
        yield OUTPUT_LAYER, (stage.output_runs + of_norm) * split, 0.0
    layers = [(layer, layer) for layer in stage.layers] + [(DEPTH, model.mtp_layer)] * stage.depths
    for position, (component, layer) in enumerate(layers):
        kept = _kept_of_layer(layer, model, execution)
        left = _left_for_w(kept, execution) * tokens * size
        if execution.is_recomputed(position):
            yield component, boundary, left
        else:
            inside = (kept.elements * size + kept.figures) * tokens / execution.tensor_parallel
            between = (kept.between * size + kept.masks) * execution.split_tokens
            yield component, inside + between, left


def keys_values_of_stage(model: Model, stage: Stage, execution: Execution) -> float:
    """Return the bytes of a microbatch's keys and values on a rank of ``stage``.

    Later slices of the sequence attend to them.
    """
    width = 2 * model.key_value_width
    if model.multi_latent_attention:
        keys = model.qk_head_dim + model.qk_pos_emb_head_dim
        width = model.num_attention_heads * (keys + model.v_head_dim)
    layers = (*stage.layers, *[model.mtp_layer] * stage.depths)
    attentions = sum(symbol in "*w+" for layer in layers for symbol in layer)
    share = execution.tokens * execution.element_bytes / execution.tensor_parallel
    return attentions * width * share


def _left_for_w(kept: Kept, execution: Execution) -> float:
    """Return the summed widths of the activations that a rank stores until W, for one layer."""
    share = 1 / execution.tensor_parallel
    gathered = len(execution.gathered_for_w) if execution.sequence_parallel else 0
    return kept.widths * share + kept.unsharded / 2 * (2 - gathered) * (1 - share)


@lru_cache(maxsize=1024)
def _kept_of_layer(layer: str, model: Model, execution: Execution) -> Kept:
    return sum((_kept_by(symbol, model, execution) for symbol in layer), Kept())


def _kept_by(symbol: str, model: Model, execution: Execution) -> Kept:
    hidden_size, captured = model.hidden_size, execution.captured
    match symbol:
        case "*" | "w" | "+":
            kept, unsharded_width, name = _attention(model, execution), 2 * hidden_size, "attn"
        case "G":
            kept, unsharded_width, name = _delta_net(model, execution), 2 * hidden_size, "attn"
        case "M":
            kept, unsharded_width, name = _mamba(model, execution), 2 * hidden_size, "mamba"
        case "-":
            kept, unsharded_width, name = _mlp(model, execution), 2 * hidden_size, "mlp"
        case _:
            kept, unsharded_width, name = _experts(model, execution), 0, "moe"
            if model.moe_shared_expert_intermediate_size:
                unsharded_width = 2 * hidden_size
    if name in captured:
        return replace(kept, widths=0.0, unsharded=0.0)
    if execution.tensor_parallel == 1 or not unsharded_width:
        return kept
    if "column" in execution.userbuffers:
        return replace(kept, widths=0.0)
    if execution.userbuffers:
        return replace(
            kept,
            widths=kept.widths - hidden_size - _row_input(symbol, model),
            unsharded=hidden_size,
        )
    return replace(kept, unsharded=float(unsharded_width))


def _row_input(symbol: str, model: Model) -> float:
    """Return the width of the input of the second (row-parallel) matrix of an attention or MLP."""
    match symbol:
        case "*" | "w" | "+":
            if model.multi_latent_attention:
                return model.num_attention_heads * model.v_head_dim
            return model.query_width
        case "G":
            return model.linear_num_value_heads * model.linear_value_head_dim
        case "M":
            return model.mamba_num_heads * model.mamba_head_dim
        case "-":
            return model.ffn_hidden_size
    return model.moe_shared_expert_intermediate_size


def _norms(model: Model, execution: Execution) -> int:
    """Return the number of tensors that a norm stores, including its output, the input of a matrix.

    torch's own RMSNorm stores its input twice, in fp32: as it is, and divided by its length.
    """
    is_twice = model.normalization == "RMSNorm" and not execution.transformer_engine
    return 1 + 2 * 4 // execution.element_bytes if is_twice else 2


def _around(
    model: Model, execution: Execution, matrix: str = "", *, is_alone: bool = False
) -> Kept:
    """Return what the norm before attention or an MLP, and the dropout after it, store.

    The stored tensors include the input of the ``matrix`` after the norm. If ``layernorm`` is
    recomputed, Megatron recomputes norms that are separate modules: all norms of its local layers,
    and those of Transformer Engine's that are not fused into the matrix after them (``is_alone``).
    """
    may_be_recomputed = is_alone or not execution.transformer_engine
    is_recomputed = may_be_recomputed and "layernorm" in execution.recompute_modules
    norms = 1 if is_recomputed else _norms(model, execution) - (matrix in execution.unkept)
    masks = model.hidden_size if execution.hidden_dropout else 0
    return Kept(between=norms * model.hidden_size, masks=masks)


def _attention(model: Model, execution: Execution) -> Kept:
    hidden_size, heads = model.hidden_size, model.num_attention_heads
    norms = _norms(model, execution)
    if model.multi_latent_attention:
        query = heads * (model.qk_head_dim + model.qk_pos_emb_head_dim)
        output = heads * model.v_head_dim
        inside = 2 * query + output
        low_ranks = model.q_lora_rank + model.kv_lora_rank
        made = low_ranks * (norms if model.qk_layernorm else 1) + model.qk_pos_emb_head_dim
        projected = query + heads * model.qk_head_dim + output
        widths = projected + 2 * low_ranks + model.qk_pos_emb_head_dim
        inside_kept = 0 if "mla_up_proj" in execution.recompute_modules else inside
    else:
        output, made = model.query_width, 0
        widths = output + 2 * model.key_value_width
        inside_kept = _queries_keys_values(model, execution)
        if model.qk_layernorm and execution.transformer_engine:
            made = output + model.key_value_width
    if model.attention_output_gate:
        made += 2 * output  # the gate of attention and the gated output are stored, too
    matrix, masks = _attention_matrix(model, execution)
    # Transformer Engine's attention itself stores its output, so the output stays stored even if
    # linear_proj's input is recomputed.
    is_forgotten = "linear_proj" in execution.unkept and not execution.transformer_engine
    kept = Kept(
        elements=inside_kept + (0 if is_forgotten else output) + made + matrix,
        figures=masks,
        widths=hidden_size + widths + output + hidden_size,
    )
    return kept + _around(model, execution, "linear_qkv", is_alone=model.multi_latent_attention)


def _queries_keys_values(model: Model, execution: Execution) -> int:
    """Return the elements of queries, keys and values that attention stores for each token.

    They include what the norms of queries and keys store in Megatron's local layers. In PyTorch and
    in Megatron's local layers queries, keys and values are views of their joint projection, which
    stays as a whole as long as one of the views does. Rotary positions and norms make new queries
    and keys. Queries of several groups are copied; queries of one group are copied only in unfused
    attention with several samples. Unfused attention repeats keys and values for the queries of
    their group.
    """
    query, keys = model.query_width, model.key_value_width
    joint = query + 2 * keys
    if execution.framework is Framework.PYTORCH:
        return joint + query + keys
    if execution.transformer_engine:
        return joint
    is_new = model.is_rotary or model.qk_layernorm
    is_copied = execution.tensor_parallel < model.num_query_groups < model.num_attention_heads
    is_repeated = keys < query and "core_attn" not in execution.recompute_modules
    is_view = not (is_new or is_copied or (is_repeated and execution.micro_batch > 1))
    has_joint = is_view or not is_repeated
    kept = 0 if is_view else query
    if is_repeated:
        kept += 2 * query
    elif is_new:
        kept += keys
    if model.qk_layernorm:
        # Values that the norms of queries and keys store, without their outputs, which are counted
        # already.
        of_norms = _norms(model, execution) - 1
        if model.normalization != "RMSNorm" or execution.element_bytes == _FP32:
            of_norms -= 1  # the norms' inputs are views of a tensor that is counted already
            has_joint = True
            kept += query if is_copied else 0
        kept += of_norms * (query + keys)
    return kept + (joint if has_joint else 0)


def _attention_matrix(model: Model, execution: Execution) -> tuple[float, float]:
    """Return the elements and bytes that attention stores beyond its inputs and outputs.

    Fused attention stores one number a head. Unfused attention stores its matrix of scores, and
    with dropout the matrix after dropout and a mask.
    """
    heads = model.num_attention_heads
    is_recomputed = "core_attn" in execution.recompute_modules
    looked_at = heads * execution.sequence
    # Elements of queries and keys that rotary embeddings rotate by cosines and sines of positions.
    turned = 0.0
    if model.is_rotary and not execution.transformer_engine:
        width = model.qk_pos_emb_head_dim if model.multi_latent_attention else model.kv_channels
        turned = 4 * width / execution.micro_batch
    if execution.has_fused_attention:
        return turned, 0 if is_recomputed else 4 * heads
    if is_recomputed:
        return turned, 0
    if execution.attention_dropout:
        return 2 * looked_at + turned, looked_at
    return looked_at + turned, 0


def _mlp(model: Model, execution: Execution) -> Kept:
    # The MLP stores the input and the output of its activation function.
    activation = _matrices(model) * model.ffn_hidden_size
    kept = activation - ("linear_fc2" in execution.unkept) * model.ffn_hidden_size
    if execution.framework is Framework.PYTORCH and model.gated_linear_unit:
        kept += model.ffn_hidden_size  # the input of the product with the gate is stored, too
    if "mlp" in execution.recompute_modules:
        kept = 0
    inside = Kept(elements=kept, widths=2 * model.hidden_size + activation)
    return inside + _around(model, execution, "linear_fc1")


def _matrices(model: Model) -> int:
    return 3 if model.gated_linear_unit else 2


def _experts(model: Model, execution: Execution) -> Kept:
    """Return the activations that a layer's experts store for each token.

    A shared expert's input is the norm's output; routed experts have copies of it.
    """
    latent, recomputed = model.moe_latent_size, execution.recompute_modules
    shared, routed = model.moe_shared_expert_intermediate_size, model.moe_router_topk
    inner = latent or model.hidden_size
    matrices, width = _matrices(model), model.moe_ffn_hidden_size
    elements = routed * (inner + (matrices - ("moe_act" in recomputed)) * width) + latent
    if "shared_experts" not in recomputed:
        elements += matrices * shared
    entering = routed * inner + (model.hidden_size if shared else 0)
    widths = 2 * entering + matrices * (routed * width + shared)
    if latent:
        widths += 2 * (model.hidden_size + latent)
    kept = Kept(elements=0 if "moe" in recomputed else elements, widths=widths)
    return kept + _around(model, execution, is_alone=True)


def _delta_net(model: Model, execution: Execution) -> Kept:
    keys = model.linear_num_key_heads * model.linear_key_head_dim
    values = model.linear_num_value_heads * model.linear_value_head_dim
    projected = 2 * keys + 2 * values + 2 * model.linear_num_value_heads
    return _recurrent(model, execution, projected, values)


def _mamba(model: Model, execution: Execution) -> Kept:
    width = model.mamba_num_heads * model.mamba_head_dim
    states = model.mamba_num_groups * model.mamba_state_dim
    return _recurrent(model, execution, 2 * width + 2 * states + model.mamba_num_heads, width)


def _recurrent(model: Model, execution: Execution, projected: int, width: int) -> Kept:
    kept = Kept(
        elements=2 * projected + width,  # elements around the convolution of a recurrent layer
        widths=2 * model.hidden_size + projected + width,
    )
    return kept + _around(model, execution)
