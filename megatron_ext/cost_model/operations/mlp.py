"""Operations of MLPs, and of experts in their place.

Experts are MLPs whose tokens come from other ranks. So there is one count of products for both, and
for experts in addition the sorting of tokens and the exchanges, with even routing assumed.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    local_bias,
    norm_and_residual,
    passing_over,
    tensor_parallel_part,
)

# Bytes that the router moves for the score of a token for an expert, in fp32: the softmax, the best
# scores, and the map of them.
_ROUTING_BYTES = 16


def mlp(model: Model, execution: Execution) -> Part:
    """Return the operations of an MLP on a microbatch, with the norm before it.

    An MLP has two matrices, or three with a gate.
    """
    products = _products(model, execution, model.ffn_hidden_size, ["mlp"])
    operations = [*norm_and_residual(model.hidden_size, execution), *products]
    if execution.has_local_kernels and model.add_bias_linear:
        gates = 2 if model.gated_linear_unit else 1
        width = gates * model.ffn_hidden_size / execution.tensor_parallel
        for name, elements in (
            ("fc1's bias", execution.tokens * width),
            ("fc2's bias", execution.split_tokens * model.hidden_size),
        ):
            operations.append(local_bias(name, elements, execution, is_added=False))
    # In Scaling the gate's matrix is a separate layer, which all-reduces the gradient of its input
    # separately.
    is_separate = execution.framework is Framework.PYTORCH and model.gated_linear_unit
    return tensor_parallel_part(
        operations,
        2 * model.hidden_size,
        execution,
        modules=["mlp"],
        more_sums=int(is_separate and not execution.sequence_parallel),
    )


def experts(model: Model, execution: Execution) -> Part:
    """Return the operations of routed experts on a microbatch, and of a shared one if there is one.

    The router's weight gradient is computed with its input's gradient, because the router is not
    one of the layers' linear modules that defer it.
    """
    hidden_size, tokens = model.hidden_size, execution.split_tokens
    modules = ["moe"]
    operations = [
        *norm_and_residual(hidden_size, execution, is_alone=True),
        *linear(
            "router",
            tokens,
            hidden_size,
            model.num_experts,
            execution,
            modules=modules,
            engine=Engine.MATRIX,
            is_unsplit=True,
        ),
        elementwise(
            "routing",
            tokens * model.num_experts,
            _ROUTING_BYTES,
            tokens * model.num_experts * _ROUTING_BYTES,
            modules,
        ),
        *_routed(model, execution),
    ]
    exchanges = _to_experts(model, execution)
    shared = model.moe_shared_expert_intermediate_size
    if not shared:
        return Part(tuple(operations), tuple(exchanges))
    operations += _products(model, execution, shared, [*modules, "shared_experts"])
    if model.moe_shared_expert_gate:
        operations += linear(
            "gate",
            tokens,
            hidden_size,
            1,
            execution,
            engine=Engine.MATRIX,
            is_unsplit=True,
        )
    return tensor_parallel_part(operations, 2 * hidden_size, execution, exchanges, modules=modules)


def _products(
    model: Model, execution: Execution, width: int, modules: Sequence[str]
) -> list[Operation]:
    """Return the operations of an MLP of this ``width``, which tensor-parallel ranks partition."""
    tokens, local = execution.tokens, width / execution.tensor_parallel
    gates = 2 if model.gated_linear_unit else 1
    hidden_size = model.hidden_size
    return [
        *linear(
            "fc1", tokens, hidden_size, gates * local, execution, modules=modules, is_column=True
        ),
        _activation(model, execution, tokens * local, modules),
        *linear("fc2", tokens, local, hidden_size, execution, modules=modules, is_row=True),
    ]


def _activation(
    model: Model, execution: Execution, elements: float, modules: Sequence[str]
) -> Operation:
    times = (3, 5) if model.gated_linear_unit else (2, 3)
    if execution.framework is Framework.PYTORCH and model.gated_linear_unit:
        times = (5, 9)  # reads and writes of two kernels: silu, and its product with the gate
    return passing_over("activation", elements, times, execution, modules)


def _routed(model: Model, execution: Execution) -> list[Operation]:
    """Return the operations that sort tokens by experts, multiply, and sort them back.

    Routing is assumed to be even.
    """
    hidden_size, latent = model.hidden_size, model.moe_latent_size
    inner = latent or hidden_size
    tokens, routed = execution.split_tokens, model.moe_router_topk
    divides = execution.expert_tensor_parallel
    rows = tokens * routed * divides
    local_width = model.moe_ffn_hidden_size / divides
    local = model.num_experts / execution.expert_parallel
    gates = 2 if model.gated_linear_unit else 1
    modules = ["moe"]
    # Tokens are sorted by the ranks of their experts, and back. If several ranks send tokens to a
    # rank with several experts, tokens are sorted once more, by experts.
    copies = 2 * (1 + routed)
    if execution.dispatcher == "alltoall" and local > 1 and execution.expert_parallel > 1:
        copies += 4 * routed
    operations = [
        passing_over("sorting by experts", tokens * inner, (copies, copies), execution, modules)
    ]
    for name, widths in (
        ("latent down", (hidden_size, latent)),
        ("latent up", (latent, hidden_size)),
    ):
        if latent:
            operations += linear(name, tokens, *widths, execution, modules=modules)

    def product(name: str, entering: float, leaving: float) -> list[Operation]:
        return linear(
            name,
            rows,
            entering,
            leaving,
            execution,
            modules=modules,
            engine=Engine.GROUPED,
            weights=local,
        )

    operations += product("experts' fc1", inner, gates * local_width)
    operations.append(_activation(model, execution, rows * local_width, [*modules, "moe_act"]))
    operations += product("experts' fc2", local_width, inner)
    return operations


def _to_experts(model: Model, execution: Execution) -> list[Exchange]:
    """Return the exchanges of tokens with the ranks of experts: to them and back, in F and in I."""
    ranks, divides = execution.expert_parallel, execution.expert_tensor_parallel
    inner = model.moe_latent_size or model.hidden_size
    size = execution.split_tokens * inner * execution.element_bytes
    routed = model.moe_router_topk
    exchanges = []
    if ranks > 1:
        copies = {"allgather": ranks, "flex": 1}.get(execution.dispatcher, routed)
        choices = routed if execution.dispatcher == "flex" else 0
        moved = Passes(2 * size * copies, 2 * size * copies)
        groups = model.moe_router_group_topk, model.moe_router_num_groups
        exchanges.append(
            Exchange(Group.EXPERT, ranks, divides, moved, frozenset(["moe"]), choices, groups)
        )
    if divides > 1:
        both = 2 * size * routed * divides
        exchanges.append(Exchange(Group.TENSOR, divides, 1, Passes(both, both), frozenset(["moe"])))
    return exchanges
