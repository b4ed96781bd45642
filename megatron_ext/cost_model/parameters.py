"""Parameters of a stage of a model on one rank, in Megatron's order.

A layer is given by the symbols of hybrid patterns: attention ``*``, windowed ``w``, latent ``+``;
MLP ``-``, experts ``E``, gated delta net ``G``, Mamba ``M``. A transformer layer has two, ``*-``.
Every symbol includes the norm before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from megatron_ext.cost_model.execution import Execution
from megatron_ext.cost_model.model import Model, Stage
from megatron_ext.cost_model.tower_costs import tower_matrices


@dataclass(frozen=True)
class Parameter:
    """Size of a parameter of the model, or of a rank's part of it.

    Attributes:
        is_matrix: whether it is a matrix of a layer, which products use in 8 bits if the run does
            so.
        of_experts: whether only data-parallel ranks that have the same experts reduce it.
        is_table: whether it is an embedding or an output layer.
        is_alone: whether its gradient has a bucket of its own, as a table on two stages has.
        is_frozen: whether it is not trained, and has neither gradient nor optimizer state.
    """

    elements: int
    is_matrix: bool = False
    of_experts: bool = False
    is_table: bool = False
    is_alone: bool = False
    is_frozen: bool = False


def parameters_of_stage(model: Model, stage: Stage, execution: Execution) -> Iterator[Parameter]:
    """Yield the parameters of ``stage`` on one rank, without vocabulary parallelism."""
    if stage.embedding and model.tower is not None:
        for matrices, others, is_trained in tower_matrices(model.tower):
            share = matrices // execution.tensor_parallel
            yield Parameter(share, is_matrix=True, is_frozen=not is_trained)
            yield Parameter(others, is_frozen=not is_trained)
    parameters = _of_language_model(model, stage, execution)
    yield from (
        (replace(one, is_frozen=True) for one in parameters) if model.is_frozen else parameters
    )


def _of_language_model(model: Model, stage: Stage, execution: Execution) -> Iterator[Parameter]:
    is_tied = not model.untie_embeddings_and_output_weights
    has_both = stage.embedding and stage.output_layer
    is_shared = (is_tied or model.mtp_num_layers > 0) and not has_both
    elements = table_elements(model) // execution.tensor_parallel
    table = Parameter(elements, is_table=True, is_alone=is_shared)
    if stage.embedding or stage.depths:
        yield table
        if model.max_position_embeddings:
            yield Parameter(model.max_position_embeddings * model.hidden_size)
    for layer in stage.layers:
        yield from _of_layer(model, layer, execution)
    if stage.final_norm:
        yield from _norm(model, model.hidden_size)
    for _ in range(min(stage.depths, 1) if model.mtp_use_repeated_layer else stage.depths):
        yield from _of_depth(model, execution)
    if stage.output_layer and not (is_tied and has_both):
        # If a stage with multi-token prediction has tied embeddings, its output layer uses the
        # prediction's embedding table. Megatron still allocates a table for the output layer, which
        # is unused.
        yield replace(table, is_alone=is_tied and not stage.depths)


def table_elements(model: Model) -> int:
    """Return the elements of the embedding, or of the output layer, summed over tensor-parallel
    ranks."""
    return model.vocabulary * model.hidden_size


def _of_depth(model: Model, execution: Execution) -> Iterator[Parameter]:
    """Yield the parameters of one depth of multi-token prediction."""
    for _ in ("embedding", "hidden state"):
        yield from _norm(model, model.hidden_size)
    both = 2 * model.hidden_size
    yield Parameter(both * model.hidden_size // execution.tensor_parallel, is_matrix=True)
    yield from _of_layer(model, model.mtp_layer, execution)
    yield from _norm(model, model.hidden_size)


def _of_layer(model: Model, symbols: str, execution: Execution) -> Iterator[Parameter]:
    for symbol in symbols:
        yield from _norm(model, model.hidden_size)
        match symbol:
            case "+":
                yield from _latent_attention(model, execution)
            case "*" | "w":
                is_latent = model.multi_latent_attention
                yield from (_latent_attention if is_latent else _attention)(model, execution)
            case "-":
                yield from _mlp(model, model.ffn_hidden_size, execution.tensor_parallel)
            case "E":
                yield from _experts(model, execution)
            case "G":
                yield from _delta_net(model, execution.tensor_parallel)
            case "M":
                yield from _mamba(model, execution.tensor_parallel)
            case _:
                raise AssertionError(f"layers with the symbol {symbol!r} are not known")


def _norm(model: Model, width: int) -> Iterator[Parameter]:
    yield Parameter(width)
    if model.normalization == "LayerNorm":
        yield Parameter(width)


def _linear(
    inputs: int, outputs: int, *, bias: bool, columns: int = 1, rows: int = 1
) -> Iterator[Parameter]:
    """Yield a linear layer's matrix and bias on one rank.

    The matrix is partitioned over ``columns`` ranks by its outputs or over ``rows`` ranks by its
    inputs.
    """
    yield Parameter(inputs * outputs // (columns * rows), is_matrix=True)
    if bias:
        yield Parameter(outputs // columns)


def _attention(model: Model, execution: Execution) -> Iterator[Parameter]:
    ranks = execution.tensor_parallel
    query, key_value = model.query_width, 2 * model.key_value_width
    if model.softmax_type == "learnable":
        yield Parameter(model.num_attention_heads // ranks)
    yield from _linear(query, model.hidden_size, bias=model.add_bias_linear, rows=ranks)
    yield from _linear(
        model.hidden_size,
        query * (2 if model.attention_output_gate else 1) + key_value,
        bias=model.add_bias_linear or model.add_qkv_bias,
        columns=ranks,
    )
    if model.qk_layernorm:
        for _ in ("query", "key"):
            yield from _norm(model, model.kv_channels)


def _latent_attention(model: Model, execution: Execution) -> Iterator[Parameter]:
    ranks, heads = execution.tensor_parallel, model.num_attention_heads
    # Transformer Engine's down projections are not split over the tensor-parallel ranks.
    down = 1 if execution.transformer_engine else ranks
    query = heads * (model.qk_head_dim + model.qk_pos_emb_head_dim)
    yield from _linear(
        heads * model.v_head_dim, model.hidden_size, bias=model.add_bias_linear, rows=ranks
    )
    entering, low_rank = model.hidden_size, model.q_lora_rank
    if low_rank:
        yield from _linear(entering, low_rank, bias=False, columns=down)
    yield from _linear(low_rank or entering, query, bias=False, columns=ranks)
    latent = model.kv_lora_rank
    yield from _linear(entering, latent + model.qk_pos_emb_head_dim, bias=False, columns=down)
    key_value = heads * (model.qk_head_dim + model.v_head_dim)
    yield from _linear(latent, key_value, bias=False, columns=ranks)
    if model.qk_layernorm:
        for width in filter(None, (low_rank, latent)):
            yield from _norm(model, width)


def _mlp(model: Model, width: int, ranks: int, hidden_size: int = 0) -> Iterator[Parameter]:
    """Yield the parameters of an MLP of this ``width`` on one rank.

    ``hidden_size`` is the width of its input; 0 takes the model's.
    """
    hidden_size, bias = hidden_size or model.hidden_size, model.add_bias_linear
    first = width * (2 if model.gated_linear_unit else 1)
    yield from _linear(hidden_size, first, bias=bias, columns=ranks)
    yield from _linear(width, hidden_size, bias=bias, rows=ranks)


def _experts(model: Model, execution: Execution) -> Iterator[Parameter]:
    hidden_size, latent = model.hidden_size, model.moe_latent_size
    yield Parameter(hidden_size * model.num_experts)  # the matrix of the router
    if model.add_bias_linear:
        yield Parameter(model.num_experts)
    if latent:
        yield from _linear(hidden_size, latent, bias=model.add_bias_linear)
        yield from _linear(latent, hidden_size, bias=model.add_bias_linear)
    tensor = execution.expert_tensor_parallel
    has_own_group = execution.expert_parallel > 1 or tensor != execution.tensor_parallel
    expert = _of_experts(_mlp(model, model.moe_ffn_hidden_size, tensor, latent), has_own_group)
    yield from (model.num_experts // execution.expert_parallel) * expert
    shared = model.moe_shared_expert_intermediate_size
    if shared:
        yield from _mlp(model, shared, execution.tensor_parallel)
        if model.moe_shared_expert_gate:
            yield Parameter(hidden_size)


def _of_experts(parameters: Iterable[Parameter], has_own_group: bool) -> tuple[Parameter, ...]:
    return tuple(replace(parameter, of_experts=has_own_group) for parameter in parameters)


def _delta_net(model: Model, ranks: int) -> Iterator[Parameter]:
    keys = model.linear_num_key_heads * model.linear_key_head_dim
    heads = model.linear_num_value_heads
    values = heads * model.linear_value_head_dim
    for _ in ("step's bias", "decay"):
        yield Parameter(heads // ranks)
    projected = 2 * keys + 2 * values + 2 * heads
    yield from _linear(model.hidden_size, projected, bias=False, columns=ranks)
    yield Parameter((2 * keys + values) // ranks * model.linear_conv_kernel_dim)
    yield Parameter(model.linear_value_head_dim)  # the norm of the output has no bias
    yield from _linear(values, model.hidden_size, bias=False, rows=ranks)


_MAMBA_KERNEL = 4  # width of Mamba's convolution


def _mamba(model: Model, ranks: int) -> Iterator[Parameter]:
    heads = model.mamba_num_heads
    width = heads * model.mamba_head_dim
    states = 2 * model.mamba_num_groups * model.mamba_state_dim
    convolved = (width + states) // ranks
    yield Parameter(convolved * _MAMBA_KERNEL)
    yield Parameter(convolved)
    for _ in ("step's bias", "decay", "skip"):
        yield Parameter(heads // ranks)
    projected = 2 * width + states + heads
    yield from _linear(model.hidden_size, projected, bias=False, columns=ranks)
    yield Parameter(width // ranks)  # the norm of the output
    yield from _linear(width, model.hidden_size, bias=False, rows=ranks)
